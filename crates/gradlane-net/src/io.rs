//! The lanes: they give their engines inputs and carry out their decisions.
//!
//! Each lane (`lane`) is a thread with an engine for its share of the slices, and a connection to each peer. `core`
//! is the engine with everything that its decisions are carried out with but the connections.
//! `commands` handles the application's calls, `peer_sockets` sends and receives, `keepalive` loses silent peers,
//! `shutdown` ends a session, over all lanes.

#[cfg(test)]
#[path = "../tests/all/support/adversary.rs"]
mod adversary;
mod commands;
mod connection;
#[allow(unsafe_code, reason = "borrows memory for frames going out")]
mod core;
mod driver;
mod frame_reader;
mod frame_sink;
mod frame_writer;
mod keepalive;
mod lane;
mod peer_sockets;
#[allow(unsafe_code, reason = "borrows memory for frames coming in")]
mod receive;
#[cfg(test)]
mod relayed_tests;
#[cfg(test)]
#[path = "../../gradlane-seal/tests/all/samples.rs"]
mod samples;
mod sealed_reader;
#[cfg(test)]
mod sealed_tests;
mod shutdown;
#[cfg(test)]
#[allow(unsafe_code, reason = "registers the memory of tests")]
mod tests;

pub(crate) use driver::{Driver, PeerLink};
pub(crate) use frame_reader::FrameReader;
pub(crate) use frame_sink::{Fault, FrameSink, PayloadTarget};
pub(crate) use frame_writer::{Flushed, FrameWriter, OutgoingFrame, OutgoingPayload};
