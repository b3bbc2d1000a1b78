//! The squares of a step's means: every owner adds up those of the slices that it has reduced, and tells all
//! ranks the sum once, at top priority. So all know the norm of all gradients as soon as the last
//! slice is reduced, and before the means are everywhere. The sums are exact ([`SquareSum`]): neither
//! plan nor arrival changes a bit. Blocks have no owner: whoever wants the norm adds the squares of their
//! means, which all ranks make, or one for all.

use crate::api::UsageError;
use crate::plan::{Plan, Synchrony, Update};
use crate::rank_set::RankSet;
use alloc::collections::BTreeMap;
use alloc::format;
use gradlane_units::{Rank, SquareSum, Step, TensorId};

/// What is known of a step.
#[derive(Debug)]
struct StepSquares {
    sum: SquareSum,
    /// Ranks whose sums are in it.
    summed: RankSet,
}

/// The current step, where squares are added up in it.
#[derive(Debug)]
struct Measured {
    step: Step,
    /// Tensors before this one are gradients.
    tensors: TensorId,
    /// Owned slices whose squares are missing.
    missing: usize,
    own: SquareSum,
}

/// Sums of squares, of this rank and from others.
#[derive(Debug, Default)]
pub(crate) struct Squares {
    measured: Option<Measured>,
    /// Ranks may be ahead by a step.
    steps: BTreeMap<Step, StepSquares>,
}

impl Squares {
    /// Whether results of a step wait until the squares of all gradients are known.
    pub(crate) fn are_measured(&self, step: Step) -> bool {
        self.measured.as_ref().is_some_and(|it| it.step == step)
    }

    /// Whether a slice's squares are to be added up by its owner.
    pub(crate) fn measures(&self, step: Step, tensor: TensorId) -> bool {
        self.measured.as_ref().is_some_and(|it| it.step == step && tensor < it.tensors)
    }

    /// In this step the squares of this many owned slices of the tensors before this one are added up.
    pub(crate) fn measure(&mut self, step: Step, tensors: TensorId, missing: usize) {
        self.measured = Some(Measured { step, tensors, missing, own: SquareSum::default() });
    }

    /// Adds the squares of an owned slice; `None` where no rank had a gradient.
    pub(crate) fn add(&mut self, sum: Option<&SquareSum>) {
        if let Some(measured) = &mut self.measured {
            measured.missing -= 1;
            sum.into_iter().for_each(|sum| measured.own.merge(sum));
        }
    }

    /// The sum of this rank, once it is whole, and its step.
    pub(crate) fn take_whole(&mut self) -> Option<(Step, SquareSum)> {
        let whole = self.measured.as_mut().filter(|it| it.missing == 0);
        whole.map(|it| (it.step, core::mem::take(&mut it.own)))
    }

    /// Notes a rank's sum; that of all, where it was the last one and they are measured here.
    pub(crate) fn note(
        &mut self,
        rank: Rank,
        step: Step,
        sum: &SquareSum,
        ranks: u32,
    ) -> Option<SquareSum> {
        let measured = self.are_measured(step);
        let known = self.steps.entry(step).or_insert_with(|| StepSquares {
            sum: SquareSum::default(),
            summed: RankSet::empty(ranks),
        });
        known.sum.merge(sum);
        known.summed.insert(rank);
        (known.summed.len() == ranks && measured).then(|| known.sum.clone())
    }

    /// Ranks whose sums of a step are here.
    pub(crate) fn summed(&self, step: Step) -> Option<&RankSet> {
        self.steps.get(&step).map(|it| &it.summed)
    }

    /// A step has begun: those before it are done with.
    pub(crate) fn enter(&mut self, step: Step) {
        self.steps = self.steps.split_off(&step);
        self.measured = None;
    }
}

impl Plan {
    /// Checks that the owners of slices can add up the squares of the first `tensors` gradients before
    /// the means are everywhere: [`Input::MeasureSquares`](crate::Input::MeasureSquares).
    ///
    /// # Errors
    ///
    /// There are fewer tensors, or nobody has the mean of one in time; says why.
    pub fn check_measurable_squares(&self, tensors: TensorId) -> Result<(), UsageError> {
        let count = self.tensors.len();
        if tensors.index() > count {
            return Err(UsageError::UnknownTensor { tensor: tensors.0, count });
        }
        let why = if self.strategy.synchrony != Synchrony::Bulk {
            "steps do not wait for all ranks"
        } else if self.update == Update::Server {
            "updates run on the servers"
        } else if self.dedicated_servers > 0 {
            "dedicated servers own the slices"
        } else {
            return Ok(());
        };
        Err(UsageError::Argument(format!("squares cannot be added up: {why}")))
    }
}
