//! The interface to drivers: inputs, frames, jobs, events, errors, and the journal of all of them.

mod error;
mod event;
mod frame;
mod input;
mod job;
mod journal;
mod options;
mod queue_stats;
mod region;
mod staleness;

pub(crate) use error::never_refused;
pub use error::{Failure, Outstanding, PlanError, ProtocolError, Refusal, UsageError};
pub use event::Event;
pub use frame::{Payload, PayloadDest, Transmit};
pub use input::{Input, LaneNews};
pub use job::{Job, JobId, JobResult, Operation};
pub use journal::{Divergence, Entry, Journal, JournaledEngine};
pub use options::{EngineOptions, GoingOn, FRAME_BYTES_DEFAULT};
pub use queue_stats::{PeerQueueStats, QueueStats};
pub use region::{BufferRef, Memory, Region};
pub use staleness::{RankStaleness, Staleness};
