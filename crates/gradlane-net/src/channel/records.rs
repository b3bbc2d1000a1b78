//! Records of a channel: counters, traced frames and jobs, the engine's journal.

use super::handle::Channel;
use crate::channel::shared::{Command, LaneInbox};
use crate::metrics::trace::{JobEntry, TraceEntry};
use crate::metrics::MetricsSnapshot;
use crate::sys::lock;
use gradlane_engine::Journal;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Longest wait for the queue statistics of the lanes.
const QUEUE_STATS_TIMEOUT: Duration = Duration::from_millis(100);

impl Channel {
    /// Returns the counters, also after the end. Queue statistics are of this moment, or older if
    /// a lane is too busy.
    #[must_use]
    pub fn metrics(&self) -> MetricsSnapshot {
        let shared = &self.shared;
        if !self.forgotten.load(Ordering::Relaxed) {
            shared
                .metrics
                .queue_stats
                .request(QUEUE_STATS_TIMEOUT, || shared.tell_all(|| Command::ReportQueueStats));
        }
        shared.metrics.snapshot(&self.plan)
    }

    /// Returns the time that application threads have waited so far, in nanoseconds.
    #[must_use]
    pub fn waited_ns(&self) -> u64 {
        self.shared.metrics.wait_ns.load(Ordering::Relaxed)
    }

    /// Returns the frames recorded since the last call, in the order in which they were sent or had arrived; none
    /// without the option `trace`.
    #[must_use]
    pub fn take_trace(&self) -> Vec<TraceEntry> {
        let of_lane = |lane: &LaneInbox| {
            let mut frames = lane.trace.take_frames();
            for frame in &mut frames {
                frame.header.slice = lane.plan.in_whole_plan(frame.header.slice);
            }
            frames
        };
        let mut frames: Vec<TraceEntry> = self.shared.lanes.iter().flat_map(of_lane).collect();
        frames.sort_by_key(|frame| frame.time_ns);
        frames
    }

    /// Returns the jobs recorded since the last call, in the order of their ends; none without the option `trace`.
    #[must_use]
    pub fn take_jobs(&self) -> Vec<JobEntry> {
        let of_lane = |lane: &LaneInbox| {
            let mut jobs = lane.trace.take_jobs();
            for job in &mut jobs {
                job.slice = lane.plan.in_whole_plan(job.slice);
            }
            jobs
        };
        let mut jobs: Vec<JobEntry> = self.shared.lanes.iter().flat_map(of_lane).collect();
        jobs.sort_by_key(|job| job.end_ns);
        jobs
    }

    /// Returns the number of frames and jobs that fell out of the record before they were taken.
    #[must_use]
    pub fn trace_dropped(&self) -> u64 {
        self.shared.lanes.iter().map(|lane| lane.trace.dropped()).sum()
    }

    /// Returns the inputs and decisions of each lane's engine, once, after the end of a session with the option
    /// `journal`.
    pub fn take_journals(&self) -> Vec<Journal> {
        self.shared.lanes.iter().filter_map(|lane| lock(&lane.journal).take()).collect()
    }
}
