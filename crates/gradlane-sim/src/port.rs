//! Ports: each rank has one, full duplex, with a first-come first-served queue in each direction.
//!
//! A piece travels at once: a packet as segmentation offload makes it, or an
//! acknowledgement. On a wire it begins to arrive when it begins to leave, and is whole when both
//! ports have carried it. A port that is shaped by a token bucket lets a piece through at once as
//! soon as it owes nothing, and then owes the piece's time. A port that several senders meet at
//! carries one piece after the other. A port that stands for several equal ranks carries a piece as
//! many times as there are ranks at the other end.

use crate::rank_lane::LaneId;
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
    /// The lane of both, whose connection it is of.
    pub(crate) lane: u32,
    /// Bytes with frame headers.
    pub(crate) bytes: u32,
}

impl Piece {
    /// The lane that sends it.
    pub(crate) fn sender(&self) -> LaneId {
        LaneId { rank: self.from, lane: self.lane }
    }

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
    /// Pieces that wait to leave, with the time from which they may, the earliest first.
    queue: VecDeque<(u64, Piece)>,
    /// Bytes of them.
    pub(crate) bytes: u64,
    pub(crate) line: Line,
    /// One nanosecond after the port is looked at next; 0: nobody does.
    looked_at: u64,
}

/// Pieces that come to a port.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct Incoming {
    /// Pieces on their way here, with the time at which they are whole.
    pub(crate) queue: VecDeque<(u64, Piece)>,
    pub(crate) line: Line,
}

/// Connections that hold bytes, which share ports out: of each lane by itself.
#[derive(Debug)]
pub(crate) struct PortSharing {
    lanes: u32,
    /// By port and lane: those that leave, and those that come; one of a rank that stands for several
    /// counts for each.
    counts: Vec<[u32; 2]>,
}

impl PortSharing {
    /// None at any of so many ports.
    pub(crate) fn new(ports: u32, lanes: u32) -> PortSharing {
        PortSharing { lanes, counts: vec![[0; 2]; (ports * lanes) as usize] }
    }

    /// Those of a lane that leave a port, and those that come to it.
    pub(crate) fn of(&mut self, port: u32, lane: u32) -> &mut [u32; 2] {
        &mut self.counts[(port * self.lanes + lane) as usize]
    }
}

impl Outgoing {
    /// Queues a piece that may leave at `time`, behind those that may as early; when the port should
    /// be looked at, if nobody does so early.
    pub(crate) fn push(&mut self, time: u64, piece: Piece) -> Option<u64> {
        self.bytes += u64::from(piece.bytes);
        let at = self.queue.partition_point(|&(other, _)| other <= time);
        self.queue.insert(at, (time, piece));
        let looks_at = time.max(self.line.free_at);
        (at == 0 && self.look(looks_at)).then_some(looks_at)
    }

    /// Notes that the port is to be looked at then; whether nobody does so early.
    fn look(&mut self, at: u64) -> bool {
        let is_earlier = self.looked_at == 0 || at < self.looked_at - 1;
        if is_earlier {
            self.looked_at = at + 1;
        }
        is_earlier
    }

    /// Takes the piece that leaves `now`, if the port is to be looked at now. Until it has `departed`
    /// nobody else looks: what is queued because it leaves waits.
    pub(crate) fn depart(&mut self, now: u64) -> Option<Piece> {
        if self.looked_at != now + 1 {
            return None;
        }
        let (_, piece) = self.queue.pop_front()?;
        self.bytes -= u64::from(piece.bytes);
        Some(piece)
    }

    /// Returns when the next piece may leave after one that has left.
    pub(crate) fn departed(&mut self) -> Option<u64> {
        let next = self.queue.front().map(|&(time, _)| time.max(self.line.free_at));
        self.looked_at = next.map_or(0, |at| at + 1);
        next
    }
}
