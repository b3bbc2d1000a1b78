//! The communication engine: a pure state machine.
//!
//! It is told what happened (a gradient is ready, a frame arrived, a peer can take more, a peer is
//! lost, time is now T) and is asked what to do next. It knows no socket, clock, thread or gradient
//! byte: it moves descriptors. The same engine runs over real sockets (`gradlane-net`) and over
//! virtual time.
//!
//! After any input, call [`Engine::poll_job`], [`Engine::poll_transmit`] and
//! [`Engine::poll_event`] until each returns `None`; the order does not matter.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[cfg(test)]
extern crate std;

mod aggregate;
mod answer;
mod async_owner;
mod buffers;
mod contribution;
mod contribution_set;
mod contributors;
mod coordinator;
mod depths;
mod encoding;
mod engine;
mod error;
mod gather;
mod headers;
mod input;
mod io;
mod jobs;
mod journal;
mod landing;
mod late_pushes;
mod lifecycle;
mod median_window;
mod options;
mod placement;
mod plan;
mod plan_validate;
mod priority;
mod pull;
mod queue;
mod rank_set;
mod receive;
mod ring;
mod ring_encoded;
mod roles;
mod scheduler;
mod scheme;
mod server;
mod staleness;
mod strategy;
mod test_support;
mod validate;
mod worker;

pub use depths::{PeerQueueStats, QueueStats};
pub use encoding::CodecPlan;
pub use engine::Engine;
pub use error::{Failure, Outstanding, PlanError, ProtocolError, UsageError};
pub use gradlane_units::{CodecSizes, RingBytes};
pub use input::Input;
pub use io::{
    BufferRef, Event, Job, JobId, Memory, Operation, Payload, PayloadDest, Region, Transmit,
};
pub use journal::{Call, Decision, Divergence, Journal, JournaledEngine};
pub use options::{EngineOptions, FRAME_BYTES_DEFAULT};
pub use plan::{Plan, Slice, TensorKind, TensorPlan, TensorSetting, TensorSpec, Update};
pub use roles::Roles;
pub use scheme::{Scheme, RING_CHUNK_ELEMS, RING_ENCODED_CHUNK_ELEMS};
pub use staleness::{RankStaleness, Staleness};
pub use strategy::{
    Cutoff, Granularity, Order, Placement, PullRule, Release, StragglerPolicy, Strategy, Synchrony,
    KVSTORE_SPLIT_ELEMS, POSEIDON_PAIR_ELEMS, SLICE_ELEMS,
};
