//! The contents of an abort frame: a rank or a link that is to blame, and the reason.

use crate::plan::Plan;
use alloc::string::String;
use alloc::vec::Vec;
use gradlane_units::Rank;

/// Longest reason that is sent to the others.
pub(crate) const REASON_BYTES_MAX: usize = 2048;

const NOBODY: u32 = u32::MAX;
const LINK: u32 = u32::MAX - 1;
const ALL: u32 = u32::MAX - 2;

/// The culprit of a failed session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blame {
    /// No rank in particular.
    Nobody,
    Rank(Rank),
    /// The link between two ranks, which the reason names.
    Link,
    /// Training cannot go on, whoever is left: all ranks end, where a loss else ends none.
    All,
}

impl Blame {
    /// The rank, if one is to blame.
    pub(crate) fn rank(self) -> Option<Rank> {
        match self {
            Blame::Rank(rank) => Some(rank),
            Blame::Nobody | Blame::Link | Blame::All => None,
        }
    }

    /// An abort frame's payload: the number of a rank, then the reason.
    pub(crate) fn payload(self, reason: &str) -> Vec<u8> {
        let code = match self {
            Blame::Nobody => NOBODY,
            Blame::Rank(rank) => rank.0,
            Blame::Link => LINK,
            Blame::All => ALL,
        };
        let mut payload = code.to_le_bytes().to_vec();
        let mut end = reason.len().min(REASON_BYTES_MAX);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        payload.extend_from_slice(&reason.as_bytes()[..end]);
        payload
    }

    /// Reads an abort frame's payload.
    pub(crate) fn read(plan: &Plan, payload: &[u8]) -> (Blame, String) {
        let (code, text) = payload.split_at(payload.len().min(4));
        let code = <[u8; 4]>::try_from(code).map_or(NOBODY, u32::from_le_bytes);
        let blame = match code {
            LINK => Blame::Link,
            ALL => Blame::All,
            code if code < plan.world_size => Blame::Rank(Rank(code)),
            _ => Blame::Nobody,
        };
        (blame, String::from_utf8_lossy(text).into_owned())
    }
}
