//! One I/O thread: drives the connections of its peers.
//!
//! One turn of its loop handles commands, finished works and all socket events that there are, and
//! then asks the engine for works, frames and events until it has none. A frame is chosen only when
//! its socket can take it; nothing here blocks but the wait for the next event, and for a moment the
//! engine's lock. Frames that are chosen here for a peer of another thread wait in that peer's
//! outbox, and its thread is woken.

use super::connection::Connection;
use super::core::Core;
use super::driver::ShutdownCause;
use crate::channel::shared::{panic_text, Shared};
use crate::flow::frame_size::FrameSizer;
use crate::flow::send_buffer::SendBuffer;
use crate::flow::wakeup_coalescing::WakeupCoalescer;
use crate::metrics::counters::count;
use crate::sys::lock;
use crate::sys::syscall::EpollEvents;
use gradlane_engine::Transmit;
use gradlane_units::{Rank, Time};
use gradlane_wire::FrameHeader;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Bytes sent before sockets are looked at again.
const SEND_TURN_BYTES: usize = 1 << 20;

/// A connection and what only its thread knows of it.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    pub(super) send_buffer: SendBuffer,
    pub(super) frame_size: FrameSizer,
    /// Whether the poller reports it as writable.
    pub(super) armed: bool,
    pub(super) last_sent: Time,
    pub(super) heard_goodbye: bool,
}

impl Link {
    pub(super) fn new(
        connection: Connection,
        send_buffer: SendBuffer,
        frame_size: FrameSizer,
    ) -> Link {
        Link {
            connection,
            send_buffer,
            frame_size,
            armed: false,
            last_sent: Time::ZERO,
            heard_goodbye: false,
        }
    }
}

/// Connections by rank; none where another thread has it, and for this rank itself.
pub(crate) type Links = Vec<Option<Link>>;

/// An I/O thread while it runs.
#[derive(Debug)]
pub(super) struct IoThread<'a> {
    pub(super) index: usize,
    pub(super) core: &'a Mutex<Core>,
    pub(super) shared: Arc<Shared>,
    pub(super) links: Links,
    /// When silence is looked at next.
    pub(super) next_keepalive_check: Time,
    pub(super) coalescer: WakeupCoalescer,
    /// Peers to send to in this moment, the most urgent first.
    chosen: Vec<Rank>,
    /// Frames that the kernel has and the engine has not heard of.
    pub(super) sent: Vec<(FrameHeader, Option<Transmit>)>,
}

impl<'a> IoThread<'a> {
    /// The thread with this number and these connections.
    pub(super) fn new(index: usize, core: &'a Mutex<Core>, links: Links) -> IoThread<'a> {
        IoThread {
            index,
            core,
            shared: Arc::clone(&lock(core).shared),
            links,
            next_keepalive_check: Time::ZERO,
            coalescer: WakeupCoalescer::new(Instant::now()),
            chosen: Vec::new(),
            sent: Vec::new(),
        }
    }

    /// Runs until the session ends, and hands the connections back. A panic ends the session.
    pub(super) fn run(mut self) -> Links {
        let shared = Arc::clone(&self.shared);
        let _count = shared.metrics.count_this_thread("io");
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run_loop())) {
            self.core().end(ShutdownCause::Panicked(panic_text(&*panic)));
        }
        self.links
    }

    pub(super) fn core(&self) -> MutexGuard<'a, Core> {
        lock(self.core)
    }

    fn run_loop(&mut self) {
        let mut events = EpollEvents::new();
        let mut reports = Vec::new();
        loop {
            self.check_keepalive();
            let hurry = self.pump();
            let (asked, pause) = {
                let mut core = self.core();
                if core.shutdown.is_some() {
                    return;
                }
                core.pace();
                let asked = if hurry {
                    Duration::ZERO
                } else {
                    let next = core.engine.poll_timeout();
                    next.map_or(self.next_keepalive_check, |it| it.min(self.next_keepalive_check))
                        .since(core.now)
                };
                (asked, self.pause(&core).min(asked))
            };
            let idle = || self.core().is_idle(self.index);
            let poller = &self.shared.pollers[self.index];
            if !pause.is_zero() {
                // A failure leaves sockets unmoderated: the wait below returns as soon as it can.
                let _ = poller.rest(pause, idle);
            }
            let timeout = Some(asked - pause);
            let waited = poller.wait(&mut events, timeout, idle, &mut reports);
            self.coalescer.begin_turn(Instant::now());
            {
                let mut core = self.core();
                if let Err(error) = waited {
                    core.engine.abort(&format!("cannot wait for sockets: {error}"));
                }
                core.read_clock(asked);
                // What the application said before a peer's frame came is heard before it.
                core.handle_commands();
                count(&self.shared.metrics.turns, 1);
            }
            for report in &reports {
                let rank = Rank(report.key as u32);
                if report.readable {
                    self.receive(rank);
                }
                if report.writable {
                    self.on_writable(rank);
                }
            }
        }
    }

    /// How long to leave sockets alone, while a connection takes no more: until the first of those
    /// that the kernel paces has almost nothing left, and all that this thread paces are due, which
    /// it then serves in one turn.
    fn pause(&self, core: &Core) -> Duration {
        let (mut first_drained, mut all_due) = (None, None);
        for (rank, link) in self.links.iter().enumerate() {
            let Some(link) = link.as_ref().filter(|link| link.armed) else {
                continue;
            };
            let pacer = core.pacer(Rank(rank as u32));
            if let Some(until_due) = pacer.and_then(|pacer| pacer.until_due(core.now)) {
                all_due = all_due.max(Some(until_due));
            } else {
                let drain_time = link.send_buffer.drain_time();
                first_drained =
                    Some(first_drained.map_or(drain_time, |first_drained: Duration| {
                        first_drained.min(drain_time)
                    }));
            }
        }
        self.coalescer.pause(Instant::now(), first_drained, all_due)
    }

    /// Does what the engine asks for until it asks for nothing; `true` when it stopped early so
    /// that sockets get their turn.
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

    /// Lets the engine decide, takes what it has chosen for this thread's peers, and wakes the
    /// threads of others.
    fn choose(&mut self) {
        let mut core = self.core();
        core.pump();
        if core.shutdown.is_some() {
            return;
        }
        std::mem::swap(&mut self.chosen, &mut core.chosen[self.index]);
        for &rank in &self.chosen {
            if let Some(link) = &mut self.links[rank.index()] {
                core.take_chosen(rank, &mut link.connection);
            }
        }
        for (thread, chosen) in core.chosen.iter().enumerate() {
            if !chosen.is_empty() {
                self.shared.wake(thread);
            }
        }
    }
}
