//! The transmit scheduler: of all frames that may go now, the most urgent goes.
//!
//! Messages to one peer wait in that peer's queue. A broadcast waits as *one* entry with the set of
//! peers that it still owes; it is spread over the peers' queues only when it is the most urgent and
//! none of its peers can take more. Credit bounds the bytes handed out towards a peer and not yet
//! reported as sent; one frame always goes, so a slice larger than the credit never starves.

use crate::api::{Payload, PeerQueueStats, Region, Transmit};
use crate::rank_set::RankSet;
use crate::transmit::OrderKey;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, Step};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, HEADER_BYTES, MAX_FRAME_BYTES};

/// A peer, in one line of the cache: a thousand ranks have a million of them.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Peer {
    queue: Queue,
    /// Bytes handed out that the kernel does not have.
    in_flight_bytes: u64,
    /// Frames handed out whose memory is still read.
    frames_read: u32,
    /// Largest payload of a frame to it.
    frame_bytes: u32,
    writable: bool,
    /// Whether the head of its queue is in `Scheduler::heads`.
    indexed: bool,
}

#[derive(Debug)]
struct Shared {
    message: Arc<Message>,
    owed: RankSet,
}

#[derive(Debug)]
pub(crate) struct Scheduler {
    rank: Rank,
    credit_bytes: u64,
    /// By rank.
    peers: Vec<Peer>,
    /// Head of each peer's queue, for the peers that can take it now.
    heads: BTreeSet<(OrderKey, Rank)>,
    shared: BTreeMap<OrderKey, Shared>,
    /// Peers that can take at least an empty frame now.
    open: RankSet,
    /// Whether control messages alone are handed out.
    slices_held: bool,
    /// Peers that are lost: nothing is queued for them.
    forgotten: RankSet,
}

impl Scheduler {
    pub(crate) fn new(
        rank: Rank,
        world_size: u32,
        frame_bytes: u32,
        credit_bytes: u64,
    ) -> Scheduler {
        Scheduler {
            rank,
            credit_bytes,
            peers: (0..world_size).map(|_| Peer { frame_bytes, ..Peer::default() }).collect(),
            heads: BTreeSet::new(),
            shared: BTreeMap::new(),
            open: RankSet::empty(world_size),
            slices_held: false,
            forgotten: RankSet::empty(world_size),
        }
    }

    /// Queues a message to one peer.
    pub(crate) fn push(&mut self, peer: Rank, key: OrderKey, message: Message) {
        if !self.forgotten.contains(peer) {
            self.insert(peer, key, Arc::new(message));
        }
    }

    /// Queues a message to several peers as one entry.
    pub(crate) fn push_shared(&mut self, owed: RankSet, key: OrderKey, message: Message) {
        let owed = owed.without(&self.forgotten);
        if !owed.is_empty() {
            self.shared.insert(key, Shared { message: Arc::new(message), owed });
        }
    }

    /// Takes back pushes of a step of which no frame was handed out; their slices.
    pub(crate) fn withdraw_pushes(&mut self, step: Step) -> Vec<SliceId> {
        let mut slices = Vec::new();
        for peer in (0..self.peers.len() as u32).map(Rank) {
            let state = &mut self.peers[peer.index()];
            let before = state.head();
            state.queue.retain(|entry| {
                let header = &entry.message.header;
                let is_push = header.kind == FrameKind::Push && header.step == step;
                let goes = is_push && entry.offset == 0;
                if goes {
                    slices.push(header.slice);
                }
                !goes
            });
            self.reindex(peer, before);
        }
        slices
    }

    pub(crate) fn set_writable(&mut self, peer: Rank, writable: bool) {
        let state = &mut self.peers[peer.index()];
        if state.writable != writable {
            state.writable = writable;
            let head = state.head();
            self.reindex(peer, head);
        }
    }

    /// Sets the largest payload of frames to a peer.
    pub(crate) fn set_frame_bytes(&mut self, peer: Rank, frame_bytes: u32) {
        let state = &mut self.peers[peer.index()];
        state.frame_bytes = frame_bytes;
        for entry in state.queue.iter_mut() {
            entry.next_bytes = entry.message.frame_length(entry.offset, frame_bytes);
        }
        let head = state.head();
        self.reindex(peer, head);
    }

    /// The kernel has a frame handed out by `poll`, with this much payload.
    pub(crate) fn sent(&mut self, rank: Rank, length: u32) {
        let bytes = frame_cost(length);
        let peer = &mut self.peers[rank.index()];
        assert!(peer.in_flight_bytes >= bytes, "more bytes were sent than were handed out");
        peer.in_flight_bytes -= bytes;
        let head = peer.head();
        self.reindex(rank, head);
    }

    /// The memory of a frame handed out by `poll` is read no longer.
    pub(crate) fn read(&mut self, rank: Rank) {
        let peer = &mut self.peers[rank.index()];
        assert!(peer.frames_read > 0, "more frames were read than were handed out");
        peer.frames_read -= 1;
    }

    /// Drops everything queued; frames handed out stay accounted for.
    pub(crate) fn clear(&mut self) {
        self.shared.clear();
        for peer in &mut self.peers {
            peer.queue.clear();
            peer.indexed = false;
        }
        self.heads.clear();
    }

    /// Drops everything queued but control messages; frames handed out stay accounted for.
    pub(crate) fn clear_slices(&mut self) {
        self.shared.retain(|key, _| key.is_control());
        for rank in (0..self.peers.len() as u32).map(Rank) {
            let before = self.peers[rank.index()].head();
            self.peers[rank.index()].queue.retain(|entry| entry.message.header.kind.is_control());
            self.reindex(rank, before);
        }
    }

    /// Hands out control messages alone, or all again.
    pub(crate) fn hold_slices(&mut self, held: bool) {
        self.slices_held = held;
    }

    /// Forgets a peer that is lost: nothing that was handed out for it is read any more.
    pub(crate) fn forget(&mut self, rank: Rank) {
        self.forgotten.insert(rank);
        let peer = &mut self.peers[rank.index()];
        let before = peer.head();
        peer.queue.clear();
        peer.in_flight_bytes = 0;
        peer.frames_read = 0;
        peer.writable = false;
        self.reindex(rank, before);
        self.shared.retain(|_, entry| {
            entry.owed.remove(rank);
            !entry.owed.is_empty()
        });
    }

    /// Whether nothing that was handed out for a peer is read any more.
    pub(crate) fn reads_nothing(&self, rank: Rank) -> bool {
        self.peers[rank.index()].frames_read == 0
    }

    /// Whether nothing is queued, in flight, or read.
    pub(crate) fn is_idle(&self) -> bool {
        let is_idle =
            |it: &Peer| it.queue.is_empty() && it.in_flight_bytes == 0 && it.frames_read == 0;
        self.shared.is_empty() && self.peers.iter().all(is_idle)
    }

    /// Sizes of all queues; a message to several peers counts for each that it is still owed to.
    pub(crate) fn queue_stats(&self) -> Vec<PeerQueueStats> {
        let mut stats: Vec<PeerQueueStats> = Vec::with_capacity(self.peers.len());
        for peer in &self.peers {
            let mut of_peer =
                PeerQueueStats { in_flight_bytes: peer.in_flight_bytes, ..Default::default() };
            for entry in peer.queue.iter() {
                of_peer.add(entry.message.bytes() - entry.offset);
            }
            stats.push(of_peer);
        }
        for entry in self.shared.values() {
            for peer in entry.owed.iter() {
                stats[peer.index()].add(entry.message.bytes());
            }
        }
        stats
    }

    /// The most urgent frame that may go now.
    pub(crate) fn poll(&mut self) -> Option<Transmit> {
        if self.open.is_empty() {
            return None;
        }
        let shared = self.first_shared();
        let head = self.heads.first().copied();
        let first = head.map(|(key, _)| key).into_iter().chain(shared.map(|(key, _)| key)).min();
        if self.slices_held && !first?.is_control() {
            return None;
        }
        match (head, shared) {
            (None, None) => None,
            (Some((key, peer)), None) => Some(self.emit_unicast(key, peer)),
            (Some((key, peer)), Some((shared_key, _))) if key <= shared_key => {
                Some(self.emit_unicast(key, peer))
            }
            (_, Some((key, peer))) => self.emit_shared(key, peer),
        }
    }

    /// The most urgent shared entry that owes a peer which can take it, unless a queue's head is
    /// more urgent. Entries passed over are spread over their peers' queues.
    fn first_shared(&mut self) -> Option<(OrderKey, Rank)> {
        loop {
            let (&key, entry) = self.shared.first_key_value()?;
            if self.heads.first().is_some_and(|&(head, _)| head < key) {
                return None;
            }
            let able = |&peer: &Rank| self.can_take(peer, key, &entry.message);
            if let Some(peer) = entry.owed.iter_after(self.rank).find(able) {
                return Some((key, peer));
            }
            let entry = self.shared.remove(&key)?;
            for peer in entry.owed.iter() {
                self.insert(peer, key, Arc::clone(&entry.message));
            }
        }
    }

    fn emit_unicast(&mut self, key: OrderKey, rank: Rank) -> Transmit {
        let peer = &mut self.peers[rank.index()];
        let (first, mut entry) = peer.queue.pop_first().expect("an indexed head is in its queue");
        debug_assert_eq!(first, key, "the indexed entry is the head");
        let length = entry.next_bytes;
        let transmit = entry.message.frame(rank, entry.offset, length);
        peer.in_flight_bytes += frame_cost(length);
        peer.frames_read += 1;
        entry.offset += u64::from(length);
        if entry.offset < entry.message.bytes() {
            entry.next_bytes = entry.message.frame_length(entry.offset, peer.frame_bytes);
            peer.queue.insert(key, entry);
        }
        self.reindex(rank, Some(key));
        transmit
    }

    fn emit_shared(&mut self, key: OrderKey, rank: Rank) -> Option<Transmit> {
        let entry = self.shared.get_mut(&key)?;
        entry.owed.remove(rank);
        let message = if entry.owed.is_empty() {
            self.shared.remove(&key)?.message
        } else {
            Arc::clone(&entry.message)
        };
        self.insert(rank, key, message);
        Some(self.emit_unicast(key, rank))
    }

    /// Queues a message of which nothing was handed out.
    fn insert(&mut self, peer: Rank, key: OrderKey, message: Arc<Message>) {
        let state = &mut self.peers[peer.index()];
        let before = state.head();
        let next_bytes = message.frame_length(0, state.frame_bytes);
        state.queue.insert(key, Unicast { message, offset: 0, next_bytes });
        self.reindex(peer, before);
    }

    /// Whether a peer can take the first frame of a message with this key now: it has room, and
    /// nothing more urgent of its own queue waits for more room than there is.
    fn can_take(&self, peer: Rank, key: OrderKey, message: &Message) -> bool {
        let peer = &self.peers[peer.index()];
        let passes_over = peer.queue.first().is_some_and(|(head, _)| head < key);
        let length = message.frame_length(0, peer.frame_bytes);
        peer.can_take(length, self.credit_bytes) && !passes_over
    }

    /// Brings `heads` and `open` up to date for one peer, whose queue began with `before` so far.
    fn reindex(&mut self, rank: Rank, before: Option<OrderKey>) {
        let peer = &mut self.peers[rank.index()];
        if peer.can_take(0, self.credit_bytes) {
            self.open.insert(rank);
        } else {
            self.open.remove(rank);
        }
        let head = peer.queue.first().and_then(|(key, entry)| {
            peer.can_take(entry.next_bytes, self.credit_bytes).then_some(key)
        });
        let old = before.filter(|_| peer.indexed);
        if head == old {
            return;
        }
        if let Some(key) = old {
            self.heads.remove(&(key, rank));
        }
        if let Some(key) = head {
            self.heads.insert((key, rank));
        }
        peer.indexed = head.is_some();
    }
}

impl Peer {
    /// Key of the most urgent entry.
    fn head(&self) -> Option<OrderKey> {
        self.queue.first().map(|(key, _)| key)
    }

    fn can_take(&self, length: u32, credit_bytes: u64) -> bool {
        let after = self.in_flight_bytes + frame_cost(length);
        self.writable && (self.in_flight_bytes == 0 || after <= credit_bytes)
    }
}

fn frame_cost(length: u32) -> u64 {
    HEADER_BYTES as u64 + u64::from(length)
}

// Messages, and the frames that they are cut into.

/// A rest of up to this share of a frame, 1/8, goes with the frame before it.
const REST_SHIFT: u32 = 3;

/// A whole message: one slice or one control payload, cut into frames when sent.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    /// Header of all its frames, but for length and the flag of the last; its offset is that of the
    /// first.
    pub(crate) header: FrameHeader,
    pub(crate) body: Body,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    Empty,
    Region(Region),
    Inline(Vec<u8>),
}

impl Message {
    pub(crate) fn bytes(&self) -> u64 {
        match &self.body {
            Body::Empty => 0,
            Body::Region(region) => region.length,
            Body::Inline(bytes) => bytes.len() as u64,
        }
    }

    /// Length of the frame that starts at `offset`. Control payloads travel whole, and a small rest
    /// goes with the frame before it: a frame costs both ends the same, however small it is.
    pub(crate) fn frame_length(&self, offset: u64, frame_bytes: u32) -> u32 {
        let rest = self.bytes() - offset;
        let most = frame_bytes.saturating_add(frame_bytes >> REST_SHIFT).min(MAX_FRAME_BYTES);
        match self.body {
            Body::Inline(_) => rest as u32,
            _ if rest <= u64::from(most) => rest as u32,
            _ => frame_bytes,
        }
    }

    pub(crate) fn frame(&self, peer: Rank, offset: u64, length: u32) -> Transmit {
        let mut header = self.header;
        header.offset += offset;
        header.length = length;
        if offset + u64::from(length) == self.bytes() {
            header.flags = header.flags.with(FrameFlags::LAST);
        }
        let payload = match &self.body {
            _ if length == 0 => Payload::None,
            Body::Empty => Payload::None,
            Body::Inline(bytes) => Payload::Inline(bytes.clone()),
            Body::Region(region) => Payload::Region(Region {
                memory: region.memory,
                offset: region.offset + offset,
                length: u64::from(length),
            }),
        };
        Transmit { peer, header, payload }
    }
}

// Messages to one peer, most urgent first. A thousand ranks have a million such queues, most of them
// with one entry or none: an empty one owns no memory, and a message that is owed to many peers is
// shared by their queues.

/// A message to one peer and how much of it was handed out.
#[derive(Clone, Debug)]
pub(crate) struct Unicast {
    pub(crate) message: Arc<Message>,
    pub(crate) offset: u64,
    /// Length of its next frame; kept here, so that the message need not be read for it.
    pub(crate) next_bytes: u32,
}

/// Entries in ascending order of their keys. New ones nearly always belong at one of the ends.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    entries: VecDeque<(OrderKey, Unicast)>,
}

impl Queue {
    /// The most urgent entry.
    pub(crate) fn first(&self) -> Option<(OrderKey, &Unicast)> {
        self.entries.front().map(|(key, entry)| (*key, entry))
    }

    /// Takes the most urgent entry.
    pub(crate) fn pop_first(&mut self) -> Option<(OrderKey, Unicast)> {
        self.entries.pop_front()
    }

    /// Adds an entry.
    pub(crate) fn insert(&mut self, key: OrderKey, entry: Unicast) {
        if self.entries.back().is_none_or(|(last, _)| *last < key) {
            self.entries.push_back((key, entry));
            return;
        }
        let at = self.entries.partition_point(|(other, _)| *other < key);
        self.entries.insert(at, (key, entry));
    }

    /// Keeps the entries that are to be kept.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&Unicast) -> bool) {
        self.entries.retain(|(_, entry)| keep(entry));
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All entries, most urgent first, to be changed.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Unicast> {
        self.entries.iter_mut().map(|(_, entry)| entry)
    }

    /// All entries, most urgent first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Unicast> {
        self.entries.iter().map(|(_, entry)| entry)
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
