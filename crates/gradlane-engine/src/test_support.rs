//! An engine as it would be after very many steps, for tests of what numbers do then: a run of a year is a
//! hundred million steps, and no test can wait for that.

use crate::engine::Engine;
use gradlane_units::Step;

impl Engine {
    /// Goes on as if `step` were the one that has just been completed, and as if as many messages
    /// had been queued and jobs been done. All ranks have to skip to the same step, when nothing is
    /// under way.
    ///
    /// # Panics
    /// When a step is not complete, or this one is not a later one.
    #[doc(hidden)]
    pub fn fast_forward(&mut self, step: Step) {
        assert!(self.worker.is_complete() && step > self.worker.step, "between steps, and later");
        self.worker.step = step;
        self.keys.skip(step.0);
        self.jobs.skip(step.0);
        for owned in self.server.owned.values_mut() {
            owned.step = step.next();
        }
        for round in &mut self.ring.slices {
            round.step = step.next();
        }
        self.async_owners.skip(self.plan.world_size, step);
        self.contributors.skip(self.plan.world_size, step);
    }
}
