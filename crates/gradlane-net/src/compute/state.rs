//! The state that lives between jobs: optimizers and residuals of slices, update rules of tensors.

use super::error::JobError;
use super::planned_codecs::{self, CodecPlanError, PlannedCodec};
use super::residual::{self, ResidualSquares};
use super::server_command::{ServerCommand, StateWrite};
use super::server_optimizer::{JobState, SliceState, StateKind, StateRead, UpdateRule};
use crate::options::ChannelOptions;
use gradlane_engine::{Plan, Synchrony};
use gradlane_units::{Rank, SliceId, Step, TensorId};
use std::sync::Arc;

/// What contributions to a step are that hands something to dedicated servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Write {
    /// Optimizer state.
    State(StateRead),
    /// Parameters.
    Parameters,
}

/// The plan and the state that jobs are prepared from.
#[derive(Debug)]
pub(crate) struct ComputeState {
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
    /// The step that this rank is in.
    step: Step,
    /// Whether that step goes on without this rank. Others may be several steps further by then, also
    /// without it, before its last contribution to this one is encoded.
    is_left_out: bool,
    /// By tensor, from the last `set_optimizer` on.
    rules: Vec<Option<UpdateRule>>,
    /// The step that broadcasts state in place of parameters. Where ranks may be late, an owner can be in a
    /// later step than its own application: it reads in that step alone.
    reading: Option<(Step, StateRead)>,
    /// On a dedicated server: what the contributions of the current step are, if not gradients.
    writing: Option<Write>,
    /// By slice: optimizer state of the slices that this rank updates, and residuals.
    states: Vec<Option<SliceState>>,
}

impl ComputeState {
    /// Makes the state before step 0, without settings.
    ///
    /// # Errors
    /// When the plan has a codec that its tensor cannot have.
    pub(super) fn new(
        plan: &Arc<Plan>,
        options: &ChannelOptions,
    ) -> Result<ComputeState, CodecPlanError> {
        Ok(ComputeState {
            plan: Arc::clone(plan),
            rank: Rank(options.rank),
            seed: options.seed,
            codecs: planned_codecs::of_plan(plan)?,
            is_async: plan.strategy.synchrony == Synchrony::Async,
            may_be_late: plan.strategy.synchrony.stragglers().is_some(),
            step: Step(0),
            is_left_out: false,
            rules: vec![None; plan.tensors.len()],
            reading: None,
            writing: None,
            states: (0..plan.slices.len()).map(|_| None).collect(),
        })
    }

    /// Begins a step, which ends a reading of state. In asynchronous training this rank's steps say
    /// nothing about the others': there only new settings end a reading.
    pub(crate) fn begin_step(&mut self, step: Step) {
        self.step = step;
        self.is_left_out = false;
        if !self.is_async {
            self.reading = None;
        }
    }

    /// Sets update rules, in force from now on.
    fn set_optimizer(&mut self, rows: Vec<(TensorId, UpdateRule)>) {
        self.reading = None;
        for (tensor, rule) in rows {
            self.rules[tensor.index()] = Some(rule);
        }
    }

    /// Does in a step what a command says, in place of what the last one said.
    pub(crate) fn carry_out(&mut self, command: ServerCommand, step: Step) {
        self.writing = None;
        match command {
            ServerCommand::Update(rows) => self.set_optimizer(rows),
            ServerCommand::ReadState(read) => self.reading = Some((step, read)),
            ServerCommand::WriteState(StateWrite { state, clear }) => {
                self.reading = None;
                self.writing = Some(Write::State(state));
                if clear {
                    self.clear_state();
                }
            }
            ServerCommand::WriteParameters(_) => {
                self.reading = None;
                self.writing = Some(Write::Parameters);
            }
        }
    }

    /// What contributions are in place of gradients.
    pub(super) fn writing(&self) -> Option<Write> {
        self.writing
    }

    /// The state that a step broadcasts in place of results.
    pub(super) fn read_in(&self, step: Step) -> Option<StateRead> {
        self.reading.filter(|(of, _)| self.is_async || *of == step).map(|(_, read)| read)
    }

    /// Forgets all optimizer state.
    pub(crate) fn clear_state(&mut self) {
        self.states.iter_mut().flatten().for_each(SliceState::clear_optimizer);
    }

    /// Returns the residual of this rank's contributions to a tensor, between steps: of each slice the first
    /// element, and the values.
    pub(crate) fn worker_residual(&mut self, tensor: TensorId) -> Vec<(u64, Vec<f32>)> {
        let width = self.plan.residual_width(tensor);
        let slices = self.plan.slices_of(tensor);
        let of_slice = |slice: SliceId| {
            let (start, length) = (self.plan.slice(slice).start, self.plan.slice(slice).length);
            let mut values = self.state(slice).values(StateKind::WorkerResidual).clone();
            values.resize(values.len().max(length as usize * width), 0.0);
            (start, values)
        };
        slices.map(of_slice).collect()
    }

    /// Returns the squared norms of the residuals of this rank's contributions, of the slices from
    /// `first` on, until about `elements_max` numbers are read. A slice whose residual is with a job,
    /// or has none, is left out.
    pub(crate) fn residual_squares(
        &mut self,
        first: SliceId,
        elements_max: usize,
    ) -> ResidualSquares {
        let mut found = ResidualSquares::default();
        let mut read = 0;
        for (index, state) in self.states.iter_mut().enumerate().skip(first.index()) {
            if read >= elements_max {
                found.next = SliceId(index as u32);
                break;
            }
            let Some(state) = state else { continue };
            let values = state.values(StateKind::WorkerResidual);
            if !values.is_empty() {
                read += values.len();
                let slice = SliceId(index as u32);
                let tensor = self.plan.slice(slice).tensor;
                let squares = residual::squares(values, self.plan.residual_width(tensor));
                found.rows.push((tensor, slice, squares));
            }
        }
        found
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

    /// Puts back the state that a job has taken along.
    pub(super) fn store_state(&mut self, slice: SliceId, state: JobState) {
        let left_out = self.is_left_out.then_some(self.step);
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
        self.is_left_out |= step == self.step;
        self.states.iter_mut().flatten().for_each(|state| state.contributed().rollback(step));
    }

    /// Moves a slice's state out, for a job that gives it back.
    pub(super) fn take_state(&mut self, slice: SliceId) -> SliceState {
        std::mem::take(self.state(slice))
    }

    /// Returns a slice's state.
    pub(super) fn state(&mut self, slice: SliceId) -> &mut SliceState {
        self.states[slice.index()].get_or_insert_default()
    }

    /// Returns the update rule of a tensor.
    pub(super) fn update_rule(&self, tensor: TensorId) -> Result<UpdateRule, JobError> {
        self.rules[tensor.index()].ok_or(JobError::NoUpdateRule)
    }
}

#[cfg(test)]
mod tests {
    use super::super::residual::WorkerResidual;
    use super::*;
    use gradlane_engine::{Roles, Strategy, TensorKind, TensorSpec, Update};
    use gradlane_units::Dtype;

    fn state() -> ComputeState {
        let tensor = TensorSpec {
            name: "layer".into(),
            numel: 1,
            dtype: Dtype::F32,
            kind: TensorKind::Parameter,
        };
        let strategy = Strategy::named("p3", None, 0).expect("a strategy");
        let plan = Plan::build_for(vec![tensor], strategy, Update::Worker, Roles::shared(2));
        let plan = Arc::new(plan.expect("a plan"));
        ComputeState::new(&plan, &ChannelOptions::new(0, 2)).expect("no codecs")
    }

    /// A residual of 1 that is 2 after an encoding in a step, which a job has still got.
    fn encoded_in(step: Step) -> WorkerResidual {
        let mut residual = WorkerResidual::default();
        residual.values.push(1.0);
        residual.snapshot(step);
        residual.values[0] = 2.0;
        residual
    }

    #[test]
    fn what_is_encoded_when_others_are_further_leaves_no_trace() {
        for further in 0..3 {
            let mut state = state();
            state.begin_step(Step(4));
            (0..=further).for_each(|steps| state.left_out(Step(4 + steps)));
            state.store_state(SliceId(0), JobState::WorkerResidual(encoded_in(Step(4))));
            let residual = state.worker_residual(TensorId(0));
            assert_eq!(residual, [(0, vec![1.0])], "{further} steps further");
        }
    }

    #[test]
    fn what_counts_is_kept_after_a_step_that_did_not() {
        let mut state = state();
        state.begin_step(Step(4));
        state.left_out(Step(4));
        state.begin_step(Step(5));
        state.store_state(SliceId(0), JobState::WorkerResidual(encoded_in(Step(5))));
        assert_eq!(state.worker_residual(TensorId(0)), [(0, vec![2.0])]);
    }
}
