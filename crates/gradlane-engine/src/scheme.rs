//! Schemes: how one tensor is aggregated, which other settings each of them goes with, and how the
//! tensors of a ring are cut and dealt to ranks.

use crate::error::PlanError;
use crate::plan::{Plan, Role, TensorSpec, Update};
use crate::strategy::{Granularity, PullRule, ReadyRule, Strategy};
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
}

/// Elements of a ring tensor's block: the ring's slices are parts of blocks, and where a sum
/// begins follows from the block alone. So the order of addition does not depend on the slice
/// size. A block of f32 is one frame.
pub const RING_BLOCK_ELEMS: u64 = 16_384;

/// Most ranks of a ring: the header counts hops in 16 bits.
const RING_RANKS_MAX: u32 = 1 << 16;

impl Scheme {
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
        let refuse = |why: &str| {
            let name = &spec.name;
            Err(PlanError::new(format!("tensor {name:?} has scheme ring, but {why}")))
        };
        if update == Update::Server {
            return refuse(
                "update=server keeps optimizer state on the server that owns a slice, and a ring \
                 has no servers: use update=worker, or scheme ps",
            );
        }
        if strategy.pull != PullRule::Broadcast {
            let name = &strategy.name;
            return refuse(&format!(
                "in strategy {name:?} workers pull results from servers, and a ring has no \
                 servers: use p3, slicing or wfbp, or scheme ps"
            ));
        }
        if strategy.ready != ReadyRule::All {
            return refuse(
                "a sum goes on only when each rank has added its part, so a ring cannot do with \
                 the contributions of some: use the ready rule all, or scheme ps",
            );
        }
        if world_size > RING_RANKS_MAX {
            return refuse(&format!("a ring has at most {RING_RANKS_MAX} ranks: use scheme ps"));
        }
        Ok(())
    }
}

impl Plan {
    /// To how many others a rank sends gradients and results.
    #[must_use]
    pub fn peers_sent_to(&self) -> u32 {
        let others = self.world_size - 1;
        let is_ring = self.tensors.iter().all(|tensor| tensor.scheme == Scheme::Ring);
        if is_ring && !self.tensors.is_empty() {
            others.min(1)
        } else {
            others
        }
    }

    /// Checks that every tensor's scheme goes with the other rules.
    ///
    /// # Errors
    /// At the first one that does not; the text names the tensor and says why.
    pub fn check_schemes(&self) -> Result<(), PlanError> {
        let Plan { strategy, update, world_size, .. } = self;
        self.tensors
            .iter()
            .try_for_each(|it| it.scheme.check(&it.spec, strategy, *update, *world_size))
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
    pub(crate) fn deal(&mut self, spec: &TensorSpec) -> Vec<(Range<u64>, Rank)> {
        let count = spec.numel.div_ceil(RING_BLOCK_ELEMS).max(1);
        let block = |i: u64| i * RING_BLOCK_ELEMS..((i + 1) * RING_BLOCK_ELEMS).min(spec.numel);
        let blocks = (0..count).map(block);
        if spec.role == Role::Initial {
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
    /// Equal parts of a ring tensor's block, none larger than a slice may be.
    pub(crate) fn cut_block(self, block: &Range<u64>) -> Vec<Range<u64>> {
        let length = block.end - block.start;
        let most = match self {
            Granularity::Slices { elems } => elems.max(1),
            Granularity::SplitAbove { .. } => RING_BLOCK_ELEMS,
        };
        let parts = length.div_ceil(most).max(1);
        let bound = |i: u64| block.start + length * i / parts;
        (0..parts).map(|i| bound(i)..bound(i + 1)).collect()
    }
}
