//! Checks of the application's calls, so that misuse is an error of the very call.
//!
//! The engine checks the same on its own thread; these checks come earlier. A refused call changes
//! nothing.

use gradlane_engine::{Plan, Scheme, UsageError};
use gradlane_units::{Step, TensorId};

/// Steps and contributions as called.
#[derive(Debug)]
pub(crate) struct ApiGuard {
    current: Option<Step>,
    /// By tensor: one more than the last step of a contribution.
    contributed: Vec<u64>,
    /// The step in which squares are added up.
    measured: Option<Step>,
}

impl ApiGuard {
    /// Makes the guard of a session before step 0.
    pub(crate) fn new(tensors: usize) -> ApiGuard {
        ApiGuard { current: None, contributed: vec![0; tensors], measured: None }
    }

    /// Returns the step in force; step 0 before any.
    pub(crate) fn current(&self) -> Step {
        self.current.unwrap_or_default()
    }

    /// Checks that a step may begin. `is_complete` tells whether the one in force is, `missing` how
    /// many tensors it lacks, with the name of the first.
    pub(crate) fn step_begin(
        &mut self,
        step: Step,
        is_complete: impl FnOnce(Step) -> bool,
        missing: impl FnOnce(Step) -> (usize, String),
    ) -> Result<(), UsageError> {
        let expected = self.current.map_or(Step(0), Step::next);
        if step != expected {
            return Err(UsageError::WrongStep { call: "step_begin", step, current: expected });
        }
        if let Some(current) = self.current.filter(|&current| !is_complete(current)) {
            let (missing, name) = missing(current);
            return Err(UsageError::Incomplete { step, current, missing, name });
        }
        self.current = Some(step);
        Ok(())
    }

    /// Checks that a call is for the step in force.
    pub(crate) fn check_step(&self, call: &'static str, step: Step) -> Result<(), UsageError> {
        if self.current == Some(step) {
            return Ok(());
        }
        Err(UsageError::WrongStep { call, step, current: self.current() })
    }

    /// Checks that squares may be added up in a step, and notes it.
    pub(crate) fn measure_squares(
        &mut self,
        plan: &Plan,
        tensors: TensorId,
        step: Step,
    ) -> Result<(), UsageError> {
        self.check_step("measure_squares", step)?;
        plan.check_measurable_squares(tensors)?;
        if self.contributed.contains(&(step.0 + 1)) {
            let what = "measure_squares comes before the step's first contribution";
            return Err(UsageError::Argument(what.to_owned()));
        }
        self.measured = Some(step);
        Ok(())
    }

    /// Checks that squares are added up in a step.
    pub(crate) fn check_measured(&self, step: Step) -> Result<(), UsageError> {
        if self.measured == Some(step) {
            return Ok(());
        }
        Err(UsageError::Argument(format!("no squares are added up in {step}")))
    }

    /// Checks that a tensor exists.
    pub(crate) fn check_tensor(plan: &Plan, tensor: TensorId) -> Result<(), UsageError> {
        if tensor.index() < plan.tensors.len() {
            return Ok(());
        }
        Err(UsageError::UnknownTensor { tensor: tensor.0, count: plan.tensors.len() })
    }

    /// Checks that memory is as large as its tensor.
    pub(crate) fn check_memory(
        plan: &Plan,
        tensor: TensorId,
        memory: crate::memory::UserMemory,
    ) -> Result<(), UsageError> {
        ApiGuard::check_tensor(plan, tensor)?;
        let spec = &plan.tensor(tensor).spec;
        let expected = spec.numel * spec.dtype.bytes();
        if memory.bytes() as u64 != expected || memory.is_null() {
            return Err(UsageError::Argument(format!(
                "memory of {} bytes for tensor {:?}, which has {} elements of {} ({expected} bytes)",
                memory.bytes(),
                spec.name,
                spec.numel,
                spec.dtype
            )));
        }
        Ok(())
    }

    /// Checks a contribution: once a step, and only if the tensor takes part.
    pub(crate) fn contribute(
        &mut self,
        call: &'static str,
        plan: &Plan,
        tensor: TensorId,
        step: Step,
        memory: crate::memory::UserMemory,
    ) -> Result<(), UsageError> {
        ApiGuard::check_memory(plan, tensor, memory)?;
        if plan.tensor(tensor).scheme.has_blocks() {
            let name = &plan.tensor(tensor).spec.name;
            let message = format!("tensor {name:?} has blocks of any size: use block_ready");
            return Err(UsageError::Argument(message));
        }
        self.note(call, plan, tensor, step)
    }

    /// Checks that a tensor has blocks, and may have one of this size.
    pub(crate) fn check_block(
        plan: &Plan,
        tensor: TensorId,
        bytes: usize,
    ) -> Result<(), UsageError> {
        ApiGuard::check_tensor(plan, tensor)?;
        let planned = plan.tensor(tensor);
        let (name, element) = (&planned.spec.name, planned.spec.dtype.bytes());
        let most = planned.spec.numel.saturating_mul(element);
        if !planned.scheme.has_blocks() {
            let message = format!("tensor {name:?} has no blocks: use gradient_ready");
            return Err(UsageError::Argument(message));
        }
        if bytes as u64 > most || !(bytes as u64).is_multiple_of(element) {
            return Err(UsageError::Argument(format!(
                "a block of {bytes} bytes for tensor {name:?}, whose blocks are at most {most} bytes \
                 in elements of {element}"
            )));
        }
        Ok(())
    }

    /// Checks a block: once a step, and no larger than the plan allows.
    pub(crate) fn contribute_block(
        &mut self,
        plan: &Plan,
        tensor: TensorId,
        step: Step,
        bytes: usize,
    ) -> Result<(), UsageError> {
        ApiGuard::check_block(plan, tensor, bytes)?;
        self.note("block_ready", plan, tensor, step)
    }

    /// Notes the one contribution of a tensor to the step in force.
    fn note(
        &mut self,
        call: &'static str,
        plan: &Plan,
        tensor: TensorId,
        step: Step,
    ) -> Result<(), UsageError> {
        self.check_step(call, step)?;
        let name = || plan.tensor(tensor).spec.name.clone();
        if !plan.takes_part(tensor, step) {
            let only = match plan.tensor(tensor).scheme {
                Scheme::AllGather | Scheme::GatherToRoot => "has blocks in training steps only",
                _ => "is spread in step 0 only",
            };
            return Err(UsageError::Argument(format!(
                "tensor {:?} {only} and takes no part in {step}",
                name()
            )));
        }
        let entry = &mut self.contributed[tensor.index()];
        if *entry == step.0 + 1 {
            return Err(UsageError::Twice { name: name(), step });
        }
        *entry = step.0 + 1;
        Ok(())
    }
}
