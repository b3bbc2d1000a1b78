//! Statistics of the engine's queues, on request of application threads.
//!
//! Only the I/O thread sees the engine, and counting takes it some time: so it counts on request
//! alone.

use crate::sys::lock;
use gradlane_engine::QueueStats;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

#[derive(Debug, Default)]
struct QueryState {
    /// Queries so far.
    requested: u64,
    /// Queries that the statistics below answer.
    replied_to: u64,
    stats: QueueStats,
    closed: bool,
}

/// Queries and the last reply.
#[derive(Debug, Default)]
pub(crate) struct StatsQuery {
    state: Mutex<QueryState>,
    replied: Condvar,
}

impl StatsQuery {
    /// Sends a query by `notify` and waits for the reply, or until the timeout.
    pub(crate) fn request(&self, timeout: Duration, notify: impl FnOnce()) {
        let mut state = lock(&self.state);
        if state.closed {
            return;
        }
        state.requested += 1;
        let query = state.requested;
        drop(state);
        notify();
        let waits = |state: &mut QueryState| state.replied_to < query && !state.closed;
        let result = self.replied.wait_timeout_while(lock(&self.state), timeout, waits);
        drop(result.unwrap_or_else(PoisonError::into_inner));
    }

    /// Replies to all queries so far.
    pub(crate) fn reply(&self, stats: QueueStats) {
        let mut state = lock(&self.state);
        state.replied_to = state.requested;
        state.stats = stats;
        self.replied.notify_all();
    }

    /// Ends all queries: the queues are gone.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        state.stats = QueueStats::default();
        self.replied.notify_all();
    }

    /// Returns the last reply.
    pub(crate) fn latest(&self) -> QueueStats {
        lock(&self.state).stats.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn whoever_asks_gets_an_answer_given_after_the_question() {
        let state = Arc::new(StatsQuery::default());
        state.reply(QueueStats { peers: Vec::new(), jobs: 1 });
        let replying = Arc::clone(&state);
        state.request(Duration::from_secs(60), move || {
            std::thread::spawn(move || {
                replying.reply(QueueStats { peers: Vec::new(), jobs: 2 });
            });
        });
        assert_eq!(state.latest().jobs, 2);
    }

    #[test]
    fn after_the_end_nobody_waits_and_nothing_is_queued() {
        let state = StatsQuery::default();
        state.reply(QueueStats { peers: Vec::new(), jobs: 3 });
        state.close();
        state.request(Duration::from_secs(60), || unreachable!("nobody is left to replied"));
        assert_eq!(state.latest(), QueueStats::default());
    }
}
