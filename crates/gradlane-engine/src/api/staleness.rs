//! How old the parameters were that gradients were computed from (synchrony `Async`).
//!
//! The staleness of a push is the number of updates that its owner applied to the slice between the
//! version that the pushing rank had received and this push: 0 without another push in between.

use alloc::vec::Vec;
use gradlane_units::Rank;

/// The staleness of one rank's pushes, as the owner of some slices has seen them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankStaleness {
    /// Pushes that were applied.
    pub pushes: u64,
    /// Sum of their stalenesses.
    pub sum: u64,
    /// The largest of them.
    pub max: u64,
    /// Pushes by staleness; the last entry counts this one and all larger ones.
    pub histogram: Vec<u64>,
}

impl RankStaleness {
    /// Entries of a histogram at most: everything from here on is one entry.
    pub const HISTOGRAM_MAX: usize = 65;

    /// Counts a push.
    pub fn note(&mut self, staleness: u64) {
        self.pushes += 1;
        self.sum += staleness;
        self.max = self.max.max(staleness);
        let bin = staleness.min(RankStaleness::HISTOGRAM_MAX as u64 - 1) as usize;
        if self.histogram.len() <= bin {
            self.histogram.resize(bin + 1, 0);
        }
        self.histogram[bin] += 1;
    }

    /// The mean staleness; 0 without pushes.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.pushes.max(1) as f64
    }
}

/// The staleness of all ranks' pushes, as one owner has seen them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Staleness {
    by_rank: Vec<RankStaleness>,
}

impl Staleness {
    /// Nothing yet, from ranks 0 to below `world_size`.
    #[must_use]
    pub fn new(world_size: u32) -> Staleness {
        Staleness { by_rank: alloc::vec![RankStaleness::default(); world_size as usize] }
    }

    /// Counts a push of a rank.
    pub fn note(&mut self, from: Rank, staleness: u64) {
        if let Some(tally) = self.by_rank.get_mut(from.index()) {
            tally.note(staleness);
        }
    }

    /// By rank.
    #[must_use]
    pub fn by_rank(&self) -> &[RankStaleness] {
        &self.by_rank
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalenesses_are_counted_by_rank_and_large_ones_together() {
        let mut staleness = Staleness::new(2);
        for value in [0, 2, 2, 1_000_000] {
            staleness.note(Rank(1), value);
        }
        staleness.note(Rank(7), 3);
        let [none, some] = staleness.by_rank() else {
            panic!("two ranks");
        };
        assert_eq!(*none, RankStaleness::default());
        assert_eq!((some.pushes, some.max), (4, 1_000_000));
        assert!((some.mean() - 250_001.0).abs() < 1e-9);
        assert_eq!(some.histogram.len(), RankStaleness::HISTOGRAM_MAX);
        assert_eq!(some.histogram[..3], [1, 0, 2]);
        assert_eq!(some.histogram.last(), Some(&1));
    }
}
