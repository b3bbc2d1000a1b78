//! The engine over real sockets and real memory.
//!
//! A [`Channel`] connects all ranks of a job for one prepared model and runs the engine of
//! `gradlane-engine` on threads of its own: frames leave straight from gradient memory and arrive
//! straight in it, reductions run on job threads. Calls of application threads are commands to
//! the I/O threads and return at once, except those that wait.
//!
//! # Guarantees
//!
//! A payload is released only after its checksum was verified; on a sealed connection, nothing leaves the
//! reader's buffer before its tag was. A lost or misbehaving peer ends the
//! session on every rank with a message that names rank, tensors and bytes. The channel's threads stop
//! using the application's memory before any caller learns that the session is over.
//!
//! # Structure
//!
//! | folder | holds |
//! | --- | --- |
//! | `sys` | poller, sockets, descriptors closed after a fork, clock |
//! | `memory` | addresses of gradients, parameters and scratch buffers |
//! | `connect` | listener, acceptor, handshake, mesh of connections |
//! | `io` | I/O threads: frames between sockets and the engine, keepalive, shutdown |
//! | `flow` | rates: pacing, frame size, send buffers, wake-up coalescing |
//! | `compute` | jobs: reductions, codecs, optimizers, on threads of their own |
//! | `metrics` | counters, traces and their snapshots |
//! | `channel` | the handle for applications, checks of its calls, completions |
//! | `collectives` | groups of ranks for programs of `torch.distributed`, beside channels |
//!
//! Each lane has an I/O thread, an engine for its share of the slices and a connection to each peer. The crate
//! needs Linux (epoll, eventfd).
//!
//! `tests/all/unsafe_files.rs` lists the files that may hold unsafe code.

#![deny(unsafe_code)]

mod channel;
mod collectives;
mod compute;
mod connect;
mod error;
mod flow;
mod io;
mod memory;
mod metrics;
mod options;
mod sys;

pub use channel::{Block, Blocks, Channel, MembershipEvent};
#[cfg(feature = "fuzzing")]
pub use collectives::{hostile_peer, Outcome};
pub use collectives::{
    Call, Element, Group, GroupError, GroupErrorKind, GroupOptions, Operation, Reduction, Work,
};
pub use compute::{ResidualSquares, StateKind, StateRead, StateWrite, UpdateRule, UpdateRuleError};
pub use connect::Listener;
pub use error::{ChannelError, ChannelFailure};
pub use gradlane_codec::{AdamOptions, CodecSpecError, SgdOptions, TensorCodec};
pub use memory::UserMemory;
pub use metrics::{
    Direction, JobEntry, JobKind, LeftOutSnapshot, MetricsSnapshot, PeerSnapshot, Refusal,
    StalenessSnapshot, StepParticipation, StragglerSnapshot, TraceEntry, WaitSnapshot,
};
pub use options::{ChannelOptions, GoingOnOptions};
