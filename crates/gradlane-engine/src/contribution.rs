//! Contributions of ranks to a slice.

use crate::api::BufferRef;
use gradlane_units::{Priority, Rank, Step};
use gradlane_wire::PayloadForm;

/// A whole contribution of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contribution {
    /// This rank's own gradient memory.
    Own,
    /// A whole slice in scratch.
    Buffer(BufferRef),
    /// A whole slice in scratch, encoded.
    Encoded(BufferRef),
    /// Nothing: counts as zeros.
    Absent,
}

impl Contribution {
    /// A whole slice that has arrived in this form.
    pub(crate) fn arrived(arriving: Arriving, form: PayloadForm) -> Contribution {
        let buffer = BufferRef { bytes: arriving.received_bytes, ..arriving.buffer };
        match form {
            PayloadForm::Raw => Contribution::Buffer(buffer),
            PayloadForm::Encoded => Contribution::Encoded(buffer),
        }
    }

    /// Where it lies in scratch.
    pub(crate) fn buffer(self) -> Option<BufferRef> {
        match self {
            Contribution::Buffer(buffer) | Contribution::Encoded(buffer) => Some(buffer),
            Contribution::Own | Contribution::Absent => None,
        }
    }

    /// Its form; none without bytes.
    pub(crate) fn form(self) -> Option<PayloadForm> {
        match self {
            Contribution::Own | Contribution::Buffer(_) => Some(PayloadForm::Raw),
            Contribution::Encoded(_) => Some(PayloadForm::Encoded),
            Contribution::Absent => None,
        }
    }
}

/// A slice that is arriving from a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arriving {
    pub(crate) buffer: BufferRef,
    pub(crate) received_bytes: u64,
}

/// A whole push that is applied alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Push {
    pub(crate) rank: Rank,
    pub(crate) step: Step,
    pub(crate) contribution: Contribution,
    pub(crate) priority: Priority,
}
