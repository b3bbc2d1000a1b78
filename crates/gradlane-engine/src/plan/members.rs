//! A plan after ranks were lost: the same slices, owned by those that are left.

use crate::api::UsageError;
use crate::plan::placement::{Dealt, Placer};
use crate::plan::{Plan, PullRule, Scheme, Synchrony, Update};
use crate::rank_set::RankSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId};

impl Plan {
    /// Ranks that train, and have not been lost.
    pub(crate) fn members(&self) -> RankSet {
        RankSet::all(self.workers()).without(&self.lost)
    }

    /// Checks that training under this plan can go on when ranks are lost.
    ///
    /// # Errors
    /// Says which part of the plan it cannot go on with.
    pub fn check_goes_on(&self) -> Result<(), UsageError> {
        let ring = self.tensors.iter().find(|tensor| tensor.scheme != Scheme::Ps);
        let encoded = self.tensors.iter().find(|tensor| tensor.codec.is_some());
        let why: String = if self.strategy.synchrony != Synchrony::Bulk {
            "steps do not wait for all ranks".into()
        } else if self.update == Update::Server {
            "updates run on the servers, and a lost one takes its optimizer's state along".into()
        } else if self.dedicated_servers > 0 {
            "dedicated servers own the slices".into()
        } else if self.strategy.pull != PullRule::Broadcast {
            "results are pulled".into()
        } else if let Some(tensor) = ring {
            let (name, scheme) = (&tensor.spec.name, tensor.scheme.name());
            format!("tensor {name:?} has scheme {scheme}, and only scheme ps is done again")
        } else if let Some(tensor) = encoded {
            format!("tensor {:?} is encoded", tensor.spec.name)
        } else {
            return Ok(());
        };
        Err(UsageError::Argument(format!("training cannot go on without a lost rank: {why}")))
    }

    /// The same plan for fewer ranks. Slices keep their cut; those ranks own them that did before, or
    /// all, if none of these is left.
    pub(crate) fn with_members(&self, members: &RankSet) -> Plan {
        let mut plan = self.clone();
        plan.lost = RankSet::all(self.world_size).without(members);
        let owns = |rank: &Rank| self.slices.iter().any(|slice| slice.owner == *rank);
        let mut owners: Vec<Rank> = members.iter().filter(owns).collect();
        if owners.is_empty() {
            owners = members.iter().collect();
        }
        let mut placer = Placer::new(self.strategy.placement, owners.len() as u32);
        for tensor in &self.tensors {
            let whole = tensor.slices.len() == 1;
            for (part, slice) in tensor.slices.clone().map(SliceId).enumerate() {
                let bytes = self.slice_bytes(slice);
                let server = placer.place(&Dealt { kind: tensor.spec.kind, bytes, part, whole });
                plan.slices[slice.index()].owner = owners[server.index()];
            }
        }
        plan
    }
}
