//! Asynchronous training. Every push is applied alone, in the order in which pushes become whole, and the
//! new state goes to the rank that pushed, alone. No rank waits for another rank's gradients.
//!
//! An owner keeps the parameters of its slices in buffers of their own, apart from what this rank
//! trains on. An update never writes to the state before it: it makes the next one, and a rank that is
//! still owed the old one is sent the old one. So a reply is always the state right after one update,
//! never a mixture of two.
//!
//! Steps are each rank's own. A rank contributes every slice once a step, and not before it has the
//! reply for the step before, so an owner owes each rank at most one reply a slice.

use crate::api::{violation, BufferRef, Event, Job, Operation, Validated};
use crate::cx::Cx;
use crate::jobs::{Contribution, PsTask, PsWritten, Push, Running, Then, Written};
use crate::plan::{Plan, Synchrony};
use crate::transmit::Body;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step};
use gradlane_wire::PayloadForm;

/// How far one rank is, for one slice.
#[derive(Clone, Copy, Debug)]
struct RankClock {
    /// The step that its next push is for.
    step: Step,
    /// The version that it was sent last.
    received: u64,
}

impl RankClock {
    const START: RankClock = RankClock { step: Step(1), received: 0 };
}

/// A slice that this rank owns.
#[derive(Debug)]
struct OwnedState {
    /// The parameters after `version` updates.
    state: BufferRef,
    version: u64,
    clocks: BTreeMap<Rank, RankClock>,
    waiting: VecDeque<Push>,
    /// The rank whose push is being applied.
    applying: Option<Rank>,
}

impl OwnedState {
    fn new(state: BufferRef) -> OwnedState {
        let (clocks, waiting) = (BTreeMap::new(), VecDeque::new());
        OwnedState { state, version: 0, clocks, waiting, applying: None }
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.applying.is_none()
    }

    fn clock(&mut self, rank: Rank) -> &mut RankClock {
        self.clocks.entry(rank).or_insert(RankClock::START)
    }
}

/// The states of all owned slices.
#[derive(Debug, Default)]
pub(crate) struct AsyncOwners {
    /// Whether the driver knows how to update.
    updates_ready: bool,
    /// Whether replies carry what the driver reads out, and updates change nothing.
    reading: bool,
    owned: BTreeMap<SliceId, OwnedState>,
    /// Replies whose last frame is not yet with the kernel.
    replies: BTreeMap<(SliceId, Rank), Option<BufferRef>>,
}

fn is_updated(plan: &Plan, slice: SliceId) -> bool {
    plan.strategy.synchrony == Synchrony::Async
        && plan.takes_part(plan.slice(slice).tensor, Step(1))
}

impl AsyncOwners {
    /// Goes on as if every rank had pushed, and been replied to, in each step up to this one.
    pub(super) fn fast_forward(&mut self, world_size: u32, step: Step) {
        let clock = RankClock { step: step.next(), received: step.0 };
        for owned in self.owned.values_mut() {
            owned.version = step.0;
            owned.clocks = (0..world_size).map(|rank| (Rank(rank), clock)).collect();
        }
    }

    /// Whether every push was applied and every reply is with the kernel.
    pub(crate) fn is_idle(&self) -> bool {
        self.replies.is_empty() && self.owned.values().all(OwnedState::is_idle)
    }

    /// The step that a rank's next push of a slice is for; an error while it is owed a reply.
    pub(super) fn expected(&self, slice: SliceId, from: Rank) -> Validated<Step> {
        let owned = self.owned.get(&slice).ok_or("there are no parameters yet")?;
        let waits = owned.waiting.iter().any(|push| push.rank == from);
        if waits || owned.applying == Some(from) || self.replies.contains_key(&(slice, from)) {
            return violation(format!("{from} has no reply for the step before"));
        }
        Ok(owned.clocks.get(&from).copied().unwrap_or(RankClock::START).step)
    }

    /// No push is applied before the driver knows how tensors are updated.
    pub(super) fn updates_ready(&mut self, cx: &mut Cx) {
        self.updates_ready = true;
        self.reading = false;
        let slices: Vec<SliceId> = self.owned.keys().copied().collect();
        for slice in slices {
            self.apply_next(cx, slice);
        }
    }

    pub(super) fn updates_paused(&mut self) {
        self.reading = true;
    }

    /// Keeps the result of step 0 as the state that updates start from; an empty slice has none.
    pub(super) fn keep_initial(&mut self, cx: &mut Cx, slice: SliceId, state: Option<BufferRef>) {
        if !is_updated(cx.plan(), slice) {
            return;
        }
        let state = match state {
            Some(state) => {
                cx.retain(state);
                state
            }
            None => cx.acquire(cx.plan().slice_bytes(slice)),
        };
        self.owned.insert(slice, OwnedState::new(state));
    }

    /// For engines that begin after step 0: states, of any values.
    pub(super) fn skip_initial(&mut self, cx: &mut Cx) {
        let own = |slice: &SliceId| cx.plan().slice(*slice).owner == cx.rank();
        let own = cx.plan().slice_ids().filter(own).filter(|&it| is_updated(cx.plan(), it));
        for slice in own.collect::<Vec<SliceId>>() {
            let state = cx.acquire(cx.plan().slice_bytes(slice));
            self.owned.insert(slice, OwnedState::new(state));
            self.updates_ready = true;
        }
    }

    pub(super) fn drop_states(&mut self, cx: &mut Cx) {
        for owned in core::mem::take(&mut self.owned).into_values() {
            cx.release(owned.state);
        }
    }

    /// A rank's push of a slice that this rank owns is whole.
    pub(super) fn push(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        rank: Rank,
        contribution: Contribution,
        priority: Priority,
    ) {
        let is_empty = cx.plan().slice(slice).length == 0;
        let owned = self.owned.get_mut(&slice).expect("a state is there after step 0");
        let (version, state) = (owned.version, owned.state);
        let clock = owned.clock(rank);
        let step = clock.step;
        clock.step = step.next();
        if contribution == Contribution::Absent || is_empty {
            // Nothing to apply: the rank gets the newest state, if it does not have it.
            let is_new = clock.received < version;
            clock.received = version;
            return self.reply(cx, slice, rank, step, is_new.then_some(state), priority);
        }
        owned.waiting.push_back(Push { rank, step, contribution, priority });
        self.apply_next(cx, slice);
    }

    /// Starts on the next push of a slice, unless one is being applied.
    fn apply_next(&mut self, cx: &mut Cx, slice: SliceId) {
        let ready = self.updates_ready;
        let idle = self.owned.get_mut(&slice).filter(|it| ready && it.applying.is_none());
        let Some(owned) = idle else {
            return;
        };
        if let Some(push) = owned.waiting.pop_front() {
            owned.applying = Some(push.rank);
            cx.queue_job_at(push.priority, slice, push.step, PsTask::Apply(push));
        }
    }

    pub(super) fn start(&mut self, cx: &mut Cx, slice: SliceId, push: Push) -> Job {
        let bytes = cx.plan().slice_bytes(slice);
        let (input, buffer, spent) = match push.contribution {
            Contribution::Buffer(buffer) => (buffer.whole(), buffer, Vec::new()),
            Contribution::Encoded(buffer) => {
                (buffer.whole(), cx.acquire(bytes), Vec::from([buffer]))
            }
            _ => (cx.gradient_region(slice), cx.acquire(bytes), Vec::new()),
        };
        let owned = self.owned.get(&slice).expect("a state is there after step 0");
        let (inputs, output) = (Vec::from([input]), buffer.whole());
        let parameters = owned.state.whole();
        // The learning rate was chosen for gradients of this size: one rank's own mean.
        let (absent, divisor) = (false, 1);
        let operation = match push.contribution.form() {
            Some(PayloadForm::Encoded) => {
                Operation::DecodeReduceApply { inputs, absent, divisor, parameters, output }
            }
            _ => Operation::ReduceApply { inputs, absent, divisor, parameters, output },
        };
        let then = Then::Wrote(buffer, Written::Ps(PsWritten::State(push)));
        cx.start(operation, Running { slice, step: push.step, spent, then })
    }

    /// An update is done: its result is the slice's state, and the reply to the rank that pushed.
    pub(super) fn applied(&mut self, cx: &mut Cx, slice: SliceId, push: Push, output: BufferRef) {
        let Push { rank, step, priority, .. } = push;
        let owned = self.owned.get_mut(&slice).expect("a state is there after step 0");
        owned.applying = None;
        if self.reading {
            self.reply(cx, slice, rank, step, Some(output), priority);
            cx.release(output);
        } else {
            owned.version += 1;
            let version = owned.version;
            let clock = owned.clock(rank);
            let staleness = version - 1 - clock.received;
            clock.received = version;
            let before = core::mem::replace(&mut owned.state, output);
            cx.release(before);
            cx.tell(Event::Applied { slice, rank, step, version, staleness });
            self.reply(cx, slice, rank, step, Some(output), priority);
        }
        self.apply_next(cx, slice);
    }

    /// Gives a rank the state of a slice; without one it has the newest already.
    fn reply(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        rank: Rank,
        step: Step,
        state: Option<BufferRef>,
        priority: Priority,
    ) {
        if let Some(state) = state {
            cx.retain(state);
        }
        if rank == cx.rank() {
            return match state {
                Some(state) => cx.result_in_buffer(slice, state, PayloadForm::Raw),
                None => cx.slice_done(slice, false),
            };
        }
        self.replies.insert((slice, rank), state);
        let message = cx.result_message(slice, step, (state, PayloadForm::Raw), priority);
        debug_assert!(!matches!(message.body, Body::Inline(_)), "a state lies in a buffer");
        let key = cx.slice_key(step, priority, slice);
        cx.send(rank, key, message);
    }

    /// The last frame of a reply is with the kernel.
    pub(super) fn reply_sent(&mut self, cx: &mut Cx, slice: SliceId, rank: Rank) {
        if let Some(Some(state)) = self.replies.remove(&(slice, rank)) {
            cx.release(state);
        }
    }
}
