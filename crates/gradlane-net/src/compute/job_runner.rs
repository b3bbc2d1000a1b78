//! The jobs between the engine and the kernels, and the state that lives between jobs: optimizers and
//! residuals of slices, update rules of tensors.

use super::codecs::{self, PlannedCodec};
use super::error::JobError;
use super::job::{FinishedJob, JobState};
use super::job_queue::JobQueue;
use super::optimizer::{SliceState, StateKind, StateRead, UpdateRule};
use crate::channel::shared::Shared;
use crate::memory::MemoryTable;
use crate::options::ChannelOptions;
use gradlane_engine::{JournaledEngine, Plan, Synchrony};
use gradlane_units::{Rank, SliceId, Step, TensorId};
use std::io;
use std::sync::Arc;

/// A job that failed, with the name of its tensor.
#[derive(Debug, thiserror::Error)]
#[error("job on tensor {tensor:?}, {slice}: {error}")]
pub(crate) struct FailedJob {
    tensor: String,
    slice: SliceId,
    error: JobError,
}

/// Jobs in flight and the state between them.
#[derive(Debug)]
pub(crate) struct JobRunner {
    queue: JobQueue,
    pub(super) plan: Arc<Plan>,
    pub(super) rank: Rank,
    /// Seed of all random draws of codecs.
    pub(super) seed: u64,
    /// By tensor.
    pub(super) codecs: Vec<Option<PlannedCodec>>,
    /// Whether each push is a step of the optimizer, which then only the owner can count.
    pub(super) is_async: bool,
    /// Whether steps may go on without this rank's contributions.
    pub(super) may_be_late: bool,
    /// The last step that went on without this rank.
    left_out: Option<Step>,
    /// By tensor, from the last `set_optimizer` on.
    rules: Vec<Option<UpdateRule>>,
    /// The step that broadcasts state in place of parameters. Where ranks may be late, an owner can be in a
    /// later step than its own application: it reads in that step alone.
    reading: Option<(Step, StateRead)>,
    /// By slice: optimizer state of the slices that this rank updates, and residuals.
    states: Vec<Option<SliceState>>,
    finished: Vec<FinishedJob>,
    in_flight: u64,
}

impl JobRunner {
    /// Makes a runner without jobs and settings.
    ///
    /// # Errors
    /// When a thread cannot start, or the plan has a codec that its tensor cannot have.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        plan: &Arc<Plan>,
        options: &ChannelOptions,
    ) -> io::Result<JobRunner> {
        Ok(JobRunner {
            queue: JobQueue::start(shared, options.work_threads)?,
            plan: Arc::clone(plan),
            rank: Rank(options.rank),
            seed: options.seed,
            codecs: codecs::of_plan(plan).map_err(io::Error::other)?,
            is_async: plan.strategy.synchrony == Synchrony::Async,
            may_be_late: plan.strategy.synchrony.stragglers().is_some(),
            left_out: None,
            rules: vec![None; plan.tensors.len()],
            reading: None,
            states: (0..plan.slices.len()).map(|_| None).collect(),
            finished: Vec::new(),
            in_flight: 0,
        })
    }

    /// Begins a step, which ends a reading of state. In asynchronous training this rank's steps say
    /// nothing about the others': there only new settings end a reading.
    pub(crate) fn begin_step(&mut self) {
        if !self.is_async {
            self.reading = None;
        }
    }

    /// Sets update rules, in force from now on.
    pub(crate) fn set_optimizer(&mut self, rows: Vec<(TensorId, UpdateRule)>) {
        self.reading = None;
        for (tensor, rule) in rows {
            self.rules[tensor.index()] = Some(rule);
        }
    }

    /// Makes a step broadcast the state of slices in place of their update.
    pub(crate) fn read_state(&mut self, read: StateRead, step: Step) {
        self.reading = Some((step, read));
    }

    /// The state that a step broadcasts in place of results.
    pub(super) fn read_in(&self, step: Step) -> Option<StateRead> {
        self.reading.filter(|(of, _)| self.is_async || *of == step).map(|(_, read)| read)
    }

    /// Forgets all optimizer state.
    pub(crate) fn clear_state(&mut self) {
        self.states.iter_mut().flatten().for_each(SliceState::clear_optimizer);
    }

    /// Returns the residual of this rank's contributions to a tensor in the order of its storage, between
    /// steps.
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

    /// Restores optimizer state of slices that this rank owns, or its own residuals.
    pub(crate) fn load_state(&mut self, kind: StateKind, slices: Vec<(SliceId, Vec<f32>)>) {
        for (slice, mut values) in slices {
            let width = self.plan.residual_width(self.plan.slice(slice).tensor);
            if kind == StateKind::OwnerResidual && width > 1 {
                // Of an owner's residual only the first number of each value is not zero.
                let mut wide = vec![0.0; values.len() * width];
                wide.iter_mut().step_by(width).zip(&values).for_each(|(wide, it)| *wide = *it);
                values = wide;
            }
            let state = self.state(slice);
            *state.values(kind) = values;
        }
    }

    /// Whether finished jobs wait to be reported.
    pub(crate) fn has_finished(&self) -> bool {
        self.queue.has_finished()
    }

    /// Jobs handed out and not yet reported.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Reports finished jobs to the engine and starts those that it asks for. Returns whether there were
    /// any.
    pub(crate) fn advance(
        &mut self,
        engine: &mut JournaledEngine,
        memory: &mut MemoryTable,
    ) -> Result<bool, FailedJob> {
        let mut progressed = false;
        let mut finished = std::mem::take(&mut self.finished);
        self.queue.take_finished(&mut finished);
        for job in finished.drain(..) {
            progressed = true;
            self.report(job, engine)?;
        }
        self.finished = finished;
        while let Some(request) = engine.poll_job() {
            progressed = true;
            self.in_flight += 1;
            let job = self.prepare(&request, memory);
            let job = job.map_err(|error| self.failed(request.slice, error))?;
            if let Some(job) = self.queue.give(job) {
                self.report(job, engine)?;
            }
        }
        Ok(progressed)
    }

    fn report(&mut self, job: FinishedJob, engine: &mut JournaledEngine) -> Result<(), FailedJob> {
        self.in_flight = self.in_flight.saturating_sub(1);
        if let Some(state) = job.outcome.state {
            self.store_state(job.slice, state);
        }
        match job.outcome.result {
            Ok(Some(bytes)) => engine.handle_encoded(job.id, bytes),
            Ok(None) => engine.handle_job_done(job.id),
            Err(error) => return Err(self.failed(job.slice, error)),
        }
        Ok(())
    }

    fn failed(&self, slice: SliceId, error: JobError) -> FailedJob {
        let tensor = self.plan.tensor(self.plan.slice(slice).tensor).spec.name.clone();
        FailedJob { tensor, slice, error }
    }

    fn store_state(&mut self, slice: SliceId, state: JobState) {
        let left_out = self.left_out;
        let stored = self.state(slice);
        match state {
            JobState::Slice(state) => *stored = state,
            JobState::OwnerResidual(values) => *stored.values(StateKind::OwnerResidual) = values,
            JobState::WorkerResidual(mut residual) => {
                if let Some(step) = left_out {
                    residual.rollback(step);
                }
                *stored.contributed() = residual;
            }
        }
    }

    /// Rolls residuals back: a step went on without this rank's contributions.
    pub(crate) fn left_out(&mut self, step: Step) {
        self.left_out = Some(step);
        self.states.iter_mut().flatten().for_each(|state| state.contributed().rollback(step));
    }

    /// Moves a slice's state out, for a job that gives it back.
    pub(super) fn take_state(&mut self, slice: SliceId) -> SliceState {
        std::mem::take(self.state(slice))
    }

    pub(super) fn state(&mut self, slice: SliceId) -> &mut SliceState {
        self.states[slice.index()].get_or_insert_default()
    }

    pub(super) fn update_rule(&self, tensor: TensorId) -> Result<UpdateRule, JobError> {
        self.rules[tensor.index()].ok_or(JobError::NoUpdateRule)
    }

    /// Waits for running jobs and starts no others: no job touches memory afterwards.
    pub(crate) fn stop(&mut self) {
        self.queue.stop();
    }
}
