//! The schemes: how the slices of a tensor are aggregated. The one `match` over them is here.

use crate::aggregator::Aggregator;
use crate::cx::Cx;
use crate::gather::Gather;
use crate::plan::{Plan, Scheme};
use crate::ps::ParameterServer;
use crate::rank_set::RankSet;
use crate::ring::Ring;
use gradlane_units::Rank;

#[derive(Debug)]
pub(crate) struct Schemes {
    pub(crate) ps: ParameterServer,
    pub(crate) ring: Ring,
    pub(crate) gather: Gather,
}

impl Schemes {
    pub(crate) fn new(plan: &Plan, rank: Rank) -> Schemes {
        Schemes {
            ps: ParameterServer::new(plan, rank),
            ring: Ring::new(plan),
            gather: Gather::default(),
        }
    }

    pub(crate) fn of(&mut self, scheme: Scheme) -> &mut dyn Aggregator {
        match scheme {
            Scheme::Ps => &mut self.ps,
            Scheme::Ring => &mut self.ring,
            Scheme::AllGather | Scheme::GatherToRoot => &mut self.gather,
        }
    }

    /// Ranks that hold up the current step, whatever the scheme of what is missing.
    pub(crate) fn missing(&self, cx: &Cx) -> RankSet {
        let mut missing = RankSet::empty(cx.plan.world_size);
        let all: [&dyn Aggregator; 3] = [&self.ps, &self.ring, &self.gather];
        for scheme in all {
            scheme.missing(cx).iter().for_each(|rank| {
                missing.insert(rank);
            });
        }
        missing
    }
}
