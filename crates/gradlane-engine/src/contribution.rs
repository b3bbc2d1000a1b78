//! What this rank contributes to a step: a gradient that is ready, or word that there is none; and
//! the pushes that come of it.

use crate::encoding::PendingEncode;
use crate::engine::Engine;
use crate::error::UsageError;
use crate::scheduler::{Body, Message};
use crate::scheme::Scheme;
use crate::server::Contribution;
use crate::worker::Submission;
use alloc::format;
use gradlane_units::{Step, TensorId};
use gradlane_wire::{FrameFlags, FrameKind, PayloadForm};

impl Engine {
    /// A tensor's gradient is ready in memory that the driver knows as `Memory::Gradient`. From now
    /// on the engine owns that memory until the tensor is ready. In step 0 the memory is the
    /// tensor itself.
    ///
    /// # Errors
    /// For an unknown tensor, a second call in a step, another step than the current one, or an
    /// ended session. Nothing was changed then.
    pub(crate) fn gradient_ready(
        &mut self,
        tensor: TensorId,
        step: Step,
    ) -> Result<(), UsageError> {
        self.check_call(tensor, step, "gradient_ready")?;
        let planned = self.plan.tensor(tensor);
        if planned.scheme.has_blocks() {
            let name = &planned.spec.name;
            let message = format!("tensor {name:?} has blocks of any size: use block_ready");
            return Err(UsageError::Argument(message));
        }
        self.contribute(tensor, step, Submission::Gradient, "gradient_ready")
    }

    /// This rank has no gradient for a tensor in this step; others' count as the sum, zeros for
    /// this one. Memory for the result is registered all the same.
    ///
    /// # Errors
    /// As [`Engine::gradient_ready`].
    pub(crate) fn tensor_absent(&mut self, tensor: TensorId, step: Step) -> Result<(), UsageError> {
        self.contribute(tensor, step, Submission::Absent, "tensor_absent")
    }

    pub(crate) fn contribute(
        &mut self,
        tensor: TensorId,
        step: Step,
        submission: Submission,
        call: &'static str,
    ) -> Result<(), UsageError> {
        self.check_call(tensor, step, call)?;
        let name = &self.plan.tensor(tensor).spec.name;
        if !self.plan.takes_part(tensor, step) {
            let message = format!("tensor {name:?} is not trained: it has no gradient in {step}");
            return Err(UsageError::Argument(message));
        }
        if self.lacks_initial(step, self.rank(), submission == Submission::Absent) {
            let message = format!("tensor {name:?} has no value to start from, which updates need");
            return Err(UsageError::Argument(message));
        }
        if self.worker.tensor(tensor).submission != Submission::Missing {
            return Err(UsageError::Twice { name: name.clone(), step });
        }
        self.worker.tensor_mut(tensor).submission = submission;
        self.worker.uncontributed -= 1;
        self.lifecycle.progressed();
        match &mut self.switch {
            Some(switch) if step >= switch.hold_from => switch.held.push(tensor),
            _ => self.send_contribution(tensor),
        }
        self.on_submitted(tensor, step);
        Ok(())
    }

    /// Queues the pushes of a tensor, or hands its own slices to the server.
    pub(crate) fn send_contribution(&mut self, tensor: TensorId) {
        match self.plan.tensor(tensor).scheme {
            Scheme::Ps => {}
            Scheme::Ring => return self.contribute_round(tensor),
            Scheme::AllGather | Scheme::GatherToRoot => return self.contribute_block(tensor),
        }
        let step = self.worker.step;
        let absent = self.worker.tensor(tensor).submission == Submission::Absent;
        let contributes = self.contributes(self.rank(), step);
        let priority = self.priorities.priority(step, tensor);
        for slice in self.plan.slices_of(tensor) {
            let owner = self.plan.slice(slice).owner;
            let encoded = contributes && !absent && self.own_form(slice) == PayloadForm::Encoded;
            if !contributes {
                self.worker.slice_mut(slice).push_sent = true;
                self.install_if_open(slice);
            } else if encoded {
                let key = self.keys.slice(step, priority, tensor, slice);
                self.encodes.push(owner, key, PendingEncode { slice, step });
            } else if owner == self.rank() {
                self.worker.slice_mut(slice).push_sent = true;
                let part = if absent { Contribution::Absent } else { Contribution::Own };
                self.add_part(slice, self.rank(), part, priority);
            } else {
                let key = self.keys.slice(step, priority, tensor, slice);
                let mut header = self.slice_header(FrameKind::Push, step, slice, priority);
                let body = if absent {
                    header.flags = FrameFlags::ABSENT;
                    Body::Empty
                } else {
                    Body::Region(self.gradient_region(slice))
                };
                self.scheduler.push(owner, key, Message { header, body });
            }
        }
    }
}
