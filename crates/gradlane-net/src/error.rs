//! Errors of calls on a channel. Every message is one sentence that names the ranks, tensors and
//! sizes involved and stands on its own: the user of a training script reads it.

use gradlane_engine::UsageError;
use gradlane_units::{Rank, Step};

/// Why a session failed, for every thread that waits in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChannelFailure {
    /// The event, the outstanding tensors, bytes and ranks, and the last complete step.
    pub message: String,
    /// Last step that was complete on this rank, if one was.
    pub last_complete: Option<Step>,
    /// The rank that is at fault or was lost, if one is.
    pub peer: Option<Rank>,
    /// Whether the reason is that nothing happened in time.
    pub timed_out: bool,
}

impl std::fmt::Display for ChannelFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

/// Errors of calls on a channel or a listener.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelError {
    /// An argument or an option is invalid.
    #[error("{0}")]
    Argument(String),
    /// The calls are not in order.
    #[error("{0}")]
    Usage(#[from] UsageError),
    /// Another rank refused this one, or was refused by it.
    #[error("{message}")]
    Refused {
        /// Which rank refused which, and why.
        message: String,
        /// The other rank.
        peer: Rank,
    },
    /// Not all ranks were connected in time, or `finish` was not answered in time.
    #[error("{message}")]
    TimedOut {
        /// The target of the wait, and its time.
        message: String,
        /// Last step that was complete on this rank, if one was.
        last_complete: Option<Step>,
        /// One of the missing ranks, if there is one.
        peer: Option<Rank>,
    },
    /// The session has failed.
    #[error("{0}")]
    Failed(ChannelFailure),
    /// The channel was closed in good order, or belongs to a parent process.
    #[error("{0}")]
    Closed(String),
    /// The operating system refused something.
    #[error("{0}")]
    System(String),
    /// The caller's interrupt function asked to stop waiting.
    #[error("interrupted while waiting")]
    Interrupted,
}

impl ChannelError {
    /// Makes an error of the operating system that names the failed action.
    pub(crate) fn system(what: impl std::fmt::Display, error: &std::io::Error) -> ChannelError {
        ChannelError::System(format!("{what}: {error}"))
    }
}
