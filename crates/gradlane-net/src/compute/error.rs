//! Why a job fails: a broken invariant, or bytes of a peer that are no encoding.

use crate::memory::MemoryError;
use gradlane_codec::{AdamError, DecodeError, SgdError};

#[derive(Debug, thiserror::Error)]
pub(crate) enum JobError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("a job over {found} and {expected} bytes")]
    Length { found: usize, expected: usize },
    #[error("memory of {found} bytes for a slice of {expected}")]
    SliceLength { found: usize, expected: usize },
    #[error("an encoding of {found} bytes where {expected} are expected")]
    EncodingLength { found: usize, expected: usize },
    #[error("an encoding of {found} bytes ends before {end}")]
    EncodingEnd { found: usize, end: usize },
    #[error("a residual of {found} numbers where the slice has {expected}")]
    ResidualLength { found: usize, expected: usize },
    #[error("{name} has {found} elements where the slice has {expected}")]
    StateLength { name: &'static str, found: usize, expected: usize },
    #[error("state travels in elements of 2 or 4 bytes, not {0}")]
    StateElement(usize),
    #[error("state or parameters of several ranks: rank 0 alone gives them")]
    WrittenTwice,
    #[error("encoded state or parameters")]
    WrittenEncoded,
    #[error("a mean over no ranks")]
    NoRanks,
    #[error("plain bytes cannot be averaged or encoded")]
    PlainBytes,
    #[error("no optimizer settings: call set_optimizer before gradients")]
    NoUpdateRule,
    #[error("the plan has no codec for it")]
    NoCodec,
    #[error("the plan has no sums of codes for it")]
    NoSums,
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    UpdateRule(#[from] UpdateRuleError),
    #[error("a kernel panicked: {0}")]
    Panic(String),
}

/// Invalid settings of an update.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum UpdateRuleError {
    /// Of SGD.
    #[error(transparent)]
    Sgd(#[from] SgdError),
    /// Of Adam.
    #[error(transparent)]
    Adam(#[from] AdamError),
}
