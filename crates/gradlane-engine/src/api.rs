//! The interface to drivers: calls, frames, jobs, events, errors, and the journal of all of them.

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

pub use error::{Failure, Outstanding, PlanError, ProtocolError, UsageError};
pub use event::Event;
pub use frame::{Payload, PayloadDest, Transmit};
pub use input::{Input, LaneNews};
pub use job::{Job, JobId, Operation};
pub use journal::{Call, Decision, Divergence, Journal, JournaledEngine};
pub use options::{EngineOptions, GoingOn, FRAME_BYTES_DEFAULT};
pub use queue_stats::{PeerQueueStats, QueueStats};
pub use region::{BufferRef, Memory, Region};
pub use staleness::{RankStaleness, Staleness};
