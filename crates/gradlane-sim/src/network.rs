//! The network: what kernels take of a connection, and what ports carry.

use crate::calendar::Kind;
use crate::node::Input;
use crate::port::{Piece, NO_FRAME};
use crate::simulation::{fraction, Run};
use crate::trace::{Lane, Subject};
use gradlane_engine::Transmit;
use gradlane_units::Rank;
use gradlane_wire::HEADER_BYTES;

impl Run {
    /// Gives a frame that the engine has chosen to the kernel, if that takes it.
    pub(crate) fn offer(&mut self, rank: u32, transmit: Transmit, time: u64) -> u64 {
        let peer = transmit.peer.0;
        let waits = self.nodes[rank as usize].unsent.contains_key(&peer);
        if waits || !self.takes_more(rank, peer) {
            let unsent = &mut self.nodes[rank as usize].unsent;
            unsent.entry(peer).or_default().push_back(transmit);
            self.mark_busy(rank, peer);
            return time;
        }
        self.send(rank, &transmit, time)
    }

    /// The connection takes no more for now.
    fn mark_busy(&mut self, rank: u32, peer: u32) {
        let node = &mut self.nodes[rank as usize];
        node.connections[peer as usize].busy = true;
        node.engine.handle_writable(Rank(peer), false);
    }

    /// Gives the kernel what waited for a connection to take more.
    pub(crate) fn flush(&mut self, rank: u32, peer: u32, mut time: u64) -> u64 {
        while self.takes_more(rank, peer) {
            let unsent = &mut self.nodes[rank as usize].unsent;
            let Some(queue) = unsent.get_mut(&peer) else {
                break;
            };
            let transmit = queue.pop_front();
            if queue.is_empty() {
                unsent.remove(&peer);
            }
            if let Some(transmit) = transmit {
                time = self.send(rank, &transmit, time);
            }
        }
        if self.nodes[rank as usize].unsent.contains_key(&peer) {
            self.mark_busy(rank, peer);
        }
        time
    }

    fn takes_more(&self, rank: u32, peer: u32) -> bool {
        let connection = &self.nodes[rank as usize].connections[peer as usize];
        let queued_at_port = self.ports[rank as usize].outgoing_bytes <= self.queue_bytes;
        let waiting = u64::from(connection.waiting_bytes);
        u64::from(connection.held_bytes) < self.window_bytes
            && (queued_at_port || waiting < self.low_water_bytes)
    }

    /// The kernel takes a whole frame.
    fn send(&mut self, rank: u32, transmit: &Transmit, time: u64) -> u64 {
        let peer = transmit.peer.0;
        let bytes = transmit.header.length + HEADER_BYTES as u32;
        let weight = self.fold.weights[peer as usize];
        let cost = self.charges.send_frame + self.charges.send_byte * f64::from(bytes);
        let time = time + (cost * f64::from(weight)) as u64;
        self.meters.frames += 1;
        self.meters.sent_bytes += u64::from(bytes);
        self.meters.port_bytes[rank as usize] += u64::from(bytes) * u64::from(weight);
        let number = self.frames.insert(transmit.header);
        self.queue_pieces(rank, peer, number, bytes, time);
        let node = &mut self.nodes[rank as usize];
        let connection = &mut node.connections[peer as usize];
        connection.held_bytes += bytes;
        connection.waiting_bytes += bytes;
        // Said in this order, the engine need not find the next head for a peer that is busy.
        if !self.takes_more(rank, peer) {
            self.mark_busy(rank, peer);
        }
        self.nodes[rank as usize].engine.handle_sent(transmit);
        time
    }

    fn queue_pieces(&mut self, rank: u32, peer: u32, frame: u32, bytes: u32, time: u64) {
        let mut rest = bytes;
        while rest > 0 {
            let size = rest.min(self.piece_bytes);
            let first = rest == bytes;
            rest -= size;
            let piece = Piece { frame, from: rank, to: peer, bytes: size, first, last: rest == 0 };
            if let Some(at) = self.ports[rank as usize].queue(time, piece) {
                self.calendar.at(at, Kind::Depart, rank);
            }
        }
    }

    /// The next piece begins to leave, and so to arrive.
    pub(crate) fn depart(&mut self, rank: u32) {
        let Some(piece) = self.ports[rank as usize].depart() else {
            return;
        };
        let weights = &self.fold.weights;
        let occupies = |weight: u32| {
            (f64::from(piece.bytes) * self.ns_per_byte * f64::from(weight)).ceil() as u64
        };
        let out_ns = occupies(weights[piece.to as usize]);
        let in_ns = occupies(weights[piece.from as usize]);
        let (now, left_at) = (self.now, self.now + out_ns);
        let port = &mut self.ports[rank as usize];
        port.out_free_at = left_at;
        if let Some(at) = port.next_departure() {
            self.calendar.at(at, Kind::Depart, rank);
        }
        let target = &mut self.ports[piece.to as usize];
        let begins_at = target.in_free_at.max(now + self.latency);
        let whole_at = (begins_at + in_ns).max(left_at + self.latency);
        target.in_free_at = whole_at;
        target.incoming.push_back((whole_at, piece));
        if target.incoming.len() == 1 {
            self.calendar.at(whole_at, Kind::Arrive, piece.to);
        }
        self.meters.tx.add(now, left_at);
        self.meters.rx.add(whole_at - in_ns, whole_at);
        if piece.frame == NO_FRAME {
            return;
        }
        if self.trace.is_some() {
            let header = self.frames.get(piece.frame);
            let (kind, slice, priority) = (Some(header.kind), header.slice, header.priority);
            let subject = |peer| Subject::Slice { kind, slice, peer, bytes: piece.bytes, priority };
            let lane = Lane::of(header.kind);
            self.span(rank, lane, header.step, subject(piece.to), now, left_at);
            let (subject, begin) = (subject(rank), whole_at - in_ns);
            self.span(piece.to, Lane::Receive, header.step, subject, begin, whole_at);
        }
        let connection = &mut self.nodes[rank as usize].connections[piece.to as usize];
        connection.waiting_bytes -= piece.bytes;
        self.wake_if_writable(rank, piece.to);
    }

    /// A piece is whole at its receiver.
    pub(crate) fn arrive(&mut self, rank: u32) {
        let port = &mut self.ports[rank as usize];
        let Some((_, piece)) = port.incoming.pop_front() else {
            return;
        };
        if let Some(&(time, _)) = port.incoming.front() {
            self.calendar.at(time, Kind::Arrive, rank);
        }
        if piece.frame == NO_FRAME {
            return;
        }
        self.meters.received_bytes += u64::from(piece.bytes);
        let connection = &mut self.nodes[piece.from as usize].connections[rank as usize];
        connection.held_bytes -= piece.bytes;
        if piece.last {
            self.hear(rank, Input::Frame(piece.frame, piece.first));
        } else if piece.first {
            self.hear(rank, Input::Header(piece.frame));
        }
        self.wake_if_writable(piece.from, rank);
    }

    fn wake_if_writable(&mut self, rank: u32, peer: u32) {
        let busy = self.nodes[rank as usize].connections[peer as usize].busy;
        if busy && self.takes_more(rank, peer) {
            self.nodes[rank as usize].connections[peer as usize].busy = false;
            self.hear(rank, Input::Writable(peer));
        }
    }

    pub(crate) fn schedule_background(&mut self, rank: u32) {
        let Some(background) = self.background else {
            return;
        };
        let wait = -background.interval_ns * (1.0 - fraction(&mut self.rng)).ln();
        self.calendar.at(self.now + wait as u64, Kind::Background, rank);
    }

    pub(crate) fn burst(&mut self, rank: u32) {
        let ranks = self.nodes.len() as u32;
        let Some(background) = self.background.filter(|_| self.finished < ranks) else {
            return;
        };
        let to = (rank + 1 + self.rng.below(ranks - 1)) % ranks;
        let bytes = background.bytes;
        let piece = Piece { frame: NO_FRAME, from: rank, to, bytes, first: true, last: true };
        if let Some(at) = self.ports[rank as usize].queue(self.now, piece) {
            self.calendar.at(at, Kind::Depart, rank);
        }
        self.schedule_background(rank);
    }
}
