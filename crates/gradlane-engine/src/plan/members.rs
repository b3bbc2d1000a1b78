//! A plan after ranks were lost: the same slices, owned by those that are left.

use crate::api::UsageError;
use crate::plan::build::LeastLoaded;
use crate::plan::{Plan, PullRule, Scheme, Synchrony, TensorKind, TensorPlan, Update};
use crate::rank_set::RankSet;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId};
use gradlane_wire::{PayloadForm, HEADER_BYTES};

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
        let mut refused = self.tensors.iter().filter_map(TensorPlan::why_not_done_again);
        let why: String = if self.strategy.synchrony != Synchrony::Bulk {
            "steps do not wait for all ranks".into()
        } else if self.update == Update::Server {
            "updates run on the servers, and a lost one takes its optimizer's state along".into()
        } else if self.dedicated_servers > 0 {
            "dedicated servers own the slices".into()
        } else if self.strategy.pull != PullRule::Broadcast {
            "results are pulled".into()
        } else if let Some(why) = refused.next() {
            why
        } else {
            return Ok(());
        };
        Err(UsageError::Argument(format!("training cannot go on without a lost rank: {why}")))
    }

    /// The same plan for fewer ranks. Tensors of rings have servers from then on. Slices keep their cut, and
    /// their owner if it is left: it has what it has held back of their results. The others are dealt to
    /// the ranks that own some, or to all if none of these is left.
    pub(crate) fn with_members(&self, members: &RankSet) -> Plan {
        let mut plan = self.clone();
        plan.lost = RankSet::all(self.world_size).without(members);
        for tensor in plan.tensors.iter_mut().filter(|tensor| tensor.scheme == Scheme::Ring) {
            tensor.scheme = Scheme::Ps;
        }
        let owns = |rank: &Rank| self.slices.iter().any(|slice| slice.owner == *rank);
        let mut owners: Vec<Rank> = members.iter().filter(owns).collect();
        if owners.is_empty() {
            owners = members.iter().collect();
        }
        for kind in [TensorKind::Parameter, TensorKind::Initial] {
            let is_of_kind =
                |&slice: &SliceId| self.tensor(self.slice(slice).tensor).spec.kind == kind;
            let of_kind = self.slice_ids().filter(is_of_kind);
            let (kept, orphans): (Vec<SliceId>, Vec<SliceId>) =
                of_kind.partition(|&slice| members.contains(self.slice(slice).owner));
            let mut loads: BTreeMap<Rank, u64> = owners.iter().map(|&rank| (rank, 0)).collect();
            for slice in kept {
                *loads.entry(self.slice(slice).owner).or_default() += self.message_bytes(slice);
            }
            let mut placer = LeastLoaded::with(loads);
            for slice in orphans {
                plan.slices[slice.index()].owner = placer.place(self.message_bytes(slice));
            }
        }
        plan
    }

    /// The most bytes of a slice on the wire, as a placement counts them.
    pub(super) fn message_bytes(&self, slice: SliceId) -> u64 {
        let form = match self.codec(slice) {
            Some(_) => PayloadForm::Encoded,
            None => PayloadForm::Raw,
        };
        self.bytes_as(slice, form).saturating_add(HEADER_BYTES as u64)
    }
}

impl TensorPlan {
    /// Why contributions to this tensor cannot be added up anew; none if they can.
    fn why_not_done_again(&self) -> Option<String> {
        let (name, scheme) = (&self.spec.name, self.scheme.name());
        if self.scheme == Scheme::Ps {
            return None;
        }
        if self.scheme != Scheme::Ring {
            return Some(format!(
                "tensor {name:?} has scheme {scheme}, and only schemes ps and ring are done again"
            ));
        }
        let codec = self.codec.as_ref()?;
        let why = if codec.residual_width > 0 {
            "each rank holds back parts of sums, which are not its own contributions"
        } else if !codec.scales.is_empty() {
            "codes are added up by scales of all ranks, and servers would need another size of slices"
        } else {
            return None;
        };
        let codec = &codec.name;
        Some(format!(
            "tensor {name:?} has scheme {scheme} and codec {codec:?}: {why}; use scheme ps, as strategy p3 does"
        ))
    }
}
