//! Which tensors are ready in which step, and who waits for them.
//!
//! The I/O thread publishes, application threads look and wait. Looking is one atomic load;
//! publishing costs a lock for waiters only when somebody waits.

use gradlane_units::{Step, TensorId};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Locks; a panic of another holder leaves these simple states valid.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a waiter waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Awaited {
    Tensor(TensorId, Step),
    Step(Step),
    /// That the contributors of a step are known, where they are chosen.
    Decided(Step),
    /// Something that became ready in a step and was not taken yet.
    News(Step),
    /// Blocks of a tensor that this rank owes an answer to.
    Question,
    End,
}

#[derive(Debug)]
struct Waiter {
    awaited: Awaited,
    signal: Arc<Condvar>,
}

/// The board of results.
#[derive(Debug)]
pub(crate) struct ReadyBoard {
    /// Per tensor: one more than the last step in which it became ready.
    tensors: Vec<AtomicU64>,
    /// The tensor that became ready last.
    newest: AtomicU32,
    /// One more than the last complete step.
    complete: AtomicU64,
    /// One more than the last step whose contributors are known.
    decided: AtomicU64,
    /// Not zero when the session is over.
    ended: AtomicU64,
    news: Mutex<VecDeque<(Step, TensorId, bool)>>,
    questions: Mutex<VecDeque<(TensorId, Step)>>,
    waiting: AtomicUsize,
    waiters: Mutex<Vec<Waiter>>,
}

impl ReadyBoard {
    /// A board on which nothing is ready.
    pub(crate) fn new(tensors: usize) -> ReadyBoard {
        ReadyBoard {
            tensors: (0..tensors).map(|_| AtomicU64::new(0)).collect(),
            newest: AtomicU32::new(0),
            complete: AtomicU64::new(0),
            decided: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            news: Mutex::default(),
            questions: Mutex::default(),
            waiting: AtomicUsize::new(0),
            waiters: Mutex::default(),
        }
    }

    /// Whether what is awaited is there.
    pub(crate) fn has(&self, awaited: Awaited) -> bool {
        let (board, step) = match awaited {
            Awaited::Tensor(tensor, step) => match self.tensors.get(tensor.index()) {
                Some(board) => (board, step),
                None => return false,
            },
            Awaited::Step(step) => (&self.complete, step),
            Awaited::Decided(step) => (&self.decided, step),
            Awaited::News(step) => return lock(&self.news).iter().any(|&(at, ..)| at == step),
            Awaited::Question => return !lock(&self.questions).is_empty(),
            Awaited::End => (&self.ended, Step(0)),
        };
        board.load(Ordering::SeqCst) > step.0
    }

    /// The last step that is complete, if one is.
    pub(crate) fn last_complete(&self) -> Option<Step> {
        self.complete.load(Ordering::SeqCst).checked_sub(1).map(Step)
    }

    /// The tensor that became ready last: of a complete step, the one that completed it.
    pub(crate) fn newest(&self) -> TensorId {
        TensorId(self.newest.load(Ordering::Relaxed))
    }

    /// A tensor is ready. What was written to its memory before is seen by who sees this.
    pub(crate) fn publish_tensor(&self, tensor: TensorId, step: Step, absent: bool) {
        let mut news = lock(&self.news);
        // Where nobody takes news they must not pile up; of the step before they may still be wanted.
        while news.front().is_some_and(|&(at, ..)| at.next() < step) {
            news.pop_front();
        }
        news.push_back((step, tensor, absent));
        drop(news);
        self.newest.store(tensor.0, Ordering::Relaxed);
        self.tensors[tensor.index()].store(step.0 + 1, Ordering::SeqCst);
        self.signal(Awaited::Tensor(tensor, step));
        self.signal(Awaited::News(step));
    }

    /// The blocks of a tensor are here, and this rank owes an answer.
    pub(crate) fn publish_question(&self, tensor: TensorId, step: Step) {
        lock(&self.questions).push_back((tensor, step));
        self.signal(Awaited::Question);
    }

    /// All questions since the last call.
    pub(crate) fn take_questions(&self) -> Vec<(TensorId, Step)> {
        lock(&self.questions).drain(..).collect()
    }

    /// A step is complete.
    pub(crate) fn publish_step(&self, step: Step) {
        self.complete.store(step.0 + 1, Ordering::SeqCst);
        self.signal(Awaited::Step(step));
    }

    /// The contributors of a step are known.
    pub(crate) fn publish_decided(&self, step: Step) {
        self.decided.store(step.0 + 1, Ordering::SeqCst);
        self.signal(Awaited::Decided(step));
    }

    /// The session is over: every waiter wakes.
    pub(crate) fn publish_end(&self) {
        self.ended.store(1, Ordering::SeqCst);
        for waiter in lock(&self.waiters).iter() {
            waiter.signal.notify_all();
        }
    }

    fn signal(&self, awaited: Awaited) {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        for waiter in lock(&self.waiters).iter().filter(|waiter| waiter.awaited == awaited) {
            waiter.signal.notify_all();
        }
    }

    /// Waits until it is there, the session is over, or the time is up.
    pub(crate) fn wait(&self, awaited: Awaited, timeout: Duration) {
        if self.has(awaited) {
            return;
        }
        let signal = Arc::new(Condvar::new());
        // The count goes up before the state is looked at again: a publisher either sees the
        // count, or published early enough for this look.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut waiters = lock(&self.waiters);
        waiters.push(Waiter { awaited, signal: Arc::clone(&signal) });
        let done = |_: &mut Vec<Waiter>| !self.has(awaited) && !self.has(Awaited::End);
        let result = signal.wait_timeout_while(waiters, timeout, done);
        let (mut waiters, _) = result.unwrap_or_else(PoisonError::into_inner);
        waiters.retain(|waiter| !Arc::ptr_eq(&waiter.signal, &signal));
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// What became ready in `step` since the last call; news of earlier steps is dropped.
    pub(crate) fn take(&self, step: Step) -> Vec<(TensorId, bool)> {
        let mut news = lock(&self.news);
        let mut taken = Vec::new();
        news.retain(|&(at, tensor, absent)| {
            if at == step {
                taken.push((tensor, absent));
            }
            at > step
        });
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_waiter_wakes_for_its_tensor_and_for_the_end_only() {
        let board = Arc::new(ReadyBoard::new(2));
        let awaited = Awaited::Tensor(TensorId(1), Step(3));
        let waits = |board: &Arc<ReadyBoard>| {
            let board = Arc::clone(board);
            std::thread::spawn(move || {
                board.wait(awaited, Duration::from_secs(60));
                board.has(awaited)
            })
        };
        let waiter = waits(&board);
        board.publish_tensor(TensorId(0), Step(3), false);
        board.publish_tensor(TensorId(1), Step(2), false);
        assert!(!board.has(awaited));
        board.publish_tensor(TensorId(1), Step(3), true);
        assert!(waiter.join().is_ok_and(|there| there));
        let waiter = {
            let board = Arc::clone(&board);
            std::thread::spawn(move || board.wait(Awaited::Step(Step(9)), Duration::from_secs(60)))
        };
        board.publish_end();
        assert!(waiter.join().is_ok());
        assert_eq!(board.take(Step(3)), vec![(TensorId(0), false), (TensorId(1), true)]);
        assert_eq!(board.take(Step(3)), vec![]);
    }

    #[test]
    fn a_waiter_for_news_wakes_for_any_tensor_of_its_step() {
        let board = Arc::new(ReadyBoard::new(2));
        let waiter = {
            let board = Arc::clone(&board);
            std::thread::spawn(move || {
                board.wait(Awaited::News(Step(2)), Duration::from_secs(60));
                board.take(Step(2))
            })
        };
        board.publish_tensor(TensorId(0), Step(1), false);
        board.publish_tensor(TensorId(1), Step(2), true);
        assert!(waiter.join().is_ok_and(|news| news == vec![(TensorId(1), true)]));
        assert!(!board.has(Awaited::News(Step(2))));
    }

    #[test]
    fn news_that_nobody_takes_do_not_pile_up() {
        let board = ReadyBoard::new(2);
        for step in 0..10_000 {
            board.publish_tensor(TensorId(0), Step(step), false);
            board.publish_tensor(TensorId(1), Step(step), false);
        }
        assert_eq!(lock(&board.news).len(), 4, "of two steps");
        assert_eq!(board.take(Step(9_999)).len(), 2);
    }

    #[test]
    fn questions_are_taken_once() {
        let board = Arc::new(ReadyBoard::new(2));
        let waiter = {
            let board = Arc::clone(&board);
            std::thread::spawn(move || {
                board.wait(Awaited::Question, Duration::from_secs(60));
                board.take_questions()
            })
        };
        board.publish_tensor(TensorId(0), Step(1), false);
        board.publish_question(TensorId(1), Step(2));
        assert!(waiter.join().is_ok_and(|questions| questions == [(TensorId(1), Step(2))]));
        assert!(board.take_questions().is_empty() && !board.has(Awaited::Question));
    }

    #[test]
    fn a_wait_ends_when_the_time_is_up() {
        let board = ReadyBoard::new(1);
        let start = Instant::now();
        board.wait(Awaited::Step(Step(0)), Duration::from_millis(5));
        assert!(start.elapsed() >= Duration::from_millis(5));
        assert_eq!(board.last_complete(), None);
        board.publish_step(Step(0));
        assert_eq!(board.last_complete(), Some(Step(0)));
    }
}
