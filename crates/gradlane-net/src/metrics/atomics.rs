//! Counters that threads share.

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
