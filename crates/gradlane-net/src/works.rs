//! Works between the engine and the kernels: regions become checked spans, slices keep their
//! optimizer state, tensors their optimizer settings.

use crate::codecs::{self, Planned};
use crate::encoded::{Coder, EncodedParts, Hop};
use crate::executor::Executor;
use crate::kernels::{Contributions, Done, Job, Kept, Kernel};
use crate::memory::MemoryTable;
use crate::optimizer::{Rule, SliceState, StateKind, StateRead};
use gradlane_codec::{FloatDtype, Place};
use gradlane_engine::{JournaledEngine, Operation, Plan, Region, Synchrony};
use gradlane_units::{Rank, SliceId, Step, TensorId};
use std::sync::Arc;

/// Works in flight and what lives between them.
#[derive(Debug)]
pub(crate) struct Works {
    executor: Executor,
    plan: Arc<Plan>,
    rank: Rank,
    /// Of all draws of codecs.
    seed: u64,
    /// Per tensor: its codec.
    codecs: Vec<Option<Planned>>,
    /// Whether each push is a step of the optimizer, which then only the owner can count.
    applies_each: bool,
    /// Whether steps may go on without this rank's contributions.
    may_be_late: bool,
    /// The last step that did.
    left_out: Option<Step>,
    /// Per tensor: settings in force from the last `set_optimizer` on.
    rules: Vec<Option<Rule>>,
    /// Set from a step on that broadcasts state in place of parameters. Where ranks may be late an owner can
    /// be in a later step than its own application: it reads in that step alone.
    reading: Option<(Step, StateRead)>,
    /// Per slice: optimizer state of the slices that this rank updates, and what codecs have lost.
    states: Vec<Option<SliceState>>,
    done: Vec<Done>,
    in_flight: u64,
}

impl Works {
    /// No works, no settings.
    ///
    /// # Errors
    /// When the plan has a codec that its tensor cannot have.
    pub(crate) fn new(
        executor: Executor,
        plan: &Arc<Plan>,
        rank: Rank,
        seed: u64,
    ) -> Result<Works, String> {
        Ok(Works {
            executor,
            plan: Arc::clone(plan),
            rank,
            seed,
            codecs: codecs::of_plan(plan)?,
            applies_each: plan.strategy.synchrony == Synchrony::Async,
            may_be_late: plan.strategy.synchrony.stragglers().is_some(),
            left_out: None,
            rules: vec![None; plan.tensors.len()],
            reading: None,
            states: (0..plan.slices.len()).map(|_| None).collect(),
            done: Vec::new(),
            in_flight: 0,
        })
    }

    /// A step begins: its slices are not read until that is asked for. Where each push is applied
    /// alone, this rank's steps say nothing about the others': there settings end a reading.
    pub(crate) fn begin_step(&mut self) {
        if !self.applies_each {
            self.reading = None;
        }
    }

    /// Settings in force from now on.
    pub(crate) fn set_optimizer(&mut self, rows: Vec<(TensorId, Rule)>) {
        self.reading = None;
        for (tensor, rule) in rows {
            self.rules[tensor.index()] = Some(rule);
        }
    }

    /// From this step on slices are not updated: their state is broadcast.
    pub(crate) fn read_state(&mut self, read: StateRead, step: Step) {
        self.reading = Some((step, read));
    }

    /// What is broadcast in a step in place of what is computed.
    fn read_in(&self, step: Step) -> Option<StateRead> {
        self.reading.filter(|(of, _)| self.applies_each || *of == step).map(|(_, read)| read)
    }

    /// Forgets all optimizer state.
    pub(crate) fn clear_state(&mut self) {
        self.states.iter_mut().flatten().for_each(SliceState::clear_optimizer);
    }

    /// What encoding this rank's contributions to a tensor has lost so far, in the order of its
    /// storage; between steps.
    pub(crate) fn worker_residual(&mut self, tensor: TensorId) -> Vec<f32> {
        let mut values = Vec::new();
        let width = self.plan.residual_width(tensor);
        for slice in self.plan.slices_of(tensor) {
            let length = self.plan.slice(slice).length as usize * width;
            let state = self.state(slice);
            let own = state.values(StateKind::WorkerResidual);
            values.extend_from_slice(own);
            values.resize(values.len() + length - own.len().min(length), 0.0);
        }
        values
    }

    /// Puts optimizer state of slices that this rank owns in place, or its own residuals.
    pub(crate) fn load_state(&mut self, kind: StateKind, slices: Vec<(SliceId, Vec<f32>)>) {
        for (slice, mut values) in slices {
            let width = self.plan.residual_width(self.plan.slice(slice).tensor);
            if kind == StateKind::OwnerResidual && width > 1 {
                // Of what an owner keeps only the first number of each value is not zero.
                let mut wide = vec![0.0; values.len() * width];
                wide.iter_mut().step_by(width).zip(&values).for_each(|(wide, it)| *wide = *it);
                values = wide;
            }
            let state = self.state(slice);
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
        while let Some(work) = engine.poll_job() {
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
        if let Some(kept) = done.kept {
            self.keep(done.slice, kept);
        }
        match done.result {
            Ok(Some(bytes)) => engine.handle_encoded(done.id, bytes),
            Ok(None) => engine.handle_job_done(done.id),
            Err(reason) => {
                let tensor = self.plan.slice(done.slice).tensor;
                let name = &self.plan.tensor(tensor).spec.name;
                return Err(format!("work on tensor {name:?}, {}: {reason}", done.slice));
            }
        }
        Ok(())
    }

    fn keep(&mut self, slice: SliceId, kept: Kept) {
        let left_out = self.left_out;
        let state = self.state(slice);
        match kept {
            Kept::Whole(whole) => *state = whole,
            Kept::Reduced(values) => *state.values(StateKind::OwnerResidual) = values,
            Kept::Contributed(mut residual) => {
                if let Some(step) = left_out {
                    residual.take_back(step);
                }
                *state.contributed() = residual;
            }
        }
    }

    /// A step went on without this rank: what its contributions have lost is as before.
    pub(crate) fn left_out(&mut self, step: Step) {
        self.left_out = Some(step);
        self.states.iter_mut().flatten().for_each(|state| state.contributed().take_back(step));
    }

    /// What is kept of a slice goes with its work, and comes back with what was done.
    fn take_state(&mut self, slice: SliceId) -> SliceState {
        std::mem::take(self.state(slice))
    }

    fn state(&mut self, slice: SliceId) -> &mut SliceState {
        self.states[slice.index()].get_or_insert_default()
    }

    fn prepare(
        &mut self,
        work: &gradlane_engine::Job,
        memory: &mut MemoryTable,
    ) -> Result<Job, String> {
        let mut locate = |region: &Region| memory.locate(*region).map_err(|it| it.to_string());
        let dtype = self.plan.tensor(work.tensor).spec.dtype;
        let kernel = match (&work.operation, self.read_in(work.step)) {
            (Operation::Copy { from, to }, _) => {
                if from.length != to.length {
                    return Err(format!("a copy of {} to {} bytes", from.length, to.length));
                }
                Kernel::Copy { from: locate(from)?, to: locate(to)? }
            }
            (Operation::Reduce { output, copy_to, .. }, Some(read)) => Kernel::ReadState {
                read,
                dtype,
                output: locate(output)?,
                copy_to: copy_to.as_ref().map(&mut locate).transpose()?,
                state: self.take_state(work.slice),
            },
            (Operation::Reduce { inputs, absent, divisor, output, copy_to }, None) => {
                Kernel::Reduce {
                    from: Contributions {
                        inputs: inputs.iter().map(&mut locate).collect::<Result<_, _>>()?,
                        absent: *absent,
                        divisor: *divisor,
                        dtype,
                    },
                    output: locate(output)?,
                    copy_to: copy_to.as_ref().map(&mut locate).transpose()?,
                }
            }
            (Operation::ReduceApply { output, .. }, Some(read)) => Kernel::ReadState {
                read,
                dtype,
                output: locate(output)?,
                copy_to: None,
                state: self.take_state(work.slice),
            },
            (Operation::ReduceApply { inputs, absent, divisor, parameters, output }, None) => {
                let rule = self.rules[work.tensor.index()]
                    .ok_or("no optimizer settings: call set_optimizer before gradients")?;
                let mut state = self.take_state(work.slice);
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
            (Operation::Encode { input, output }, reading) => {
                let coder = self.coder(work, self.rank.0)?;
                Kernel::Encode {
                    // What nobody looks at leaves no residual.
                    feedback: coder.codec.keeps_residual() && reading.is_none(),
                    coder,
                    may_be_late: self.may_be_late,
                    from: locate(input)?,
                    output: locate(output)?,
                    residual: std::mem::take(self.state(work.slice).contributed()),
                }
            }
            (Operation::DecodeReduceEncode { inputs, absent, divisor, output, copy_to }, _) => {
                Kernel::Recode {
                    coder: self.coder(work, Place::BROADCAST)?,
                    from: EncodedParts {
                        inputs: inputs.iter().map(&mut locate).collect::<Result<_, _>>()?,
                        absent: *absent,
                        divisor: *divisor,
                    },
                    output: locate(output)?,
                    copy_to: copy_to.as_ref().map(&mut locate).transpose()?,
                    residual: std::mem::take(
                        self.state(work.slice).values(StateKind::OwnerResidual),
                    ),
                }
            }
            (Operation::DecodeReduceApply { inputs, absent, divisor, parameters, output }, _) => {
                Kernel::DecodeApply {
                    coder: self.coder(work, Place::BROADCAST)?,
                    from: EncodedParts {
                        inputs: inputs.iter().map(&mut locate).collect::<Result<_, _>>()?,
                        absent: *absent,
                        divisor: *divisor,
                    },
                    dtype,
                    parameters: locate(parameters)?,
                    output: locate(output)?,
                    rule: self.rules[work.tensor.index()]
                        .ok_or("no optimizer settings: call set_optimizer before gradients")?,
                    state: self.take_state(work.slice),
                }
            }
            (Operation::RingEncode { received, own, divisor, output, copy_to }, _) => {
                let leg = if *divisor > 1 { Place::BROADCAST } else { self.rank.0 };
                Kernel::RingEncode {
                    coder: self.coder(work, leg)?,
                    from: Hop {
                        received: received.as_ref().map(&mut locate).transpose()?,
                        own: own.as_ref().map(&mut locate).transpose()?,
                        divisor: *divisor,
                    },
                    output: locate(output)?,
                    copy_to: copy_to.as_ref().map(&mut locate).transpose()?,
                    state: self.take_state(work.slice),
                }
            }
            (Operation::RingMaxScales { received, own, output }, _) => Kernel::RingScale {
                coder: self.coder(work, self.rank.0)?,
                received: received.as_ref().map(&mut locate).transpose()?,
                own: locate(own)?,
                output: locate(output)?,
                state: self.take_state(work.slice),
            },
            (Operation::RingBeginCodes { scales, own, output }, _) => Kernel::RingBegin {
                coder: self.coder(work, self.rank.0)?,
                scales: scales.as_ref().map(&mut locate).transpose()?,
                own: own.as_ref().map(&mut locate).transpose()?,
                output: locate(output)?,
                state: self.take_state(work.slice),
            },
            (Operation::RingAddCodes { sums, own, copy_to }, _) => Kernel::RingAdd {
                coder: self.coder(work, self.rank.0)?,
                sums: locate(sums)?,
                own: own.as_ref().map(&mut locate).transpose()?,
                copy_to: copy_to.as_ref().map(&mut locate).transpose()?,
                state: self.take_state(work.slice),
            },
            (Operation::Decode { from, to }, _) => Kernel::Decode {
                coder: self.coder(work, Place::BROADCAST)?,
                from: locate(from)?,
                to: locate(to)?,
            },
        };
        Ok(Job { id: work.id, step: work.step, slice: work.slice, kernel })
    }

    /// The codec of a slice, for a push of a rank or a broadcast.
    fn coder(&self, work: &gradlane_engine::Job, leg: u32) -> Result<Coder, String> {
        let planned = self.codecs[work.tensor.index()].as_ref();
        let Planned { codec, sums } = planned.ok_or("the plan has no codec for it")?.clone();
        let slice = self.plan.slice(work.slice);
        let dtype = self.plan.tensor(work.tensor).spec.dtype;
        Ok(Coder {
            codec,
            sums,
            place: Place {
                seed: self.seed,
                step: work.step.0,
                tensor: work.tensor.0,
                leg,
                first_element: slice.start,
            },
            elements: slice.length as usize,
            dtype: FloatDtype::of(dtype).ok_or("plain bytes cannot be encoded")?,
        })
    }

    /// Waits for running works and starts no others: no work touches memory afterwards.
    pub(crate) fn stop(&mut self) {
        self.executor.stop();
    }
}
