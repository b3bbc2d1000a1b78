//! Works between the engine and the kernels: regions become checked spans, slices keep their
//! momentum, tensors their optimizer settings.

use crate::executor::Executor;
use crate::kernels::{Contributions, Done, Job, Kernel, Momentum};
use crate::memory::MemoryTable;
use gradlane_codec::SgdOptions;
use gradlane_engine::{Engine, Operation, Plan, Region, Work};
use gradlane_units::TensorId;
use std::sync::Arc;

/// Works in flight and what lives between them.
#[derive(Debug)]
pub(crate) struct Works {
    executor: Executor,
    plan: Arc<Plan>,
    /// Per tensor: settings in force from the last `set_optimizer` on.
    optimizer: Vec<Option<SgdOptions>>,
    /// Per slice: momentum of the slices that this rank updates.
    momentum: Vec<Option<Momentum>>,
    done: Vec<Done>,
    in_flight: u64,
}

impl Works {
    /// No works, no settings.
    pub(crate) fn new(executor: Executor, plan: &Arc<Plan>) -> Works {
        Works {
            executor,
            plan: Arc::clone(plan),
            optimizer: vec![None; plan.tensors.len()],
            momentum: (0..plan.slices.len()).map(|_| None).collect(),
            done: Vec::new(),
            in_flight: 0,
        }
    }

    /// Settings in force from now on.
    pub(crate) fn set_optimizer(&mut self, rows: Vec<(TensorId, SgdOptions)>) {
        for (tensor, options) in rows {
            self.optimizer[tensor.index()] = Some(options);
        }
    }

    /// Whether finished works wait to be reported.
    pub(crate) fn has_done(&self) -> bool {
        self.executor.has_done()
    }

    /// Works handed out and not yet reported.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Reports finished works to the engine and starts those that it asks for; whether there were
    /// any.
    pub(crate) fn advance(
        &mut self,
        engine: &mut Engine,
        memory: &mut MemoryTable,
    ) -> Result<bool, String> {
        let mut progressed = false;
        let mut done = std::mem::take(&mut self.done);
        self.executor.take_done(&mut done);
        for done in done.drain(..) {
            progressed = true;
            self.report(done, engine)?;
        }
        self.done = done;
        while let Some(work) = engine.poll_work() {
            progressed = true;
            self.in_flight += 1;
            let job = self.prepare(&work, memory).map_err(|reason| {
                let name = &self.plan.tensor(work.tensor).spec.name;
                format!("work on tensor {name:?}, {}, {}: {reason}", work.slice, work.step)
            })?;
            if let Some(done) = self.executor.give(job) {
                self.report(done, engine)?;
            }
        }
        Ok(progressed)
    }

    fn report(&mut self, done: Done, engine: &mut Engine) -> Result<(), String> {
        self.in_flight = self.in_flight.saturating_sub(1);
        if done.momentum.is_some() {
            self.momentum[done.slice.index()] = done.momentum;
        }
        if let Err(reason) = done.result {
            let tensor = self.plan.slice(done.slice).tensor;
            let name = &self.plan.tensor(tensor).spec.name;
            return Err(format!("work on tensor {name:?}, {}: {reason}", done.slice));
        }
        engine.handle_work_done(done.id);
        Ok(())
    }

    fn prepare(&mut self, work: &Work, memory: &mut MemoryTable) -> Result<Job, String> {
        let mut locate = |region: &Region| memory.locate(*region).map_err(|it| it.to_string());
        let dtype = self.plan.tensor(work.tensor).spec.dtype;
        let kernel = match &work.operation {
            Operation::Copy { from, to } => {
                if from.length != to.length {
                    return Err(format!("a copy of {} to {} bytes", from.length, to.length));
                }
                Kernel::Copy { from: locate(from)?, to: locate(to)? }
            }
            Operation::Reduce { inputs, absent, divisor, output, copy_to } => Kernel::Reduce {
                from: Contributions {
                    inputs: inputs.iter().map(&mut locate).collect::<Result<_, _>>()?,
                    absent: *absent,
                    divisor: *divisor,
                    dtype,
                },
                output: locate(output)?,
                copy_to: copy_to.as_ref().map(&mut locate).transpose()?,
            },
            Operation::ReduceApply { inputs, absent, divisor, parameters, output } => {
                Kernel::Apply {
                    from: Contributions {
                        inputs: inputs.iter().map(&mut locate).collect::<Result<_, _>>()?,
                        absent: *absent,
                        divisor: *divisor,
                        dtype,
                    },
                    parameters: locate(parameters)?,
                    output: locate(output)?,
                    options: self.optimizer[work.tensor.index()]
                        .ok_or("no optimizer settings: call set_optimizer before gradients")?,
                    momentum: self.momentum[work.slice.index()].take().unwrap_or_default(),
                }
            }
        };
        Ok(Job { id: work.id, slice: work.slice, kernel })
    }

    /// Waits for running works and starts no others: no work touches memory afterwards.
    pub(crate) fn stop(&mut self) {
        self.executor.stop();
    }
}
