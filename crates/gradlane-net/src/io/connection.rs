//! One connection: frames going out, frames coming in.

use super::frame_reader::{FrameReader, FrameSink};
use super::frame_writer::{Flushed, FrameWriter};
use crate::sys::socket::Socket;
use gradlane_engine::Transmit;
use gradlane_wire::FrameHeader;
use std::io;
use std::sync::Arc;

/// Why a connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The peer is gone: the reason without its name.
    Lost(String),
    /// The peer violated the protocol: the sentence without its name at the front.
    ProtocolViolation(String),
    /// This rank broke an invariant of its own: the whole sentence.
    Internal(String),
}

/// A socket with both directions.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: Arc<dyn Socket>,
    pub(crate) writer: FrameWriter,
    pub(crate) reader: FrameReader,
}

impl Connection {
    /// Makes a connection after the handshake.
    pub(crate) fn new(socket: Arc<dyn Socket>) -> Connection {
        Connection { socket, writer: FrameWriter::default(), reader: FrameReader::new() }
    }

    /// Sends the queue, as [`FrameWriter::flush`].
    pub(crate) fn flush(
        &mut self,
        total: &mut usize,
        sent: impl FnMut(&FrameHeader, Option<Transmit>),
    ) -> io::Result<Flushed> {
        self.writer.flush(&*self.socket, total, sent)
    }

    /// Reads frames, as [`FrameReader::receive`].
    pub(crate) fn receive(
        &mut self,
        budget: usize,
        sink: &mut impl FrameSink,
    ) -> (usize, Result<(), Fault>) {
        self.reader.receive(&*self.socket, budget, sink)
    }
}
