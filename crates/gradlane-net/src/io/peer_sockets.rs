//! The sockets of peers: sending, receiving, and their loss.

use super::frame_sink::Fault;
use super::frame_writer::Flushed;
use super::lane::Lane;
use super::receive::ReceivedFrames;
use crate::flow::Pacer;
use crate::metrics::atomics::count;
use crate::sys::poller::Interest;
use gradlane_engine::Input;
use gradlane_units::Rank;
use std::io;
use std::sync::atomic::Ordering;

/// Bytes read from one connection before others get their turn.
const RECEIVE_TURN_BYTES: usize = 512 << 10;

impl Lane {
    /// Sends the frames that wait for a peer and returns the bytes that its socket took.
    pub(super) fn flush(&mut self, rank: Rank) -> usize {
        let core = &mut self.core;
        let Some(Some(connection)) = self.connections.get_mut(rank.index()) else {
            return 0;
        };
        let (trace, sent) = (&self.shared.lanes[core.lane].trace, &mut self.sent);
        let mut total = 0;
        let socket = &*connection.socket;
        let result = connection.writer.flush(socket, &mut total, |header, is_engines| {
            trace.sent(rank, header);
            sent.push((*header, is_engines));
        });
        self.coalescer.count(total);
        if total > 0 {
            count(&self.shared.metrics.peers[rank.index()].sent_bytes, total as u64);
        }
        connection.flow.sent(socket, total);
        let takes_more = matches!(result, Ok(Flushed::All)) && !connection.flow.is_full();
        if total > 0 {
            connection.last_sent = core.now;
        }
        if let Some(frame_bytes) = connection.flow.frame_bytes(core.now) {
            core.engine.tell(Input::FrameBytes(rank, frame_bytes));
        }
        core.sent(rank, total, &mut self.sent);
        connection.flow.set_paced_by_thread(core.pacer(rank).is_some_and(Pacer::by_thread));
        let writable = takes_more && core.may_send(rank);
        if let Err(error) = result {
            self.on_send_error(rank, &error);
        } else {
            self.set_writable(rank, writable);
        }
        total
    }

    /// Loses a peer whose socket fails, after reading it: a peer that gives up says why and closes.
    fn on_send_error(&mut self, rank: Rank, error: &io::Error) {
        while self.receive(rank) > 0 {}
        self.lose(rank, &format!("connection failed: {error}"));
    }

    /// Loses a peer. Where the session goes on, its connection ends, and with it all borrows of memory.
    pub(super) fn lose(&mut self, rank: Rank, reason: &str) {
        if self.core.goes_on() {
            if let Some(connection) = self.connections[rank.index()].take() {
                // The peer may still be there, and is to notice.
                let _ = connection.socket.end_stream();
                let dropped = connection.writer.engines_frames();
                self.shared.metrics.outgoing_frames.fetch_sub(dropped, Ordering::Relaxed);
            }
        }
        self.core.lose(rank, reason);
    }

    /// Closes the connections of peers that the other ranks go on without.
    pub(super) fn disconnect(&mut self) {
        for rank in std::mem::take(&mut self.core.to_disconnect) {
            if self.connections[rank.index()].is_some() {
                self.lose(rank, "the other ranks go on without it");
            }
        }
    }

    fn set_writable(&mut self, rank: Rank, writable: bool) {
        self.core.set_writable(rank, writable);
        if !writable {
            self.arm(rank, true);
        }
    }

    /// Makes the poller report when the socket takes more, or stops that. It goes on while there is more
    /// to send, and ends only when a report finds nothing to do.
    fn arm(&mut self, rank: Rank, armed: bool) {
        let core = &mut self.core;
        let Some(Some(connection)) = self.connections.get_mut(rank.index()) else {
            return;
        };
        if connection.armed == armed || !core.is_open(rank) {
            return;
        }
        connection.armed = armed;
        let (socket, poller) = (&connection.socket, &self.shared.lanes[core.lane].poller);
        let interest = if armed { Interest::Writable } else { Interest::Readable };
        if let Err(error) = socket.watch(poller, u64::from(rank.0), interest) {
            core.engine
                .tell(Input::Abort(format!("cannot wait for the socket of {rank}: {error}")));
        }
    }

    pub(super) fn on_writable(&mut self, rank: Rank) {
        let Some(Some(connection)) = self.connections.get(rank.index()) else {
            return;
        };
        let nothing_waits = connection.writer.is_empty();
        if !self.core.is_open(rank) {
            return;
        }
        if self.core.is_writable(rank) {
            self.arm(rank, false);
        } else if nothing_waits {
            // A frame that is not due yet is reported again in the next turn.
            if self.core.may_send(rank) {
                self.set_writable(rank, true);
            }
        } else {
            self.flush(rank);
        }
    }

    /// Reads from a peer's socket and returns the number of bytes.
    pub(super) fn receive(&mut self, rank: Rank) -> usize {
        let core = &mut self.core;
        let Some(Some(connection)) = self.connections.get_mut(rank.index()) else {
            return 0;
        };
        if !core.is_open(rank) {
            return 0;
        }
        let mut frames =
            ReceivedFrames { core, peer: rank, heard_goodbye: &mut connection.heard_goodbye };
        let (bytes, result) =
            connection.reader.receive(&*connection.socket, RECEIVE_TURN_BYTES, &mut frames);
        self.coalescer.count(bytes);
        if bytes == 0 && result.is_ok() {
            return 0;
        }
        let core = &mut self.core;
        if bytes > 0 {
            core.heard(rank);
            count(&self.shared.metrics.peers[rank.index()].received_bytes, bytes as u64);
        }
        match result {
            Ok(()) => {}
            Err(Fault::Lost(reason)) => self.lose(rank, &reason),
            Err(Fault::ProtocolViolation(what)) => {
                let reason = format!("{rank} {what}");
                core.engine.tell(Input::RejectPeer(rank, reason.clone()));
                if core.goes_on() {
                    // Nothing that follows on this connection can be read.
                    self.lose(rank, &reason);
                }
            }
            Err(Fault::Internal(what)) => core.engine.tell(Input::Abort(what)),
        }
        bytes
    }
}
