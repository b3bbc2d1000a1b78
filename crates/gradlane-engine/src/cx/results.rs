//! This rank's step: its submissions, and its own copy of results.

use super::Cx;
use crate::api::BufferRef;
use crate::jobs::Task;
use crate::kept_results::KeptResult;
use crate::worker::{Arrived, EarlyResult, Install, Submission};
use gradlane_units::{SliceId, Step, TensorId};
use gradlane_wire::{FrameHeader, FrameKind, PayloadForm};

/// Steps.
impl Cx {
    /// Begins the next step.
    pub(crate) fn begin(&mut self, step: Step) {
        self.worker.begin(&self.plan);
        self.sources.clear();
        self.squares.enter(step);
        self.enter_priorities(step);
    }

    /// Ends the step: with updates on the server, parameters may be written.
    pub(crate) fn end_step(&mut self) {
        if self.worker.end() {
            for slice in self.plan.slice_ids() {
                self.install_if_open(slice);
            }
        }
    }

    /// Notes this rank's submission of a tensor.
    pub(crate) fn submit(&mut self, tensor: TensorId, submission: Submission) {
        self.worker.submit(tensor, submission);
        self.check_squares_are_wanted();
    }

    /// Contributions to this step travel as they are.
    pub(crate) fn send_raw(&mut self) {
        self.worker.send_raw();
    }

    /// Goes on as if this step were the one that has just been completed.
    pub(crate) fn fast_forward(&mut self, step: Step) {
        self.worker.fast_forward(step);
        self.keys.fast_forward(step.0);
        self.jobs.fast_forward(step.0);
    }

    /// One more owner has announced its slice of a tensor; whether all have.
    pub(crate) fn announce(&mut self, tensor: TensorId) -> bool {
        self.worker.announce(&self.plan, tensor)
    }

    /// Notes that the pulls of a tensor are sent; whether they were before.
    pub(crate) fn pull(&mut self, tensor: TensorId) -> bool {
        self.worker.pull(tensor)
    }
}

/// Results.
impl Cx {
    /// In which form this rank's contribution to a slice travels in the current step. That of the last rank
    /// goes nowhere, and is encoded only where the codec keeps what it has not sent.
    pub(crate) fn own_form(&self, slice: SliceId) -> PayloadForm {
        let may = self.plan.may_be_encoded(FrameKind::Push, slice, self.step());
        let stays = self.others().is_empty() && !self.plan.keeps_residual(slice);
        if may && !stays && !self.worker.sends_raw() {
            PayloadForm::Encoded
        } else {
            PayloadForm::Raw
        }
    }

    /// This rank's push of a slice is read no longer.
    pub(crate) fn mark_push_sent(&mut self, slice: SliceId) {
        self.worker.mark_push_sent(slice);
    }

    /// This rank's push of a slice is read no longer, or it owes none: a result may be written.
    pub(crate) fn push_sent(&mut self, slice: SliceId) {
        self.worker.mark_push_sent(slice);
        self.install_if_open(slice);
    }

    /// Notes a frame of a result that has arrived.
    pub(crate) fn receive_result(&mut self, header: &FrameHeader) -> Arrived {
        self.worker.receive(header)
    }

    /// A whole result lies in a buffer, which this rank holds a reference to.
    pub(crate) fn result_in_buffer(
        &mut self,
        slice: SliceId,
        buffer: BufferRef,
        form: PayloadForm,
    ) {
        self.worker.hold_result(slice, buffer, form);
        self.install_if_open(slice);
    }

    /// A slice's result is here and has no bytes. Where the step may go on without this rank, its own
    /// push may still be under way, and reads memory that is the engine's until then.
    pub(crate) fn result_without_bytes(&mut self, slice: SliceId, has_value: bool) {
        if self.plan.drops_stragglers(self.step()) {
            self.worker.hold_empty_result(slice, has_value);
            return self.install_if_open(slice);
        }
        self.slice_done(slice, has_value);
    }

    /// A result that came before this step began, whole or in part.
    pub(crate) fn take_early(&mut self, slice: SliceId, early: &EarlyResult) {
        if !self.worker.take_early(slice, early) {
            self.result_without_bytes(slice, early.has_value);
        }
    }

    /// Copies a result that waits in scratch into the tensor's memory, if that is open by now.
    pub(crate) fn install_if_open(&mut self, slice: SliceId) {
        match self.worker.install(&self.plan, slice) {
            Install::Nothing => {}
            Install::Copy(buffer) => self.queue_job(slice, self.step(), Task::Install(buffer)),
            Install::Finish { has_value } => self.slice_done(slice, has_value),
        }
    }

    /// A slice's result is in place, or there is none. Its squares are added up first, where this
    /// rank owes them.
    pub(crate) fn slice_done(&mut self, slice: SliceId, has_value: bool) {
        if self.owes_squares(slice) {
            if has_value {
                return self.queue_job(slice, self.step(), Task::AddSquares);
            }
            self.add_squares(None);
        }
        self.finish_slice(slice, has_value);
    }

    /// A slice's result may be released.
    pub(crate) fn finish_slice(&mut self, slice: SliceId, has_value: bool) {
        if self.kept.are_kept() && self.kept.of(slice, self.step()).is_none() {
            let empty = if has_value { KeptResult::Empty } else { KeptResult::Absent };
            self.keep(slice, empty);
        }
        self.worker.finish(&self.plan, slice, has_value, &mut self.events);
    }

    /// A tensor waits for one thing less.
    pub(crate) fn part_done(&mut self, tensor: TensorId) {
        self.worker.part_done(&self.plan, tensor, &mut self.events);
    }
}
