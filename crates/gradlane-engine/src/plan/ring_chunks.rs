//! How the tensors of a ring are cut into chunks and dealt to ranks.

use crate::plan::{TensorKind, TensorSpec};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::ops::Range;
use gradlane_units::Rank;

/// Elements of a ring tensor's block: the ring's slices are parts of blocks, and where a sum
/// begins follows from the block alone. So the order of addition does not depend on the slice
/// size. A block of f32 is one frame.
pub const RING_CHUNK_ELEMS: u64 = 16_384;

/// The same where slices are encoded: large, so that headers weigh little beside a bit or two an element.
pub const RING_ENCODED_CHUNK_ELEMS: u64 = 65_536;

/// Elements of an encoded tensor's block, whose parts begin at multiples of the codec's granule.
pub(crate) fn encoded_chunk_elems(granule: u64) -> u64 {
    (RING_ENCODED_CHUNK_ELEMS / granule * granule).max(granule)
}

/// Deals the blocks of all trained tensors to ranks, evenly by bytes, whatever the tensors' schemes:
/// the order in which a tensor's gradients are added follows from the model and the number of
/// ranks alone.
pub(crate) struct RingPlacer {
    /// Bytes of the blocks whose sums end on each rank, and the rank.
    loads: BTreeSet<(u64, Rank)>,
}

impl RingPlacer {
    pub(crate) fn new(world_size: u32) -> RingPlacer {
        RingPlacer { loads: (0..world_size).map(|rank| (0, Rank(rank))).collect() }
    }

    /// The blocks of a tensor, each with the rank on which its sums end. Sums of tensors that are
    /// not trained end nowhere: their values come from rank 0.
    pub(crate) fn deal(&mut self, spec: &TensorSpec, chunk_elems: u64) -> Vec<(Range<u64>, Rank)> {
        let count = spec.numel.div_ceil(chunk_elems).max(1);
        let block = |i: u64| i * chunk_elems..((i + 1) * chunk_elems).min(spec.numel);
        let blocks = (0..count).map(block);
        if spec.kind == TensorKind::Initial {
            return blocks.map(|block| (block, Rank(0))).collect();
        }
        let bytes = |block: &Range<u64>| (block.end - block.start) * spec.dtype.bytes();
        blocks
            .map(|block| {
                let (load, rank) = self.loads.pop_first().expect("a world has ranks");
                self.loads.insert((load + bytes(&block), rank));
                (block, rank)
            })
            .collect()
    }
}
