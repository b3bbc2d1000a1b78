//! One connection: its socket, both directions of frames, and the state that only its thread has.

use super::frame_reader::FrameReader;
use super::frame_writer::FrameWriter;
use crate::connect::FrameSeals;
use crate::flow::ConnectionFlow;
use crate::sys::socket::Socket;
use gradlane_units::Time;
use std::sync::Arc;

/// A connection to one peer.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Arc<dyn Socket>,
    pub(super) writer: FrameWriter,
    pub(super) reader: FrameReader,
    pub(super) flow: ConnectionFlow,
    /// Whether the poller reports it as writable.
    pub(super) armed: bool,
    pub(super) last_sent: Time,
    pub(super) heard_goodbye: bool,
}

impl Connection {
    /// Makes a connection after the handshake; without seals, frames go in the clear.
    pub(super) fn new(
        socket: Arc<dyn Socket>,
        seals: Option<FrameSeals>,
        flow: ConnectionFlow,
    ) -> Connection {
        let (sealer, opener) = seals.map(|it| (it.sealer, it.opener)).unzip();
        Connection {
            socket,
            writer: FrameWriter::new(sealer),
            reader: FrameReader::new(opener),
            flow,
            armed: false,
            last_sent: Time::ZERO,
            heard_goodbye: false,
        }
    }
}

/// Connections by rank; `None` for those of other threads, and for this rank itself.
pub(super) type Connections = Vec<Option<Connection>>;
