//! The lanes: they give their engines inputs and carry out their decisions.
//!
//! Each lane (`lane`) is a thread with an engine for its share of the slices, and a connection to each peer. `core`
//! is the engine with everything that its decisions are carried out with but the connections.
//! `commands` handles the application's calls, `frame_reader` and `frame_writer` hold the bytes of a connection, `keepalive`
//! loses silent peers,
//! `shutdown` ends a session, over all lanes.

#[cfg(test)]
#[path = "../tests/all/support/adversary.rs"]
mod adversary;
mod commands;
#[allow(unsafe_code, reason = "borrows memory for frames")]
mod core;
mod driver;
mod frame_reader;
mod frame_writer;
mod keepalive;
mod lane;
#[cfg(test)]
mod relayed_tests;
#[cfg(test)]
#[path = "../../gradlane-seal/tests/all/samples.rs"]
mod samples;
#[cfg(test)]
mod sealed_tests;
mod shutdown;
#[cfg(test)]
#[allow(unsafe_code, reason = "registers the memory of tests")]
mod tests;

pub(crate) use driver::{Driver, PeerLink};
pub(crate) use frame_reader::{Fault, FrameReader, FrameSink, PayloadTarget};
pub(crate) use frame_writer::{Flushed, FrameWriter, OutgoingFrame, OutgoingPayload};
