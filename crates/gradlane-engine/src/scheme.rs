//! Schemes: how one tensor is aggregated, which other settings each of them goes with, and how the
//! tensors of a ring are cut and dealt to ranks.

use crate::error::PlanError;
use crate::plan::{Plan, TensorKind, TensorSpec, Update};
use crate::strategy::{Granularity, PullRule, Strategy, Synchrony};
use alloc::collections::BTreeSet;
use alloc::format;
use alloc::vec::Vec;
use core::ops::Range;
use gradlane_units::Rank;
use serde::{Deserialize, Serialize};

/// How one tensor is aggregated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheme {
    /// Sharded parameter servers.
    #[default]
    Ps,
    /// Round a ring: each slice's sum grows from rank to rank, and its mean goes round once more.
    Ring,
    /// Not at all: every rank gets every rank's block, of at most as many elements as the tensor has.
    /// There is nothing to spread in step 0.
    #[serde(rename = "gather")]
    AllGather,
    /// By its owner: every rank's block goes there, and one block comes back to all. Nothing in step 0.
    #[serde(rename = "answer")]
    GatherToRoot,
}

/// Elements of a ring tensor's block: the ring's slices are parts of blocks, and where a sum
/// begins follows from the block alone. So the order of addition does not depend on the slice
/// size. A block of f32 is one frame.
pub const RING_CHUNK_ELEMS: u64 = 16_384;

/// The same where slices are encoded: so many that headers weigh little beside a bit or two an element.
pub const RING_ENCODED_CHUNK_ELEMS: u64 = 65_536;

/// Elements of an encoded tensor's block, whose parts begin at multiples of the codec's granule.
pub(crate) fn encoded_block_elems(granule: u64) -> u64 {
    (RING_ENCODED_CHUNK_ELEMS / granule * granule).max(granule)
}

/// Most ranks of a ring: the header counts hops in 16 bits.
const RING_RANKS_MAX: u32 = 1 << 16;

impl Scheme {
    /// The name in plans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::Ps => "ps",
            Scheme::Ring => "ring",
            Scheme::AllGather => "gather",
            Scheme::GatherToRoot => "answer",
        }
    }

    /// Whether ranks give blocks of any size, not gradients that are added up.
    #[must_use]
    pub const fn has_blocks(self) -> bool {
        matches!(self, Scheme::AllGather | Scheme::GatherToRoot)
    }

    /// Whether a tensor of this scheme may be part of a plan with these rules.
    ///
    /// # Errors
    /// When the engine cannot do that; the text says why, and what to use instead.
    pub(crate) fn check(
        self,
        spec: &TensorSpec,
        strategy: &Strategy,
        update: Update,
        world_size: u32,
    ) -> Result<(), PlanError> {
        if self == Scheme::Ps {
            return Ok(());
        }
        let (name, scheme) = (&spec.name, self.name());
        let refuse = |why: &str| {
            Err(PlanError::new(format!("tensor {name:?} has scheme {scheme}, but {why}")))
        };
        if self.has_blocks() && spec.numel * spec.dtype.bytes() > u64::from(u32::MAX) {
            return refuse("blocks are below 4 GiB: split the tensor");
        }
        if update == Update::Server {
            return refuse(
                "update=server keeps optimizer state on the server that owns a slice, and this \
                 scheme has no servers: use update=worker, or scheme ps",
            );
        }
        if strategy.pull != PullRule::Broadcast {
            let strategy = &strategy.name;
            return refuse(&format!(
                "in strategy {strategy:?} workers pull results from servers, and this scheme has \
                 no servers: use p3, slicing or wfbp, or scheme ps"
            ));
        }
        if strategy.synchrony != Synchrony::Bulk {
            return refuse(
                "it needs the contributions of all ranks: use synchronous training without stragglers, or scheme ps",
            );
        }
        if self == Scheme::Ring && world_size > RING_RANKS_MAX {
            return refuse(&format!("a ring has at most {RING_RANKS_MAX} ranks: use scheme ps"));
        }
        Ok(())
    }
}

impl Plan {
    /// To how many others a rank sends gradients and results.
    #[must_use]
    pub fn peers_sent_to(&self, rank: Rank) -> u32 {
        let others = if self.dedicated_servers == 0 {
            self.world_size - 1
        } else if !self.trains(rank) {
            self.workers()
        } else if self.tensors.iter().all(|tensor| tensor.scheme == Scheme::Ps) {
            self.dedicated_servers
        } else {
            self.world_size - 1
        };
        let is_ring = self.tensors.iter().all(|tensor| tensor.scheme == Scheme::Ring);
        if is_ring && !self.tensors.is_empty() {
            others.min(1)
        } else {
            others
        }
    }
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
    pub(crate) fn deal(&mut self, spec: &TensorSpec, block_elems: u64) -> Vec<(Range<u64>, Rank)> {
        let count = spec.numel.div_ceil(block_elems).max(1);
        let block = |i: u64| i * block_elems..((i + 1) * block_elems).min(spec.numel);
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

impl Granularity {
    /// Parts of a ring tensor's block, as equal as multiples of the granule can be and none larger than a
    /// slice may be.
    pub(crate) fn cut_block(self, block: &Range<u64>, granule: u64) -> Vec<Range<u64>> {
        let length = block.end - block.start;
        let granules = length.div_ceil(granule);
        let most = match self {
            Granularity::Slices { elems } => (elems / granule).max(1),
            Granularity::SplitAbove { .. } => granules.max(1),
        };
        let parts = granules.div_ceil(most).max(1);
        let bound = |i: u64| (block.start + granules * i / parts * granule).min(block.end);
        (0..parts).map(|i| bound(i)..bound(i + 1)).collect()
    }
}
