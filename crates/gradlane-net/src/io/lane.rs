//! One lane: an engine for its share of the slices, and a connection to each peer, on a thread of their own.
//!
//! One turn of its loop handles calls, finished jobs and all socket events that there are, and then asks
//! the engine for jobs, frames and events until it has none. A frame is chosen only when its socket can
//! take it. The thread blocks only in the wait for the next event; lanes wait for each other nowhere.

use super::connection::Connections;
use super::core::Core;
use crate::channel::shared::{panic_text, LaneInbox, Shared, StopCause};
use crate::flow::WakeupCoalescer;
use crate::metrics::atomics::count;
use crate::sys::poller::Report;
use gradlane_engine::Input;
use gradlane_units::{Rank, Time};
use gradlane_wire::FrameHeader;
use std::panic::{catch_unwind, AssertUnwindSafe};
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
        self.check_keepalive();
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
                let drain_time = connection.flow.drain_time();
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
