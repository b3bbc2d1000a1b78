//! Calls for updates on the servers: memory of parameters, settings and state of optimizers,
//! residuals of codecs.

use super::handle::Channel;
use crate::channel::guard::ApiGuard;
use crate::channel::shared::Command;
use crate::compute::{ResidualSquares, StateKind, StateRead, StateWrite, UpdateRule};
use crate::connect::INTERRUPT_EVERY;
use crate::error::ChannelError;
use crate::memory::UserMemory;
use crate::sys::lock;
use gradlane_engine::{Input, UsageError};
use gradlane_units::{SliceId, Step, TensorId};
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;

impl Channel {
    /// Registers a parameter's own memory, before its first step with updates on the servers.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor or memory of another size.
    pub fn set_parameter(&self, tensor: TensorId, memory: UserMemory) -> Result<(), ChannelError> {
        self.check()?;
        ApiGuard::check_memory(&self.plan, tensor, memory)?;
        self.shared.tell_lanes_of(tensor, || Command::SetParameter(tensor, memory));
        Ok(())
    }

    /// Sets the optimizer on the servers for the named tensors, from the step on whose gradients
    /// come next; others keep theirs. Where dedicated servers update, each step sets it, once, after it has
    /// begun and before its first gradient; all ranks set the same.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor or settings that torch refuses.
    pub fn set_optimizer(&self, rows: &[(TensorId, UpdateRule)]) -> Result<(), ChannelError> {
        self.check()?;
        for (tensor, rule) in rows {
            ApiGuard::check_tensor(&self.plan, *tensor)?;
            rule.validate().map_err(|error| {
                let name = &self.plan.tensor(*tensor).spec.name;
                UsageError::Argument(format!("optimizer settings of tensor {name:?}: {error}"))
            })?;
        }
        self.shared.tell_all(|| Command::SetOptimizer(rows.to_vec()));
        Ok(())
    }

    /// Makes the step that has just begun, and all until settings are given again, broadcast
    /// optimizer state in place of updated parameters. Every rank calls it. The state lands where
    /// `set_parameter` says.
    ///
    /// # Errors
    /// As [`Channel::step_begin`].
    pub fn read_state(&self, read: StateRead) -> Result<(), ChannelError> {
        self.check()?;
        let guard = lock(&self.guard);
        self.shared.tell_all(|| Command::ReadState(read, guard.current()));
        Ok(())
    }

    /// Makes the step that has just begun hand optimizer state to dedicated servers: the contributions,
    /// of rank 0 alone, are state in the parts of [`StateRead`]. Every rank calls it, before its first
    /// contribution. Results are the parameters, which stay as they are.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] where no dedicated servers update parameters.
    pub fn write_state(&self, write: StateWrite) -> Result<(), ChannelError> {
        self.check_commands_servers("write_state")?;
        let guard = lock(&self.guard);
        self.shared.tell_all(|| Command::WriteState(write, guard.current()));
        Ok(())
    }

    /// Makes the step that has just begun hand parameters to dedicated servers, and from them to all
    /// ranks: the contributions, of rank 0 alone, are these tensors' values. Every rank calls it, before
    /// its first contribution.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor, or where no dedicated servers update parameters.
    pub fn write_parameters(&self, tensors: &[TensorId]) -> Result<(), ChannelError> {
        self.check_commands_servers("write_parameters")?;
        tensors.iter().try_for_each(|tensor| ApiGuard::check_tensor(&self.plan, *tensor))?;
        let guard = lock(&self.guard);
        self.shared.tell_all(|| Command::WriteParameters(tensors.to_vec(), guard.current()));
        Ok(())
    }

    fn check_commands_servers(&self, call: &str) -> Result<(), ChannelError> {
        self.check()?;
        if self.plan.commands_servers() {
            return Ok(());
        }
        Err(ChannelError::Usage(UsageError::Argument(format!(
            "{call} without dedicated servers that update parameters"
        ))))
    }

    /// Makes this rank's contributions to the step that has just begun travel raw, whatever codec
    /// the plan has. Every rank calls it, before its first contribution.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for another step than the current one. A call that comes too late is
    /// an error of the next call.
    pub fn send_raw(&self, step: Step) -> Result<(), ChannelError> {
        self.check()?;
        let guard = lock(&self.guard);
        guard.check_step("send_raw", step)?;
        self.shared.tell_all(|| Command::Engine(Input::SendRaw(step)));
        Ok(())
    }

    /// Returns the residual of this rank's contributions to a tensor (error feedback), in the order
    /// of its storage, between steps. `interrupt` is called every 50 ms.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor, [`ChannelError::Interrupted`] when asked.
    pub fn worker_residual(
        &self,
        tensor: TensorId,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<f32>, ChannelError> {
        self.check()?;
        ApiGuard::check_tensor(&self.plan, tensor)?;
        let mut slices = Vec::new();
        for lane in self.shared.lanes.iter().filter(|lane| lane.plan.has_slices_of(tensor)) {
            let (reply, answer) = std::sync::mpsc::channel();
            lane.command(Command::WorkerResidual(tensor, reply));
            slices.extend(self.await_reply(&answer, interrupt)?);
        }
        slices.sort_by_key(|&(start, _)| start);
        Ok(slices.into_iter().flat_map(|(_, values)| values).collect())
    }

    /// Returns the squared norms of the residuals of this rank's contributions, of the slices from
    /// `first` on, until about `elements_max` numbers are read; at any time and from any thread: a
    /// misuse is left for the program's next call. A slice that is being encoded is left out. A lane
    /// reads the numbers, so more of them delay it for longer.
    ///
    /// # Errors
    /// [`ChannelError::Interrupted`] when asked, the reason of the end when the channel has ended.
    pub fn residual_squares(
        &self,
        first: SliceId,
        elements_max: usize,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<ResidualSquares, ChannelError> {
        if self.forgotten.load(Ordering::Relaxed) {
            return Err(ChannelError::Interrupted);
        }
        // `first` counts the slices lane by lane.
        let mut before = 0;
        for lane in &self.shared.lanes {
            let count = lane.plan.slices.len() as u32;
            if first.0 >= before + count {
                before += count;
                continue;
            }
            let (reply, answer) = std::sync::mpsc::channel();
            lane.command(Command::ResidualSquares(SliceId(first.0 - before), elements_max, reply));
            let mut found = self.await_reply(&answer, interrupt)?;
            for (_, slice, _) in &mut found.rows {
                *slice = lane.plan.in_whole_plan(*slice);
            }
            let is_whole = found.next == SliceId(0);
            let next = if is_whole { before + count } else { before + found.next.0 };
            let is_last = next as usize == self.plan.slices.len();
            found.next = SliceId(if is_last { 0 } else { next });
            return Ok(found);
        }
        Ok(ResidualSquares::default())
    }

    /// Waits for a lane's reply to a command.
    fn await_reply<T>(
        &self,
        answer: &Receiver<T>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<T, ChannelError> {
        loop {
            if let Ok(reply) = answer.recv_timeout(INTERRUPT_EVERY) {
                return Ok(reply);
            }
            if let Some(ended) = self.shared.outcome_error() {
                return Err(ended);
            }
            if interrupt() {
                return Err(ChannelError::Interrupted);
            }
        }
    }

    /// Forgets all optimizer state on this rank; between steps.
    ///
    /// # Errors
    /// As [`Channel::step_begin`].
    pub fn clear_state(&self) -> Result<(), ChannelError> {
        self.check()?;
        self.shared.tell_all(|| Command::ClearState);
        Ok(())
    }

    /// Restores a tensor's optimizer state, between steps. `values` are those of the whole tensor
    /// in the order of its storage; this rank keeps the slices that it owns, or, of its own
    /// residual, all.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor or another number of values.
    pub fn load_state(
        &self,
        tensor: TensorId,
        kind: StateKind,
        values: &[f32],
    ) -> Result<(), ChannelError> {
        self.check()?;
        ApiGuard::check_tensor(&self.plan, tensor)?;
        let spec = &self.plan.tensor(tensor).spec;
        let width = match kind {
            StateKind::WorkerResidual => self.plan.residual_width(tensor),
            _ => 1,
        };
        if values.len() as u64 != spec.numel * width as u64 {
            return Err(ChannelError::Usage(UsageError::Argument(format!(
                "{} of tensor {:?} has {} elements, the tensor {}",
                kind.name(),
                spec.name,
                values.len(),
                spec.numel * width as u64
            ))));
        }
        for lane in self.shared.lanes.iter().filter(|lane| lane.plan.has_slices_of(tensor)) {
            let owned = |&slice: &SliceId| {
                kind == StateKind::WorkerResidual || lane.plan.slice(slice).owner == self.rank
            };
            let part = |id: SliceId| {
                let slice = lane.plan.slice(id);
                let start = slice.start as usize * width;
                (id, values[start..start + slice.length as usize * width].to_vec())
            };
            let owned = lane.plan.slices_of(tensor).filter(owned).map(part).collect();
            lane.command(Command::LoadState(kind, owned));
        }
        Ok(())
    }
}
