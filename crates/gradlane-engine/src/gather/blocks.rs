//! The blocks of one tensor in one step.

use crate::api::{BufferRef, Memory, Region};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use gradlane_units::{Rank, TensorId};

/// The block of another rank.
#[derive(Clone, Copy, Debug)]
pub(super) enum Block {
    Arriving {
        buffer: BufferRef,
        received_bytes: u64,
    },
    Whole(BufferRef),
    /// A block without bytes.
    Empty,
    Absent,
}

impl Block {
    pub(super) fn is_here(&self) -> bool {
        !matches!(self, Block::Arriving { .. })
    }
}

/// The blocks of one tensor in one step.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    pub(super) of: BTreeMap<Rank, Block>,
    /// Bytes of this rank's own block; none where it has none, or not yet.
    pub(super) own_bytes: Option<u64>,
    /// Whether this rank's own block, or word that there is none, is on its way.
    pub(super) is_queued: bool,
    /// Messages of this rank, one a slice and receiver, that are not yet with the kernel.
    pub(super) unsent: u32,
    /// On the root.
    pub(super) result: RootResult,
}

impl Blocks {
    /// Number of blocks of other ranks that are here.
    pub(super) fn here(&self) -> usize {
        self.of.values().filter(|block| block.is_here()).count()
    }

    pub(super) fn is_here(&self, rank: Rank) -> bool {
        self.of.get(&rank).is_some_and(Block::is_here)
    }

    /// All blocks by rank, as `rank` has them.
    pub(super) fn regions(&self, tensor: TensorId, rank: Rank, ranks: u32) -> Vec<Option<Region>> {
        let of_this_rank =
            |bytes| Region { memory: Memory::Gradient(tensor), offset: 0, length: bytes };
        let block = |from: Rank| match self.of.get(&from) {
            Some(Block::Whole(buffer)) => Some(buffer.whole()),
            Some(Block::Empty) => Some(of_this_rank(0)),
            Some(_) => None,
            None => self.own_bytes.filter(|_| from == rank).map(of_this_rank),
        };
        (0..ranks).map(Rank).map(block).collect()
    }

    /// Where whole blocks lie.
    pub(super) fn buffers(&self) -> Vec<BufferRef> {
        let whole = |block: &Block| match block {
            Block::Whole(buffer) => Some(*buffer),
            _ => None,
        };
        self.of.values().filter_map(whole).collect()
    }
}

/// How far the root of a tensor is with its result in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum RootResult {
    /// Blocks are missing.
    #[default]
    Collecting,
    /// The application has all blocks.
    Requested,
    /// The result is on its way: this many bytes, or none.
    Sent(Option<u64>),
}
