//! Strategies: settings of the one engine. Each of the papers' systems is a value of [`Strategy`];
//! nothing else in the engine knows their names.

use crate::api::PlanError;
use crate::plan::{Scheme, RING_ENCODED_CHUNK_ELEMS};
use alloc::format;
use alloc::string::{String, ToString};
use serde::{Deserialize, Serialize};

/// Into what pieces tensors are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "rule")]
pub enum Granularity {
    /// Slices of at most this many elements (P3, section 4).
    Slices {
        /// Most elements in a slice.
        elems: u64,
    },
    /// Whole tensors below the threshold; all others split equally over all servers (MXNet's
    /// `KVStore`).
    SplitAbove {
        /// First size, in elements, that is split.
        elems: u64,
    },
}

/// In what order frames of one step leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// The most urgent first.
    Priority,
    /// First come, first served.
    Arrival,
}

/// Which server owns a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "rule")]
pub enum Placement {
    /// Each slice on the server with the fewest bytes so far: server after server where slices are
    /// equally long, and as even as one slice where they are not.
    Even,
    /// Whole tensors on a server drawn from this seed; split tensors one part a server.
    Random {
        /// Seed, the same on every rank.
        seed: u64,
    },
}

/// How an aggregated slice comes back to the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PullRule {
    /// At once, to all, unasked.
    Broadcast,
    /// The server notifies; the worker pulls once all slices of the tensor are announced.
    AfterNotice,
    /// The worker pulls when its next iteration starts, or when a consumer waits.
    NextStep,
}

/// Which contributions an owner waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Synchrony {
    /// Those of all ranks: synchronous (bulk-synchronous) training.
    #[serde(rename = "all")]
    Bulk,
    /// Those of the ranks that rank 0 names, step by step: stragglers are left out.
    #[serde(rename = "set")]
    BackupWorkers(StragglerPolicy),
    /// None: each push is applied and returned alone (asynchronous SGD). Requires updates on the
    /// server.
    #[serde(rename = "each")]
    Async,
}

/// When a step goes on without those that are late (synchrony `BackupWorkers`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StragglerPolicy {
    /// When the contributors of a step are known.
    #[serde(rename = "close")]
    pub cutoff: Cutoff,
    /// How many steps the others may be decided ahead of the slowest rank, which keeps all results
    /// that it has not come to; at least 1.
    pub ahead_steps: u32,
}

/// When the contributors of a step are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cutoff {
    /// Once all but `ranks` ranks have all their gradients: backup workers.
    Backup {
        /// How many are left out.
        ranks: u32,
    },
    /// Once all have, or so long after the last decision: at this percentage of the time that half
    /// of the contributors of recent steps took (the median of the last 16).
    Deadline {
        /// The percentage.
        percent: u32,
    },
    /// Once all have, or as long after half of all ranks as ranks differ by: twice the time that
    /// recently lay between the first and the half, three times that by which steps differed, or a
    /// twentieth of a step, whichever is the longest (medians of the last 16).
    #[serde(rename = "spread")]
    Adaptive,
}

impl Synchrony {
    /// The rule by which stragglers are left out, if they are.
    #[must_use]
    pub const fn stragglers(self) -> Option<StragglerPolicy> {
        match self {
            Synchrony::BackupWorkers(rule) => Some(rule),
            _ => None,
        }
    }
}

/// When a tensor that is complete is given to its waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Release {
    /// As soon as the tensor itself is there.
    Tensor,
    /// Only when all tensors of the step are there (a barrier between iterations).
    Step,
}

/// Granularity, order, placement, pull rule, synchrony, release rule and scheme.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Strategy {
    /// Name for tables and messages.
    pub name: String,
    /// Into what pieces tensors are cut.
    pub granularity: Granularity,
    /// In what order frames leave.
    pub order: Order,
    /// Which server owns a slice.
    pub placement: Placement,
    /// How aggregated slices come back.
    pub pull: PullRule,
    /// Which contributions an owner waits for.
    #[serde(rename = "ready")]
    pub synchrony: Synchrony,
    /// When tensors are given to their waiters.
    pub release: Release,
    /// How tensors are aggregated whose plan says nothing else.
    #[serde(default)]
    pub scheme: Scheme,
}

/// Elements in a slice by default: the best value in the P3 paper (section 5.7).
pub const SLICE_ELEMS: u64 = 50_000;
/// Tensors of this many elements and more are split by MXNet's `KVStore` unless it is told another
/// number (`MXNET_KVSTORE_BIGARRAY_BOUND`).
pub const KVSTORE_SPLIT_ELEMS: u64 = 1_000_000;
/// Poseidon's key-value pairs: 2 MB of f32.
pub const POSEIDON_PAIR_ELEMS: u64 = (2 << 20) / 4;

impl Strategy {
    /// The names that [`Strategy::named`] knows.
    pub const NAMES: [&'static str; 7] =
        ["p3", "slicing", "wfbp", "kvstore", "deferred-pull", "ring", "asgd"];
    /// Those of them that give all ranks the same mean in each step.
    pub const SYNCHRONOUS: [&'static str; 6] =
        ["p3", "slicing", "wfbp", "kvstore", "deferred-pull", "ring"];

    /// A strategy of the papers by name: `p3` (R1), `slicing` (R3), `wfbp` (R17), `kvstore` (R2),
    /// `deferred-pull` (R4), `ring`: p3's slices and order round a ring (R7), and `asgd` (R5;
    /// everything but the synchrony is P3's). `slice_elems` replaces the slice size of `p3`,
    /// `slicing`, `wfbp`, `ring` and `asgd` (`None`: 50,000, 2 MB for `wfbp`, and for `ring` the most
    /// that it has: whole blocks, of [`RING_ENCODED_CHUNK_ELEMS`] where slices are encoded and of
    /// [`RING_CHUNK_ELEMS`](crate::RING_CHUNK_ELEMS) where not). In the other two it is the first size
    /// that is split ([`KVSTORE_SPLIT_ELEMS`]), and `seed` places whole tensors.
    ///
    /// # Errors
    /// When the name is unknown or the slice size is zero.
    pub fn named(name: &str, slice_elems: Option<u64>, seed: u64) -> Result<Strategy, PlanError> {
        if slice_elems == Some(0) {
            return Err(PlanError::new("slice_elems is 0: a slice needs at least one element"));
        }
        let sliced = |default: u64| Granularity::Slices { elems: slice_elems.unwrap_or(default) };
        let base = Strategy {
            name: name.to_string(),
            granularity: sliced(SLICE_ELEMS),
            order: Order::Priority,
            placement: Placement::Even,
            pull: PullRule::Broadcast,
            synchrony: Synchrony::Bulk,
            release: Release::Tensor,
            scheme: Scheme::Ps,
        };
        let split_above = slice_elems.unwrap_or(KVSTORE_SPLIT_ELEMS);
        let kvstore = Strategy {
            granularity: Granularity::SplitAbove { elems: split_above },
            order: Order::Arrival,
            placement: Placement::Random { seed },
            pull: PullRule::AfterNotice,
            ..base.clone()
        };
        match name {
            "p3" => Ok(base),
            "slicing" => Ok(Strategy { order: Order::Arrival, ..base }),
            "wfbp" => Ok(Strategy {
                granularity: sliced(POSEIDON_PAIR_ELEMS),
                order: Order::Arrival,
                release: Release::Step,
                ..base
            }),
            "kvstore" => Ok(kvstore),
            "ring" => Ok(Strategy {
                granularity: sliced(RING_ENCODED_CHUNK_ELEMS),
                scheme: Scheme::Ring,
                ..base
            }),
            "deferred-pull" => Ok(Strategy { pull: PullRule::NextStep, ..kvstore }),
            "asgd" => Ok(Strategy { synchrony: Synchrony::Async, ..base }),
            _ => Err(PlanError::new(format!(
                "unknown strategy {name:?}; known are {}",
                Strategy::NAMES.join(", ")
            ))),
        }
    }
}
