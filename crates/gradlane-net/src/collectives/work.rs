//! The end of a call, which any thread sees without a lock.

use super::error::GroupError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// A call that runs: its work, and its time.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) work: Arc<Work>,
    pub(super) at: Instant,
    pub(super) deadline: Option<Instant>,
}

impl Begun {
    /// Begins a call.
    pub(super) fn new(work: &Arc<Work>, timeout: Option<Duration>, at: Instant) -> Begun {
        Begun { work: Arc::clone(work), at, deadline: timeout.map(|it| at + it) }
    }

    /// Whether its time is over.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| now >= deadline)
    }

    /// Seconds since it began.
    pub(super) fn seconds(&self, now: Instant) -> f64 {
        now.saturating_duration_since(self.at).as_secs_f64()
    }
}

/// One call that was begun.
#[derive(Debug, Default)]
pub struct Work {
    result: OnceLock<Result<u32, GroupError>>,
    is_watched: AtomicBool,
}

impl Work {
    /// Returns how the call ended: the rank that a received message is from (another call: this rank),
    /// or the error; `None` while it runs.
    #[must_use]
    pub fn result(&self) -> Option<&Result<u32, GroupError>> {
        self.result.get()
    }

    /// Whether the call has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.result.get().is_some()
    }

    /// Ends the call. Returns whether somebody asked to be told.
    pub(super) fn finish(&self, result: Result<u32, GroupError>) -> bool {
        // The first result stays.
        let _ = self.result.set(result);
        self.is_watched.load(Ordering::SeqCst)
    }

    /// Asks to be told. Returns whether the call has ended already.
    pub(super) fn watch(&self) -> bool {
        self.is_watched.store(true, Ordering::SeqCst);
        self.is_done()
    }
}
