//! What the application asked for: each command in the order in which it was given.

use super::core::Core;
use crate::channel::shared::Command;
use crate::sys::lock;
use gradlane_engine::ReadyRule;
use gradlane_units::{Step, TensorId};

impl Core {
    pub(super) fn handle_commands(&mut self) {
        std::mem::swap(&mut self.commands, &mut *lock(&self.shared.commands));
        let mut commands = std::mem::take(&mut self.commands);
        for command in commands.drain(..) {
            let result = match command {
                Command::StepBegin(step) => {
                    self.jobs.begin_step();
                    self.engine.step_begin(step)
                }
                Command::StepPass(step) => {
                    self.jobs.begin_step();
                    self.engine.step_pass(step)
                }
                Command::StepGather(step) => {
                    self.jobs.begin_step();
                    self.engine.step_gather(step)
                }
                Command::AllConnected => {
                    self.connected_at.get_or_insert(self.now);
                    Ok(())
                }
                Command::SendRaw(step) => self.engine.send_raw(step),
                Command::GradientReady(tensor, step, memory) => {
                    self.memory.set_gradient(tensor, memory);
                    self.note_own_contribution(tensor, step);
                    self.engine.gradient_ready(tensor, step)
                }
                Command::TensorAbsent(tensor, step, memory) => {
                    self.memory.set_gradient(tensor, memory);
                    self.note_own_contribution(tensor, step);
                    self.engine.tensor_absent(tensor, step)
                }
                Command::BlockReady(tensor, step, memory) => {
                    self.memory.set_gradient(tensor, memory);
                    self.engine.block_ready(tensor, step, memory.bytes() as u64)
                }
                Command::BlockAbsent(tensor, step) => self.engine.tensor_absent(tensor, step),
                Command::AnswerReady(tensor, step, memory) => {
                    // The owner's own block goes nowhere: the answer takes its place.
                    self.memory.set_gradient(tensor, memory);
                    self.engine.answer_ready(tensor, step, memory.bytes() as u64)
                }
                Command::ReleaseBlocks(tensor, step, scratch) => {
                    scratch.into_iter().for_each(|block| self.memory.recycle(block));
                    self.engine.release_blocks(tensor, step)
                }
                Command::SetParameter(tensor, memory) => {
                    self.memory.set_parameter(tensor, memory);
                    Ok(())
                }
                Command::SetOptimizer(rows) => {
                    self.jobs.set_optimizer(rows);
                    self.engine.updates_ready();
                    Ok(())
                }
                Command::ReadState(read, step) => {
                    self.jobs.read_state(read, step);
                    self.engine.updates_paused();
                    if self.engine.plan().strategy.ready == ReadyRule::Each {
                        // It is asked for between steps there, and nothing is ever encoded.
                        Ok(())
                    } else {
                        // State is exact: owners broadcast it as it is.
                        self.engine.send_raw(step)
                    }
                }
                Command::WorkerResidual(tensor, reply) => {
                    // Who asked may have been interrupted.
                    let _ = reply.send(self.jobs.worker_residual(tensor));
                    Ok(())
                }
                Command::ClearState => {
                    self.jobs.clear_state();
                    Ok(())
                }
                Command::LoadState(kind, slices) => {
                    self.jobs.load_state(kind, slices);
                    Ok(())
                }
                Command::StepEnd(step) => self.engine.step_end(step),
                Command::Needed(tensors, step) => {
                    // Need is a wish: what became ready in the meantime needs nothing.
                    for tensor in tensors {
                        let _ = self.engine.tensor_needed(tensor, step);
                    }
                    Ok(())
                }
                Command::SwitchPriorities(priorities) => self.engine.switch_priorities(priorities),
                Command::ReportDepths => {
                    self.shared.metrics.queue_stats.reply(self.engine.queue_depths());
                    Ok(())
                }
                Command::Finish => {
                    self.engine.finish();
                    Ok(())
                }
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

    fn note_own_contribution(&mut self, tensor: TensorId, step: Step) {
        let stragglers = &self.shared.metrics.stragglers;
        self.contribution_times.own_contribution(
            self.engine.plan(),
            tensor,
            step,
            self.now,
            stragglers,
        );
    }
}
