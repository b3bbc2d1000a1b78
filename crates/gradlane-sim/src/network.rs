//! The network: bytes that kernels take from connections, and pieces that ports carry.
//!
//! A kernel cuts a frame into packets as large as segmentation offload allows, and begins a packet
//! while its send buffer has room. A packet leaves the buffer when its acknowledgement is back, which
//! waits in the ports' queues like everything else: where all ranks send to all, about half of what
//! the buffers hold has arrived and is on its way back as acknowledgements, so that a port's queue
//! is empty at times although every connection is full.

use crate::costs::{ACKNOWLEDGEMENT_BYTES, PACKET_OVERHEAD_BYTES, SMALL_PIECE_BYTES};
use crate::draws::fraction;
use crate::event_queue::EventKind;
use crate::port::{Content, Piece};
use crate::rank_lane::{IoTask, LaneId, Partial};
use crate::simulation::Run;
use crate::trace::{Lane, Subject};
use gradlane_engine::{Input, Transmit};
use gradlane_units::Rank;

/// Acknowledgements behind one another leave together where that is so near in time.
const ACKNOWLEDGEMENTS_NS: u64 = 20_000;
/// Connections may exceed their parts of their sender's port by 1/64 (`gradlane-net`'s `pacing.rs`).
const PACED_SHARE: f64 = 64.0 / 65.0;

impl Run {
    /// Gives a frame that the engine has chosen to the kernel, or keeps it until that takes more.
    pub(crate) fn offer(&mut self, id: LaneId, transmit: Transmit, time: u64) -> u64 {
        let peer = transmit.peer.0;
        if self.connections[(id, peer)].behind {
            let unsent = &mut self.lanes[id].unsent;
            unsent.entry(peer).or_default().push_back(transmit);
            self.mark_busy(id, peer);
            return time;
        }
        self.send(id, transmit, time)
    }

    /// The connection takes no more for now.
    fn mark_busy(&mut self, id: LaneId, peer: u32) {
        self.connections[(id, peer)].busy = true;
        self.lanes[id].engine.tell(Input::Writable(Rank(peer), false));
    }

    /// Gives the kernel what waited for a connection to take more.
    pub(crate) fn flush(&mut self, id: LaneId, peer: u32, mut time: u64) -> u64 {
        if !std::mem::take(&mut self.connections[(id, peer)].behind) {
            return time;
        }
        if let Some(partial) = self.lanes[id].partial.remove(&peer) {
            self.push(id, peer, partial, time);
        }
        while !self.connections[(id, peer)].busy {
            let unsent = &mut self.lanes[id].unsent;
            let Some(queue) = unsent.get_mut(&peer) else {
                break;
            };
            let transmit = queue.pop_front();
            if queue.is_empty() {
                unsent.remove(&peer);
            }
            if let Some(transmit) = transmit {
                time = self.send(id, transmit, time);
            }
        }
        let waits = self.lanes[id].unsent.contains_key(&peer);
        self.connections[(id, peer)].behind |= waits;
        time
    }

    /// Begins a frame; the time when the thread may go on.
    fn send(&mut self, id: LaneId, transmit: Transmit, time: u64) -> u64 {
        let (rank, peer) = (id.rank, transmit.peer.0);
        let bytes = self.charges.frame_bytes(transmit.header.length);
        let weight = self.groups.weights[peer as usize];
        let charges = self.charges_of(rank);
        let cost = charges.send_frame + charges.send_byte * f64::from(bytes);
        let time = time + (cost * f64::from(weight)) as u64;
        self.meters.frames += 1;
        self.meters.sent_bytes += u64::from(bytes);
        let (port, _) = self.ports_to(rank, peer);
        if let Some(passed) = self.meters.port_bytes.get_mut(port as usize) {
            *passed += u64::from(bytes) * u64::from(weight);
        }
        let number = self.frames.insert(&transmit);
        self.push(id, peer, Partial { number, bytes, rest: bytes, transmit }, time);
        time
    }

    /// Gives the kernel as much of a frame as it takes: it begins a packet as long as the buffer has
    /// room, and ends it even where that is over.
    fn push(&mut self, id: LaneId, peer: u32, mut partial: Partial, time: u64) {
        let overhead = PACKET_OVERHEAD_BYTES;
        let LaneId { rank, lane } = id;
        let to = self.channels.topology.peer(rank, peer);
        while partial.rest > 0 {
            let connection = &mut self.connections[(id, peer)];
            if connection.held_bytes >= connection.window_bytes {
                connection.behind = true;
                self.lanes[id].partial.insert(peer, partial);
                return self.mark_busy(id, peer);
            }
            let room = connection.window_bytes - connection.held_bytes;
            let bytes = packet(partial.rest, self.piece_bytes, room);
            self.window_jitter.pass(connection, self.window_bytes, bytes);
            connection.waiting_bytes += bytes;
            self.hold(id, peer, bytes + overhead);
            let first = partial.rest == partial.bytes;
            partial.rest -= bytes;
            let content = Content::Frame { number: partial.number, first, last: partial.rest == 0 };
            let piece = Piece { content, from: rank, to, lane, bytes };
            let leaves_at = self.paced(peer, &piece, time);
            self.queue(leaves_at, piece);
        }
        // Said in this order, the engine need not find the next head for a peer that is busy.
        if !self.is_below_low_water(id, peer) {
            self.mark_busy(id, peer);
        }
        // The kernel has copied it.
        let Transmit { peer, header, .. } = partial.transmit;
        let engine = &mut self.lanes[id].engine;
        engine.tell(Input::Sent(peer, header));
        engine.tell(Input::Read(peer, header));
    }

    /// Notes bytes that a connection holds.
    fn hold(&mut self, id: LaneId, peer: u32, bytes: u32) {
        let connection = &mut self.connections[(id, peer)];
        let was_idle = connection.held_bytes == 0;
        connection.held_bytes += bytes;
        if was_idle {
            self.share_ports(id, peer, true);
        }
    }

    /// Notes that bytes which a connection held are at the peer.
    fn release(&mut self, id: LaneId, peer: u32, bytes: u32) {
        let connection = &mut self.connections[(id, peer)];
        connection.held_bytes -= bytes;
        if connection.held_bytes == 0 {
            self.share_ports(id, peer, false);
        }
    }

    /// Counts a connection at the ports of both ends, or counts it no more.
    fn share_ports(&mut self, LaneId { rank, lane }: LaneId, peer: u32, joins: bool) {
        let (out, into) = self.ports_to(rank, peer);
        let weight = |member: u32| self.groups.weights[member as usize];
        let (to, from) = (weight(peer), weight(self.channels.topology.member(rank)));
        let change = |count: &mut u32, by: u32| if joins { *count += by } else { *count -= by };
        change(&mut self.sharing.of(out, lane)[0], to);
        change(&mut self.sharing.of(into, lane)[1], from);
    }

    /// The ports at both ends of a rank's connection to a member of its channel.
    fn ports_to(&self, rank: u32, peer: u32) -> (u32, u32) {
        let topology = self.channels.topology;
        topology.ports(rank, topology.peer(rank, peer))
    }

    /// When a piece of a connection may leave, which the kernel takes at `time`: behind those before it,
    /// and where several connections share a port, when it is due at this one's part. The transport finds
    /// its rate where the slower of both ports lets it through. A lane paces its own connections, to what it
    /// carries of the port while all have something to send, and does not know when others have not.
    fn paced(&mut self, peer: u32, piece: &Piece, time: u64) -> u64 {
        let (rank, id) = (piece.from, piece.sender());
        let connection = &mut self.connections[(id, peer)];
        let leaves_at = connection.due.max(time);
        connection.due = leaves_at;
        let share = f64::from(connection.window_bytes) / self.window_bytes;
        let (out, into) = self.ports_to(rank, peer);
        let lanes = self.lanes.each();
        let paces = self.paces && (lanes == 1 || self.lanes[id].has_several_peers);
        if !(paces && self.channels.topology.is_outside(out)) {
            return leaves_at;
        }
        let part = |sharing: u32, member: u32| {
            f64::from(lanes * sharing) / f64::from(self.groups.weights[member as usize])
        };
        let leaving = part(self.sharing.of(out, id.lane)[0], peer);
        let from = self.channels.topology.member(rank);
        let coming = part(self.sharing.of(into, id.lane)[1], from);
        if leaving.max(coming) > 1.0 {
            let out_ns = self.port_ns(out, piece, piece.to) as f64 * leaving * PACED_SHARE;
            let in_ns = self.port_ns(into, piece, rank) as f64 * coming;
            self.connections[(id, peer)].due += (out_ns.max(in_ns) / share) as u64;
        }
        leaves_at
    }

    fn is_below_low_water(&self, id: LaneId, peer: u32) -> bool {
        let waiting = self.connections[(id, peer)].waiting_bytes;
        let (port, _) = self.ports_to(id.rank, peer);
        self.ports[port as usize].out.bytes <= self.queue_bytes
            || u64::from(waiting) < self.low_water_bytes
    }

    fn queue(&mut self, time: u64, piece: Piece) {
        let (port, _) = self.channels.topology.ports(piece.from, piece.to);
        if let Some(at) = self.ports[port as usize].out.push(time, piece) {
            self.events.at(at.max(self.now), EventKind::Depart, port);
        }
    }

    /// Lets the head of the queue leave: acknowledgements, and one piece behind them.
    pub(crate) fn depart(&mut self, port: u32) {
        let mut next = self.ports[port as usize].out.depart(self.now);
        while let Some(piece) = next {
            self.carry(piece);
            let Some(at) = self.ports[port as usize].out.departed() else {
                return;
            };
            let may_follow = piece.is_acknowledgement() && at <= self.now + ACKNOWLEDGEMENTS_NS;
            if !may_follow {
                return self.events.at(at, EventKind::Depart, port);
            }
            next = self.ports[port as usize].out.depart(at);
        }
    }

    /// A piece leaves its port now, and so begins to arrive.
    fn carry(&mut self, piece: Piece) {
        let topology = self.channels.topology;
        let (out, into) = topology.ports(piece.from, piece.to);
        // Between ranks of one node there is neither a wire nor what shapes it.
        let outside = topology.is_outside(out);
        let burst = if outside { self.burst_ns } else { 0 };
        let out_ns = self.port_ns(out, &piece, piece.to);
        let now = self.now;
        // An acknowledgement that left at once, too, is before it.
        let line = &mut self.ports[out as usize].out.line;
        let begins_at = if burst > 0 { now } else { line.free_at.max(now) };
        line.occupy(now, out_ns, burst);
        let left_at = begins_at + out_ns;
        if outside {
            self.meters.tx.add(begins_at, left_at);
        }
        self.note_piece(&piece, piece.from, piece.to, begins_at, left_at);
        match self.fabric.first_line(out, into) {
            Some(line) => self.enter_line(line, piece, left_at),
            None => self.reach(piece, left_at),
        }
        if matches!(piece.content, Content::Frame { .. }) {
            let peer = topology.member(piece.to);
            self.connections[(piece.sender(), peer)].waiting_bytes -= piece.bytes;
            self.wake_if_writable(piece.sender(), peer);
        }
    }

    /// Time that a port takes for a piece to or from a rank at the other end.
    fn port_ns(&self, port: u32, piece: &Piece, other: u32) -> u64 {
        let ns_per_byte = if self.channels.topology.is_outside(port) {
            self.fabric.ns_per_byte(port)
        } else {
            self.local_ns_per_byte
        };
        let weight = self.groups.weights[other as usize];
        ceiling(f64::from(piece.bytes) * ns_per_byte * f64::from(weight))
    }

    /// A piece comes to a line between ports, which carries one after the other; all of it is there
    /// at `whole_at`.
    fn enter_line(&mut self, line: u32, piece: Piece, whole_at: u64) {
        let now = self.now;
        let entered = &mut self.fabric.lines[line as usize];
        if entered.queue.is_empty() && entered.free_at <= now {
            return self.pass_line(line, piece, whole_at);
        }
        entered.queue.push_back((piece, whole_at));
        if entered.queue.len() == 1 {
            self.events.at(entered.free_at, EventKind::Line, line);
        }
    }

    /// A line has carried what it was given.
    pub(crate) fn leave_line(&mut self, line: u32) {
        let Some((piece, whole_at)) = self.fabric.lines[line as usize].queue.pop_front() else {
            return;
        };
        self.pass_line(line, piece, whole_at);
        let left = &self.fabric.lines[line as usize];
        if !left.queue.is_empty() {
            self.events.at(left.free_at, EventKind::Line, line);
        }
    }

    /// A piece begins to leave a line now, and so comes to the next line, or to the port.
    fn pass_line(&mut self, line: u32, piece: Piece, whole_at: u64) {
        let passed = &mut self.fabric.lines[line as usize];
        passed.free_at = self.now + ceiling(f64::from(piece.bytes) * passed.ns_per_byte);
        let whole_at = whole_at.max(passed.free_at);
        let (out, into) = self.channels.topology.ports(piece.from, piece.to);
        match self.fabric.next_line(line, out, into) {
            Some(next) => self.enter_line(next, piece, whole_at),
            None => self.reach(piece, whole_at),
        }
    }

    /// A piece comes to the port of its receiver; all of it has left what is before that port at
    /// `left_at`.
    fn reach(&mut self, piece: Piece, left_at: u64) {
        let (_, into) = self.channels.topology.ports(piece.from, piece.to);
        let outside = self.channels.topology.is_outside(into);
        let (latency, burst) = if outside { (self.latency, self.burst_ns) } else { (0, 0) };
        let in_ns = self.port_ns(into, &piece, piece.from);
        let target = &mut self.ports[into as usize].into;
        let begins_at = target.line.free_at.max(self.now + latency);
        let whole_at = if burst > 0 {
            target.line.occupy(begins_at, in_ns, burst);
            begins_at
        } else {
            target.line.free_at = (begins_at + in_ns).max(left_at + latency);
            target.line.free_at
        };
        target.queue.push_back((whole_at, piece));
        if target.queue.len() == 1 {
            self.events.at(whole_at, EventKind::Arrive, into);
        }
        let begin = whole_at.saturating_sub(in_ns);
        if outside {
            self.meters.rx.add(begin, whole_at);
        }
        self.note_piece(&piece, piece.to, piece.from, begin, whole_at);
    }

    /// Keeps the span of a piece at one of its two ranks, where a trace was asked for.
    fn note_piece(&mut self, piece: &Piece, rank: u32, peer: u32, begin: u64, end: u64) {
        let Content::Frame { number, .. } = piece.content else {
            return;
        };
        if self.trace.is_none() {
            return;
        }
        let header = self.frames.get(number);
        let (kind, priority) = (Some(header.kind), header.priority);
        let sender = piece.from;
        let slice = self.channels.lane_plan(piece.sender()).in_whole_plan(header.slice);
        let tensor = self.channels.tensor(sender, self.channels.plan(sender).slice(slice).tensor);
        let subject = Subject::Slice { kind, tensor, slice, peer, bytes: piece.bytes, priority };
        let lane = if rank == sender { Lane::of(header.kind) } else { Lane::Receive };
        self.span(rank, lane, header.step, subject, begin, end);
    }

    /// Pieces are whole at their receiver.
    pub(crate) fn arrive(&mut self, port: u32) {
        loop {
            let incoming = &mut self.ports[port as usize].into.queue;
            match incoming.front() {
                None => return,
                Some(&(time, _)) if time > self.now => {
                    return self.events.at(time, EventKind::Arrive, port);
                }
                Some(_) => {}
            }
            if let Some((_, piece)) = incoming.pop_front() {
                self.take(piece);
            }
        }
    }

    fn take(&mut self, piece: Piece) {
        let id = LaneId { rank: piece.to, lane: piece.lane };
        match piece.content {
            Content::Other => {}
            Content::Acknowledgement { held_bytes } => {
                let peer = self.channels.topology.member(piece.from);
                self.release(id, peer, held_bytes);
                self.wake_if_writable(id, peer);
            }
            Content::Frame { number, first, last } => {
                self.meters.received_bytes += u64::from(piece.bytes);
                self.acknowledge(&piece);
                if last {
                    self.hear(id, IoTask::Frame(number, first));
                } else if first {
                    self.hear(id, IoTask::Header(number));
                }
            }
        }
    }

    /// The receiving kernel tells the sending one, through the queues of the way back. Less than a
    /// full packet is told with what comes next; that it frees is so little that it is freed now. A
    /// switch that adds up is part of the network: what it sends back is all that there is to tell.
    fn acknowledge(&mut self, piece: &Piece) {
        let (rank, lane) = (piece.to, piece.lane);
        let held_bytes = piece.bytes + PACKET_OVERHEAD_BYTES;
        if piece.bytes <= SMALL_PIECE_BYTES || self.is_switch(rank) || self.is_switch(piece.from) {
            let peer = self.channels.topology.member(rank);
            self.release(piece.sender(), peer, held_bytes);
            return self.wake_if_writable(piece.sender(), peer);
        }
        let content = Content::Acknowledgement { held_bytes };
        let bytes = ACKNOWLEDGEMENT_BYTES;
        self.queue(self.now, Piece { content, from: rank, to: piece.from, lane, bytes });
    }

    /// Whether the kernel reports the connection as writable again: a third of the buffer is free.
    fn wake_if_writable(&mut self, id: LaneId, peer: u32) {
        let connection = self.connections[(id, peer)];
        let has_room = connection.held_bytes <= connection.window_bytes / 3 * 2;
        if connection.busy && has_room && self.is_below_low_water(id, peer) {
            self.connections[(id, peer)].busy = false;
            self.hear(id, IoTask::Writable(peer));
        }
    }

    pub(crate) fn schedule_background(&mut self, rank: u32) {
        let Some(background) = self.background else {
            return;
        };
        let wait = -background.interval_ns * (1.0 - fraction(&mut self.rng)).ln();
        self.events.at(self.now + wait as u64, EventKind::Background, rank);
    }

    pub(crate) fn burst(&mut self, rank: u32) {
        let topology = self.channels.topology;
        let Some(background) = self.background.filter(|_| self.finished < topology.ranks) else {
            return;
        };
        let nodes = topology.nodes();
        let node = (topology.node(rank) + 1 + self.rng.below(nodes - 1)) % nodes;
        let to = node * topology.per_node;
        let bytes = background.bytes;
        self.queue(self.now, Piece { content: Content::Other, from: rank, to, lane: 0, bytes });
        self.schedule_background(rank);
    }
}

/// Bytes that go at once where `rest` do: a packet, and the little that is left over where the buffer
/// has room for it too, which spares the events of its own.
fn packet(rest: u32, largest: u32, room: u32) -> u32 {
    let little = largest / 16;
    if rest <= largest || (rest - largest <= little && room > largest + PACKET_OVERHEAD_BYTES) {
        rest
    } else {
        largest
    }
}

/// The least whole number of nanoseconds that is no less.
fn ceiling(ns: f64) -> u64 {
    let whole = ns as u64;
    whole + u64::from((whole as f64) < ns)
}
