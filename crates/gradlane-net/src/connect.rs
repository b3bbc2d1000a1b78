//! Connections between all ranks: the listening socket, the thread that accepts callers, the
//! handshake, and the mesh that they form.

mod acceptor;
mod handshake;
mod listener;
mod mesh;

pub(crate) use acceptor::{Acceptor, MeshStream};
#[cfg(test)]
pub(crate) use handshake::{accept, call, HandshakeError, Link};
pub(crate) use handshake::{digest, FrameSeals, Identity};
pub use listener::Listener;
pub(crate) use mesh::{assemble, INTERRUPT_EVERY};
