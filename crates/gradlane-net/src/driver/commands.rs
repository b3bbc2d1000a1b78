//! What the application asked for: each command in the order in which it was given.

use super::core::Core;
use crate::ready::lock;
use crate::shared::Command;
use gradlane_engine::{Input, Synchrony};
use gradlane_units::{Step, TensorId};

impl Core {
    pub(super) fn handle_commands(&mut self) {
        std::mem::swap(&mut self.commands, &mut *lock(&self.shared.commands));
        let mut commands = std::mem::take(&mut self.commands);
        for command in commands.drain(..) {
            let result = match command {
                Command::StepBegin(step) => {
                    self.works.begin_step();
                    self.engine.handle(Input::StepBegin(step))
                }
                Command::StepPass(step) => {
                    self.works.begin_step();
                    self.engine.handle(Input::StepPass(step))
                }
                Command::StepGather(step) => {
                    self.works.begin_step();
                    self.engine.handle(Input::StepBarrier(step))
                }
                Command::AllConnected => {
                    self.connected_at.get_or_insert(self.now);
                    Ok(())
                }
                Command::SendRaw(step) => self.engine.handle(Input::SendRaw(step)),
                Command::GradientReady(tensor, step, memory) => {
                    self.memory.set_gradient(tensor, memory);
                    self.note_own(tensor, step);
                    self.engine.handle(Input::GradientReady(tensor, step))
                }
                Command::TensorAbsent(tensor, step, memory) => {
                    self.memory.set_gradient(tensor, memory);
                    self.note_own(tensor, step);
                    self.engine.handle(Input::TensorAbsent(tensor, step))
                }
                Command::BlockReady(tensor, step, memory) => {
                    self.memory.set_gradient(tensor, memory);
                    self.engine.handle(Input::BlockReady(tensor, step, memory.bytes() as u64))
                }
                Command::BlockAbsent(tensor, step) => {
                    self.engine.handle(Input::TensorAbsent(tensor, step))
                }
                Command::AnswerReady(tensor, step, memory) => {
                    // The owner's own block goes nowhere: the answer takes its place.
                    self.memory.set_gradient(tensor, memory);
                    self.engine.handle(Input::RootResultReady(tensor, step, memory.bytes() as u64))
                }
                Command::ReleaseBlocks(tensor, step, scratch) => {
                    scratch.into_iter().for_each(|block| self.memory.give_back(block));
                    self.engine.handle(Input::ReleaseBlocks(tensor, step))
                }
                Command::SetParameter(tensor, memory) => {
                    self.memory.set_parameter(tensor, memory);
                    Ok(())
                }
                Command::SetOptimizer(rows) => {
                    self.works.set_optimizer(rows);
                    self.engine.handle(Input::UpdatesReady)
                }
                Command::ReadState(read, step) => {
                    self.works.read_state(read, step);
                    let _ = self.engine.handle(Input::UpdatesPaused);
                    if self.engine.plan().strategy.synchrony == Synchrony::Async {
                        // It is asked for between steps there, and nothing is ever encoded.
                        Ok(())
                    } else {
                        // State is exact: owners broadcast it as it is.
                        self.engine.handle(Input::SendRaw(step))
                    }
                }
                Command::WorkerResidual(tensor, reply) => {
                    // Who asked may have been interrupted.
                    let _ = reply.send(self.works.worker_residual(tensor));
                    Ok(())
                }
                Command::ClearState => {
                    self.works.clear_state();
                    Ok(())
                }
                Command::LoadState(kind, slices) => {
                    self.works.load_state(kind, slices);
                    Ok(())
                }
                Command::StepEnd(step) => self.engine.handle(Input::StepEnd(step)),
                Command::Needed(tensors, step) => {
                    // Need is a wish: what became ready in the meantime needs nothing.
                    for tensor in tensors {
                        let _ = self.engine.handle(Input::TensorNeeded(tensor, step));
                    }
                    Ok(())
                }
                Command::SwitchPriorities(priorities) => {
                    self.engine.handle(Input::SwitchPriorities(priorities))
                }
                Command::ReportDepths => {
                    self.shared.metrics.depths.answer(self.engine.queue_stats());
                    Ok(())
                }
                Command::Finish => self.engine.handle(Input::Finish),
                Command::Abort(reason) => {
                    self.engine.abort(&reason);
                    Ok(())
                }
            };
            if let Err(error) = result {
                self.shared.note_usage(error);
            }
        }
        self.commands = commands;
    }

    fn note_own(&mut self, tensor: TensorId, step: Step) {
        let lateness = &self.shared.metrics.lateness;
        self.arrivals.own(self.engine.plan(), tensor, step, self.now, lateness);
    }
}
