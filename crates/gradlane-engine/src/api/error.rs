//! Errors. Bytes from a peer lead to a [`ProtocolError`], misuse by the caller to a [`UsageError`],
//! the end of a session to a [`Failure`]. A broken invariant of our own is an assertion instead.
#![allow(missing_docs, reason = "fields with the name of their type")]

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use gradlane_units::{Rank, Step};

/// A plan or a strategy that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PlanError {
    message: String,
}

impl PlanError {
    pub(crate) fn new(message: impl Into<String>) -> PlanError {
        PlanError { message: message.into() }
    }
}

/// The caller broke the order of calls. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UsageError {
    /// No tensor has this number.
    #[error("there is no tensor {tensor}; the plan has {count}")]
    UnknownTensor {
        /// The number.
        tensor: u32,
        /// Number of tensors in the plan.
        count: usize,
    },
    /// A second gradient for the same tensor in the same step.
    #[error("tensor {name:?} already has a gradient in {step}")]
    Twice {
        /// The tensor.
        name: String,
        step: Step,
    },
    /// A call for a step that is not the current one.
    #[error("{call} for {step}, but the current step is {current}")]
    WrongStep {
        call: &'static str,
        /// The step named.
        step: Step,
        /// The step in force.
        current: Step,
    },
    /// A new step before the last one is complete.
    #[error(
        "{step} cannot begin: {missing} tensors of {current} are not complete, first {name:?}"
    )]
    Incomplete {
        /// The step named.
        step: Step,
        /// The step in force.
        current: Step,
        /// How many tensors are missing.
        missing: usize,
        /// The first of them.
        name: String,
    },
    /// The session has failed or was closed.
    #[error("the session has ended: {reason}")]
    Ended {
        /// Why.
        reason: String,
    },
    /// Arguments that do not fit the plan.
    #[error("{0}")]
    Argument(String),
}

/// A frame that no correct peer sends. The session must end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{peer} broke the protocol: {what}")]
pub struct ProtocolError {
    pub peer: Rank,
    /// The violation, with tensor, slice and bytes.
    pub what: String,
}

/// An input that the engine refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A call of the application or the driver.
    #[error(transparent)]
    Usage(#[from] UsageError),
    /// A frame.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

/// Why a session ended before its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The rank that is at fault or was lost, if one is.
    pub peer: Option<Rank>,
    /// The reason, in one sentence.
    pub reason: String,
    /// Tensors, ranks and bytes that were outstanding.
    pub outstanding: Outstanding,
    /// Last step that was complete on this rank, if one was.
    pub last_complete: Option<Step>,
    /// Whether no progress in time was the reason.
    pub timed_out: bool,
    /// What the other ranks are told: the payload of an abort frame.
    pub notice: Vec<u8>,
}

/// Tensors, bytes and ranks that a rank waits for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outstanding {
    pub step: Step,
    /// Names of tensors that are not complete, in order; at most [`Outstanding::NAMES_MAX`].
    pub tensors: Vec<String>,
    /// How many tensors are not complete.
    pub tensor_count: usize,
    /// Bytes of aggregated slices still to come.
    pub bytes: u64,
    /// Ranks that something is still expected from.
    pub ranks: Vec<Rank>,
}

impl Outstanding {
    /// Most names that are listed.
    pub const NAMES_MAX: usize = 3;

    /// Counts a tensor that is not complete.
    pub(crate) fn add_tensor(&mut self, name: &str) {
        self.tensor_count += 1;
        if self.tensors.len() < Outstanding::NAMES_MAX {
            self.tensors.push(name.into());
        }
    }
}

impl fmt::Display for Outstanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tensor_count == 0 {
            return write!(f, "nothing was outstanding in {}", self.step);
        }
        write!(f, "in {}, {} tensors ({} bytes)", self.step, self.tensor_count, self.bytes)?;
        write!(f, " were outstanding: {}", self.tensors.join(", "))?;
        if self.tensor_count > self.tensors.len() {
            write!(f, ", …")?;
        }
        if !self.ranks.is_empty() {
            let mut separator = "; waiting for ";
            for rank in &self.ranks {
                write!(f, "{separator}{rank}")?;
                separator = ", ";
            }
        }
        Ok(())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.reason, self.outstanding)?;
        match self.last_complete {
            Some(step) => write!(f, "; last complete step: {}", step.0),
            None => write!(f, "; no step was complete"),
        }
    }
}

impl core::error::Error for Failure {}

// Refusals of frames that no correct peer sends.

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
