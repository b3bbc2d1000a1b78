//! How deep the engine's queues are, asked for by application threads.
//!
//! Only the I/O thread sees the engine, and counting what waits takes it some time: so it counts when
//! it is asked, and not otherwise.

use crate::ready::lock;
use gradlane_engine::QueueStats;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

#[derive(Debug, Default)]
struct Board {
    /// Questions asked so far.
    asked: u64,
    /// Questions that the depths below answer.
    answered: u64,
    depths: QueueStats,
    closed: bool,
}

/// Questions and the last answer.
#[derive(Debug, Default)]
pub(crate) struct DepthBoard {
    board: Mutex<Board>,
    answer: Condvar,
}

impl DepthBoard {
    /// Asks, with a call that makes the I/O thread answer, and waits for so long at most.
    pub(crate) fn ask(&self, timeout: Duration, notify: impl FnOnce()) {
        let mut board = lock(&self.board);
        if board.closed {
            return;
        }
        board.asked += 1;
        let question = board.asked;
        drop(board);
        notify();
        let waits = |board: &mut Board| board.answered < question && !board.closed;
        let result = self.answer.wait_timeout_while(lock(&self.board), timeout, waits);
        drop(result.unwrap_or_else(PoisonError::into_inner));
    }

    /// Answers all questions asked so far.
    pub(crate) fn answer(&self, depths: QueueStats) {
        let mut board = lock(&self.board);
        board.answered = board.asked;
        board.depths = depths;
        self.answer.notify_all();
    }

    /// Nothing waits any more and nobody answers.
    pub(crate) fn close(&self) {
        let mut board = lock(&self.board);
        board.closed = true;
        board.depths = QueueStats::default();
        self.answer.notify_all();
    }

    /// The last answer.
    pub(crate) fn last(&self) -> QueueStats {
        lock(&self.board).depths.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn whoever_asks_gets_an_answer_given_after_the_question() {
        let board = Arc::new(DepthBoard::default());
        board.answer(QueueStats { peers: Vec::new(), jobs: 1 });
        let answering = Arc::clone(&board);
        board.ask(Duration::from_secs(60), move || {
            std::thread::spawn(move || {
                answering.answer(QueueStats { peers: Vec::new(), jobs: 2 });
            });
        });
        assert_eq!(board.last().jobs, 2);
    }

    #[test]
    fn after_the_end_nobody_waits_and_nothing_is_queued() {
        let board = DepthBoard::default();
        board.answer(QueueStats { peers: Vec::new(), jobs: 3 });
        board.close();
        board.ask(Duration::from_secs(60), || unreachable!("nobody is left to answer"));
        assert_eq!(board.last(), QueueStats::default());
    }
}
