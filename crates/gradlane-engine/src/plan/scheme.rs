//! Schemes: how one tensor is aggregated, and which other settings each of them goes with.

use crate::api::PlanError;
use crate::plan::{Plan, PullRule, Strategy, Synchrony, TensorSpec, Update};
use alloc::format;
use gradlane_units::{Rank, TensorId};
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

    /// The rank that answers for a tensor; none where every rank gets all blocks, and of tensors
    /// without blocks.
    #[must_use]
    pub fn root(&self, tensor: TensorId) -> Option<Rank> {
        let planned = self.tensor(tensor);
        let first = self.slices.get(planned.slices.start as usize)?;
        (planned.scheme == Scheme::GatherToRoot).then_some(first.owner)
    }
}
