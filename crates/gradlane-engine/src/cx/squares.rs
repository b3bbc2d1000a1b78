//! The squares of a step's means, added up and exchanged.

use super::Cx;
use crate::api::{violation, Event, UsageError, Validated};
use crate::transmit::Body;
use alloc::format;
use gradlane_units::{Rank, SliceId, SquareSum, Step, TensorId};
use gradlane_wire::{FrameHeader, FrameKind};

impl Cx {
    /// In this step squares are added up.
    pub(crate) fn measure_squares(
        &mut self,
        step: Step,
        tensors: TensorId,
    ) -> Result<(), UsageError> {
        let plan = &self.plan;
        plan.check_measurable_squares(tensors)?;
        if self.kept.is_some() {
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
        self.squares.measure(step, tensors, missing);
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
        self.squares.add(sum);
        self.send_squares_if_whole();
    }

    fn send_squares_if_whole(&mut self) {
        let Some((step, own)) = self.squares.take_whole() else {
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
        let twice = self.squares.summed(step).is_some_and(|it| it.contains(from));
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
            let others = self.squares.summed(step).and_then(|it| it.iter().next());
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
        if let Some(sum) = self.squares.note(rank, step, sum, self.plan.world_size) {
            self.tell(Event::SquaresReady { step, sum });
        }
    }
}
