//! Records of a channel: counters, traced frames and jobs, the engine's journal.

use super::handle::Channel;
use crate::channel::shared::Command;
use crate::metrics::trace::{JobEntry, TraceEntry};
use crate::metrics::MetricsSnapshot;
use crate::sys::lock;
use gradlane_engine::Journal;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait for the queue statistics of the I/O thread.
const QUEUE_STATS_TIMEOUT: Duration = Duration::from_millis(100);

impl Channel {
    /// Returns the counters, also after the end. Queue statistics are of this moment, or older if
    /// the I/O thread is too busy.
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

    /// Returns the time that application threads have waited so far, in nanoseconds.
    #[must_use]
    pub fn waited_ns(&self) -> u64 {
        self.shared.metrics.wait_ns.load(Ordering::Relaxed)
    }

    /// Returns the frames recorded since the last call; none without the option `trace`.
    #[must_use]
    pub fn take_trace(&self) -> Vec<TraceEntry> {
        self.shared.trace.take_frames()
    }

    /// Returns the jobs recorded since the last call; none without the option `trace`.
    #[must_use]
    pub fn take_jobs(&self) -> Vec<JobEntry> {
        self.shared.trace.take_jobs()
    }

    /// Returns the number of frames and jobs that fell out of the record before they were taken.
    #[must_use]
    pub fn trace_dropped(&self) -> u64 {
        self.shared.trace.dropped()
    }

    /// Returns the engine's inputs and decisions, once, after the end of a session with the option
    /// `journal`.
    pub fn take_journal(&self) -> Option<Journal> {
        lock(&self.shared.journal).take()
    }
}
