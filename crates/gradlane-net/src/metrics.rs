//! Counters, traces, and the snapshots that the application reads of them.

pub(crate) mod counters;
pub(crate) mod host_counters;
pub(crate) mod participation_stats;
pub(crate) mod queue_stats;
mod snapshot;
pub(crate) mod straggler_stats;
pub(crate) mod trace;

pub(crate) use counters::Metrics;
pub(crate) use host_counters::HostCounters;
pub use participation_stats::{LeftOutSnapshot, StepParticipation};
pub use snapshot::{MetricsSnapshot, PeerSnapshot, Refusal, StalenessSnapshot, WaitSnapshot};
pub use straggler_stats::StragglerSnapshot;
pub use trace::{Direction, JobEntry, JobKind, TraceEntry};

use std::sync::atomic::{AtomicU64, Ordering};

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

pub(crate) fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

pub(crate) fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}
