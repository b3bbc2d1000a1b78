//! The communication engine: a pure state machine.
//!
//! It is told what happened (a gradient is ready, a frame arrived, a peer can take more, a peer is
//! lost, time is now T) and is asked what to do next. It knows no socket, clock, thread or gradient
//! byte: it moves descriptors. The same engine runs over real sockets (`gradlane-net`) and over
//! virtual time.
//!
//! After any input, call [`Engine::poll_work`], [`Engine::poll_transmit`] and
//! [`Engine::poll_event`] until each returns `None`; the order does not matter.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[cfg(test)]
extern crate std;

mod aggregate;
mod answer;
mod buffers;
mod collected;
mod contribution;
mod contributors;
mod coordinator;
mod depths;
mod each;
mod encoding;
mod engine;
mod error;
mod far;
mod gather;
mod header_checks;
mod headers;
mod inbound;
mod io;
mod journal;
mod landing;
mod latecomers;
mod lifecycle;
mod options;
mod placement;
mod plan;
mod priority;
mod pull;
mod queue;
mod rank_set;
mod recent;
mod ring;
mod ring_encoded;
mod roles;
mod scheduler;
mod scheme;
mod server;
mod staleness;
mod strategy;
mod work;
mod worker;

pub use depths::{PeerDepth, QueueDepths};
pub use encoding::Encoding;
pub use engine::Engine;
pub use error::{Failure, Outstanding, PlanError, ProtocolError, UsageError};
pub use gradlane_units::{Coding, RingBytes};
pub use io::{
    BufferRef, Event, Landing, Memory, Operation, Payload, Region, Transmit, Work, WorkId,
};
pub use journal::{Decision, Divergence, Input, Journal, JournaledEngine};
pub use options::{EngineOptions, FRAME_BYTES_DEFAULT};
pub use plan::{
    check_ready_rule, Plan, Role, Slice, TensorPlan, TensorSetting, TensorSpec, Update,
};
pub use roles::Roles;
pub use scheme::{Scheme, RING_BLOCK_ELEMS, RING_ENCODED_BLOCK_ELEMS};
pub use staleness::{Staleness, Tally};
pub use strategy::{
    Close, Granularity, Order, Placement, PullRule, ReadyRule, Release, SetRule, Strategy,
    KVSTORE_SPLIT_ELEMS, POSEIDON_PAIR_ELEMS, SLICE_ELEMS,
};
