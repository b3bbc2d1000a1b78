//! Which ranks of the ring a slice passes, and in which order. Rank r hears from r - 1 and speaks to r + 1
//! alone.

use crate::plan::Plan;
use gradlane_units::{Rank, SliceId, Step};
use gradlane_wire::FrameKind;

/// One rank's place in the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Topology {
    pub(super) rank: Rank,
    pub(super) ranks: u32,
}

impl Topology {
    pub(super) fn new(plan: &Plan, rank: Rank) -> Topology {
        Topology { rank, ranks: plan.workers() }
    }

    fn after(self, rank: Rank) -> Rank {
        Rank((rank.0 + 1) % self.ranks)
    }

    /// The rank that this one speaks to.
    pub(super) fn next(self) -> Rank {
        self.after(self.rank)
    }

    /// The rank that this one hears from.
    pub(super) fn before(self) -> Rank {
        Rank((self.rank.0 + self.ranks - 1) % self.ranks)
    }

    /// Hops from a rank to this one.
    pub(super) fn hops_from(self, rank: Rank) -> u16 {
        let size = u64::from(self.ranks);
        ((u64::from(self.rank.0) + size - u64::from(rank.0)) % size) as u16
    }

    /// The rank on which a slice's sum begins: the one after its owner.
    pub(super) fn sum_begins(self, plan: &Plan, slice: SliceId) -> Rank {
        self.after(plan.slice(slice).owner)
    }

    /// The rank from which a slice's scales go out, so that they end where its sum begins.
    pub(super) fn scales_begin(self, plan: &Plan, slice: SliceId) -> Rank {
        self.after(self.sum_begins(plan, slice))
    }

    /// The rank from which a slice's result goes out: its owner, or rank 0 in step 0.
    pub(super) fn result_begins(plan: &Plan, slice: SliceId, step: Step) -> Rank {
        if step.is_initial() {
            Rank(0)
        } else {
            plan.slice(slice).owner
        }
    }

    /// The rank from which frames of a kind about a slice go out.
    pub(super) fn begins(self, plan: &Plan, kind: FrameKind, slice: SliceId, step: Step) -> Rank {
        match kind {
            FrameKind::RingScale => self.scales_begin(plan, slice),
            FrameKind::RingReduce => self.sum_begins(plan, slice),
            _ => Topology::result_begins(plan, slice, step),
        }
    }
}
