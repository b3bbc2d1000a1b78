//! One lane: an engine for its share of the slices, and a connection to each peer, on a thread of their own.
//!
//! One turn of its loop handles calls, finished jobs and all socket events that there are, and then asks
//! the engine for jobs, frames and events until it has none. A frame is chosen only when its socket can
//! take it. The thread blocks only in the wait for the next event; lanes wait for each other nowhere.

use super::core::{Connections, Core, ReceivedFrames};
use super::frame_reader::Fault;
use super::frame_writer::Flushed;
use crate::channel::shared::{panic_text, LaneInbox, Shared, StopCause};
use crate::flow::{Pacer, WakeupCoalescer};
use crate::metrics::count;
use crate::sys::poller::{Interest, Report};
use gradlane_engine::Input;
use gradlane_units::{Rank, Time};
use gradlane_wire::FrameHeader;
use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes sent before sockets are polled again.
const SEND_TURN_BYTES: usize = 1 << 20;

/// The sleep between two turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sleep {
    /// The longest time until the next turn.
    pub(super) at_most: Duration,
    /// The part of it in which sockets are ignored.
    pub(super) pause: Duration,
}

/// A lane of this rank.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) core: Core,
    pub(super) shared: Arc<Shared>,
    /// By rank; `None` for this rank itself.
    pub(super) connections: Connections,
    pub(super) next_keepalive_check: Time,
    pub(super) coalescer: WakeupCoalescer,
    /// Peers to send to now, the most urgent first.
    chosen: Vec<Rank>,
    /// Frames that the kernel has and the engine has not heard of.
    pub(super) sent: Vec<(FrameHeader, bool)>,
}

impl Lane {
    /// Makes a lane with these connections.
    pub(super) fn new(core: Core, connections: Connections) -> Lane {
        Lane {
            shared: Arc::clone(&core.shared),
            core,
            connections,
            next_keepalive_check: Time::ZERO,
            coalescer: WakeupCoalescer::new(Instant::now()),
            chosen: Vec::new(),
            sent: Vec::new(),
        }
    }

    /// Runs until the lane is over, and returns it. A panic ends the session.
    pub(super) fn run(mut self) -> Lane {
        let shared = Arc::clone(&self.shared);
        let _count = shared.metrics.host.count_this_thread("io");
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run_loop())) {
            shared.stop(StopCause::Panicked(panic_text(&*panic)));
        }
        self
    }

    pub(super) fn inbox(&self) -> &LaneInbox {
        &self.shared.lanes[self.core.lane]
    }

    fn run_loop(&mut self) {
        let mut reports = Vec::new();
        while let Some(sleep) = self.send() {
            let idle = || self.core.is_idle();
            let poller = &self.inbox().poller;
            if !sleep.pause.is_zero() {
                // After a failure the wait below returns as soon as it can.
                let _ = poller.rest(sleep.pause, idle);
            }
            let timeout = Some(sleep.at_most - sleep.pause);
            if let Err(error) = poller.wait(timeout, idle, &mut reports) {
                self.core.engine.tell(Input::Abort(format!("cannot wait for sockets: {error}")));
            }
            self.handle_reports(Instant::now(), sleep, &reports);
        }
    }

    /// Ends a turn: sends everything that the engine asks for. Returns the sleep until the next turn, or
    /// `None` when the session has ended.
    pub(super) fn send(&mut self) -> Option<Sleep> {
        self.disconnect();
        if self.core.now >= self.next_keepalive_check {
            self.check_keepalive();
        }
        let hurry = self.pump();
        if self.core.has_ended() {
            return None;
        }
        self.core.pace();
        let at_most = if hurry {
            Duration::ZERO
        } else {
            let next = self.core.engine.poll_timeout();
            let next =
                next.map_or(self.next_keepalive_check, |it| it.min(self.next_keepalive_check));
            next.since(self.core.now)
        };
        Some(Sleep { at_most, pause: self.pause().min(at_most) })
    }

    /// Begins a turn: advances the time, and handles calls and sockets.
    pub(super) fn handle_reports(&mut self, now: Instant, sleep: Sleep, reports: &[Report]) {
        self.coalescer.begin_turn(now);
        self.core.read_clock(now, sleep.at_most);
        // Calls come first: the application made them before a peer's frame arrived.
        self.core.handle_commands();
        count(&self.shared.metrics.turns, 1);
        for report in reports {
            let rank = Rank(report.key as u32);
            if report.readable {
                self.receive(rank);
            }
            if report.writable {
                self.on_writable(rank);
            }
        }
    }

    /// Returns how long to leave sockets alone while a connection is full: until the first connection that
    /// the kernel paces has almost nothing left, and until all that this thread paces are due, so that it
    /// serves them in one turn.
    fn pause(&self) -> Duration {
        let core = &self.core;
        let (mut first_drained, mut all_due) = (None, None);
        for (rank, connection) in self.connections.iter().enumerate() {
            let Some(connection) = connection.as_ref().filter(|it| it.armed) else {
                continue;
            };
            let pacer = core.pacer(Rank(rank as u32));
            if let Some(until_due) = pacer.and_then(|pacer| pacer.until_due(core.now)) {
                all_due = all_due.max(Some(until_due));
            } else {
                let drain_time = connection.flow.send_buffer.drain_time();
                first_drained =
                    Some(first_drained.map_or(drain_time, |it: Duration| it.min(drain_time)));
            }
        }
        self.coalescer.pause(Instant::now(), first_drained, all_due)
    }

    /// Sends until the engine asks for nothing more. Returns `true` when it stops early, so that sockets
    /// get their turn.
    fn pump(&mut self) -> bool {
        let mut sent_bytes = 0;
        loop {
            self.choose();
            if self.chosen.is_empty() {
                return false;
            }
            // In the order of choice: the most urgent frame reaches its socket first.
            for index in 0..self.chosen.len() {
                sent_bytes += self.flush(self.chosen[index]);
            }
            self.chosen.clear();
            if sent_bytes >= SEND_TURN_BYTES {
                return true;
            }
        }
    }

    /// Lets the engine decide, and hands frames to the connections.
    fn choose(&mut self) {
        self.core.pump();
        if self.core.has_ended() {
            return;
        }
        std::mem::swap(&mut self.chosen, &mut self.core.chosen);
        for &rank in &self.chosen {
            if let Some(connection) = &mut self.connections[rank.index()] {
                self.core.take_chosen(rank, connection);
            }
        }
    }
}

// The sockets of peers: sending, receiving, and their loss.

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
        let takes_more =
            matches!(result, Ok(Flushed::All)) && !connection.flow.send_buffer.is_full();
        if total > 0 {
            connection.last_sent = core.now;
        }
        if let Some(frame_bytes) = connection.flow.frame_bytes(core.now) {
            core.engine.tell(Input::FrameBytes(rank, frame_bytes));
        }
        core.sent(rank, total, &mut self.sent);
        connection
            .flow
            .send_buffer
            .set_paced_by_thread(core.pacer(rank).is_some_and(Pacer::by_thread));
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
