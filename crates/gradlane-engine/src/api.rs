//! The interface to drivers: inputs, frames, jobs, events, errors, and the journal of all of them.

mod error;
mod input;
mod journal;
mod options;
mod output;
mod staleness;

pub(crate) use error::{violation, Validated};
pub use error::{Failure, Outstanding, PlanError, ProtocolError, Refusal, UsageError};
pub use input::{Input, JobId, JobResult, LaneNews};
pub use journal::{Entry, Journal};
pub use options::{EngineOptions, GoingOn, FRAME_BYTES_DEFAULT};
pub use output::{
    BufferRef, Event, Job, Memory, Operation, Payload, PayloadDest, PeerQueueStats, QueueStats,
    Region, Transmit,
};
pub use staleness::{RankStaleness, Staleness};
