//! The communication engine: a pure state machine.
//!
//! It is told what happened (a gradient is ready, a frame arrived, a peer can take more, a peer is
//! lost, time is now T) and is asked what to do next. It knows no socket, clock, thread or gradient
//! byte: it moves descriptors. The same engine runs over real sockets (`gradlane-net`) and over
//! virtual time (`gradlane-sim`).
//!
//! After any call, call [`Engine::poll_job`], [`Engine::poll_transmit`] and [`Engine::poll_event`] until
//! each returns `None`; the order does not matter.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[cfg(test)]
extern crate std;

mod aggregator;
mod api;
mod buffers;
mod control;
mod cx;
mod engine;
mod gather;
mod gradient_norm;
mod jobs;
mod kept_results;
mod lane;
mod membership;
mod plan;
mod ps;
mod rank_set;
mod replay;
mod ring;
mod transmit;
mod worker;

pub use api::*;
pub use engine::Engine;
pub use gradlane_units::{CodecSizes, RingBytes};
pub use plan::*;
pub use replay::Divergence;
