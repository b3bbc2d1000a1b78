//! The synchrony `Async`: asynchronous training. Every push is applied alone, in the order in which
//! pushes become whole, and answered to the rank that sent it, alone. Nobody waits for anybody else's
//! gradients.
//!
//! An owner keeps the parameters of its slices in buffers of their own, apart from what this rank
//! trains on. An update never writes to the state before it: it makes the next one, and whoever is
//! still owed the old one is sent the old one. So an answer is always the state right after one
//! update, never a mixture of two.
//!
//! Steps are each rank's own. A rank contributes every slice once a step, and not before it has been
//! answered for the step before, so an owner owes each rank at most one answer a slice.

use crate::engine::Engine;
use crate::io::{BufferRef, Event, Job, Operation};
use crate::jobs::{Pending, Running};
use crate::plan::Plan;
use crate::scheduler::Body;
use crate::server::Contribution;
use crate::strategy::Synchrony;
use crate::worker::Phase;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::String;
use gradlane_units::{Priority, Rank, SliceId, Step};
use gradlane_wire::PayloadForm;

/// Where one rank is, for one slice.
#[derive(Clone, Copy, Debug)]
struct Clock {
    /// The step that its next push is for.
    step: Step,
    /// The version that it was sent last.
    received: u64,
}

impl Clock {
    const START: Clock = Clock { step: Step(1), received: 0 };
}

/// A whole push that waits for its turn, or is being applied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Push {
    pub(crate) rank: Rank,
    pub(crate) step: Step,
    pub(crate) part: Contribution,
    pub(crate) priority: Priority,
}

/// A slice that this rank owns.
#[derive(Debug)]
struct OwnedState {
    /// The parameters after `version` updates.
    state: BufferRef,
    version: u64,
    clocks: BTreeMap<Rank, Clock>,
    waiting: VecDeque<Push>,
    /// Whose push is being applied.
    applying: Option<Rank>,
}

impl OwnedState {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.applying.is_none()
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct AsyncOwners {
    /// Whether the driver knows how to update.
    updates_ready: bool,
    /// Whether answers carry what the driver reads out, and updates change nothing.
    reading: bool,
    owned: BTreeMap<SliceId, OwnedState>,
    /// Answers whose last frame is not yet with the kernel.
    answers: BTreeMap<(SliceId, Rank), Option<BufferRef>>,
}

impl AsyncOwners {
    /// The parameters that everybody starts from.
    fn found(&mut self, slice: SliceId, state: BufferRef) {
        let owned = OwnedState {
            state,
            version: 0,
            clocks: BTreeMap::new(),
            waiting: VecDeque::new(),
            applying: None,
        };
        self.owned.insert(slice, owned);
    }

    /// Goes on as if every rank had pushed, and been answered, in each step up to this one.
    pub(crate) fn skip(&mut self, world_size: u32, step: Step) {
        let clock = Clock { step: step.next(), received: step.0 };
        for owned in self.owned.values_mut() {
            owned.version = step.0;
            owned.clocks = (0..world_size).map(|rank| (Rank(rank), clock)).collect();
        }
    }

    /// Whether every push was applied and every answer is with the kernel.
    pub(crate) fn is_idle(&self) -> bool {
        self.answers.is_empty() && self.owned.values().all(OwnedState::is_idle)
    }

    /// The step that a rank's next push of a slice is for; an error while it is owed an answer.
    pub(crate) fn expected(&self, slice: SliceId, from: Rank) -> Result<Step, String> {
        let owned = self.owned.get(&slice).ok_or("there are no parameters yet")?;
        let waits = owned.waiting.iter().any(|push| push.rank == from);
        if waits || owned.applying == Some(from) || self.answers.contains_key(&(slice, from)) {
            return Err(format!("{from} was not answered for the step before"));
        }
        Ok(owned.clocks.get(&from).copied().unwrap_or(Clock::START).step)
    }
}

impl Engine {
    /// Whether pushes of a step are applied one by one.
    pub(crate) fn is_async(&self, step: Step) -> bool {
        self.plan.strategy.synchrony == Synchrony::Async && step.0 > 0
    }

    /// The driver knows how tensors are updated. Under the synchrony `Async` no push is applied
    /// before; under other rules this changes nothing, as nothing is applied before this rank's own
    /// contribution.
    pub(crate) fn updates_ready(&mut self) {
        self.async_owners.updates_ready = true;
        self.async_owners.reading = false;
        for slice in self.plan_slices() {
            self.apply_next(slice);
        }
    }

    /// From now on, and until updates are ready again, the driver answers pushes with something
    /// else than parameters, which stay as they are.
    pub(crate) fn updates_paused(&mut self) {
        self.async_owners.reading = true;
    }

    fn plan_slices(&self) -> impl Iterator<Item = SliceId> + use<> {
        (0..self.plan.slices.len() as u32).map(SliceId)
    }

    /// Keeps the result of step 0 as the state that updates start from; an empty slice has none.
    pub(crate) fn keep_initial(&mut self, slice: SliceId, state: Option<BufferRef>) {
        let tensor = self.plan.slice(slice).tensor;
        if self.plan.strategy.synchrony != Synchrony::Async
            || !self.plan.takes_part(tensor, Step(1))
        {
            return;
        }
        let bytes = self.plan.slice_bytes(slice);
        let state = state.inspect(|&state| self.buffers.retain(state));
        let state = state.unwrap_or_else(|| self.buffers.acquire(bytes));
        self.async_owners.found(slice, state);
    }

    /// Whether this would leave a tensor without a state to update: rank 0 has no value in step 0.
    pub(crate) fn lacks_initial(&self, step: Step, from: Rank, absent: bool) -> bool {
        let each = self.plan.strategy.synchrony == Synchrony::Async;
        each && absent && step.0 == 0 && from == Rank(0)
    }

    /// For engines that begin after step 0: states, of whatever values.
    pub(crate) fn skip_initial_states(&mut self) {
        let (plan, rank): (&Plan, Rank) = (&self.plan, self.options.rank);
        if plan.strategy.synchrony != Synchrony::Async {
            return;
        }
        let trained = |slice: SliceId| plan.takes_part(plan.slice(slice).tensor, Step(1));
        for slice in (0..plan.slices.len() as u32).map(SliceId) {
            if plan.slice(slice).owner == rank && trained(slice) {
                let state = self.buffers.acquire(plan.slice_bytes(slice));
                self.async_owners.found(slice, state);
            }
        }
        self.async_owners.updates_ready = true;
    }

    /// The session closes: the states go.
    pub(crate) fn drop_states(&mut self) {
        for owned in core::mem::take(&mut self.async_owners.owned).into_values() {
            self.buffers.release(owned.state, &mut self.events);
        }
    }

    /// A rank's push of a slice that this rank owns is whole.
    pub(crate) fn add_push(
        &mut self,
        slice: SliceId,
        rank: Rank,
        part: Contribution,
        priority: Priority,
    ) {
        let is_empty = self.plan.slice(slice).length == 0;
        let owned = self.async_owners.owned.get_mut(&slice).expect("a state is there after step 0");
        let clock = owned.clocks.entry(rank).or_insert(Clock::START);
        let step = clock.step;
        clock.step = step.next();
        if part == Contribution::Absent || is_empty {
            // Nothing to apply: the rank is told the newest state, if it does not have it.
            let news = clock.received < owned.version;
            clock.received = owned.version;
            let state = news.then_some(owned.state);
            self.answer(slice, rank, step, state, priority);
            return;
        }
        owned.waiting.push_back(Push { rank, step, part, priority });
        self.apply_next(slice);
    }

    /// Starts on the next push of a slice, unless one is being applied.
    fn apply_next(&mut self, slice: SliceId) {
        let ready = self.async_owners.updates_ready;
        let Some(owned) = self.async_owners.owned.get_mut(&slice) else {
            return;
        };
        if !ready || owned.applying.is_some() {
            return;
        }
        if let Some(push) = owned.waiting.pop_front() {
            owned.applying = Some(push.rank);
            let key = self.slice_key(push.step, push.priority, slice);
            self.jobs.push(key, Pending::Apply { slice, push });
        }
    }

    pub(crate) fn start_apply(&mut self, slice: SliceId, push: Push) -> Job {
        let bytes = self.plan.slice_bytes(slice);
        let (input, output) = match push.part {
            Contribution::Buffer(buffer) => (buffer.whole(), buffer),
            _ => (self.gradient_region(slice), self.buffers.acquire(bytes)),
        };
        let owned = self.async_owners.owned.get(&slice).expect("a state is there after step 0");
        let operation = Operation::ReduceApply {
            inputs: alloc::vec![input],
            absent: false,
            // The learning rate was chosen for gradients of this size: one rank's own mean.
            divisor: 1,
            parameters: owned.state.whole(),
            output: output.whole(),
        };
        let running = Running::Apply { slice, push, output };
        self.hand_out(slice, push.step, operation, running)
    }

    /// An update is done: its result is the slice's state, and the answer to who pushed.
    pub(crate) fn applied(&mut self, slice: SliceId, push: Push, output: BufferRef) {
        let owned = self.async_owners.owned.get_mut(&slice).expect("a state is there after step 0");
        let clock = owned.clocks.entry(push.rank).or_insert(Clock::START);
        owned.applying = None;
        if self.async_owners.reading {
            self.answer(slice, push.rank, push.step, Some(output), push.priority);
            self.buffers.release(output, &mut self.events);
        } else {
            let staleness = owned.version - clock.received;
            owned.version += 1;
            clock.received = owned.version;
            let version = owned.version;
            let before = core::mem::replace(&mut owned.state, output);
            self.buffers.release(before, &mut self.events);
            let Push { rank, step, .. } = push;
            self.events.push_back(Event::Applied { slice, rank, step, version, staleness });
            self.answer(slice, rank, step, Some(output), push.priority);
        }
        self.apply_next(slice);
    }

    /// Gives a rank the state of a slice; without one it has the newest already.
    fn answer(
        &mut self,
        slice: SliceId,
        rank: Rank,
        step: Step,
        state: Option<BufferRef>,
        priority: Priority,
    ) {
        if let Some(state) = state {
            self.buffers.retain(state);
        }
        if rank == self.rank() {
            match state {
                Some(state) => {
                    self.worker.slice_mut(slice).phase = Phase::Buffered(state);
                    self.install_if_open(slice);
                }
                None => self.slice_done(slice, false),
            }
            return;
        }
        self.async_owners.answers.insert((slice, rank), state);
        let message = self.result_message(slice, step, (state, PayloadForm::Raw), priority);
        debug_assert!(!matches!(message.body, Body::Inline(_)), "a state lies in a buffer");
        let key = self.slice_key(step, priority, slice);
        self.scheduler.push(rank, key, message);
    }

    /// The last frame of an answer is with the kernel.
    pub(crate) fn answer_sent(&mut self, slice: SliceId, rank: Rank) {
        if let Some(Some(state)) = self.async_owners.answers.remove(&(slice, rank)) {
            self.buffers.release(state, &mut self.events);
        }
    }
}
