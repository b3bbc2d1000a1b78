//! Ports: each rank has one, full duplex, with a first-come first-served queue in each direction.
//!
//! A piece travels at once: a packet as segmentation offload makes it, or an
//! acknowledgement. On a wire it begins to arrive when it begins to leave, and is whole when both
//! ports have carried it. A port that is shaped by a token bucket lets a piece through at once as
//! soon as it owes nothing, and then owes the piece's time. A port that several senders meet at
//! carries one piece after the other. A port that stands for several equal ranks carries a piece as
//! many times as there are ranks at the other end.

use std::collections::VecDeque;

/// The contents of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// A part of the frame with this number; whether the frame begins and ends with it.
    Frame { number: u32, first: bool, last: bool },
    /// Bytes, as the kernel's send buffer counts them, have arrived.
    Acknowledgement { held_bytes: u32 },
    /// Traffic that is not gradlane's.
    Other,
}

/// Something on its way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) content: Content,
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// Bytes with frame headers.
    pub(crate) bytes: u32,
}

impl Piece {
    pub(crate) fn is_acknowledgement(&self) -> bool {
        matches!(self.content, Content::Acknowledgement { .. })
    }
}

/// Carries pieces in one direction, one after another.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// On a wire: when it has carried all that it was given. Shaped: when it owes nothing any more.
    pub(crate) free_at: u64,
}

impl Line {
    /// Carries something that takes `ns`; a shaped port that was idle has saved up `burst_ns`.
    pub(crate) fn occupy(&mut self, from: u64, ns: u64, burst_ns: u64) {
        self.free_at = self.free_at.max(from.saturating_sub(burst_ns)) + ns;
    }
}

/// One rank's port. The fields that one event needs lie in a line of the cache.
#[derive(Debug, Default)]
pub(crate) struct Port {
    pub(crate) out: Outgoing,
    pub(crate) into: Incoming,
}

/// Pieces that leave a port.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Outgoing {
    /// Pieces that wait to leave, with the time from which they may.
    queue: VecDeque<(u64, Piece)>,
    /// Bytes of them.
    pub(crate) bytes: u64,
    pub(crate) line: Line,
}

/// Pieces that come to a port.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Incoming {
    /// Pieces on their way here, with the time at which they are whole.
    pub(crate) queue: VecDeque<(u64, Piece)>,
    pub(crate) line: Line,
}

impl Outgoing {
    /// Queues a piece that may leave at `time`; when the port should be looked at, if nobody does
    /// yet.
    pub(crate) fn push(&mut self, time: u64, piece: Piece) -> Option<u64> {
        self.bytes += u64::from(piece.bytes);
        self.queue.push_back((time, piece));
        (self.queue.len() == 1).then(|| time.max(self.line.free_at))
    }

    /// The piece that leaves now. It stays at the head until it has `departed`: what is queued because
    /// it leaves is looked at already.
    pub(crate) fn depart(&mut self) -> Option<Piece> {
        let &(_, piece) = self.queue.front()?;
        self.bytes -= u64::from(piece.bytes);
        Some(piece)
    }

    /// Takes away the piece that has left. Returns when the next one may leave.
    pub(crate) fn departed(&mut self) -> Option<u64> {
        self.queue.pop_front();
        self.queue.front().map(|&(time, _)| time.max(self.line.free_at))
    }
}
