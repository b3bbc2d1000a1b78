//! One connection: frames going out, frames coming in.

mod receiving;
mod sending;

use crate::descriptors::Tracked;
use gradlane_engine::Transmit;
use gradlane_wire::FrameHeader;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;

pub(crate) use receiving::{FrameSink, Receiver, Target};
pub(crate) use sending::{Flushed, Outgoing, OutgoingPayload, Sender};

/// Why a connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The peer is gone; the reason without its name.
    Lost(String),
    /// The peer sent what it must not; the sentence without its name at the front.
    Broken(String),
    /// This rank broke an invariant of its own; the whole sentence.
    Internal(String),
}

/// The socket of a connection with both directions.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: Arc<Tracked<TcpStream>>,
    pub(crate) sender: Sender,
    pub(crate) receiver: Receiver,
}

impl Connection {
    /// A connection on which the handshake is done.
    pub(crate) fn new(socket: Arc<Tracked<TcpStream>>) -> Connection {
        Connection { socket, sender: Sender::default(), receiver: Receiver::new() }
    }

    /// Gives the kernel what is waiting to be sent, as [`Sender::flush`].
    pub(crate) fn flush(
        &mut self,
        total: &mut usize,
        sent: impl FnMut(&FrameHeader, Option<Transmit>),
    ) -> io::Result<Flushed> {
        self.sender.flush(self.socket.as_fd(), total, sent)
    }

    /// Reads what has come.
    pub(crate) fn receive(
        &mut self,
        budget: usize,
        sink: &mut impl FrameSink,
    ) -> (usize, Result<(), Fault>) {
        self.receiver.receive(self.socket.as_fd(), budget, sink)
    }
}
