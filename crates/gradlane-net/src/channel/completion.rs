//! Which tensors are ready in which step, and the threads that wait for them.
//!
//! I/O threads publish; application threads look and wait. A look is one atomic load; publishing
//! takes a lock only while a thread waits.

use crate::sys::lock;
use gradlane_units::{Rank, SquareSum, Step, TensorId};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The target of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitTarget {
    Tensor(TensorId, Step),
    Step(Step),
    /// The choice of a step's contributors.
    Contributors(Step),
    /// The sum of the squares of a step's gradients.
    Squares(Step),
    /// Any tensor that became ready in a step and was not taken yet.
    AnyTensor(Step),
    /// Blocks of a tensor whose root this rank is.
    RootRequest,
    /// News of the membership.
    Membership,
    End,
}

/// News of the membership, for the application.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields with the name of their type")]
pub enum MembershipEvent {
    /// The register of this generation in the job's store decides, and should get this value
    /// ([`Channel::answer_claim`](crate::Channel::answer_claim)).
    ClaimNeeded { generation: u32, value: Vec<u8> },
    /// Training goes on with these members.
    Changed {
        generation: u32,
        members: Vec<Rank>,
        /// The latest step that a member was in.
        step: Step,
        /// The lost ranks, and the reason.
        reason: String,
    },
}

#[derive(Debug)]
struct Waiter {
    target: WaitTarget,
    signal: Arc<Condvar>,
}

/// Completed tensors and steps.
#[derive(Debug)]
pub(crate) struct CompletionTable {
    /// By tensor: one more than the last step in which it became ready.
    tensors: Vec<AtomicU64>,
    /// The tensor that became ready last.
    newest: AtomicU32,
    /// One more than the last complete step.
    complete: AtomicU64,
    /// One more than the last step whose contributors are known.
    decided: AtomicU64,
    /// One more than the last step whose squares are known.
    measured: AtomicU64,
    /// That step, and the sum.
    squares: Mutex<Option<(Step, SquareSum)>>,
    /// Not zero when the session is over.
    ended: AtomicU64,
    finished: Mutex<VecDeque<(Step, TensorId, bool)>>,
    root_requests: Mutex<VecDeque<(TensorId, Step)>>,
    membership: Mutex<VecDeque<MembershipEvent>>,
    waiting: AtomicUsize,
    waiters: Mutex<Vec<Waiter>>,
}

impl CompletionTable {
    /// Makes a table on which nothing is complete.
    pub(crate) fn new(tensors: usize) -> CompletionTable {
        CompletionTable {
            tensors: (0..tensors).map(|_| AtomicU64::new(0)).collect(),
            newest: AtomicU32::new(0),
            complete: AtomicU64::new(0),
            decided: AtomicU64::new(0),
            measured: AtomicU64::new(0),
            squares: Mutex::default(),
            ended: AtomicU64::new(0),
            finished: Mutex::default(),
            root_requests: Mutex::default(),
            membership: Mutex::default(),
            waiting: AtomicUsize::new(0),
            waiters: Mutex::default(),
        }
    }

    /// Whether a target is reached.
    pub(crate) fn has(&self, target: WaitTarget) -> bool {
        let (table, step) = match target {
            WaitTarget::Tensor(tensor, step) => match self.tensors.get(tensor.index()) {
                Some(table) => (table, step),
                None => return false,
            },
            WaitTarget::Step(step) => (&self.complete, step),
            WaitTarget::Contributors(step) => (&self.decided, step),
            WaitTarget::Squares(step) => (&self.measured, step),
            WaitTarget::AnyTensor(step) => {
                return lock(&self.finished).iter().any(|&(at, ..)| at == step)
            }
            WaitTarget::RootRequest => return !lock(&self.root_requests).is_empty(),
            WaitTarget::Membership => return !lock(&self.membership).is_empty(),
            WaitTarget::End => (&self.ended, Step(0)),
        };
        table.load(Ordering::SeqCst) > step.0
    }

    /// Returns the last complete step.
    pub(crate) fn last_complete(&self) -> Option<Step> {
        self.complete.load(Ordering::SeqCst).checked_sub(1).map(Step)
    }

    /// Returns the tensor that became ready last: of a complete step, the one that completed it.
    pub(crate) fn newest(&self) -> TensorId {
        TensorId(self.newest.load(Ordering::Relaxed))
    }

    /// Publishes a tensor. Threads that see it also see the writes to its memory.
    pub(crate) fn publish_tensor(&self, tensor: TensorId, step: Step, absent: bool) {
        let mut finished = lock(&self.finished);
        // Entries that are never taken must not pile up; those of the step before may still be
        // wanted.
        while finished.front().is_some_and(|&(at, ..)| at.next() < step) {
            finished.pop_front();
        }
        finished.push_back((step, tensor, absent));
        drop(finished);
        self.newest.store(tensor.0, Ordering::Relaxed);
        self.tensors[tensor.index()].store(step.0 + 1, Ordering::SeqCst);
        self.signal(WaitTarget::Tensor(tensor, step));
        self.signal(WaitTarget::AnyTensor(step));
    }

    /// Publishes that all blocks of a tensor are here, whose root this rank is.
    pub(crate) fn publish_root_request(&self, tensor: TensorId, step: Step) {
        lock(&self.root_requests).push_back((tensor, step));
        self.signal(WaitTarget::RootRequest);
    }

    /// Takes all root requests since the last call.
    pub(crate) fn take_root_requests(&self) -> Vec<(TensorId, Step)> {
        lock(&self.root_requests).drain(..).collect()
    }

    /// Publishes news of the membership.
    pub(crate) fn publish_change(&self, event: MembershipEvent) {
        lock(&self.membership).push_back(event);
        self.signal(WaitTarget::Membership);
    }

    /// Takes all news of the membership since the last call.
    pub(crate) fn take_changes(&self) -> Vec<MembershipEvent> {
        lock(&self.membership).drain(..).collect()
    }

    /// Publishes a complete step.
    pub(crate) fn publish_step(&self, step: Step) {
        self.complete.store(step.0 + 1, Ordering::SeqCst);
        self.signal(WaitTarget::Step(step));
    }

    /// Publishes that the contributors of a step are known.
    pub(crate) fn publish_contributors(&self, step: Step) {
        self.decided.store(step.0 + 1, Ordering::SeqCst);
        self.signal(WaitTarget::Contributors(step));
    }

    /// Publishes the sum of the squares of a step's gradients.
    pub(crate) fn publish_squares(&self, step: Step, sum: SquareSum) {
        *lock(&self.squares) = Some((step, sum));
        self.measured.store(step.0 + 1, Ordering::SeqCst);
        self.signal(WaitTarget::Squares(step));
    }

    /// Returns the sum of the squares of a step's gradients, until the next step's is there.
    pub(crate) fn squares(&self, step: Step) -> Option<SquareSum> {
        let known = lock(&self.squares);
        known.as_ref().filter(|(at, _)| *at == step).map(|(_, sum)| sum.clone())
    }

    /// Publishes the end of the session and wakes every thread that waits.
    pub(crate) fn publish_end(&self) {
        self.ended.store(1, Ordering::SeqCst);
        for waiter in lock(&self.waiters).iter() {
            waiter.signal.notify_all();
        }
    }

    fn signal(&self, target: WaitTarget) {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        for waiter in lock(&self.waiters).iter().filter(|waiter| waiter.target == target) {
            waiter.signal.notify_all();
        }
    }

    /// Waits until the target is reached, the session is over, or the time is up.
    pub(crate) fn wait(&self, target: WaitTarget, timeout: Duration) {
        if self.has(target) {
            return;
        }
        let signal = Arc::new(Condvar::new());
        // The count goes up before the state is read again: a publisher either sees the count, or
        // published early enough for this read.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut waiters = lock(&self.waiters);
        waiters.push(Waiter { target, signal: Arc::clone(&signal) });
        let done = |_: &mut Vec<Waiter>| !self.has(target) && !self.has(WaitTarget::End);
        let result = signal.wait_timeout_while(waiters, timeout, done);
        let (mut waiters, _) = result.unwrap_or_else(PoisonError::into_inner);
        waiters.retain(|waiter| !Arc::ptr_eq(&waiter.signal, &signal));
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// Takes the tensors that became ready in `step` since the last call, and drops those of
    /// earlier steps.
    pub(crate) fn take(&self, step: Step) -> Vec<(TensorId, bool)> {
        let mut finished = lock(&self.finished);
        let mut taken = Vec::new();
        finished.retain(|&(at, tensor, absent)| {
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
        let table = Arc::new(CompletionTable::new(2));
        let target = WaitTarget::Tensor(TensorId(1), Step(3));
        let waits = |table: &Arc<CompletionTable>| {
            let table = Arc::clone(table);
            std::thread::spawn(move || {
                table.wait(target, Duration::from_secs(60));
                table.has(target)
            })
        };
        let waiter = waits(&table);
        table.publish_tensor(TensorId(0), Step(3), false);
        table.publish_tensor(TensorId(1), Step(2), false);
        assert!(!table.has(target));
        table.publish_tensor(TensorId(1), Step(3), true);
        assert!(waiter.join().is_ok_and(|there| there));
        let waiter = {
            let table = Arc::clone(&table);
            std::thread::spawn(move || {
                table.wait(WaitTarget::Step(Step(9)), Duration::from_secs(60));
            })
        };
        table.publish_end();
        assert!(waiter.join().is_ok());
        assert_eq!(table.take(Step(3)), vec![(TensorId(0), false), (TensorId(1), true)]);
        assert_eq!(table.take(Step(3)), vec![]);
    }

    #[test]
    fn a_waiter_for_news_wakes_for_any_tensor_of_its_step() {
        let table = Arc::new(CompletionTable::new(2));
        let waiter = {
            let table = Arc::clone(&table);
            std::thread::spawn(move || {
                table.wait(WaitTarget::AnyTensor(Step(2)), Duration::from_secs(60));
                table.take(Step(2))
            })
        };
        table.publish_tensor(TensorId(0), Step(1), false);
        table.publish_tensor(TensorId(1), Step(2), true);
        assert!(waiter.join().is_ok_and(|finished| finished == vec![(TensorId(1), true)]));
        assert!(!table.has(WaitTarget::AnyTensor(Step(2))));
    }

    #[test]
    fn news_that_nobody_takes_do_not_pile_up() {
        let table = CompletionTable::new(2);
        for step in 0..10_000 {
            table.publish_tensor(TensorId(0), Step(step), false);
            table.publish_tensor(TensorId(1), Step(step), false);
        }
        assert_eq!(lock(&table.finished).len(), 4, "of two steps");
        assert_eq!(table.take(Step(9_999)).len(), 2);
    }

    #[test]
    fn questions_are_taken_once() {
        let table = Arc::new(CompletionTable::new(2));
        let waiter = {
            let table = Arc::clone(&table);
            std::thread::spawn(move || {
                table.wait(WaitTarget::RootRequest, Duration::from_secs(60));
                table.take_root_requests()
            })
        };
        table.publish_tensor(TensorId(0), Step(1), false);
        table.publish_root_request(TensorId(1), Step(2));
        assert!(waiter.join().is_ok_and(|root_requests| root_requests == [(TensorId(1), Step(2))]));
        assert!(table.take_root_requests().is_empty() && !table.has(WaitTarget::RootRequest));
    }

    #[test]
    fn a_wait_ends_when_the_time_is_up() {
        let table = CompletionTable::new(1);
        let start = Instant::now();
        table.wait(WaitTarget::Step(Step(0)), Duration::from_millis(5));
        assert!(start.elapsed() >= Duration::from_millis(5));
        assert_eq!(table.last_complete(), None);
        table.publish_step(Step(0));
        assert_eq!(table.last_complete(), Some(Step(0)));
    }
}
