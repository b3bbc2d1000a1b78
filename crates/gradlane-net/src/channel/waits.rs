//! Waits of application threads for tensors, steps and decisions.

use super::handle::Channel;
use crate::channel::completion::WaitTarget;
use crate::channel::guard::ApiGuard;
use crate::channel::membership_news::MembershipEvent;
use crate::channel::shared::Command;
use crate::error::ChannelError;
use crate::sys::lock;
use gradlane_engine::{Input, PullRule, UsageError};
use gradlane_units::{SquareSum, Step, TensorId};
use std::time::{Duration, Instant};

/// Interval of the interrupt function while a call waits: within what a person notices, and too
/// rare to cost anything beside a step.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(200);

impl Channel {
    /// Declares that a consumer waits for a tensor.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor or a step that has not begun.
    pub fn needed(&self, tensor: TensorId, step: Step) -> Result<(), ChannelError> {
        self.check()?;
        self.request(&[tensor], step)
    }

    /// Checks that these tensors may be waited for, and tells the lanes where that sends pulls; else none is woken.
    fn request(&self, tensors: &[TensorId], step: Step) -> Result<(), ChannelError> {
        for &tensor in tensors {
            ApiGuard::check_tensor(&self.plan, tensor)?;
        }
        let completion = &self.shared.completion;
        let missing = |tensor: &TensorId| !completion.has(WaitTarget::Tensor(*tensor, step));
        let missing: Vec<TensorId> = tensors.iter().copied().filter(missing).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let guard = lock(&self.guard);
        if step > guard.current() {
            let current = guard.current();
            return Err(UsageError::WrongStep { call: "wait", step, current }.into());
        }
        if self.plan.strategy.pull == PullRule::NextStep {
            self.shared.tell_all(|| Command::Needed(missing.clone(), step));
        }
        Ok(())
    }

    /// Waits until all these tensors are ready in a step. `interrupt` is called every 200 ms.
    ///
    /// # Errors
    /// [`ChannelError::Failed`] when the session fails, [`ChannelError::Interrupted`] when asked,
    /// [`ChannelError::Usage`] for an unknown tensor or a step that has not begun.
    pub fn wait(
        &self,
        tensors: &[TensorId],
        step: Step,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChannelError> {
        self.check()?;
        self.request(tensors, step)?;
        for &tensor in tensors {
            self.wait_for(WaitTarget::Tensor(tensor, step), interrupt)?;
        }
        Ok(())
    }

    /// Waits until a whole step is complete on this rank.
    ///
    /// # Errors
    /// As [`Channel::wait`].
    pub fn wait_step(
        &self,
        step: Step,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChannelError> {
        self.check()?;
        let tensors = (0..self.plan.tensors.len() as u32).map(TensorId);
        let part: Vec<TensorId> = tensors.filter(|&it| self.plan.takes_part(it, step)).collect();
        self.request(&part, step)?;
        self.wait_for(WaitTarget::Step(step), interrupt)
    }

    /// Waits until the contributors of a step are known, where stragglers are left out.
    ///
    /// # Errors
    /// As [`Channel::wait`]; [`ChannelError::Usage`] where steps wait for all ranks.
    pub fn wait_decided(
        &self,
        step: Step,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChannelError> {
        self.check()?;
        if self.plan.strategy.synchrony.stragglers().is_none() {
            let what = format!("no contributors are chosen for {step}: it waits for all ranks");
            return Err(UsageError::Argument(what).into());
        }
        lock(&self.guard).check_step("wait_decided", step)?;
        self.wait_for(WaitTarget::Contributors(step), interrupt)
    }

    /// Waits until the squares of a step's gradients are added up, and returns their sum; means may
    /// still be on their way.
    ///
    /// # Errors
    /// As [`Channel::wait`]; [`ChannelError::Usage`] for a step without
    /// [`Channel::measure_squares`].
    pub fn wait_squares(
        &self,
        step: Step,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<SquareSum, ChannelError> {
        self.check()?;
        lock(&self.guard).check_measured(step)?;
        self.wait_for(WaitTarget::Squares(step), interrupt)?;
        let gone = || UsageError::Argument(format!("the squares of {step} are known no more"));
        self.shared.completion.squares(step).ok_or_else(|| gone().into())
    }

    fn wait_for(
        &self,
        target: WaitTarget,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChannelError> {
        let completion = &self.shared.completion;
        if completion.has(target) {
            return Ok(());
        }
        let start = Instant::now();
        let result = loop {
            completion.wait(target, INTERRUPT_INTERVAL);
            if completion.has(target) {
                break Ok(());
            }
            if let Err(error) = self.check() {
                break Err(error);
            }
            if interrupt() {
                break Err(ChannelError::Interrupted);
            }
        };
        self.shared.metrics.note_wait(target, completion.newest(), start.elapsed());
        result
    }

    /// Returns whether a tensor is ready in a step.
    ///
    /// # Errors
    /// When the session is over, and for an unknown tensor.
    pub fn is_ready(&self, tensor: TensorId, step: Step) -> Result<bool, ChannelError> {
        self.check()?;
        ApiGuard::check_tensor(&self.plan, tensor)?;
        Ok(self.shared.completion.has(WaitTarget::Tensor(tensor, step)))
    }

    /// Returns the tensors that became ready in a step since the last call, in order, with whether
    /// no rank had a gradient.
    ///
    /// # Errors
    /// When the session is over.
    pub fn take_ready(&self, step: Step) -> Result<Vec<(TensorId, bool)>, ChannelError> {
        self.check()?;
        Ok(self.shared.completion.take(step))
    }

    /// Waits for a tensor of `step` that was not taken yet, and takes it. For threads that pass
    /// results on: the program's wait time does not count it.
    ///
    /// # Errors
    /// [`ChannelError::Failed`] when the session fails, [`ChannelError::Interrupted`] when asked.
    pub fn next_ready(
        &self,
        step: Step,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<(TensorId, bool)>, ChannelError> {
        loop {
            let taken = self.take_ready(step)?;
            if !taken.is_empty() {
                return Ok(taken);
            }
            if interrupt() {
                return Err(ChannelError::Interrupted);
            }
            self.shared.completion.wait(WaitTarget::AnyTensor(step), INTERRUPT_INTERVAL);
        }
    }

    /// Waits for tensors whose blocks have all arrived at this rank, their root, and which wait for
    /// its result: each once, in order of arrival. [`Channel::take_blocks`] returns their blocks.
    ///
    /// # Errors
    /// When the session is over, or the wait was interrupted.
    pub fn next_root_requests(
        &self,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<(TensorId, Step)>, ChannelError> {
        loop {
            let requests = self.take_root_requests()?;
            if !requests.is_empty() {
                return Ok(requests);
            }
            if interrupt() {
                return Err(ChannelError::Interrupted);
            }
            self.shared.completion.wait(WaitTarget::RootRequest, INTERRUPT_INTERVAL);
        }
    }

    /// Waits for news of the membership, where training goes on when ranks are lost: each once, in order.
    ///
    /// # Errors
    /// When the session is over, or the wait was interrupted.
    pub fn next_changes(
        &self,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<MembershipEvent>, ChannelError> {
        loop {
            let changes = self.take_changes()?;
            if !changes.is_empty() {
                return Ok(changes);
            }
            if interrupt() {
                return Err(ChannelError::Interrupted);
            }
            self.shared.completion.wait(WaitTarget::Membership, INTERRUPT_INTERVAL);
        }
    }

    /// Returns it without a wait; there may be none.
    ///
    /// # Errors
    /// When the session is over.
    pub fn take_changes(&self) -> Result<Vec<MembershipEvent>, ChannelError> {
        self.shared.outcome_error().map_or(Ok(()), Err)?;
        Ok(self.shared.completion.take_changes())
    }

    /// Tells what the register of a generation holds in the job's store; `None`: the store does not
    /// answer.
    pub fn answer_claim(&self, generation: u32, value: Option<Vec<u8>>) {
        self.shared.tell_first(Command::Engine(Input::ClaimAnswered(generation, value)));
    }

    /// Returns them without a wait; there may be none.
    ///
    /// # Errors
    /// When the session is over.
    pub fn take_root_requests(&self) -> Result<Vec<(TensorId, Step)>, ChannelError> {
        self.shared.outcome_error().map_or(Ok(()), Err)?;
        Ok(self.shared.completion.take_root_requests())
    }
}
