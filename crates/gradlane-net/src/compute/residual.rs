//! The residual of this rank's contributions to a slice, with a snapshot to roll back to.
//!
//! Where a step may go on without this rank, a contribution that was sent may not count. Then it
//! leaves no trace: the residual is the one before, to the last bit, and the gradient is lost, or
//! the application adds it to a later one. So the sum of the counted contributions and the residual
//! is that of the counted gradients.

use gradlane_units::{SliceId, Step, TensorId};

/// Numbers that are squared at a time.
const LANES: usize = 8;

/// Squared norms of residuals by slice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResidualSquares {
    /// Tensor, slice, and the sum of the squares of its residual.
    pub rows: Vec<(TensorId, SliceId, f64)>,
    /// The slice to go on with; the first one after the last.
    pub next: SliceId,
}

/// Returns the sum of the squares of a residual, the first of `width` numbers for each value.
pub(crate) fn squares(values: &[f32], width: usize) -> f64 {
    let square = |value: &f32| f64::from(*value) * f64::from(*value);
    if width > 1 {
        return values.iter().step_by(width).map(square).sum();
    }
    let mut lanes = [0.0; LANES];
    let blocks = values.chunks_exact(LANES);
    let rest: f64 = blocks.remainder().iter().map(square).sum();
    for block in blocks {
        lanes.iter_mut().zip(block).for_each(|(lane, value)| *lane += square(value));
    }
    lanes.iter().sum::<f64>() + rest
}

/// The residual of one slice; empty while it is zero.
#[derive(Debug, Default)]
pub(crate) struct WorkerResidual {
    pub(crate) values: Vec<f32>,
    /// The values before they were last sent, and the step of that.
    before: Vec<f32>,
    sent_in: Option<Step>,
}

impl WorkerResidual {
    /// Saves the values, which are about to be sent in a step that may not count them.
    pub(crate) fn snapshot(&mut self, step: Step) {
        self.before.clear();
        self.before.extend_from_slice(&self.values);
        self.sent_in = Some(step);
    }

    /// Restores the values that were saved for a step which went on without this rank.
    pub(crate) fn rollback(&mut self, step: Step) {
        if self.sent_in == Some(step) {
            self.sent_in = None;
            std::mem::swap(&mut self.values, &mut self.before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_sent_in_the_step_is_taken_back_and_once() {
        let mut residual = WorkerResidual::default();
        residual.snapshot(Step(1));
        residual.values = vec![1.0, -0.0];
        residual.rollback(Step(2));
        assert_eq!(residual.values, [1.0, -0.0]);
        residual.snapshot(Step(2));
        residual.values[0] = 7.0;
        residual.rollback(Step(2));
        residual.rollback(Step(2));
        assert_eq!(residual.values, [1.0, -0.0]);
        assert!(residual.values[1].is_sign_negative());
    }

    #[test]
    fn squares_are_those_of_the_first_number_of_each_value() {
        let values: Vec<f32> = (0..21).map(|value| value as f32).collect();
        assert_eq!(squares(&values, 1), 2870.0);
        assert_eq!(squares(&values, 3), 0.0 + 9.0 + 36.0 + 81.0 + 144.0 + 225.0 + 324.0);
        assert_eq!(squares(&[], 1), 0.0);
    }

    #[test]
    fn the_first_contribution_leaves_nothing_behind_when_it_is_taken_back() {
        let mut residual = WorkerResidual::default();
        residual.snapshot(Step(4));
        residual.values = vec![0.5; 3];
        residual.rollback(Step(4));
        assert!(residual.values.is_empty());
    }
}
