//! One connection: frames going out, frames coming in.

use crate::sys::descriptors::ForkTracked;
use gradlane_engine::Transmit;
use gradlane_wire::FrameHeader;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::frame_reader::{FrameReader, FrameSink};
use super::frame_writer::{Flushed, FrameWriter};

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
    pub(crate) socket: Arc<ForkTracked<TcpStream>>,
    pub(crate) writer: FrameWriter,
    pub(crate) reader: FrameReader,
}

impl Connection {
    /// A connection on which the handshake is done.
    pub(crate) fn new(socket: Arc<ForkTracked<TcpStream>>) -> Connection {
        Connection { socket, writer: FrameWriter::default(), reader: FrameReader::new() }
    }

    /// Gives the kernel what is waiting to be sent, as [`FrameWriter::flush`].
    pub(crate) fn flush(
        &mut self,
        total: &mut usize,
        sent: impl FnMut(&FrameHeader, Option<Transmit>),
    ) -> io::Result<Flushed> {
        self.writer.flush(self.socket.as_fd(), total, sent)
    }

    /// Reads what has come.
    pub(crate) fn receive(
        &mut self,
        budget: usize,
        sink: &mut impl FrameSink,
    ) -> (usize, Result<(), Fault>) {
        self.reader.receive(self.socket.as_fd(), budget, sink)
    }
}
