//! Tests of sealing without sockets.

mod frames;
mod handshakes;
mod samples;
