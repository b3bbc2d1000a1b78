//! The worker's side of every tensor: what this rank contributed, what has come back, what may be
//! written where. A slice's result lands in the tensor's own memory only when that memory is open;
//! otherwise it waits in a scratch buffer and is installed when the memory opens.

use crate::io::BufferRef;
use crate::plan::Plan;
use alloc::vec::Vec;
use gradlane_units::{SliceId, Step, TensorId};
use gradlane_wire::PayloadForm;

/// What this rank has put into the current step for a tensor.
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
pub(crate) struct TensorState {
    pub(crate) submission: Submission,
    /// Slices without a result; one more until contributors are known, where they are chosen.
    pub(crate) pending: u32,
    /// Whether some slice got a value.
    pub(crate) has_value: bool,
    /// Slices announced by their owners (pull rules).
    pub(crate) announced: u32,
    /// Whether the pulls were sent (pull rules).
    pub(crate) pulled: bool,
}

/// Where a slice's result stands on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nothing has arrived.
    Waiting,
    /// Arriving in the tensor's memory.
    Receiving,
    /// Arriving in scratch.
    Buffering(BufferRef),
    /// Whole in scratch; the tensor's memory is not open.
    Buffered(BufferRef),
    /// Being copied from scratch into the tensor's memory.
    Installing,
    /// Whole, without bytes, before this rank's own push was sent (synchrony `BackupWorkers`).
    Empty {
        /// Whether some rank had a gradient.
        has_value: bool,
    },
    /// In place.
    Done,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SliceState {
    pub(crate) phase: Phase,
    /// Bytes of the result that have arrived.
    pub(crate) received_bytes: u64,
    /// Whether this rank's own push, if it owes one, is with the kernel or encoded.
    pub(crate) push_sent: bool,
    /// The form of the result.
    pub(crate) form: PayloadForm,
}

#[derive(Debug)]
pub(crate) struct Worker {
    /// The step that the states below describe.
    pub(crate) step: Step,
    /// Whether the application has begun that step.
    pub(crate) begun: bool,
    /// Whether the application has ended that step (`step_end`).
    pub(crate) ended: bool,
    /// Whether contributions to this step travel as they are, whatever the plan says.
    pub(crate) raw: bool,
    pub(crate) tensors: Vec<TensorState>,
    pub(crate) slices: Vec<SliceState>,
    /// Tensors of the step without a contribution of this rank.
    pub(crate) uncontributed: usize,
    /// Tensors of the step without a whole result.
    pub(crate) incomplete: usize,
    /// Complete tensors that wait for the rest of the step (release rule `Step`).
    pub(crate) unreleased: Vec<TensorId>,
}

impl Worker {
    pub(crate) fn new(plan: &Plan) -> Worker {
        let mut worker = Worker {
            step: Step(0),
            begun: false,
            ended: false,
            raw: false,
            tensors: Vec::new(),
            slices: Vec::new(),
            uncontributed: 0,
            incomplete: 0,
            unreleased: Vec::new(),
        };
        worker.enter(plan, Step(0));
        worker
    }

    /// Forgets the last step and expects this one.
    pub(crate) fn enter(&mut self, plan: &Plan, step: Step) {
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
        let fresh = SliceState {
            phase: Phase::Waiting,
            received_bytes: 0,
            push_sent: false,
            form: PayloadForm::Raw,
        };
        self.slices.clear();
        self.slices.resize(plan.slices.len(), fresh);
        let all = (0..plan.tensors.len() as u32).map(TensorId);
        self.incomplete = all.filter(|&tensor| plan.takes_part(tensor, step)).count();
        self.uncontributed = self.incomplete;
    }

    /// Contributors are chosen in this step: no tensor is released before this rank knows them, and
    /// has handed over the tensor itself.
    pub(crate) fn add_parts(&mut self, plan: &Plan) {
        for (index, tensor) in self.tensors.iter_mut().enumerate() {
            let takes_part = plan.takes_part(TensorId(index as u32), self.step);
            tensor.pending += u32::from(takes_part);
        }
    }

    pub(crate) fn tensor(&self, tensor: TensorId) -> &TensorState {
        &self.tensors[tensor.index()]
    }

    pub(crate) fn tensor_mut(&mut self, tensor: TensorId) -> &mut TensorState {
        &mut self.tensors[tensor.index()]
    }

    pub(crate) fn slice(&self, slice: SliceId) -> &SliceState {
        &self.slices[slice.index()]
    }

    pub(crate) fn slice_mut(&mut self, slice: SliceId) -> &mut SliceState {
        &mut self.slices[slice.index()]
    }

    /// Whether some tensor has a contribution in this step.
    pub(crate) fn has_contributed(&self) -> bool {
        self.tensors.iter().any(|tensor| tensor.submission != Submission::Missing)
    }

    /// Whether every tensor of the step has its result.
    pub(crate) fn is_complete(&self) -> bool {
        self.begun && self.incomplete == 0
    }

    /// Last step that is complete on this rank.
    pub(crate) fn last_complete(&self) -> Option<Step> {
        if self.is_complete() {
            return Some(self.step);
        }
        self.step.0.checked_sub(1).map(Step)
    }

    /// Whether this rank has done its part of a begun step and waits for others.
    pub(crate) fn waits_for_others(&self) -> bool {
        self.begun && self.uncontributed == 0 && self.incomplete > 0
    }
}
