//! What encoding this rank's contributions to a slice has lost so far, and the way back.
//!
//! Where a step may go on without this rank, what was sent of a contribution may not count. Then
//! nothing of it may stay: the residual is what it was before, to the last bit, and the gradient is lost, or
//! carried on by who has it. So the sum of what counted and the residual is that of the gradients
//! that counted.

use gradlane_units::Step;

/// The residual of one slice; empty where nothing was lost yet.
#[derive(Debug, Default)]
pub(crate) struct WorkerResidual {
    pub(crate) values: Vec<f32>,
    /// What the values were before they were last sent, and in which step that was.
    before: Vec<f32>,
    sent_in: Option<Step>,
}

impl WorkerResidual {
    /// Keeps the way back: the values are about to be sent in a step that may not count them.
    pub(crate) fn snapshot(&mut self, step: Step) {
        self.before.clear();
        self.before.extend_from_slice(&self.values);
        self.sent_in = Some(step);
    }

    /// A step went on without this rank: what was sent in it was not.
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
    fn the_first_contribution_leaves_nothing_behind_when_it_is_taken_back() {
        let mut residual = WorkerResidual::default();
        residual.snapshot(Step(4));
        residual.values = vec![0.5; 3];
        residual.rollback(Step(4));
        assert!(residual.values.is_empty());
    }
}
