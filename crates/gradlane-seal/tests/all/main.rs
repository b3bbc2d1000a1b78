//! Tests of sealing without sockets.

mod handshakes;
