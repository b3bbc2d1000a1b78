//! Statistics of the engine's queues, on request of application threads.
//!
//! Only a lane sees its engine, and counting takes it some time: so it counts on request alone.

use crate::sys::lock;
use gradlane_engine::QueueStats;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Statistics of one lane's queues.
#[derive(Clone, Debug, Default)]
struct LaneReply {
    /// Queries that the statistics answer.
    replied_to: u64,
    stats: QueueStats,
}

#[derive(Debug, Default)]
struct QueryState {
    /// Queries so far.
    requested: u64,
    lanes: Vec<LaneReply>,
    closed: bool,
}

/// Queries and the last replies.
#[derive(Debug)]
pub(crate) struct StatsQuery {
    state: Mutex<QueryState>,
    replied: Condvar,
}

impl StatsQuery {
    /// Makes the queries of so many lanes.
    pub(crate) fn new(lanes: usize) -> StatsQuery {
        let state =
            QueryState { lanes: vec![LaneReply::default(); lanes], ..QueryState::default() };
        StatsQuery { state: Mutex::new(state), replied: Condvar::new() }
    }

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
        let waits = |state: &mut QueryState| {
            state.lanes.iter().any(|lane| lane.replied_to < query) && !state.closed
        };
        let result = self.replied.wait_timeout_while(lock(&self.state), timeout, waits);
        drop(result.unwrap_or_else(PoisonError::into_inner));
    }

    /// Replies to all queries so far, for a lane.
    pub(crate) fn reply(&self, lane: usize, stats: QueueStats) {
        let mut state = lock(&self.state);
        state.lanes[lane] = LaneReply { replied_to: state.requested, stats };
        self.replied.notify_all();
    }

    /// Ends all queries: the queues are gone.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        state.lanes.clear();
        self.replied.notify_all();
    }

    /// Returns the sums of the last replies of all lanes.
    pub(crate) fn latest(&self) -> QueueStats {
        let mut all = QueueStats::default();
        for LaneReply { stats, .. } in &lock(&self.state).lanes {
            all.jobs += stats.jobs;
            all.peers.resize_with(all.peers.len().max(stats.peers.len()), Default::default);
            for (sum, peer) in all.peers.iter_mut().zip(&stats.peers) {
                sum.messages += peer.messages;
                sum.bytes += peer.bytes;
                sum.in_flight_bytes += peer.in_flight_bytes;
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn whoever_asks_gets_an_answer_given_after_the_question() {
        let state = Arc::new(StatsQuery::new(1));
        state.reply(0, QueueStats { peers: Vec::new(), jobs: 1 });
        let replying = Arc::clone(&state);
        state.request(Duration::from_secs(60), move || {
            std::thread::spawn(move || {
                replying.reply(0, QueueStats { peers: Vec::new(), jobs: 2 });
            });
        });
        assert_eq!(state.latest().jobs, 2);
    }

    #[test]
    fn after_the_end_nobody_waits_and_nothing_is_queued() {
        let state = StatsQuery::new(1);
        state.reply(0, QueueStats { peers: Vec::new(), jobs: 3 });
        state.close();
        state.request(Duration::from_secs(60), || unreachable!("nobody is left to replied"));
        assert_eq!(state.latest(), QueueStats::default());
    }
}
