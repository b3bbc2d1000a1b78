//! How fast and in which portions connections send.
//!
//! `rate` estimates rates, `limits` turns them into sizes, rates and times. The other files keep the state
//! between: `pacing` and `pacer` the share of a port, `connection_flow` the frame size and the send buffer
//! of a connection, `wakeup_coalescing` the turns of a thread.

mod connection_flow;
mod limits;
mod pacer;
mod pacing;
mod rate;
mod wakeup_coalescing;

pub(crate) use connection_flow::ConnectionFlow;
pub(crate) use limits::Ends;
pub(crate) use pacer::Pacer;
pub(crate) use pacing::PortPacing;
pub(crate) use wakeup_coalescing::WakeupCoalescer;
