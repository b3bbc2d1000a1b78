//! What a channel says of itself: counters, frames and works that were recorded, its journal.

use super::handle::Channel;
use crate::channel::shared::Command;
use crate::metrics::trace::{JobEntry, TraceEntry};
use crate::metrics::MetricsSnapshot;
use crate::sys::lock;
use gradlane_engine::Journal;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a reader of metrics waits for the depths of queues.
const QUEUE_STATS_TIMEOUT: Duration = Duration::from_millis(100);

impl Channel {
    /// The counters; also after the end. Depths of queues are those of this moment, or, if the I/O
    /// thread is too busy to say, of an earlier one.
    #[must_use]
    pub fn metrics(&self) -> MetricsSnapshot {
        let shared = &self.shared;
        if !self.forgotten.load(Ordering::Relaxed) {
            shared
                .metrics
                .queue_stats
                .request(QUEUE_STATS_TIMEOUT, || shared.command(Command::ReportQueueStats));
        }
        shared.metrics.snapshot(&self.plan)
    }

    /// Time that application threads have waited so far, in nanoseconds.
    #[must_use]
    pub fn waited_ns(&self) -> u64 {
        self.shared.metrics.wait_ns.load(Ordering::Relaxed)
    }

    /// Frames recorded since the last call; none without the option `trace`.
    #[must_use]
    pub fn take_trace(&self) -> Vec<TraceEntry> {
        self.shared.trace.take_frames()
    }

    /// JobRunner recorded since the last call; none without the option `trace`.
    #[must_use]
    pub fn take_jobs(&self) -> Vec<JobEntry> {
        self.shared.trace.take_jobs()
    }

    /// Frames and works that were recorded and fell out before they were taken.
    #[must_use]
    pub fn trace_dropped(&self) -> u64 {
        self.shared.trace.dropped()
    }

    /// After the end of a session with the option `journal`: what the engine heard and decided, once.
    pub fn take_journal(&self) -> Option<Journal> {
        lock(&self.shared.journal).take()
    }
}
