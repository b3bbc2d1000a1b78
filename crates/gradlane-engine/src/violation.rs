//! Refusals of frames that no correct peer sends.

use crate::api::ProtocolError;
use alloc::string::String;
use gradlane_units::Rank;

/// Why a frame is refused, with tensor, slice and bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Violation(pub(crate) String);

pub(crate) type Validated<T> = Result<T, Violation>;

impl Violation {
    /// The violation as the error of a peer.
    pub(crate) fn by(self, peer: Rank) -> ProtocolError {
        ProtocolError { peer, what: self.0 }
    }
}

impl From<&str> for Violation {
    fn from(what: &str) -> Violation {
        Violation(what.into())
    }
}

/// Refuses a frame.
pub(crate) fn violation<T>(what: impl Into<String>) -> Validated<T> {
    Err(Violation(what.into()))
}
