//! Which server owns a slice.

use crate::plan::{Placement, TensorKind};
use alloc::collections::{BTreeMap, BinaryHeap};
use core::cmp::Reverse;
use gradlane_units::{Rank, Rng};
use gradlane_wire::HEADER_BYTES;

/// Deals slices to servers.
pub(crate) enum Placer {
    /// To the one with the fewest bytes so far. Parameters are dealt apart from tensors that take part
    /// in step 0 only, so that each kind is even.
    Even {
        /// Slices of parameters.
        parameters: LeastLoaded,
        /// Slices of tensors that are broadcast at the start only.
        initial: LeastLoaded,
    },
    /// Whole tensors at random, split ones a part each.
    Random {
        /// How many servers there are.
        servers: u32,
        /// Draws the server of a whole tensor.
        rng: Rng,
    },
}

/// Deals bytes to the server that has the fewest so far.
#[derive(Clone)]
pub(crate) struct LeastLoaded(BinaryHeap<Reverse<(u64, Rank)>>);

impl LeastLoaded {
    /// Servers without a slice.
    pub(crate) fn new(servers: u32) -> LeastLoaded {
        LeastLoaded((0..servers).map(|rank| Reverse((0, Rank(rank)))).collect())
    }

    /// Ranks that have these bytes already.
    pub(crate) fn with(loads: BTreeMap<Rank, u64>) -> LeastLoaded {
        LeastLoaded(loads.into_iter().map(|(rank, bytes)| Reverse((bytes, rank))).collect())
    }

    /// The server that gets these bytes; the lowest rank where several have as few.
    pub(crate) fn place(&mut self, bytes: u64) -> Rank {
        let Reverse((load, rank)) = self.0.pop().expect("a plan has servers");
        self.0.push(Reverse((load.saturating_add(bytes), rank)));
        rank
    }
}

/// A slice to be dealt.
pub(crate) struct Dealt {
    /// When its tensor takes part.
    pub(crate) kind: TensorKind,
    /// Bytes on the wire at most, without header.
    pub(crate) bytes: u64,
    /// Which part of its tensor it is.
    pub(crate) part: usize,
    /// Whether it is all of its tensor.
    pub(crate) whole: bool,
}

impl Placer {
    /// A placer with nothing dealt.
    pub(crate) fn new(placement: Placement, servers: u32) -> Placer {
        match placement {
            Placement::Even => {
                let none = LeastLoaded::new(servers);
                Placer::Even { parameters: none.clone(), initial: none }
            }
            Placement::Random { seed } => Placer::Random { servers, rng: Rng::new(seed) },
        }
    }

    /// The owner of a slice. Headers count, so that empty slices do not all go to one server.
    pub(crate) fn place(&mut self, slice: &Dealt) -> Rank {
        match self {
            Placer::Even { parameters, initial } => {
                let loads = match slice.kind {
                    TensorKind::Parameter => parameters,
                    TensorKind::Initial => initial,
                };
                loads.place(slice.bytes.saturating_add(HEADER_BYTES as u64))
            }
            Placer::Random { servers, rng } if slice.whole => Rank(rng.below(*servers)),
            Placer::Random { servers, .. } => Rank((slice.part % *servers as usize) as u32),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    fn deal(lengths: &[u64], servers: u32) -> (Vec<Rank>, Vec<u64>) {
        let mut placer = Placer::new(Placement::Even, servers);
        let mut loads = vec![0; servers as usize];
        let mut owners = Vec::new();
        for &bytes in lengths {
            let slice = Dealt { kind: TensorKind::Parameter, bytes, part: 0, whole: true };
            let owner = placer.place(&slice);
            loads[owner.index()] += bytes + HEADER_BYTES as u64;
            owners.push(owner);
        }
        (owners, loads)
    }

    #[test]
    fn equal_slices_go_server_after_server() {
        let (owners, _) = deal(&[800; 7], 3);
        assert_eq!(owners, [0, 1, 2, 0, 1, 2, 0].map(Rank));
        assert_eq!(deal(&[0; 4], 4).0, [0, 1, 2, 3].map(Rank));
    }

    #[test]
    fn what_takes_part_in_step_0_only_is_dealt_apart() {
        let mut placer = Placer::new(Placement::Even, 2);
        let mut place = |kind, bytes| placer.place(&Dealt { kind, bytes, part: 0, whole: true });
        assert_eq!(place(TensorKind::Initial, 1_000_000), Rank(0));
        assert_eq!(place(TensorKind::Parameter, 10), Rank(0));
        assert_eq!(place(TensorKind::Parameter, 10), Rank(1));
        assert_eq!(place(TensorKind::Initial, 10), Rank(1));
    }

    proptest! {
        #[test]
        fn no_server_has_more_than_another_and_one_slice(
            lengths in prop::collection::vec(0_u64..200_000, 1..300), servers in 1_u32..9,
        ) {
            let (_, loads) = deal(&lengths, servers);
            let longest = lengths.iter().max().unwrap_or(&0) + HEADER_BYTES as u64;
            let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
            prop_assert!(most - least <= longest, "{loads:?}");
        }
    }
}
