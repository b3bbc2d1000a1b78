//! Works between the engine and the kernels: regions become checked spans, slices keep their
//! optimizer state, tensors their optimizer settings.

use crate::executor::Executor;
use crate::kernels::{Contributions, Done, Job, Kernel};
use crate::memory::MemoryTable;
use crate::optimizer::{Rule, SliceState, StateKind, StateRead};
use gradlane_engine::{JournaledEngine, Operation, Plan, ReadyRule, Region, Work};
use gradlane_units::{SliceId, TensorId};
use std::sync::Arc;

/// Works in flight and what lives between them.
#[derive(Debug)]
pub(crate) struct Works {
    executor: Executor,
    plan: Arc<Plan>,
    /// Whether each push is a step of the optimizer, which then only the owner can count.
    applies_each: bool,
    /// Per tensor: settings in force from the last `set_optimizer` on.
    rules: Vec<Option<Rule>>,
    /// Set in steps that broadcast state in place of parameters.
    reading: Option<StateRead>,
    /// Per slice: optimizer state of the slices that this rank updates.
    states: Vec<Option<SliceState>>,
    done: Vec<Done>,
    in_flight: u64,
}

impl Works {
    /// No works, no settings.
    pub(crate) fn new(executor: Executor, plan: &Arc<Plan>) -> Works {
        Works {
            executor,
            plan: Arc::clone(plan),
            applies_each: plan.strategy.ready == ReadyRule::Each,
            rules: vec![None; plan.tensors.len()],
            reading: None,
            states: (0..plan.slices.len()).map(|_| None).collect(),
            done: Vec::new(),
            in_flight: 0,
        }
    }

    /// Settings in force from now on.
    pub(crate) fn set_optimizer(&mut self, rows: Vec<(TensorId, Rule)>) {
        self.reading = None;
        for (tensor, rule) in rows {
            self.rules[tensor.index()] = Some(rule);
        }
    }

    /// From now on slices are not updated: their state is broadcast.
    pub(crate) fn read_state(&mut self, read: StateRead) {
        self.reading = Some(read);
    }

    /// Forgets all optimizer state.
    pub(crate) fn clear_state(&mut self) {
        self.states.fill_with(|| None);
    }

    /// Puts optimizer state of slices that this rank owns in place.
    pub(crate) fn load_state(&mut self, kind: StateKind, slices: Vec<(SliceId, Vec<f32>)>) {
        for (slice, values) in slices {
            let state = self.states[slice.index()].get_or_insert_default();
            *state.values(kind) = values;
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
        engine: &mut JournaledEngine,
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

    fn report(&mut self, done: Done, engine: &mut JournaledEngine) -> Result<(), String> {
        self.in_flight = self.in_flight.saturating_sub(1);
        if done.state.is_some() {
            self.states[done.slice.index()] = done.state;
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
        let kernel = match (&work.operation, self.reading) {
            (Operation::Copy { from, to }, _) => {
                if from.length != to.length {
                    return Err(format!("a copy of {} to {} bytes", from.length, to.length));
                }
                Kernel::Copy { from: locate(from)?, to: locate(to)? }
            }
            (Operation::Reduce { inputs, absent, divisor, output, copy_to }, _) => Kernel::Reduce {
                from: Contributions {
                    inputs: inputs.iter().map(&mut locate).collect::<Result<_, _>>()?,
                    absent: *absent,
                    divisor: *divisor,
                    dtype,
                },
                output: locate(output)?,
                copy_to: copy_to.as_ref().map(&mut locate).transpose()?,
            },
            (Operation::ReduceApply { output, .. }, Some(read)) => Kernel::ReadState {
                read,
                dtype,
                output: locate(output)?,
                state: self.states[work.slice.index()].take().unwrap_or_default(),
            },
            (Operation::ReduceApply { inputs, absent, divisor, parameters, output }, None) => {
                let rule = self.rules[work.tensor.index()]
                    .ok_or("no optimizer settings: call set_optimizer before gradients")?;
                let mut state = self.states[work.slice.index()].take().unwrap_or_default();
                let rule = if self.applies_each { state.count(rule) } else { rule };
                Kernel::Apply {
                    from: Contributions {
                        inputs: inputs.iter().map(&mut locate).collect::<Result<_, _>>()?,
                        absent: *absent,
                        divisor: *divisor,
                        dtype,
                    },
                    parameters: locate(parameters)?,
                    output: locate(output)?,
                    rule,
                    state,
                }
            }
        };
        Ok(Job { id: work.id, step: work.step, slice: work.slice, kernel })
    }

    /// Waits for running works and starts no others: no work touches memory afterwards.
    pub(crate) fn stop(&mut self) {
        self.executor.stop();
    }
}
