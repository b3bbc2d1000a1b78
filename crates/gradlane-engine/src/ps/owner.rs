//! The slices that this rank owns: contributions of one step are collected, and the result is kept until
//! every rank that is owed it has it.
//!
//! In bulk-synchronous training a slice collects for one step at a time: no rank can contribute to a
//! step before it has the result of the step before.

use crate::api::BufferRef;
use crate::jobs::{Arriving, Contribution};
use crate::plan::{Plan, Scheme};
use crate::rank_set::RankSet;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step};
use gradlane_wire::{FrameHeader, PayloadForm};

#[derive(Debug)]
pub(super) struct OwnedSlice {
    /// Step that contributions are collected for.
    pub(super) step: Step,
    pub(super) contributions: ContributionSet,
    /// Whether the reduction is queued or under way.
    pub(super) reducing: bool,
    /// In which form the step's contributions come, once one has.
    pub(super) form: Option<PayloadForm>,
    /// That of the last header, or this rank's own for own contributions.
    pub(super) priority: Priority,
    /// Ranks that pulled before the result was there.
    pub(super) early_pulls: Vec<Rank>,
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
    /// Whether contributions of the step may come in this form; the first one decides.
    pub(super) fn accepts_form(&mut self, form: PayloadForm) -> bool {
        *self.form.get_or_insert(form) == form
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
pub(crate) struct Owner {
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
    pub(crate) fn has_delivered_all(&self) -> bool {
        self.broadcasts.is_empty()
    }
}

// The contributions to one slice in one step, by rank: whole ones, and those that are arriving. Two
// frames of each of a thousand ranks ask for it, so a rank's is found without a search.

#[derive(Clone, Copy, Debug, Default)]
enum Slot {
    #[default]
    Nothing,
    Arriving(Arriving),
    Whole(Contribution),
}

/// The contributions to a slice, by rank.
#[derive(Debug, Default)]
pub(crate) struct ContributionSet {
    /// As long as the largest rank that something has come from needs.
    slots: Vec<Slot>,
    whole: usize,
    arriving: usize,
}

impl ContributionSet {
    /// Number of whole contributions.
    pub(crate) fn whole(&self) -> usize {
        self.whole
    }

    /// Whether nothing has come, nor begun to.
    pub(crate) fn is_empty(&self) -> bool {
        self.whole + self.arriving == 0
    }

    /// Whether a rank's contribution is whole.
    pub(crate) fn has(&self, rank: Rank) -> bool {
        matches!(self.slots.get(rank.index()), Some(Slot::Whole(_)))
    }

    /// Bytes that have come of a contribution that is not whole.
    pub(crate) fn received_bytes(&self, rank: Rank) -> u64 {
        match self.slots.get(rank.index()) {
            Some(Slot::Arriving(arriving)) => arriving.received_bytes,
            _ => 0,
        }
    }

    /// Returns where a rank's contribution lands; its first frame acquires a buffer.
    pub(crate) fn landing(&mut self, rank: Rank, acquire: impl FnOnce() -> BufferRef) -> BufferRef {
        if let Some(Slot::Arriving(arriving)) = self.slots.get(rank.index()) {
            return arriving.buffer;
        }
        let buffer = acquire();
        *self.slot(rank) = Slot::Arriving(Arriving { buffer, received_bytes: 0 });
        self.arriving += 1;
        buffer
    }

    /// Notes bytes of a contribution that has somewhere to land.
    pub(crate) fn receive(&mut self, rank: Rank, bytes: u32) {
        if let Some(Slot::Arriving(arriving)) = self.slots.get_mut(rank.index()) {
            arriving.received_bytes += u64::from(bytes);
        }
    }

    /// Takes a contribution out that has arrived; none where it had no bytes.
    pub(crate) fn take_arrived(&mut self, rank: Rank) -> Option<Arriving> {
        let slot = self.slots.get_mut(rank.index())?;
        let Slot::Arriving(arriving) = *slot else {
            return None;
        };
        *slot = Slot::Nothing;
        self.arriving -= 1;
        Some(arriving)
    }

    /// Adds a whole contribution, of which nothing is arriving any more.
    pub(crate) fn insert(&mut self, rank: Rank, part: Contribution) {
        let old = core::mem::replace(self.slot(rank), Slot::Whole(part));
        debug_assert!(!matches!(old, Slot::Arriving(_)), "{rank} is still arriving");
        self.whole += usize::from(!matches!(old, Slot::Whole(_)));
    }

    /// Takes all whole contributions, by rank.
    pub(crate) fn take_whole(&mut self) -> Vec<(Rank, Contribution)> {
        self.whole = 0;
        self.take(|slot| match slot {
            Slot::Whole(part) => Some(part),
            _ => None,
        })
    }

    /// Takes all that are not whole, by rank.
    pub(crate) fn take_arriving(&mut self) -> Vec<(Rank, Arriving)> {
        self.arriving = 0;
        self.take(|slot| match slot {
            Slot::Arriving(arriving) => Some(arriving),
            _ => None,
        })
    }

    fn slot(&mut self, rank: Rank) -> &mut Slot {
        if self.slots.len() <= rank.index() {
            self.slots.resize(rank.index() + 1, Slot::Nothing);
        }
        &mut self.slots[rank.index()]
    }

    fn take<T>(&mut self, wanted: impl Fn(Slot) -> Option<T>) -> Vec<(Rank, T)> {
        let mut taken = Vec::new();
        for (rank, slot) in (0..).map(Rank).zip(&mut self.slots) {
            if let Some(value) = wanted(*slot) {
                *slot = Slot::Nothing;
                taken.push((rank, value));
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(id: u32) -> BufferRef {
        BufferRef { id, bytes: 100 }
    }

    #[test]
    fn contributions_arrive_and_are_taken_by_rank() {
        let mut contributions = ContributionSet::default();
        assert!(contributions.is_empty() && !contributions.has(Rank(7)));
        assert_eq!(contributions.landing(Rank(7), || buffer(1)), buffer(1));
        assert_eq!(contributions.landing(Rank(7), || unreachable!("it has one")), buffer(1));
        contributions.receive(Rank(7), 60);
        contributions.receive(Rank(3), 60);
        assert_eq!([3, 7, 9].map(|it| contributions.received_bytes(Rank(it))), [0, 60, 0]);
        assert!(!contributions.is_empty() && contributions.whole() == 0);

        let arrived = contributions.take_arrived(Rank(7)).expect("it had begun");
        assert_eq!((arrived.buffer, arrived.received_bytes), (buffer(1), 60));
        assert!(contributions.take_arrived(Rank(7)).is_none() && contributions.is_empty());
        contributions.insert(Rank(7), Contribution::Buffer(buffer(1)));
        contributions.insert(Rank(2), Contribution::Own);
        contributions.landing(Rank(5), || buffer(2));
        assert!(
            contributions.whole() == 2 && contributions.has(Rank(2)) && !contributions.has(Rank(5))
        );

        let whole = contributions.take_whole();
        assert_eq!(
            whole,
            [(Rank(2), Contribution::Own), (Rank(7), Contribution::Buffer(buffer(1)))]
        );
        assert!(contributions.whole() == 0 && !contributions.is_empty());
        let arriving = contributions.take_arriving();
        assert_eq!(arriving.len(), 1);
        assert_eq!((arriving[0].0, arriving[0].1.buffer), (Rank(5), buffer(2)));
        assert!(contributions.is_empty());
    }
}
