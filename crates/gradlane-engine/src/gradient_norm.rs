//! The squares of a step's means: every owner adds up those of the slices that it has reduced, and tells all
//! ranks the sum once, at top priority. So all know the norm of all gradients as soon as the last
//! slice is reduced, and before the means are everywhere. The sums are exact ([`SquareSum`]): neither
//! plan nor arrival changes a bit. Blocks have no owner: whoever wants the norm adds the squares of their
//! means, which all ranks make, or one for all.

use crate::api::{Event, UsageError};
use crate::cx::Cx;
use crate::plan::{Plan, Synchrony, Update};
use crate::rank_set::RankSet;
use crate::transmit::Body;
use crate::violation::{violation, Validated};
use alloc::collections::BTreeMap;
use alloc::format;
use gradlane_units::{Rank, SliceId, SquareSum, Step, TensorId};
use gradlane_wire::{FrameHeader, FrameKind};

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
    fn measures(&self, step: Step, tensor: TensorId) -> bool {
        self.measured.as_ref().is_some_and(|it| it.step == step && tensor < it.tensors)
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

impl Cx {
    /// In this step squares are added up.
    pub(crate) fn measure_squares(
        &mut self,
        step: Step,
        tensors: TensorId,
    ) -> Result<(), UsageError> {
        let plan = &self.plan;
        plan.check_measurable_squares(tensors)?;
        if self.kept.are_kept() {
            let text =
                "squares cannot be added up by owners that may be lost while training goes on";
            return Err(UsageError::Argument(text.into()));
        }
        if self.worker.has_submitted() {
            let text = "measure_squares comes before the step's first contribution";
            return Err(UsageError::Argument(text.into()));
        }
        let owned = |slice: &SliceId| {
            let tensor = plan.slice(*slice).tensor;
            tensor < tensors && plan.takes_part(tensor, step) && self.reduces(*slice)
        };
        let missing = plan.slice_ids().filter(owned).count();
        let own = SquareSum::default();
        self.squares.measured = Some(Measured { step, tensors, missing, own });
        self.send_squares_if_whole();
        Ok(())
    }

    /// Whether this rank has the mean of a slice first. Nobody has that of a block.
    fn reduces(&self, slice: SliceId) -> bool {
        let has_blocks = self.plan.tensor(self.plan.slice(slice).tensor).scheme.has_blocks();
        self.plan.slice(slice).owner == self.rank && !has_blocks
    }

    /// Whether a slice's squares have to be added up before its result is released here.
    pub(crate) fn owes_squares(&self, slice: SliceId) -> bool {
        let tensor = self.plan.slice(slice).tensor;
        self.squares.measures(self.worker.step(), tensor) && self.reduces(slice)
    }

    /// Adds the squares of an owned slice; `None` where no rank had a gradient.
    pub(crate) fn add_squares(&mut self, sum: Option<&SquareSum>) {
        if let Some(measured) = &mut self.squares.measured {
            measured.missing -= 1;
            if let Some(sum) = sum {
                measured.own.merge(sum);
            }
        }
        self.send_squares_if_whole();
    }

    fn send_squares_if_whole(&mut self) {
        let whole = self.squares.measured.as_mut().filter(|it| it.missing == 0);
        let Some((step, own)) = whole.map(|it| (it.step, core::mem::take(&mut it.own))) else {
            return;
        };
        let header = FrameHeader { step, ..self.control_header(FrameKind::SquareSum) };
        let others = self.others();
        if !others.is_empty() {
            self.send_control(others, header, Body::Inline(own.to_bytes()));
        }
        self.note_squares(self.rank, step, &own);
    }

    /// Takes a rank's sum of squares.
    pub(crate) fn take_squares(
        &mut self,
        from: Rank,
        header: &FrameHeader,
        payload: &[u8],
    ) -> Validated<()> {
        let (step, current) = (header.step, self.worker.step());
        let Some(sum) = SquareSum::from_bytes(payload) else {
            return violation(format!("a sum of squares that is none, of {step}"));
        };
        if step < current {
            // This rank knows the step's means by other ways: it goes on without.
            return Ok(());
        }
        let twice = self.squares.steps.get(&step).is_some_and(|it| it.summed.contains(from));
        if step.is_initial() || step > current.next() || twice {
            return violation(format!("a sum of squares of {step}, this rank is in {current}"));
        }
        self.note_squares(from, step, &sum);
        self.check_squares_are_wanted();
        Ok(())
    }

    /// Ends the session where other ranks measure squares in a step, and this one does not.
    pub(crate) fn check_squares_are_wanted(&mut self) {
        let step = self.worker.step();
        if self.worker.has_submitted() && !self.squares.are_measured(step) {
            let others = self.squares.steps.get(&step).and_then(|it| it.summed.iter().next());
            if let Some(rank) = others {
                self.abort(format!(
                    "{rank} clips gradients by their norm in {step} and {} does not: \
                     clip_grad_norm_ and GradScaler have to be used on all ranks or on none",
                    self.rank
                ));
            }
        }
    }

    fn note_squares(&mut self, rank: Rank, step: Step, sum: &SquareSum) {
        let (ranks, measured) = (self.plan.world_size, self.squares.are_measured(step));
        let known = self.squares.steps.entry(step).or_insert_with(|| StepSquares {
            sum: SquareSum::default(),
            summed: RankSet::empty(ranks),
        });
        known.sum.merge(sum);
        known.summed.insert(rank);
        if known.summed.len() == ranks && measured {
            let sum = known.sum.clone();
            self.events.push_back(Event::SquaresReady { step, sum });
        }
    }
}
