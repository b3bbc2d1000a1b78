//! The sockets of peers: what they take, what comes from them, and their loss.

use super::Driver;
use crate::connection::{Fault, Flushed};
use crate::inbound::Inbound;
use crate::metrics::count;
use crate::syscall;
use gradlane_units::Rank;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

/// Bytes read from one connection before others get their turn.
const RECEIVE_TURN_BYTES: usize = 512 << 10;

impl Driver {
    /// Gives a socket what waits for it; the bytes that it took.
    pub(crate) fn flush(&mut self, rank: Rank) -> usize {
        let Some(Some(link)) = self.links.get_mut(rank.index()) else {
            return 0;
        };
        let (engine, shared) = (&mut self.engine, &self.shared);
        let counters = &shared.metrics.peers[rank.index()];
        let result = link.connection.flush(|header, transmit| {
            shared.metrics.sent(rank, header);
            shared.metrics.sent_message(engine.plan(), header);
            shared.trace.sent(rank, header);
            if let Some(transmit) = transmit {
                shared.metrics.outgoing_frames.fetch_sub(1, Ordering::Relaxed);
                engine.handle_sent(&transmit);
            }
        });
        match result {
            Ok((bytes, flushed)) => {
                if bytes > 0 {
                    link.last_sent = self.now;
                    link.flow.sent(bytes);
                    count(&counters.sent_bytes, bytes as u64);
                    // A size that the kernel refuses leaves the last one in force.
                    let _ = link.send_buffer.sent(link.connection.socket.as_fd(), bytes);
                }
                let writable = flushed == Flushed::All
                    && !link.send_buffer.is_full(link.connection.socket.as_fd());
                self.set_writable(rank, writable);
                bytes
            }
            Err(error) => {
                self.on_send_error(rank, &error);
                0
            }
        }
    }

    /// A peer that gives up says why and closes: its last words may be here although sending fails.
    fn on_send_error(&mut self, rank: Rank, error: &io::Error) {
        while self.is_open(rank) && self.receive(rank) > 0 {}
        self.lose(rank, &format!("connection failed: {error}"));
    }

    fn is_open(&self, rank: Rank) -> bool {
        self.links.get(rank.index()).and_then(Option::as_ref).is_some_and(|link| link.open)
    }

    pub(super) fn set_writable(&mut self, rank: Rank, writable: bool) {
        let Some(Some(link)) = self.links.get_mut(rank.index()) else {
            return;
        };
        if link.writable != writable {
            link.writable = writable;
            if !writable {
                link.flow.is_full();
            }
            self.engine.handle_writable(rank, writable);
        }
        if !writable && !link.armed && link.open {
            self.arm(rank, true);
        }
    }

    /// Shares this rank's port out among its connections, when it is time to.
    pub(super) fn pace(&mut self) {
        let now = self.now;
        let Some(pacing) = &mut self.pacing else {
            return;
        };
        let links = self.links.iter().flatten();
        if !pacing.rest(now, || links.filter(|link| link.open).any(|link| !link.writable)) {
            return;
        }
        let (mut flows, mut sockets) = (Vec::new(), Vec::new());
        for link in self.links.iter_mut().flatten().filter(|link| link.open) {
            flows.push((sockets.len(), !link.writable, &mut link.flow));
            sockets.push(link.connection.socket.as_fd());
        }
        let acknowledged = |socket: &BorrowedFd<'_>| {
            syscall::path_estimate(*socket).ok().map(|path| path.acknowledged_bytes)
        };
        pacing.look(
            now,
            flows.into_iter(),
            || sockets.iter().map(acknowledged).sum(),
            // A rate that the kernel refuses leaves the last one in force.
            |index, rate| drop(syscall::set_pacing(sockets[index], rate)),
        );
    }

    /// Asks the poller to report when the socket takes more. Once asked, it stays so while there is
    /// more to send, and is taken back only when a report finds nothing to do.
    fn arm(&mut self, rank: Rank, armed: bool) {
        if let Some(Some(link)) = self.links.get_mut(rank.index()) {
            link.armed = armed;
            let socket = link.connection.socket.as_fd();
            if let Err(error) = self.shared.poller.modify(socket, u64::from(rank.0), armed) {
                self.engine.abort(&format!("cannot wait for the socket of {rank}: {error}"));
            }
        }
    }

    pub(super) fn on_writable(&mut self, rank: Rank) {
        let Some(Some(link)) = self.links.get(rank.index()) else {
            return;
        };
        if !link.open {
            return;
        }
        if link.writable {
            if link.armed {
                self.arm(rank, false);
            }
        } else if link.connection.sender.is_empty() {
            self.set_writable(rank, true);
        } else {
            self.flush(rank);
        }
    }

    /// Reads from a socket; the bytes that came.
    pub(super) fn receive(&mut self, rank: Rank) -> usize {
        let Some(Some(link)) = self.links.get_mut(rank.index()) else {
            return 0;
        };
        if !link.open {
            return 0;
        }
        let mut inbound = Inbound {
            engine: &mut self.engine,
            memory: &mut self.memory,
            shared: &self.shared,
            arrivals: &mut self.arrivals,
            now: self.now,
            peer: rank,
            heard_goodbye: &mut link.heard_goodbye,
        };
        let (bytes, result) = link.connection.receive(RECEIVE_TURN_BYTES, &mut inbound);
        if bytes > 0 {
            link.last_received = self.now;
            link.heard = true;
            count(&self.shared.metrics.peers[rank.index()].received_bytes, bytes as u64);
        }
        match result {
            Ok(()) => {}
            Err(Fault::Lost(reason)) => self.lose(rank, &reason),
            Err(Fault::Broken(what)) => self.engine.reject_peer(rank, &format!("{rank} {what}")),
            Err(Fault::Internal(what)) => self.engine.abort(&what),
        }
        bytes
    }

    /// Nothing can come from a peer any more.
    pub(crate) fn lose(&mut self, rank: Rank, reason: &str) {
        let Some(Some(link)) = self.links.get_mut(rank.index()) else {
            return;
        };
        if !std::mem::replace(&mut link.open, false) {
            return;
        }
        link.writable = false;
        // The socket is closed later; that it cannot be watched any more is in order.
        let _ = self.shared.poller.delete(link.connection.socket.as_fd());
        self.engine.handle_writable(rank, false);
        self.engine.handle_peer_lost(rank, reason);
    }
}
