//! The application's calls: each in the order in which it was made.

use super::core::Core;
use crate::channel::shared::Command;
use crate::compute::server_command::ServerCommand;
use crate::sys::lock;
use gradlane_engine::{Input, Refusal, Synchrony};
use gradlane_units::{Rank, Step, TensorId};

impl Core {
    /// Handles all calls that wait.
    pub(super) fn handle_commands(&mut self) {
        std::mem::swap(&mut self.commands, &mut *lock(&self.shared.lanes[self.lane].commands));
        let mut commands = std::mem::take(&mut self.commands);
        for command in commands.drain(..) {
            if let Err(error) = self.handle_command(command) {
                self.shared.note_usage(error);
            }
        }
        self.commands = commands;
    }

    fn tell(&mut self, call: Input) -> Result<(), Refusal> {
        self.engine.handle(call).map(drop)
    }

    fn handle_command(&mut self, command: Command) -> Result<(), Refusal> {
        match command {
            Command::Engine(input) => {
                let begun = match input {
                    Input::StepBegin(step) | Input::StepPass(step) | Input::StepBarrier(step) => {
                        Some(step)
                    }
                    _ => None,
                };
                self.tell(input)?;
                if let Some(step) = begun {
                    self.jobs.state.begin_step(step);
                }
                Ok(())
            }
            Command::Contribute(memory, input) => {
                let (tensor, step) = match input {
                    Input::GradientReady(tensor, step) | Input::TensorAbsent(tensor, step) => {
                        (tensor, Some(step))
                    }
                    // The root's own block goes nowhere: its result takes the place.
                    Input::BlockReady(tensor, ..) | Input::RootResultReady(tensor, ..) => {
                        (tensor, None)
                    }
                    input => return self.tell(input),
                };
                // A call that is refused must not move the memory that frames are read from.
                self.tell(input)?;
                self.memory.set_gradient(tensor, memory);
                if let Some(step) = step {
                    self.note_own_contribution(tensor, step);
                }
                Ok(())
            }
            Command::ReleaseBlocks(tensor, step, scratch) => {
                scratch.into_iter().for_each(|buffer| self.memory.recycle(buffer));
                self.tell(Input::ReleaseBlocks(tensor, step))
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
                self.carry_out_or_send(ServerCommand::Update(rows), Step(0))
            }
            Command::WriteState(write, step) => {
                self.tell(Input::SendRaw(step))?;
                self.carry_out_or_send(ServerCommand::WriteState(write), step)
            }
            Command::WriteParameters(tensors, step) => {
                self.tell(Input::SendRaw(step))?;
                self.carry_out_or_send(ServerCommand::WriteParameters(tensors), step)
            }
            Command::ReadState(read, step) => {
                self.carry_out_or_send(ServerCommand::ReadState(read), step)?;
                if self.engine.plan().strategy.synchrony == Synchrony::Async {
                    // State is read between steps there, and nothing is ever encoded.
                    return Ok(());
                }
                // State is exact: owners broadcast it as it is.
                self.tell(Input::SendRaw(step))
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
                self.engine.tell(Input::Abort(reason));
                Ok(())
            }
            Command::ReportQueueStats => {
                let stats = self.engine.queue_stats();
                self.shared.metrics.queue_stats.reply(self.lane, stats);
                Ok(())
            }
        }
    }

    /// Carries a command out where this rank's owners are, or sends it to the dedicated servers.
    fn carry_out_or_send(&mut self, command: ServerCommand, step: Step) -> Result<(), Refusal> {
        if self.engine.plan().commands_servers() {
            return self.tell(Input::ServerCommand(command.encode()));
        }
        self.carry_out(command, step)
    }

    /// Carries a command out in a step.
    fn carry_out(&mut self, command: ServerCommand, step: Step) -> Result<(), Refusal> {
        let updates = match &command {
            ServerCommand::Update(_) | ServerCommand::WriteParameters(_) => Input::UpdatesReady,
            ServerCommand::ReadState(_) | ServerCommand::WriteState(_) => Input::UpdatesPaused,
        };
        self.jobs.state.carry_out(command, step);
        self.tell(updates)
    }

    /// Takes another rank's command for a step, which has to be that of all ranks.
    pub(super) fn take_server_command(&mut self, from: Rank, step: Step, bytes: &[u8]) {
        let Some(command) = ServerCommand::decode(bytes, self.engine.plan()) else {
            return self
                .engine
                .tell(Input::RejectPeer(from, format!("{from} sent no command for {step}")));
        };
        match &self.server_command {
            Some((of, first, same)) if *of == step && *same == command => {}
            Some((of, first, other)) if *of == step => {
                let (first, plan) = (*first, self.engine.plan());
                let [theirs, ours] = other.difference(&command, plan);
                let reason = format!(
                    "{first} has {theirs} in {step} and {from} {ours}: what updates parameters has to \
                     be the same on all ranks that train"
                );
                self.engine.tell(Input::RejectPeer(first.max(from), reason));
            }
            _ => {
                self.server_command = Some((step, from, command.clone()));
                if let Err(error) = self.carry_out(command, step) {
                    self.engine.tell(Input::Abort(error.to_string()));
                }
            }
        }
    }

    fn note_own_contribution(&mut self, tensor: TensorId, step: Step) {
        let stragglers = &self.shared.metrics.stragglers;
        let (plan, now) = (self.engine.plan(), self.now);
        self.contribution_times.own_contribution(plan, tensor, step, now, stragglers);
    }
}
