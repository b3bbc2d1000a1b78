//! The worker's side of every tensor: the step that this rank is in, the gradients that it submitted,
//! and the results that came back. A result lands in the tensor's own memory only when that memory is
//! open; otherwise it waits in a scratch buffer until it is installed.

use crate::api::{violation, BufferRef, Event, Memory, Region, Validated};
use crate::plan::{Plan, Release};
use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use gradlane_units::{SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

/// This rank's gradient of a tensor in the current step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Submission {
    /// Nothing yet.
    Missing,
    /// A gradient; the tensor's memory is registered.
    Gradient,
    /// No gradient; memory for a result is registered all the same.
    Absent,
}

#[derive(Clone, Debug)]
struct TensorState {
    submission: Submission,
    /// Slices without a result; one more until contributors are known, where stragglers are dropped.
    pending: u32,
    /// Whether some slice got a value.
    has_value: bool,
    /// Slices announced by their owners (pull rules).
    announced: u32,
    /// Whether the pulls were sent (pull rules).
    pulled: bool,
}

#[derive(Debug)]
pub(crate) struct Worker {
    /// The step that the states below describe.
    step: Step,
    begun: bool,
    /// Whether the application has ended the step (`step_end`).
    ended: bool,
    /// Whether contributions to this step travel as they are, whatever the plan says.
    raw: bool,
    tensors: Vec<TensorState>,
    slots: Vec<Slot>,
    /// Tensors of the step without a submission of this rank.
    unsubmitted: usize,
    /// Tensors of the step without a whole result.
    incomplete: usize,
    /// Complete tensors that wait for the rest of the step (release rule `Step`).
    unreleased: Vec<TensorId>,
}

/// Steps.
impl Worker {
    pub(crate) fn new(plan: &Plan) -> Worker {
        let mut worker = Worker {
            step: Step(0),
            begun: false,
            ended: false,
            raw: false,
            tensors: Vec::new(),
            slots: Vec::new(),
            unsubmitted: 0,
            incomplete: 0,
            unreleased: Vec::new(),
        };
        worker.enter(plan, Step(0));
        worker
    }

    /// Goes on as if step 0 were complete.
    pub(crate) fn skip_initial(&mut self) {
        self.begun = true;
        self.incomplete = 0;
        self.unsubmitted = 0;
    }

    /// Goes on as if this step were the one that has just been completed.
    pub(crate) fn fast_forward(&mut self, step: Step) {
        assert!(self.is_complete() && step > self.step, "between steps, and later");
        self.step = step;
    }

    /// Begins the next step. Where stragglers may be dropped, no tensor is released before this rank
    /// knows the contributors, and has submitted the tensor itself.
    pub(crate) fn begin(&mut self, plan: &Plan) {
        if self.begun {
            self.enter(plan, self.step.next());
        }
        if plan.drops_stragglers(self.step) {
            for tensor in plan.tensor_ids().filter(|&it| plan.takes_part(it, self.step)) {
                self.tensors[tensor.index()].pending += 1;
            }
        }
        self.begun = true;
    }

    fn enter(&mut self, plan: &Plan, step: Step) {
        self.step = step;
        self.begun = false;
        self.ended = false;
        self.raw = false;
        let tensors = plan.tensors.iter().map(|tensor| TensorState {
            submission: Submission::Missing,
            pending: tensor.slices.len() as u32,
            has_value: false,
            announced: 0,
            pulled: false,
        });
        self.tensors.clear();
        self.tensors.extend(tensors);
        self.slots.clear();
        self.slots.resize(plan.slices.len(), Slot::default());
        self.incomplete = plan.tensor_ids().filter(|&it| plan.takes_part(it, step)).count();
        self.unsubmitted = self.incomplete;
    }

    /// Ends the step; whether it was not ended before.
    pub(crate) fn end(&mut self) -> bool {
        !core::mem::replace(&mut self.ended, true)
    }

    /// The current step, begun or to be begun.
    pub(crate) fn step(&self) -> Step {
        self.step
    }

    /// The step that may begin next.
    pub(crate) fn next_step(&self) -> Step {
        if self.begun {
            self.step.next()
        } else {
            self.step
        }
    }

    /// Whether this step is the current one, and has begun.
    pub(crate) fn is_in(&self, step: Step) -> bool {
        self.begun && self.step == step
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.begun
    }

    /// Tensors of the step without a whole result.
    pub(crate) fn incomplete(&self) -> usize {
        self.incomplete
    }

    /// Whether this rank has submitted all tensors of the step.
    pub(crate) fn has_submitted_all(&self) -> bool {
        self.unsubmitted == 0
    }

    /// Whether every tensor of a begun step has its result.
    pub(crate) fn is_complete(&self) -> bool {
        self.begun && self.incomplete == 0
    }

    /// The last step that is complete on this rank.
    pub(crate) fn last_complete(&self) -> Option<Step> {
        if self.is_complete() {
            return Some(self.step);
        }
        self.step.0.checked_sub(1).map(Step)
    }

    /// Whether this rank has done its part of a begun step and waits for others.
    pub(crate) fn waits_for_others(&self) -> bool {
        self.begun && self.unsubmitted == 0 && self.incomplete > 0
    }
}

/// Submissions.
impl Worker {
    pub(crate) fn submission(&self, tensor: TensorId) -> Submission {
        self.tensors[tensor.index()].submission
    }

    /// Notes the submission of a tensor, which had none.
    pub(crate) fn submit(&mut self, tensor: TensorId, submission: Submission) {
        self.tensors[tensor.index()].submission = submission;
        self.unsubmitted -= 1;
    }

    /// Whether some tensor was submitted in this step.
    pub(crate) fn has_submitted(&self) -> bool {
        self.tensors.iter().any(|tensor| tensor.submission != Submission::Missing)
    }

    /// Whether this rank has no gradient for a slice in the current step, or the slice no elements.
    pub(crate) fn has_nothing(&self, plan: &Plan, slice: SliceId) -> bool {
        let absent = self.submission(plan.slice(slice).tensor) == Submission::Absent;
        absent || plan.slice_bytes(slice) == 0
    }

    /// Contributions to this step travel as they are.
    pub(crate) fn send_raw(&mut self) {
        self.raw = true;
    }

    pub(crate) fn sends_raw(&self) -> bool {
        self.raw
    }
}

/// Pulls.
impl Worker {
    /// The owner of one more slice of a tensor has announced its result; whether all have now.
    pub(crate) fn announce(&mut self, plan: &Plan, tensor: TensorId) -> bool {
        let state = &mut self.tensors[tensor.index()];
        state.announced += 1;
        state.announced == plan.tensor(tensor).slices.len() as u32
    }

    /// Whether an owner of the tensor may still announce a slice.
    pub(crate) fn awaits_announcement(&self, plan: &Plan, tensor: TensorId) -> bool {
        self.tensors[tensor.index()].announced < plan.tensor(tensor).slices.len() as u32
    }

    /// Notes that the pulls of a tensor are sent; whether they were before.
    pub(crate) fn pull(&mut self, tensor: TensorId) -> bool {
        core::mem::replace(&mut self.tensors[tensor.index()].pulled, true)
    }

    pub(crate) fn has_pulled(&self, tensor: TensorId) -> bool {
        self.tensors[tensor.index()].pulled
    }
}

/// Results.
impl Worker {
    /// Whether a tensor lacks something in the current step.
    pub(crate) fn is_pending(&self, tensor: TensorId) -> bool {
        self.tensors[tensor.index()].pending > 0
    }

    pub(crate) fn is_done(&self, slice: SliceId) -> bool {
        self.slots[slice.index()].is_done()
    }

    /// Whether a whole result is here, installed or not.
    pub(crate) fn has_result(&self, slice: SliceId) -> bool {
        self.slots[slice.index()].is_whole()
    }

    /// Bytes of a slice's result that are still to come.
    pub(crate) fn missing_bytes(&self, plan: &Plan, slice: SliceId) -> u64 {
        let slot = &self.slots[slice.index()];
        let may = plan.may_be_encoded(FrameKind::Broadcast, slice, self.step);
        let form = match slot.form {
            Some(form) => form,
            None if may && !self.raw => PayloadForm::Encoded,
            None => PayloadForm::Raw,
        };
        plan.bytes_as(slice, form).saturating_sub(slot.received_bytes)
    }

    /// Checks that a frame of a result continues the bytes that have arrived.
    pub(crate) fn check_result(
        &self,
        header: &FrameHeader,
        what: impl Fn() -> String,
    ) -> Validated<()> {
        let slot = &self.slots[header.slice.index()];
        if !slot.accepts(header.offset) {
            let (offset, arrived) = (header.offset, slot.received_bytes);
            return violation(format!("{} at offset {offset} after {arrived} bytes", what()));
        }
        match slot.form {
            Some(form) if form != header.form => {
                violation(format!("{} as {:?} after {form:?}", what(), header.form))
            }
            _ => Ok(()),
        }
    }

    /// Where a slice's result may be written in the tensor's own memory, if it may be now.
    pub(crate) fn open_region(&self, plan: &Plan, slice: SliceId) -> Option<Region> {
        let tensor = plan.slice(slice).tensor;
        if plan.updates_on_server(self.step, tensor) {
            return self.ended.then(|| plan.region(Memory::Parameter(tensor), slice));
        }
        let open =
            self.submission(tensor) != Submission::Missing && self.slots[slice.index()].push_sent;
        open.then(|| plan.region(Memory::Gradient(tensor), slice))
    }

    /// Where the bytes of a result's frame go; the first frame chooses, and may acquire a buffer.
    pub(crate) fn place(
        &mut self,
        plan: &Plan,
        header: &FrameHeader,
        buffered: bool,
        acquire: impl FnOnce(u64) -> BufferRef,
    ) -> Region {
        let (slice, form) = (header.slice, header.form);
        let open = self.open_region(plan, slice);
        let in_place = open.is_some() && form == PayloadForm::Raw && !buffered;
        let buffer =
            self.slots[slice.index()].place(form, in_place, || acquire(plan.bytes_as(slice, form)));
        match (buffer, open) {
            (Some(buffer), _) => buffer.whole().part(header.offset, header.length),
            (None, Some(open)) => open.part(header.offset, header.length),
            (None, None) => unreachable!("a slice lands in memory that is open"),
        }
    }

    /// Notes a frame of a result that has arrived.
    pub(crate) fn receive(&mut self, header: &FrameHeader) -> Arrived {
        self.slots[header.slice.index()].receive(header)
    }

    /// A whole result lies in a buffer.
    pub(crate) fn hold_result(&mut self, slice: SliceId, buffer: BufferRef, form: PayloadForm) {
        let slot = &mut self.slots[slice.index()];
        (slot.phase, slot.form) = (Phase::Buffered(buffer), Some(form));
    }

    /// A result without bytes waits until this rank's own push is sent.
    pub(crate) fn hold_empty_result(&mut self, slice: SliceId, has_value: bool) {
        self.slots[slice.index()].phase = Phase::Empty { has_value };
    }

    /// A result of this step, whole or in part, came before the step began; false where it has no
    /// bytes.
    pub(crate) fn take_early(&mut self, slice: SliceId, early: &EarlyResult) -> bool {
        self.slots[slice.index()].take_early(early)
    }

    /// Waits for all results that are not done from the beginning.
    pub(crate) fn restart(&mut self) {
        self.slots
            .iter_mut()
            .filter(|slot| !slot.is_done())
            .for_each(|slot| *slot = Slot::default());
    }

    pub(crate) fn mark_push_sent(&mut self, slice: SliceId) {
        self.slots[slice.index()].push_sent = true;
    }

    /// Starts to install a result that waits, if memory is open by now.
    pub(crate) fn install(&mut self, plan: &Plan, slice: SliceId) -> Install {
        let is_open = self.open_region(plan, slice).is_some();
        self.slots[slice.index()].install(is_open)
    }

    /// The form of the result that is being installed.
    pub(crate) fn installed_form(&self, slice: SliceId) -> PayloadForm {
        self.slots[slice.index()].form.unwrap_or(PayloadForm::Raw)
    }

    /// A slice's result is in place, or there is none.
    pub(crate) fn finish(
        &mut self,
        plan: &Plan,
        slice: SliceId,
        has_value: bool,
        events: &mut VecDeque<Event>,
    ) {
        let tensor = plan.slice(slice).tensor;
        self.slots[slice.index()].phase = Phase::Done;
        self.tensors[tensor.index()].has_value |= has_value;
        self.part_done(plan, tensor, events);
    }

    /// A tensor waits for one thing less: with the last one it is released, as the strategy says.
    pub(crate) fn part_done(
        &mut self,
        plan: &Plan,
        tensor: TensorId,
        events: &mut VecDeque<Event>,
    ) {
        let state = &mut self.tensors[tensor.index()];
        state.pending -= 1;
        if state.pending > 0 {
            return;
        }
        self.incomplete -= 1;
        self.unreleased.push(tensor);
        if plan.strategy.release == Release::Step && self.incomplete > 0 {
            return;
        }
        for tensor in self.unreleased.drain(..) {
            let absent = !self.tensors[tensor.index()].has_value;
            events.push_back(Event::TensorReady { tensor, step: self.step, absent });
        }
        if self.incomplete == 0 && self.begun {
            events.push_back(Event::StepComplete { step: self.step });
        }
    }
}

// One slice of the current step: how far its result is on this rank. Every transition is here.

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// Nothing has arrived.
    #[default]
    Waiting,
    /// Arriving in the tensor's memory.
    Receiving,
    /// Arriving in scratch.
    Buffering(BufferRef),
    /// Whole in scratch; the tensor's memory is not open.
    Buffered(BufferRef),
    /// Whole, without bytes, before this rank's own push was sent.
    Empty { has_value: bool },
    /// Being copied from scratch into the tensor's memory.
    Installing,
    /// In place, or known not to exist.
    Done,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    phase: Phase,
    /// Bytes of the result that have arrived.
    received_bytes: u64,
    /// Whether this rank's own push, if it owes one, is with the kernel or encoded.
    push_sent: bool,
    /// The form of the result, once it is known.
    form: Option<PayloadForm>,
}

/// The effect of a frame of a result.
pub(crate) enum Arrived {
    /// More of it is to come.
    Part,
    /// It is whole, in a buffer.
    Buffered(BufferRef, PayloadForm),
    /// It is whole, in the tensor's memory.
    InPlace,
    /// It is whole, without bytes.
    Empty,
}

/// The next action on a result that waits.
pub(crate) enum Install {
    Nothing,
    /// Copy this buffer into the tensor's memory.
    Copy(BufferRef),
    /// There are no bytes to copy.
    Finish {
        has_value: bool,
    },
}

/// A result of a step that this rank's worker has not come to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EarlyResult {
    /// None where no rank had a gradient, or of an empty slice.
    pub(crate) buffer: Option<BufferRef>,
    pub(crate) form: PayloadForm,
    pub(crate) received_bytes: u64,
    pub(crate) is_whole: bool,
    pub(crate) has_value: bool,
}

impl Slot {
    fn is_done(&self) -> bool {
        self.phase == Phase::Done
    }

    fn is_whole(&self) -> bool {
        matches!(self.phase, Phase::Done | Phase::Buffered(_) | Phase::Installing)
    }

    /// Whether bytes from this offset on are the next ones.
    fn accepts(&self, offset: u64) -> bool {
        let arrives = matches!(self.phase, Phase::Waiting | Phase::Receiving | Phase::Buffering(_));
        arrives && self.received_bytes == offset
    }

    /// Chooses where a result that begins to arrive goes; the buffer, where it goes into one.
    fn place(
        &mut self,
        form: PayloadForm,
        in_place: bool,
        acquire: impl FnOnce() -> BufferRef,
    ) -> Option<BufferRef> {
        if self.phase == Phase::Waiting {
            self.phase = if in_place { Phase::Receiving } else { Phase::Buffering(acquire()) };
            self.form = Some(form);
        }
        match self.phase {
            Phase::Buffering(buffer) => Some(buffer),
            _ => None,
        }
    }

    fn receive(&mut self, header: &FrameHeader) -> Arrived {
        self.received_bytes += u64::from(header.length);
        if !header.flags.contains(FrameFlags::LAST) {
            return Arrived::Part;
        }
        match self.phase {
            Phase::Buffering(buffer) => {
                let buffer = BufferRef { bytes: self.received_bytes, ..buffer };
                self.phase = Phase::Buffered(buffer);
                Arrived::Buffered(buffer, self.form.unwrap_or(header.form))
            }
            Phase::Receiving => Arrived::InPlace,
            _ => Arrived::Empty,
        }
    }

    fn take_early(&mut self, early: &EarlyResult) -> bool {
        self.received_bytes = early.received_bytes;
        self.form = Some(early.form);
        match early.buffer {
            Some(buffer) if early.is_whole => self.phase = Phase::Buffered(buffer),
            Some(buffer) => self.phase = Phase::Buffering(buffer),
            None => return false,
        }
        true
    }

    fn install(&mut self, is_open: bool) -> Install {
        match self.phase {
            Phase::Buffered(buffer) if is_open => {
                self.phase = Phase::Installing;
                Install::Copy(buffer)
            }
            Phase::Empty { has_value } if self.push_sent => Install::Finish { has_value },
            _ => Install::Nothing,
        }
    }
}
