//! Pulls, in the strategies in which workers ask for what servers have: `kvstore` when a result is
//! announced, `deferred-pull` when the next iteration begins.

use crate::engine::Engine;
use crate::error::UsageError;
use crate::scheduler::{Body, Message};
use crate::strategy::PullRule;
use gradlane_units::{Step, TensorId};
use gradlane_wire::FrameKind;

impl Engine {
    /// A consumer waits for a tensor. Drives deferred pulls: the first wait is the start of the
    /// next iteration, which pulls all tensors.
    ///
    /// # Errors
    /// For an unknown tensor, another step than the current one, or an ended session.
    pub(crate) fn tensor_needed(&mut self, tensor: TensorId, step: Step) -> Result<(), UsageError> {
        self.check_call(tensor, step, "tensor_needed")?;
        if self.worker.uncontributed == 0 {
            self.pull_deferred();
        }
        Ok(())
    }

    /// Sends the pulls that waited for the next iteration.
    pub(crate) fn pull_deferred(&mut self) {
        let step = self.worker.step;
        if self.plan.strategy.pull != PullRule::NextStep || step.0 == 0 {
            return;
        }
        for tensor in (0..self.plan.tensors.len() as u32).map(TensorId) {
            if self.plan.takes_part(tensor, step) {
                self.pull(tensor);
            }
        }
    }

    /// Sends the pulls of a tensor once.
    pub(crate) fn pull(&mut self, tensor: TensorId) {
        if core::mem::replace(&mut self.worker.tensor_mut(tensor).pulled, true) {
            return;
        }
        let step = self.worker.step;
        let priority = self.priorities.priority(step, tensor);
        for slice in self.plan.slices_of(tensor) {
            let owner = self.plan.slice(slice).owner;
            if owner != self.rank() {
                let key = self.keys.control();
                let header = self.slice_header(FrameKind::Pull, step, slice, priority);
                self.scheduler.push(owner, key, Message { header, body: Body::Empty });
            }
        }
    }
}
