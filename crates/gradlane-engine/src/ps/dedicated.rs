//! What holds up a step: contributors of owned slices, here and on dedicated servers.

use super::ParameterServer;
use crate::api::Outstanding;
use crate::cx::Cx;
use crate::plan::Plan;
use crate::rank_set::RankSet;
use gradlane_units::{Rank, SliceId, Step, TensorId};
use gradlane_wire::PayloadForm;

/// Missing contributors.
impl ParameterServer {
    /// Ranks whose contributions the owned slices still lack in the current step.
    pub(super) fn missing_contributors(&self, cx: &Cx) -> RankSet {
        let mut missing = RankSet::empty(cx.plan().world_size);
        let step = cx.step();
        if cx.plan().is_async(step) {
            return missing;
        }
        let set = self.stragglers.set(step);
        let counts = |rank: &Rank| set.is_none_or(|set| set.contains(*rank));
        for (slice, owned) in self.owner.iter() {
            let collects = cx.plan().takes_part(cx.plan().slice(slice).tensor, step);
            if owned.step() == step && !owned.is_reducing() && collects {
                self.lacking(cx, owned).filter(counts).for_each(|rank| {
                    missing.insert(rank);
                });
            }
        }
        missing.remove(cx.rank());
        missing
    }
}

/// Dedicated servers. They need no worker's state: their contributions say which step they are in.
impl ParameterServer {
    /// A slice of a step is reduced, perhaps the first one: priorities are those of the next step from
    /// now on, and the ones before this step are done with.
    pub(super) fn note_served(&mut self, cx: &mut Cx, step: Step) {
        if self.newest_served.is_none_or(|newest| newest < step) {
            self.newest_served = Some(step);
            cx.enter_priorities(step.next());
        }
    }

    /// Whether some ranks have contributed to a slice, and others not.
    pub(crate) fn is_collecting(&self) -> bool {
        self.owner.collecting().next().is_some()
    }

    /// The last step of which all that this rank owns is reduced.
    pub(crate) fn last_served(&self, plan: &Plan) -> Option<Step> {
        let trained = |slice: SliceId| plan.takes_part(plan.slice(slice).tensor, Step(1));
        let served = self.owner.iter().filter(|&(slice, _)| trained(slice));
        let least = served.map(|(_, owned)| owned.step()).min();
        least.and_then(|step| step.0.checked_sub(1)).map(Step)
    }

    /// Slices that some ranks have contributed to, and others not.
    pub(crate) fn uncollected(&self, cx: &Cx) -> Outstanding {
        let mut outstanding = Outstanding::default();
        let mut missing = RankSet::empty(cx.plan().world_size);
        let mut last: Option<TensorId> = None;
        for (slice, owned) in self.owner.collecting() {
            outstanding.step = outstanding.step.max(owned.step());
            let tensor = cx.plan().slice(slice).tensor;
            if last.replace(tensor) != Some(tensor) {
                outstanding.add_tensor(cx.plan().name_of(slice));
            }
            let bytes = cx.plan().bytes_as(slice, owned.form().unwrap_or(PayloadForm::Raw));
            for rank in self.lacking(cx, owned) {
                missing.insert(rank);
                let arrived = owned.contributions().received_bytes(rank);
                outstanding.bytes += bytes.saturating_sub(arrived);
            }
        }
        outstanding.ranks = missing.iter().collect();
        outstanding
    }
}
