//! How calls on a channel end badly. Every message is one sentence that names what is involved and
//! stands on its own: it is what the user of a training script reads.

use gradlane_engine::UsageError;
use gradlane_units::{Rank, Step};

/// Why a session ended before its time, for every thread that waits in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChannelFailure {
    /// What happened, what was outstanding (tensors, bytes, ranks) and the last complete step.
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

/// What calls on a channel or a listener return instead of a result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelError {
    /// An argument or an option makes no sense.
    #[error("{0}")]
    Argument(String),
    /// The caller broke the order of calls.
    #[error("{0}")]
    Usage(#[from] UsageError),
    /// Another rank refused this one, or was refused by it.
    #[error("{message}")]
    Refused {
        /// Who refused whom and why.
        message: String,
        /// The other rank.
        peer: Rank,
    },
    /// Not all ranks were connected in time, or `finish` was not answered in time.
    #[error("{message}")]
    TimedOut {
        /// What was waited for, and for how long.
        message: String,
        /// Last step that was complete on this rank, if one was.
        last_complete: Option<Step>,
        /// One of the ranks that were waited for, if there is one.
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
    /// An error of the operating system in the words of what was tried.
    pub(crate) fn system(what: impl std::fmt::Display, error: &std::io::Error) -> ChannelError {
        ChannelError::System(format!("{what}: {error}"))
    }
}
