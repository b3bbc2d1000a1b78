//! The plan: every tensor, its slices and their owners; the same on every rank.
//!
//! A plan never changes after it is built, and knows nothing of the machine that follows it. Priorities
//! stand beside it (`transmit::priorities`), because they are observed while training and switched at
//! step boundaries.
#![allow(missing_docs, reason = "fields with the name of their type")]

mod build;
mod codec_plan;
mod encoded_sizes;
mod lanes;
mod members;
mod placement;
mod ring_chunks;
mod roles;
mod scheme;
mod spec;
mod strategy;
mod validate;

pub use codec_plan::CodecPlan;
pub use ring_chunks::{RING_CHUNK_ELEMS, RING_ENCODED_CHUNK_ELEMS};
pub use roles::Roles;
pub use scheme::Scheme;
pub use spec::{TensorKind, TensorSetting, TensorSpec, Update};
pub use strategy::{
    Cutoff, Granularity, Order, Placement, PullRule, Release, StragglerPolicy, Strategy, Synchrony,
    KVSTORE_SPLIT_ELEMS, POSEIDON_PAIR_ELEMS, SLICE_ELEMS,
};

use crate::api::{Memory, Region};
use crate::rank_set::RankSet;
use alloc::vec::Vec;
use core::ops::Range;
use gradlane_units::{Dtype, Rank, SliceId, Step, TensorId};
use serde::{Deserialize, Serialize};

/// A tensor in the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorPlan {
    /// The tensor as the user has it.
    #[serde(flatten)]
    pub spec: TensorSpec,
    /// How it is aggregated.
    pub scheme: Scheme,
    /// How its slices travel after step 0; none: as they are.
    #[serde(default, rename = "encoding", skip_serializing_if = "Option::is_none")]
    pub codec: Option<CodecPlan>,
    /// Its slices are `slices.start .. slices.end` of the plan's.
    pub slices: Range<u32>,
}

/// A contiguous part of a tensor's storage: the unit of scheduling, aggregation and placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// The tensor that it is part of.
    pub tensor: TensorId,
    /// First element.
    pub start: u64,
    /// Number of elements.
    pub length: u64,
    /// The server that aggregates it; of a ring, the rank on which its sum ends; of an all-gather,
    /// rank 0, which does nothing more than others; of a gather to a root, the root.
    pub owner: Rank,
}

/// Everything that the ranks must agree on before the first frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Number of ranks.
    pub world_size: u32,
    /// How many of them, the last ones, only serve: they own slices, and train nothing.
    #[serde(default, rename = "serving", skip_serializing_if = "is_zero")]
    pub dedicated_servers: u32,
    pub strategy: Strategy,
    /// Where the optimizer runs.
    pub update: Update,
    /// All tensors.
    pub tensors: Vec<TensorPlan>,
    /// All slices; those of a tensor are consecutive and in the order of its elements.
    pub slices: Vec<Slice>,
    /// Ranks that were lost while training went on.
    #[serde(skip)]
    pub(crate) lost: RankSet,
    /// In the plan of a lane: the numbers of its slices in the whole plan.
    #[serde(skip)]
    pub(crate) whole: Vec<SliceId>,
    /// The number of the lane that carries this plan.
    #[serde(skip)]
    pub(crate) lane: u32,
    /// How many other lanes a rank has. Where lanes have to agree, the first leads ([`crate::LaneNews`]).
    #[serde(skip)]
    pub(crate) other_lanes: u32,
}

impl Plan {
    /// The tensor with this number.
    ///
    /// # Panics
    /// When the plan has no such tensor.
    #[must_use]
    pub fn tensor(&self, tensor: TensorId) -> &TensorPlan {
        &self.tensors[tensor.index()]
    }

    /// The slice with this number.
    ///
    /// # Panics
    /// When the plan has no such slice.
    #[must_use]
    pub fn slice(&self, slice: SliceId) -> &Slice {
        &self.slices[slice.index()]
    }

    /// The slices of a tensor.
    pub fn slices_of(&self, tensor: TensorId) -> impl Iterator<Item = SliceId> + use<> {
        self.tensor(tensor).slices.clone().map(SliceId)
    }

    /// Bytes of a slice's elements.
    #[must_use]
    pub fn slice_bytes(&self, slice: SliceId) -> u64 {
        let slice = self.slice(slice);
        slice.length * self.tensor(slice.tensor).spec.dtype.bytes()
    }

    /// Where a slice starts in its tensor's storage, in bytes.
    #[must_use]
    pub fn slice_start_bytes(&self, slice: SliceId) -> u64 {
        let slice = self.slice(slice);
        slice.start * self.tensor(slice.tensor).spec.dtype.bytes()
    }

    /// Whether a tensor takes part in a step: all but blocks in step 0, trained ones afterwards; in the plan of a
    /// lane, those that it has slices of.
    #[must_use]
    pub fn takes_part(&self, tensor: TensorId, step: Step) -> bool {
        let tensor = self.tensor(tensor);
        if tensor.slices.is_empty() {
            false
        } else if step.is_initial() {
            !tensor.scheme.has_blocks()
        } else {
            tensor.spec.kind == TensorKind::Parameter
        }
    }

    /// Whether each push of a step is applied alone.
    #[must_use]
    pub fn is_async(&self, step: Step) -> bool {
        self.strategy.synchrony == Synchrony::Async && !step.is_initial()
    }

    /// Whether a step may go on without stragglers.
    #[must_use]
    pub fn drops_stragglers(&self, step: Step) -> bool {
        self.strategy.synchrony.stragglers().is_some() && !step.is_initial()
    }

    /// Whether ranks take up new priorities each at a step of its own.
    pub(crate) fn switches_independently(&self) -> bool {
        self.strategy.synchrony != Synchrony::Bulk
    }

    /// Whether the owners of a tensor's slices update it in a step. They have kernels for f32, f16
    /// and bf16; a tensor of f64 is averaged, as with updates on the ranks.
    #[must_use]
    pub fn updates_on_server(&self, step: Step, tensor: TensorId) -> bool {
        self.update == Update::Server
            && !step.is_initial()
            && self.tensor(tensor).spec.dtype != Dtype::F64
    }

    /// How many ranks contribute to a step, if none is left out: rank 0 alone in step 0.
    #[must_use]
    pub fn contributors(&self, step: Step) -> u32 {
        if step.is_initial() {
            1
        } else {
            self.members().len()
        }
    }

    /// A slice's range in a memory that holds the whole tensor.
    pub(crate) fn region(&self, memory: Memory, slice: SliceId) -> Region {
        let (offset, length) = (self.slice_start_bytes(slice), self.slice_bytes(slice));
        Region { memory, offset, length }
    }

    /// All slices.
    pub(crate) fn slice_ids(&self) -> impl Iterator<Item = SliceId> + use<> {
        (0..self.slices.len() as u32).map(SliceId)
    }

    /// All tensors.
    pub(crate) fn tensor_ids(&self) -> impl Iterator<Item = TensorId> + use<> {
        (0..self.tensors.len() as u32).map(TensorId)
    }

    /// How the tensor of a slice is aggregated.
    pub(crate) fn scheme_of(&self, slice: SliceId) -> Scheme {
        self.tensor(self.slice(slice).tensor).scheme
    }

    /// The name of the tensor of a slice.
    pub(crate) fn name_of(&self, slice: SliceId) -> &str {
        &self.tensor(self.slice(slice).tensor).spec.name
    }
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}
