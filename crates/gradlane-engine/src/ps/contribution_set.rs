//! The contributions to one slice in one step, by rank: whole ones, and those that are arriving. Two
//! frames of each of a thousand ranks ask for it, so a rank's is found without a search.

use crate::api::BufferRef;
use crate::contribution::{Arriving, Contribution};
use alloc::vec::Vec;
use gradlane_units::Rank;

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
