//! A set of ranks as a bit set: 16 words for a thousand ranks, iterated in rank order.

use alloc::vec;
use alloc::vec::Vec;
use gradlane_units::Rank;

/// A set of ranks below a fixed world size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RankSet {
    words: Vec<u64>,
    count: u32,
}

impl RankSet {
    /// The empty set.
    pub(crate) fn empty(world_size: u32) -> RankSet {
        RankSet { words: vec![0; (world_size as usize).div_ceil(64)], count: 0 }
    }

    /// All ranks below `world_size` but one.
    pub(crate) fn all_but(world_size: u32, rank: Rank) -> RankSet {
        let mut set = RankSet::all(world_size);
        set.remove(rank);
        set
    }

    /// All ranks below `world_size`.
    pub(crate) fn all(world_size: u32) -> RankSet {
        let mut set = RankSet::empty(world_size);
        set.words.fill(u64::MAX);
        if let Some(last) = set.words.last_mut().filter(|_| !world_size.is_multiple_of(64)) {
            *last = (1 << (world_size % 64)) - 1;
        }
        set.count = world_size;
        set
    }

    /// These ranks.
    pub(crate) fn of(world_size: u32, ranks: impl IntoIterator<Item = Rank>) -> RankSet {
        let mut set = RankSet::empty(world_size);
        ranks.into_iter().for_each(|rank| {
            set.insert(rank);
        });
        set
    }

    /// Adds a rank; false when it was there.
    pub(crate) fn insert(&mut self, rank: Rank) -> bool {
        let added = !self.contains(rank);
        if added {
            self.words[rank.index() / 64] |= 1 << (rank.index() % 64);
            self.count += 1;
        }
        added
    }

    /// Takes a rank out; false when it was not there.
    pub(crate) fn remove(&mut self, rank: Rank) -> bool {
        let there = self.contains(rank);
        if there {
            self.words[rank.index() / 64] &= !(1 << (rank.index() % 64));
            self.count -= 1;
        }
        there
    }

    /// The same ranks, but for those of another set.
    pub(crate) fn without(mut self, other: &RankSet) -> RankSet {
        other.iter().for_each(|rank| {
            self.remove(rank);
        });
        self
    }

    /// These, and others.
    pub(crate) fn with(mut self, other: &RankSet) -> RankSet {
        for rank in other.iter() {
            self.insert(rank);
        }
        self
    }

    pub(crate) fn contains(&self, rank: Rank) -> bool {
        self.words.get(rank.index() / 64).is_some_and(|word| word >> (rank.index() % 64) & 1 == 1)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many ranks there are in it.
    pub(crate) fn len(&self) -> u32 {
        self.count
    }

    /// One bit a rank, the lowest first, in as few bytes as hold them.
    pub(crate) fn to_bytes(&self, world_size: u32) -> Vec<u8> {
        let bytes = self.words.iter().flat_map(|word| word.to_le_bytes());
        bytes.take((world_size as usize).div_ceil(8)).collect()
    }

    /// The set that `to_bytes` wrote; none for other lengths or ranks outside the world.
    pub(crate) fn from_bytes(world_size: u32, bytes: &[u8]) -> Option<RankSet> {
        let mut set = RankSet::empty(world_size);
        for (index, byte) in bytes.iter().enumerate() {
            for bit in (0..8).filter(|bit| byte >> bit & 1 == 1) {
                let rank = u32::try_from(index * 8 + bit).ok().filter(|&it| it < world_size)?;
                set.insert(Rank(rank));
            }
        }
        (bytes.len() == (world_size as usize).div_ceil(8)).then_some(set)
    }

    /// The ranks in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Rank> + '_ {
        self.iter_from(Rank(0))
    }

    /// The ranks in ascending order, starting after `rank` and going round.
    pub(crate) fn iter_after(&self, rank: Rank) -> impl Iterator<Item = Rank> + '_ {
        let later = self.iter_from(Rank(rank.0 + 1));
        later.chain(self.iter().take_while(move |&other| other <= rank))
    }

    /// The ranks from `first` on; words before it are not looked at.
    fn iter_from(&self, first: Rank) -> impl Iterator<Item = Rank> + '_ {
        let begin = first.index() / 64;
        self.words.iter().enumerate().skip(begin).flat_map(move |(index, &word)| {
            let wanted = if index == begin { u64::MAX << (first.0 % 64) } else { u64::MAX };
            let word = word & wanted;
            core::iter::successors((word != 0).then_some(word), |&rest| {
                let rest = rest & (rest - 1);
                (rest != 0).then_some(rest)
            })
            .map(move |rest| Rank(index as u32 * 64 + rest.trailing_zeros()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn behaves_like_an_ordered_set(ops in proptest::collection::vec((any::<bool>(), 0..150_u32), 0..200)) {
            let mut set = RankSet::empty(150);
            let mut model = BTreeSet::new();
            for (insert, rank) in ops {
                if insert {
                    prop_assert_eq!(set.insert(Rank(rank)), model.insert(rank));
                } else {
                    prop_assert_eq!(set.remove(Rank(rank)), model.remove(&rank));
                }
                prop_assert_eq!(set.is_empty(), model.is_empty());
            }
            let ranks: Vec<u32> = set.iter().map(|rank| rank.0).collect();
            prop_assert_eq!(ranks, model.iter().copied().collect::<Vec<_>>());
        }
    }

    proptest! {
        #[test]
        fn all_but_one_is_every_other_rank(world_size in 1..200_u32, rank in 0..200_u32) {
            let ranks: Vec<u32> =
                RankSet::all_but(world_size, Rank(rank)).iter().map(|it| it.0).collect();
            let others: Vec<u32> = (0..world_size).filter(|&other| other != rank).collect();
            prop_assert_eq!(ranks, others);
        }

        #[test]
        fn going_round_is_the_order_turned(
            members in proptest::collection::btree_set(0..150_u32, 0..150), rank in 0..150_u32,
        ) {
            let mut set = RankSet::empty(150);
            members.iter().for_each(|&member| { set.insert(Rank(member)); });
            let round: Vec<u32> = set.iter_after(Rank(rank)).map(|it| it.0).collect();
            let later = members.iter().filter(|&&member| member > rank);
            let turned: Vec<u32> =
                later.chain(members.iter().filter(|&&member| member <= rank)).copied().collect();
            prop_assert_eq!(round, turned);
        }
    }

    proptest! {
        #[test]
        fn a_set_is_what_its_bytes_say(
            world_size in 1..200_u32, ranks in proptest::collection::btree_set(0..200_u32, 0..99),
        ) {
            let mut set = RankSet::empty(world_size);
            for &rank in ranks.iter().filter(|&&rank| rank < world_size) {
                set.insert(Rank(rank));
            }
            let mut bytes = set.to_bytes(world_size);
            prop_assert_eq!(RankSet::from_bytes(world_size, &bytes), Some(set));
            bytes.push(0);
            prop_assert_eq!(RankSet::from_bytes(world_size, &bytes), None);
        }
    }

    #[test]
    fn ranks_outside_the_world_are_refused() {
        assert_eq!(RankSet::from_bytes(3, &[0b1000]), None);
        assert!(RankSet::from_bytes(3, &[0b101]).is_some_and(|set| set.len() == 2));
    }

    #[test]
    fn goes_round_from_a_rank() {
        let set = RankSet::all_but(5, Rank(2));
        let order: Vec<u32> = set.iter_after(Rank(2)).map(|rank| rank.0).collect();
        assert_eq!(order, [3, 4, 0, 1]);
    }
}
