//! The other ranks of a group: frames that wait to be sent, bytes under way, presence.

use super::call::{Description, Operation};
use super::error::{violation, Failure};
use super::frame::FramePurpose;
use super::limits::Limits;
use super::memory;
use crate::io::{OutgoingFrame, OutgoingPayload};
use crate::memory::Span;
use gradlane_units::Rank;
use gradlane_wire::{FrameHeader, HEADER_BYTES};
use std::collections::VecDeque;
use std::time::Instant;

/// Messages that a peer announces before this rank's calls come to them, at most.
pub(super) const AHEAD_MAX: usize = 1 << 20;
/// After this part of the bytes that may be under way is taken, the peer is told.
const CREDIT_REPORT_PART: u64 = 4;

/// What ends when the kernel has a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// Nothing, or not yet.
    Nothing,
    /// A message of a collective: its number and its strand.
    Collective(u64, u32),
    /// A message of a send: its number, to the peer.
    Point(u64),
}

/// Whether a rank is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// It takes part.
    Live,
    /// It has left in good order and will send no more.
    Left,
}

/// One other rank.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) outbox: VecDeque<(OutgoingFrame, Sent)>,
    pub(super) presence: Presence,
    /// When its last bytes came.
    pub(super) heard: Instant,
    /// Collectives that it has begun, as far as this rank knows.
    pub(super) begun: u64,
    /// Bytes sent without asking and not yet reported as taken.
    unreported: u64,
    /// Bytes that it sent without asking, taken here since the last report.
    taken: u64,
    /// Bytes that it sent without asking and that it was not told to be taken.
    unasked: u64,
}

/// All ranks.
#[derive(Debug)]
pub(super) struct Peers {
    pub(super) rank: u32,
    /// Number of the membership, which every frame carries.
    pub(super) generation: u32,
    pub(super) limits: Limits,
    all: Vec<Peer>,
}

impl Peers {
    pub(super) fn new(
        rank: u32,
        size: u32,
        generation: u32,
        limits: Limits,
        now: Instant,
    ) -> Peers {
        let peer = |_| Peer {
            outbox: VecDeque::new(),
            presence: Presence::Live,
            heard: now,
            begun: 0,
            unreported: 0,
            taken: 0,
            unasked: 0,
        };
        Peers { rank, generation, limits, all: (0..size).map(peer).collect() }
    }

    pub(super) fn size(&self) -> u32 {
        self.all.len() as u32
    }

    pub(super) fn get(&self, peer: u32) -> &Peer {
        &self.all[peer as usize]
    }

    pub(super) fn get_mut(&mut self, peer: u32) -> &mut Peer {
        &mut self.all[peer as usize]
    }

    /// The numbers of the other ranks.
    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.rank;
        (0..self.size()).filter(move |it| *it != own)
    }

    /// Returns whether a short message may go without asking, and counts it if so.
    pub(super) fn take_credit(&mut self, peer: u32, length: usize) -> bool {
        let most = self.limits.credit;
        let peer = self.get_mut(peer);
        let bytes = credit_of(length);
        let is_allowed = peer.unreported + bytes <= most;
        if is_allowed {
            peer.unreported += bytes;
        }
        is_allowed
    }

    /// Notes that a message that came without asking has reached its call.
    pub(super) fn note_taken(&mut self, from: u32, length: usize) {
        let least = self.limits.credit / CREDIT_REPORT_PART;
        let peer = self.get_mut(from);
        peer.taken += credit_of(length);
        if peer.taken >= least {
            let taken = std::mem::take(&mut peer.taken);
            peer.unasked -= taken;
            let header = FramePurpose::Credit.header(self.rank, taken);
            self.push(from, header, OutgoingPayload::Owned(Vec::new()), Sent::Nothing);
        }
    }

    /// Notes the header of a message that comes without asking. Fails when the peer may not send so much.
    pub(super) fn note_unasked(&mut self, from: u32, length: usize) -> Result<(), Failure> {
        let most = self.limits.credit;
        let peer = self.get_mut(from);
        peer.unasked += credit_of(length);
        if peer.unasked <= most {
            return Ok(());
        }
        let unasked = peer.unasked;
        Err(violation(from, &format!("{unasked} bytes without asking, where {most} are allowed")))
    }

    /// Bytes that a peer has sent without asking, and was not told to be taken.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn unasked_of(&self, peer: u32) -> u64 {
        self.get(peer).unasked
    }

    /// Notes a peer's report. Returns whether it is right.
    pub(super) fn note_credit(&mut self, from: u32, bytes: u64) -> bool {
        let peer = self.get_mut(from);
        let left = peer.unreported.checked_sub(bytes);
        peer.unreported = left.unwrap_or(0);
        left.is_some()
    }

    /// Queues a frame without payload.
    pub(super) fn push_control(&mut self, to: u32, header: FrameHeader) {
        self.push(to, header, OutgoingPayload::Owned(Vec::new()), Sent::Nothing);
    }

    /// Queues a copy of a short message.
    pub(super) fn push_copy(&mut self, to: u32, header: FrameHeader, bytes: Span) {
        let copy = memory::read(bytes).to_vec();
        self.push(to, header, OutgoingPayload::Owned(copy), Sent::Nothing);
    }

    /// Queues the frames of a message, which stays where it is until the kernel has it.
    pub(super) fn push_message(&mut self, to: u32, header: FrameHeader, bytes: Span, sent: Sent) {
        let total = bytes.length();
        if total == 0 {
            self.push(to, header, OutgoingPayload::Owned(Vec::new()), sent);
        }
        let most = self.limits.frame;
        for start in (0..total).step_by(most) {
            let length = most.min(total - start);
            let header = FrameHeader {
                offset: header.offset | start as u64,
                length: length as u32,
                ..header
            };
            let payload = memory::read(memory::part(bytes, start, length));
            let sent = if start + length == total { sent } else { Sent::Nothing };
            self.push(to, header, OutgoingPayload::Borrowed(payload), sent);
        }
    }

    /// Queues a frame.
    pub(super) fn push(
        &mut self,
        to: u32,
        mut header: FrameHeader,
        payload: OutgoingPayload,
        sent: Sent,
    ) {
        header.sender = Rank(self.rank);
        header.generation = self.generation;
        if let OutgoingPayload::Owned(bytes) = &payload {
            header.length = bytes.len() as u32;
        }
        let frame = OutgoingFrame::new(header, payload, false);
        self.get_mut(to).outbox.push_back((frame, sent));
    }
}

/// Bytes that a short message counts for: empty ones take memory, too.
fn credit_of(length: usize) -> u64 {
    (length + HEADER_BYTES) as u64
}

/// Bytes of a message that a frame's header announces, and where in it the frame begins.
pub(super) fn message_range(header: &FrameHeader) -> (usize, usize) {
    ((header.offset >> 32) as usize, (header.offset & u64::from(u32::MAX)) as usize)
}

/// Returns a description's operation, unless it is of a message between two ranks.
pub(super) fn is_collective(description: &Description) -> bool {
    !matches!(description.operation, Operation::Send | Operation::Receive)
}
