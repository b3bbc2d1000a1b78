//! The engine over real sockets and real memory.
//!
//! A [`Channel`] connects all ranks of a job for one prepared model and runs the engine of
//! `gradlane-engine` on threads of its own: frames leave straight from gradient memory and arrive
//! straight in it, reductions run on work threads. Calls of application threads are commands to
//! those threads and return at once, except those that wait.
//!
//! What always holds: a payload is released only after its checksum was right; a lost or
//! misbehaving peer ends the session with a message that names rank, tensors and bytes, on every
//! rank; and before anybody is told that a session is over, its threads have let go of the
//! application's memory.
//!
//! # Structure
//!
//! [`Listener`] and `mesh` (with `handshake` and `doorman`) make connections; `driver` (with
//! `connection`, `inbound`, `ending`) is the I/O threads; `works`, `executor`, `kernels` and `encoded` compute;
//! `memory` knows addresses; `ready` tells waiters. Each I/O thread has the connections of some peers,
//! but there is one engine for all: its choice of the next frame is global, because all peers share one
//! port. Unsafe code is in `memory`, `kernels`, `encoded` and `syscall` only. The crate needs Linux
//! (epoll, eventfd).

mod arrivals;
mod attendance;
mod blocks;
mod channel;
mod codecs;
mod connection;
mod depths;
mod descriptors;
mod doorman;
mod driver;
mod encoded;
mod ending;
mod error;
mod executor;
mod frame_size;
mod handshake;
mod inbound;
mod integer_ring;
mod kernels;
mod ledger;
mod listener;
mod memory;
mod mesh;
mod metrics;
mod optimizer;
mod options;
mod paced_flow;
mod pacing;
mod poller;
mod readings;
mod ready;
mod residual;
mod send_buffer;
mod shared;
mod syscall;
mod trace;
mod uptime;
mod works;

pub use arrivals::LatenessReading;
pub use attendance::{LeftOutReading, Standing};
pub use blocks::{Block, Blocks};
pub use channel::Channel;
pub use error::{ChannelError, ChannelFailure};
pub use gradlane_codec::{AdamOptions, CodecSpecError, SgdOptions, TensorCodec};
pub use listener::Listener;
pub use memory::UserMemory;
pub use optimizer::{Rule, RuleError, StateKind, StateRead};
pub use options::ChannelOptions;
pub use readings::{MetricsReading, PeerReading, Refusal, StalenessReading, WaitReading};
pub use trace::{Direction, TraceEntry, WorkEntry, WorkKind};
