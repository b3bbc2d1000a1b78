//! The server's side of the slices that this rank owns: contributions of one step are collected,
//! reduced once, and the result is kept until everyone who is owed it has it.
//!
//! Under the synchrony `Bulk` a slice collects for one step at a time: nobody can contribute to a
//! step before having the result of the one before.

use crate::contribution_set::ContributionSet;
use crate::io::BufferRef;
use crate::plan::{Plan, Slice};
use crate::rank_set::RankSet;
use crate::scheme::Scheme;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step};
use gradlane_wire::PayloadForm;

/// What one rank contributed to a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contribution {
    /// This rank's own gradient memory.
    Own,
    /// A whole slice in scratch.
    Buffer(BufferRef),
    /// A whole slice in scratch, encoded.
    Encoded(BufferRef),
    /// Nothing: counts as zeros.
    Absent,
}

#[derive(Debug)]
pub(crate) struct OwnedSlice {
    /// Step that contributions are collected for.
    pub(crate) step: Step,
    /// Contributions, whole and partial ones.
    pub(crate) contributions: ContributionSet,
    /// Whether the reduction is queued or under way.
    pub(crate) reducing: bool,
    /// In which form the step's contributions come, once one has.
    pub(crate) form: Option<PayloadForm>,
    /// Urgency: what the last header said, or the own vector for own contributions.
    pub(crate) priority: Priority,
    /// Ranks that asked before the result was there.
    pub(crate) early_pulls: Vec<Rank>,
}

/// A result that is still owed to some ranks.
#[derive(Debug)]
pub(crate) struct Owed {
    /// The result; none when no rank had a gradient.
    pub(crate) buffer: Option<BufferRef>,
    /// Its form.
    pub(crate) form: PayloadForm,
    /// Ranks that must still ask (pull rules).
    pub(crate) to_pull: RankSet,
    /// Ranks whose last frame is not yet with the kernel.
    pub(crate) to_send: RankSet,
    /// Urgency.
    pub(crate) priority: Priority,
}

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) owned: BTreeMap<SliceId, OwnedSlice>,
    pub(crate) owed: BTreeMap<(SliceId, Step), Owed>,
    /// The newest step of which a slice was reduced, on a rank that only serves.
    pub(crate) newest: Option<Step>,
}

impl Server {
    pub(crate) fn new(plan: &Plan, rank: Rank) -> Server {
        let fresh = || OwnedSlice {
            step: Step(0),
            contributions: ContributionSet::default(),
            reducing: false,
            form: None,
            priority: Priority(0),
            early_pulls: Vec::new(),
        };
        let slices = plan.slices.iter().enumerate();
        let served = |slice: &Slice| plan.tensor(slice.tensor).scheme == Scheme::Ps;
        let mine = slices.filter(|(_, slice)| slice.owner == rank && served(slice));
        let owned = mine.map(|(index, _)| (SliceId(index as u32), fresh())).collect();
        Server { owned, owed: BTreeMap::new(), newest: None }
    }

    /// Step 0 is behind: collects for step 1.
    pub(crate) fn skip_initial(&mut self) {
        self.owned.values_mut().for_each(OwnedSlice::advance);
    }
}

impl OwnedSlice {
    /// Whether some contributions have come, or begun to, and others are missing.
    pub(crate) fn is_collecting(&self) -> bool {
        !self.contributions.is_empty() && !self.reducing
    }

    /// After a reduction: the next step's contributions may come.
    pub(crate) fn advance(&mut self) {
        self.step = self.step.next();
        self.reducing = false;
        self.form = None;
        self.early_pulls.clear();
    }
}
