//! Which tensors are ready in which step, and the threads that wait for them.
//!
//! Lanes publish; application threads look and wait. A look is one atomic load; publishing
//! takes a lock only while a thread waits.

use crate::sys::lock;
use gradlane_engine::Plan;
use gradlane_units::{Rank, SquareSum, Step, TensorId};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
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

#[derive(Debug)]
struct Waiter {
    target: WaitTarget,
    signal: Arc<Condvar>,
}

/// A tensor's parts, each carried by a lane.
#[derive(Debug, Default)]
struct Parts {
    count: u32,
    /// Parts that are ready in the current step.
    ready: AtomicU32,
    /// Whether a rank has a gradient of one of these.
    has_value: AtomicBool,
}

/// Completed tensors and steps.
#[derive(Debug)]
pub(crate) struct CompletionTable {
    lanes: u32,
    /// Lanes in which the current step is complete.
    complete_lanes: AtomicU32,
    parts: Vec<Parts>,
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
    /// That step, the sum, and the lanes that are in it.
    squares: Mutex<Option<(Step, SquareSum, u32)>>,
    /// Not zero when the session is over.
    ended: AtomicU64,
    finished: Mutex<VecDeque<(Step, TensorId, bool)>>,
    root_requests: Mutex<VecDeque<(TensorId, Step)>>,
    membership: Mutex<MembershipNews>,
    waiting: AtomicUsize,
    waiters: Mutex<Vec<Waiter>>,
}

impl CompletionTable {
    /// Makes a table on which nothing is complete, for lanes with these plans.
    pub(crate) fn new<'a>(plans: impl Iterator<Item = &'a Plan>) -> CompletionTable {
        let (mut parts, mut lanes) = (Vec::<Parts>::new(), 0);
        for plan in plans {
            lanes += 1;
            parts.resize_with(plan.tensors.len(), Parts::default);
            for (tensor, parts) in parts.iter_mut().enumerate() {
                parts.count += u32::from(plan.has_slices_of(TensorId(tensor as u32)));
            }
        }
        CompletionTable {
            lanes,
            complete_lanes: AtomicU32::new(0),
            tensors: parts.iter().map(|_| AtomicU64::new(0)).collect(),
            parts,
            newest: AtomicU32::new(0),
            complete: AtomicU64::new(0),
            decided: AtomicU64::new(0),
            measured: AtomicU64::new(0),
            squares: Mutex::default(),
            ended: AtomicU64::new(0),
            finished: Mutex::default(),
            root_requests: Mutex::default(),
            membership: Mutex::new(MembershipNews::new(lanes as usize)),
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

    /// Notes that a lane's part of a tensor is ready, and publishes the tensor with the last one. Threads that
    /// see it also see the writes to its memory.
    pub(crate) fn publish_tensor(&self, tensor: TensorId, step: Step, absent: bool) {
        let parts = &self.parts[tensor.index()];
        parts.has_value.fetch_or(!absent, Ordering::SeqCst);
        if parts.ready.fetch_add(1, Ordering::SeqCst) + 1 < parts.count {
            return;
        }
        // No lane is in the next step before this one is complete.
        parts.ready.store(0, Ordering::SeqCst);
        let absent = !parts.has_value.swap(false, Ordering::SeqCst);
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

    /// Publishes a lane's news of the membership.
    pub(crate) fn publish_change(&self, lane: usize, event: MembershipEvent) {
        lock(&self.membership).note(lane, event);
        self.signal(WaitTarget::Membership);
    }

    /// Takes all news of the membership since the last call.
    pub(crate) fn take_changes(&self) -> Vec<MembershipEvent> {
        lock(&self.membership).take()
    }

    /// Notes that a step is complete in a lane, and publishes it with the last one.
    pub(crate) fn publish_step(&self, step: Step) {
        if self.complete_lanes.fetch_add(1, Ordering::SeqCst) + 1 < self.lanes {
            return;
        }
        self.complete_lanes.store(0, Ordering::SeqCst);
        self.complete.store(step.0 + 1, Ordering::SeqCst);
        self.signal(WaitTarget::Step(step));
    }

    /// Publishes that the contributors of a step are known.
    pub(crate) fn publish_contributors(&self, step: Step) {
        self.decided.store(step.0 + 1, Ordering::SeqCst);
        self.signal(WaitTarget::Contributors(step));
    }

    /// Adds the squares of a step's gradients in a lane, and publishes the sum with the last one.
    pub(crate) fn publish_squares(&self, step: Step, sum: &SquareSum) {
        {
            let mut known = lock(&self.squares);
            let of_step = known.take().filter(|(at, ..)| *at == step);
            let (_, mut all, lanes) = of_step.unwrap_or((step, SquareSum::default(), 0));
            all.merge(sum);
            *known = Some((step, all, lanes + 1));
            if lanes + 1 < self.lanes {
                return;
            }
        }
        self.measured.store(step.0 + 1, Ordering::SeqCst);
        self.signal(WaitTarget::Squares(step));
    }

    /// Returns the sum of the squares of a step's gradients, until the next step's is there.
    pub(crate) fn squares(&self, step: Step) -> Option<SquareSum> {
        let known = lock(&self.squares);
        known.as_ref().filter(|(at, ..)| *at == step).map(|(_, sum, _)| sum.clone())
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

// News of the membership for the application.

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

/// News that the application has not taken, or that not all lanes have yet.
#[derive(Debug)]
pub(crate) struct MembershipNews {
    /// By lane: the newest membership that it goes on with.
    lanes: Vec<u32>,
    /// Memberships that some lanes go on with, by generation. A lane may skip one for the next.
    ahead: BTreeMap<u32, MembershipEvent>,
    known: VecDeque<MembershipEvent>,
}

impl MembershipNews {
    /// Makes the news of a rank with as many lanes, of which there are none.
    pub(crate) fn new(lanes: usize) -> MembershipNews {
        MembershipNews { lanes: vec![0; lanes], ahead: BTreeMap::new(), known: VecDeque::new() }
    }

    /// Notes news that a lane has. Those on a claim are known at once, a membership when all lanes go on with it or
    /// a later one.
    pub(crate) fn note(&mut self, lane: usize, mut event: MembershipEvent) {
        let MembershipEvent::Changed { generation, step, .. } = &mut event else {
            return self.known.push_back(event);
        };
        self.lanes[lane] = *generation;
        if let Some(MembershipEvent::Changed { step: other, .. }) = self.ahead.get(generation) {
            *step = (*step).max(*other);
        }
        self.ahead.insert(*generation, event);
        let common = self.lanes.iter().min().copied().unwrap_or_default();
        let later = self.ahead.split_off(&(common + 1));
        self.known.extend(std::mem::replace(&mut self.ahead, later).into_values());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Takes all that is known since the last call.
    pub(crate) fn take(&mut self) -> Vec<MembershipEvent> {
        self.known.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradlane_engine::{Strategy, TensorKind, TensorSpec, Update};
    use gradlane_units::Dtype;
    use std::time::Instant;

    /// A table of tensors of two slices.
    fn table_of(tensors: usize, lanes: u32) -> CompletionTable {
        let spec = |tensor: usize| TensorSpec {
            name: tensor.to_string(),
            numel: 4,
            dtype: Dtype::F32,
            kind: TensorKind::Parameter,
        };
        let strategy = Strategy::named("p3", Some(2), 0).expect("a strategy");
        let specs = (0..tensors).map(spec).collect();
        let plan = Plan::build(specs, strategy, Update::Worker, 1).expect("a plan");
        let plans: Vec<Plan> = (0..lanes).map(|lane| plan.lane(lane, lanes)).collect();
        CompletionTable::new(plans.iter())
    }

    #[test]
    fn what_several_lanes_carry_is_ready_when_all_have_their_part() {
        let table = table_of(1, 2);
        for step in [Step(1), Step(2)] {
            let (tensor, whole) = (WaitTarget::Tensor(TensorId(0), step), WaitTarget::Step(step));
            table.publish_tensor(TensorId(0), step, step == Step(2));
            table.publish_step(step);
            assert!(!table.has(tensor) && !table.has(whole));
            table.publish_tensor(TensorId(0), step, true);
            table.publish_step(step);
            assert!(table.has(tensor) && table.has(whole));
            assert_eq!(table.take(step), vec![(TensorId(0), step == Step(2))]);
        }
    }

    #[test]
    fn squares_are_those_of_all_lanes() {
        let table = table_of(1, 2);
        let sum = |value: f32| {
            let mut sum = SquareSum::default();
            sum.add_square_of(f64::from(value));
            sum
        };
        for step in [Step(1), Step(2)] {
            table.publish_squares(step, &sum(2.0));
            assert!(!table.has(WaitTarget::Squares(step)));
            table.publish_squares(step, &sum(3.0));
            assert!(table.has(WaitTarget::Squares(step)));
            let mut both = sum(2.0);
            both.merge(&sum(3.0));
            assert_eq!(table.squares(step), Some(both));
        }
    }

    #[test]
    fn a_waiter_wakes_for_its_tensor_and_for_the_end_only() {
        let table = Arc::new(table_of(2, 1));
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
        let table = Arc::new(table_of(2, 1));
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
        let table = table_of(2, 1);
        for step in 0..10_000 {
            table.publish_tensor(TensorId(0), Step(step), false);
            table.publish_tensor(TensorId(1), Step(step), false);
        }
        assert_eq!(lock(&table.finished).len(), 4, "of two steps");
        assert_eq!(table.take(Step(9_999)).len(), 2);
    }

    #[test]
    fn questions_are_taken_once() {
        let table = Arc::new(table_of(2, 1));
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
        let table = table_of(1, 1);
        let start = Instant::now();
        table.wait(WaitTarget::Step(Step(0)), Duration::from_millis(5));
        assert!(start.elapsed() >= Duration::from_millis(5));
        assert_eq!(table.last_complete(), None);
        table.publish_step(Step(0));
        assert_eq!(table.last_complete(), Some(Step(0)));
    }

    fn changed(generation: u32, step: u64) -> MembershipEvent {
        let (members, reason) = (vec![Rank(0)], String::new());
        MembershipEvent::Changed { generation, members, step: Step(step), reason }
    }

    #[test]
    fn a_membership_is_known_when_all_lanes_have_it_or_a_later_one() {
        let mut news = MembershipNews::new(3);
        news.note(0, changed(1, 4));
        news.note(1, changed(1, 5));
        news.note(0, changed(2, 6));
        assert!(news.is_empty());
        news.note(2, changed(2, 6));
        assert_eq!(news.take(), vec![changed(1, 5)]);
        news.note(1, changed(2, 6));
        assert_eq!(news.take(), vec![changed(2, 6)]);
        let claim = MembershipEvent::ClaimNeeded { generation: 3, value: Vec::new() };
        news.note(0, claim.clone());
        assert_eq!(news.take(), vec![claim]);
    }
}
