//! Ports: each rank has one, full duplex, with a first-come first-served queue in each direction.
//!
//! A piece begins to arrive when it begins to leave, and is whole when both ports have carried it:
//! a port that several senders meet at carries one piece after the other. A port that stands
//! for several equal ranks carries a piece as many times as there are ranks at the other end.

use std::collections::VecDeque;

/// A part of a frame on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Number of the frame; [`NO_FRAME`] for other traffic.
    pub(crate) frame: u32,
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// Bytes with headers.
    pub(crate) bytes: u32,
    /// Whether the frame begins with it.
    pub(crate) first: bool,
    /// Whether the frame ends with it.
    pub(crate) last: bool,
}

/// The frame number of traffic that is not gradlane's.
pub(crate) const NO_FRAME: u32 = u32::MAX;

/// One rank's port.
#[derive(Debug, Default)]
pub(crate) struct Port {
    /// Pieces that wait to leave, with the time from which they may.
    pub(crate) outgoing: VecDeque<(u64, Piece)>,
    /// Bytes in `outgoing`.
    pub(crate) outgoing_bytes: u64,
    /// When the last piece that began to leave has left.
    pub(crate) out_free_at: u64,
    /// Pieces on their way here, with the time at which they are whole.
    pub(crate) incoming: VecDeque<(u64, Piece)>,
    /// When the last of them is whole.
    pub(crate) in_free_at: u64,
}

impl Port {
    /// Queues a piece that may leave at `time`; when the port should be looked at, if nobody does
    /// yet.
    pub(crate) fn queue(&mut self, time: u64, piece: Piece) -> Option<u64> {
        self.outgoing_bytes += u64::from(piece.bytes);
        self.outgoing.push_back((time, piece));
        (self.outgoing.len() == 1).then(|| time.max(self.out_free_at))
    }

    /// Takes the piece that leaves now.
    pub(crate) fn depart(&mut self) -> Option<Piece> {
        let (_, piece) = self.outgoing.pop_front()?;
        self.outgoing_bytes -= u64::from(piece.bytes);
        Some(piece)
    }

    /// When the next piece may leave.
    pub(crate) fn next_departure(&self) -> Option<u64> {
        self.outgoing.front().map(|&(time, _)| time.max(self.out_free_at))
    }
}
