//! The application's calls: each in the order in which it was made.

use super::core::Core;
use crate::channel::shared::Command;
use crate::sys::lock;
use gradlane_engine::{Input, Synchrony, UsageError};
use gradlane_units::{Step, TensorId};

impl Core {
    /// Handles all calls that wait.
    pub(super) fn handle_commands(&mut self) {
        std::mem::swap(&mut self.commands, &mut *lock(&self.shared.commands));
        let mut commands = std::mem::take(&mut self.commands);
        for command in commands.drain(..) {
            if let Err(error) = self.handle_command(command) {
                self.shared.note_usage(error);
            }
        }
        self.commands = commands;
    }

    fn handle_command(&mut self, command: Command) -> Result<(), UsageError> {
        match command {
            Command::Engine(input) => {
                if let Input::StepBegin(_) | Input::StepPass(_) | Input::StepBarrier(_) = input {
                    self.jobs.state.begin_step();
                }
                self.engine.handle(input)
            }
            Command::Contribute(memory, input) => {
                match input {
                    Input::GradientReady(tensor, step) | Input::TensorAbsent(tensor, step) => {
                        self.memory.set_gradient(tensor, memory);
                        self.note_own_contribution(tensor, step);
                    }
                    // The root's own block goes nowhere: its result takes the place.
                    Input::BlockReady(tensor, ..) | Input::RootResultReady(tensor, ..) => {
                        self.memory.set_gradient(tensor, memory);
                    }
                    _ => {}
                }
                self.engine.handle(input)
            }
            Command::ReleaseBlocks(tensor, step, scratch) => {
                scratch.into_iter().for_each(|buffer| self.memory.recycle(buffer));
                self.engine.handle(Input::ReleaseBlocks(tensor, step))
            }
            Command::Needed(tensors, step) => {
                for tensor in tensors {
                    // A tensor that became ready in the meantime is an error of no consequence.
                    let _ = self.engine.handle(Input::TensorNeeded(tensor, step));
                }
                Ok(())
            }
            Command::SetParameter(tensor, memory) => {
                self.memory.set_parameter(tensor, memory);
                Ok(())
            }
            Command::SetOptimizer(rows) => {
                self.jobs.state.set_optimizer(rows);
                self.engine.handle(Input::UpdatesReady)
            }
            Command::ReadState(read, step) => {
                self.jobs.state.read_state(read, step);
                self.engine.handle(Input::UpdatesPaused)?;
                if self.engine.plan().strategy.synchrony == Synchrony::Async {
                    // State is read between steps there, and nothing is ever encoded.
                    return Ok(());
                }
                // State is exact: owners broadcast it as it is.
                self.engine.handle(Input::SendRaw(step))
            }
            Command::WorkerResidual(tensor, reply) => {
                // The caller may have been interrupted.
                let _ = reply.send(self.jobs.state.worker_residual(tensor));
                Ok(())
            }
            Command::ResidualSquares(first, elements_max, reply) => {
                // The caller may have given up.
                let _ = reply.send(self.jobs.state.residual_squares(first, elements_max));
                Ok(())
            }
            Command::ClearState => {
                self.jobs.state.clear_state();
                Ok(())
            }
            Command::LoadState(kind, slices) => {
                self.jobs.state.load_state(kind, slices);
                Ok(())
            }
            Command::AllConnected => {
                self.connected_at.get_or_insert(self.now);
                Ok(())
            }
            Command::Abort(reason) => {
                self.engine.abort(&reason);
                Ok(())
            }
            Command::ReportQueueStats => {
                self.shared.metrics.queue_stats.reply(self.engine.queue_stats());
                Ok(())
            }
        }
    }

    fn note_own_contribution(&mut self, tensor: TensorId, step: Step) {
        let stragglers = &self.shared.metrics.stragglers;
        let (plan, now) = (self.engine.plan(), self.now);
        self.contribution_times.own_contribution(plan, tensor, step, now, stragglers);
    }
}
