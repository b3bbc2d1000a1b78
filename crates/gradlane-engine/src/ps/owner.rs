//! The slices that this rank owns: contributions of one step are collected, and the result is kept until
//! every rank that is owed it has it.
//!
//! In bulk-synchronous training a slice collects for one step at a time: no rank can contribute to a
//! step before it has the result of the step before.

use super::contribution_set::ContributionSet;
use crate::api::BufferRef;
use crate::contribution::{Arriving, Contribution};
use crate::plan::{Plan, Scheme};
use crate::rank_set::RankSet;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step};
use gradlane_wire::{FrameHeader, PayloadForm};

#[derive(Debug)]
pub(super) struct OwnedSlice {
    /// Step that contributions are collected for.
    step: Step,
    contributions: ContributionSet,
    /// Whether the reduction is queued or under way.
    reducing: bool,
    /// In which form the step's contributions come, once one has.
    form: Option<PayloadForm>,
    /// That of the last header, or this rank's own for own contributions.
    priority: Priority,
    /// Ranks that pulled before the result was there.
    early_pulls: Vec<Rank>,
}

/// A result that is still owed to some ranks.
#[derive(Debug)]
pub(super) struct PendingBroadcast {
    /// The result; none when no rank had a gradient.
    pub(super) buffer: Option<BufferRef>,
    pub(super) form: PayloadForm,
    /// Ranks that have not pulled it yet (pull rules).
    pub(super) to_pull: RankSet,
    /// Ranks whose last frame is not yet with the kernel.
    pub(super) to_send: RankSet,
    pub(super) priority: Priority,
}

/// Contributions to a slice, taken to be reduced; some of them count.
pub(super) struct ReductionInput {
    pub(super) step: Step,
    pub(super) priority: Priority,
    /// Whole contributions that count, by rank.
    pub(super) counted: Vec<(Rank, Contribution)>,
    /// Whole contributions that do not.
    pub(super) dropped: Vec<(Rank, Contribution)>,
    /// Contributions that have not arrived in whole, and do not count.
    pub(super) arriving: Vec<(Rank, Arriving)>,
}

impl OwnedSlice {
    pub(super) fn step(&self) -> Step {
        self.step
    }

    pub(super) fn is_reducing(&self) -> bool {
        self.reducing
    }

    pub(super) fn contributions(&self) -> &ContributionSet {
        &self.contributions
    }

    pub(super) fn contributions_mut(&mut self) -> &mut ContributionSet {
        &mut self.contributions
    }

    pub(super) fn form(&self) -> Option<PayloadForm> {
        self.form
    }

    /// Whether contributions of the step may come in this form; the first one decides.
    pub(super) fn accepts_form(&mut self, form: PayloadForm) -> bool {
        *self.form.get_or_insert(form) == form
    }

    pub(super) fn has_pulled_early(&self, rank: Rank) -> bool {
        self.early_pulls.contains(&rank)
    }

    pub(super) fn pull_early(&mut self, rank: Rank) {
        self.early_pulls.push(rank);
    }

    /// Whether some contributions have come, or begun to, and others are missing.
    fn is_collecting(&self) -> bool {
        !self.contributions.is_empty() && !self.reducing
    }

    /// Adds a whole contribution; false where its form is another one than that of the others.
    pub(super) fn add(
        &mut self,
        rank: Rank,
        contribution: Contribution,
        priority: Priority,
    ) -> bool {
        if contribution.form().is_some_and(|form| !self.accepts_form(form)) {
            return false;
        }
        self.contributions.insert(rank, contribution);
        self.priority = priority;
        true
    }

    /// Takes the contributions for reduction, once as many are whole as count.
    pub(super) fn take_all(&mut self, count: usize) -> Option<ReductionInput> {
        if self.contributions.whole() < count {
            return None;
        }
        let counted = self.contributions.take_whole();
        Some(self.start_reducing(counted, Vec::new(), Vec::new()))
    }

    /// Takes the contributions for reduction, once all of a decided set are whole.
    pub(super) fn take_decided(&mut self, set: &RankSet) -> Option<ReductionInput> {
        if self.reducing || !set.iter().all(|rank| self.contributions.has(rank)) {
            return None;
        }
        let whole = self.contributions.take_whole().into_iter();
        let (counted, dropped) = whole.partition(|&(rank, _)| set.contains(rank));
        let arriving = self.contributions.take_arriving();
        Some(self.start_reducing(counted, dropped, arriving))
    }

    fn start_reducing(
        &mut self,
        counted: Vec<(Rank, Contribution)>,
        dropped: Vec<(Rank, Contribution)>,
        arriving: Vec<(Rank, Arriving)>,
    ) -> ReductionInput {
        self.reducing = true;
        ReductionInput { step: self.step, priority: self.priority, counted, dropped, arriving }
    }

    /// After a reduction, the next step's contributions may come. Returns the priority of the result,
    /// and the ranks that have pulled it already.
    pub(super) fn advance(&mut self) -> (Priority, Vec<Rank>) {
        self.step = self.step.next();
        self.reducing = false;
        self.form = None;
        (self.priority, core::mem::take(&mut self.early_pulls))
    }
}

#[derive(Debug)]
pub(super) struct Owner {
    slices: BTreeMap<SliceId, OwnedSlice>,
    broadcasts: BTreeMap<(SliceId, Step), PendingBroadcast>,
}

impl Owner {
    pub(super) fn new(plan: &Plan, rank: Rank) -> Owner {
        let fresh = || OwnedSlice {
            step: Step(0),
            contributions: ContributionSet::default(),
            reducing: false,
            form: None,
            priority: Priority(0),
            early_pulls: Vec::new(),
        };
        let mine = plan
            .slice_ids()
            .filter(|&it| plan.slice(it).owner == rank && plan.scheme_of(it) == Scheme::Ps);
        Owner { slices: mine.map(|it| (it, fresh())).collect(), broadcasts: BTreeMap::new() }
    }

    /// Goes on as if results of all steps before this one had been delivered.
    pub(super) fn fast_forward(&mut self, step: Step) {
        self.fast_forward_each(|_| step);
    }

    /// The same, for a step of each slice.
    pub(super) fn fast_forward_each(&mut self, step: impl Fn(SliceId) -> Step) {
        self.slices.iter_mut().for_each(|(&slice, owned)| owned.step = step(slice));
    }

    pub(super) fn get(&self, slice: SliceId) -> Option<&OwnedSlice> {
        self.slices.get(&slice)
    }

    pub(super) fn get_mut(&mut self, slice: SliceId) -> Option<&mut OwnedSlice> {
        self.slices.get_mut(&slice)
    }

    /// A slice that this rank owns: a contribution reaches no other rank.
    pub(super) fn owned(&mut self, slice: SliceId) -> &mut OwnedSlice {
        self.slices.get_mut(&slice).expect("only the owner collects a slice")
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SliceId, &OwnedSlice)> {
        self.slices.iter().map(|(&slice, owned)| (slice, owned))
    }

    /// Slices that some contributions have come for, and others not.
    pub(super) fn collecting(&self) -> impl Iterator<Item = (SliceId, &OwnedSlice)> {
        self.iter().filter(|(_, owned)| owned.is_collecting())
    }

    /// Whether no rank waits any more for the step that a push is for.
    pub(super) fn is_late(&self, plan: &Plan, header: &FrameHeader) -> bool {
        let behind =
            |it: &OwnedSlice| header.step < it.step || (header.step == it.step && it.reducing);
        plan.drops_stragglers(header.step) && self.get(header.slice).is_some_and(behind)
    }

    /// All owned slices.
    pub(super) fn slices(&self) -> Vec<SliceId> {
        self.slices.keys().copied().collect()
    }

    /// Keeps a result until all ranks that it is owed to have it.
    pub(super) fn keep(&mut self, slice: SliceId, step: Step, pending: PendingBroadcast) {
        self.broadcasts.insert((slice, step), pending);
    }

    pub(super) fn pending(&self, slice: SliceId, step: Step) -> Option<&PendingBroadcast> {
        self.broadcasts.get(&(slice, step))
    }

    /// A rank that is owed a result pulls it.
    pub(super) fn pull(
        &mut self,
        slice: SliceId,
        step: Step,
        rank: Rank,
    ) -> Option<&PendingBroadcast> {
        let pending = self.broadcasts.get_mut(&(slice, step))?;
        pending.to_pull.remove(rank);
        Some(pending)
    }

    /// A rank has a result; its buffer, where that was the last rank.
    pub(super) fn sent(&mut self, slice: SliceId, step: Step, rank: Rank) -> Option<BufferRef> {
        let pending = self.broadcasts.get_mut(&(slice, step))?;
        pending.to_send.remove(rank);
        if !pending.to_send.is_empty() {
            return None;
        }
        self.broadcasts.remove(&(slice, step))?.buffer
    }

    /// Drops results that are owed; their buffers.
    pub(super) fn drop_broadcasts(&mut self) -> impl Iterator<Item = BufferRef> {
        core::mem::take(&mut self.broadcasts).into_values().filter_map(|it| it.buffer)
    }

    /// Whether no result is owed to any rank.
    pub(super) fn has_delivered_all(&self) -> bool {
        self.broadcasts.is_empty()
    }
}
