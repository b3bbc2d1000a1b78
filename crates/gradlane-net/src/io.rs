//! The I/O threads: they give the engine its inputs and carry out its decisions.
//!
//! `core` is the engine with everything that its decisions are carried out with, one for all
//! threads and behind a lock. Each thread (`io_thread`) has the connections of its part of the
//! peers, and does system calls, copies and checksums outside of the lock. `commands` handles the
//! application's calls, `peer_sockets` sends and receives, `keepalive` loses silent peers,
//! `shutdown` ends a session.

#[cfg(test)]
#[path = "../tests/all/support/adversary.rs"]
mod adversary;
mod commands;
mod connection;
#[allow(unsafe_code, reason = "borrows memory for frames going out")]
mod core;
mod driver;
mod frame_reader;
mod frame_writer;
mod io_thread;
mod keepalive;
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
