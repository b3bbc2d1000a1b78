//! The plan: every tensor, its slices and their owners; the same on every rank.
//!
//! A plan never changes after it is built, and knows nothing of the machine that follows it. Priorities
//! stand beside it (`transmit::order`), because they are observed while training and switched at
//! step boundaries.
#![allow(missing_docs, reason = "fields with the name of their type")]

mod build;
mod lanes;
mod members;
mod scheme;
mod strategy;
mod validate;

pub use scheme::{Scheme, RING_CHUNK_ELEMS, RING_ENCODED_CHUNK_ELEMS};
pub use strategy::{
    Cutoff, Granularity, Order, Placement, PullRule, Release, StragglerPolicy, Strategy, Synchrony,
    KVSTORE_SPLIT_ELEMS, POSEIDON_PAIR_ELEMS, SLICE_ELEMS,
};

use crate::api::{Memory, PlanError, Region};
use crate::rank_set::RankSet;
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;
use gradlane_units::{CodecSizes, Dtype, Rank, RingBytes, SliceId, Step, TensorId};
use gradlane_wire::{FrameKind, PayloadForm};
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

// Tensors as the user has them.

/// When a tensor takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TensorKind {
    /// Trained: takes part in every step.
    Parameter,
    /// Spread from rank 0 at step 0 only: buffers, frozen parameters.
    Initial,
}

/// Where the optimizer runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Update {
    /// On each worker, with the averaged gradient.
    #[default]
    Worker,
    /// On the owner of the slice; parameters are broadcast.
    Server,
}

/// A tensor as the user has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name in messages, as in `named_parameters()`.
    pub name: String,
    /// Number of elements.
    pub numel: u64,
    /// Type of the elements.
    pub dtype: Dtype,
    /// When the tensor takes part.
    #[serde(rename = "role")]
    pub kind: TensorKind,
}

/// A tensor, and how it is to be aggregated.
pub struct TensorSetting {
    /// The tensor as the user has it.
    pub spec: TensorSpec,
    /// How it is aggregated; none: as the strategy says.
    pub scheme: Option<Scheme>,
    /// How its slices travel after step 0; none: as they are.
    pub codec: Option<Box<dyn CodecSizes>>,
}

impl From<TensorSpec> for TensorSetting {
    fn from(spec: TensorSpec) -> TensorSetting {
        TensorSetting { spec, scheme: None, codec: None }
    }
}

impl From<(TensorSpec, Scheme)> for TensorSetting {
    fn from((spec, scheme): (TensorSpec, Scheme)) -> TensorSetting {
        TensorSetting { spec, scheme: Some(scheme), codec: None }
    }
}

impl From<(TensorSpec, Option<Box<dyn CodecSizes>>)> for TensorSetting {
    fn from((spec, codec): (TensorSpec, Option<Box<dyn CodecSizes>>)) -> TensorSetting {
        TensorSetting { spec, scheme: None, codec }
    }
}

// Roles of ranks: which ones train, and which ones own slices. Mostly every rank does both. Dedicated
// servers follow the ranks that train: they collect, reduce and broadcast, contribute no gradient,
// begin no step, and leave when the ranks that train have left.

/// How many ranks train, how many own slices, and whether these are the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles {
    /// Ranks that train: the first ones.
    pub workers: u32,
    /// Ranks that own slices: the first ones, or those after the workers.
    pub servers: u32,
    /// Whether servers train nothing.
    pub dedicated: bool,
}

impl Roles {
    /// All ranks train and own slices.
    #[must_use]
    pub const fn shared(world_size: u32) -> Roles {
        Roles { workers: world_size, servers: world_size, dedicated: false }
    }

    /// All ranks train, and the first `servers` own slices.
    #[must_use]
    pub const fn first(world_size: u32, servers: u32) -> Roles {
        Roles { workers: world_size, servers, dedicated: false }
    }

    /// The first `workers` ranks train; `servers` ranks after them own the slices, and only serve.
    #[must_use]
    pub const fn dedicated(workers: u32, servers: u32) -> Roles {
        Roles { workers, servers, dedicated: true }
    }

    /// How many ranks there are.
    #[must_use]
    pub const fn world_size(self) -> u32 {
        if self.dedicated {
            self.workers.saturating_add(self.servers)
        } else {
            self.workers
        }
    }

    /// How many ranks only serve.
    pub(crate) fn dedicated_servers(self) -> u32 {
        self.world_size() - self.workers
    }

    /// The rank of a server, by its number.
    pub(crate) fn server(self, number: Rank) -> Rank {
        Rank(number.0 + self.dedicated_servers().min(1) * self.workers)
    }

    /// Checks that either role has a rank.
    pub(crate) fn check(self) -> Result<(), PlanError> {
        let Roles { workers, servers, dedicated } = self;
        if workers == 0 {
            let what = "world_size is 0: a plan needs at least one rank that trains";
            return Err(PlanError::new(what));
        }
        if dedicated && workers.checked_add(servers).is_none() {
            return Err(PlanError::new("more than 2^32 ranks"));
        }
        if servers == 0 || (!dedicated && servers > workers) {
            return Err(PlanError::new(format!(
                "{servers} servers of {workers} ranks: slices need at least one, and each is a rank"
            )));
        }
        Ok(())
    }
}

impl Plan {
    /// How many ranks train: all but those that only serve.
    #[must_use]
    pub fn workers(&self) -> u32 {
        self.world_size.saturating_sub(self.dedicated_servers)
    }

    /// Whether a rank trains.
    #[must_use]
    pub fn trains(&self, rank: Rank) -> bool {
        rank.0 < self.workers() && !self.lost.contains(rank)
    }

    /// Whether the ranks that train tell dedicated servers how to update parameters.
    #[must_use]
    pub fn commands_servers(&self) -> bool {
        self.dedicated_servers > 0 && self.update == Update::Server
    }

    /// Whether a rank would leave a tensor without a value to update: rank 0 has none in step 0, and owners
    /// keep parameters of their own.
    pub(crate) fn lacks_initial(&self, step: Step, from: Rank, absent: bool) -> bool {
        let keeps = self.strategy.synchrony == Synchrony::Async || self.commands_servers();
        keeps && absent && step.is_initial() && from == Rank(0)
    }

    /// Ranks that train, but this one.
    pub(crate) fn workers_but(&self, rank: Rank) -> RankSet {
        RankSet::all_but(self.workers(), rank).without(&self.lost)
    }

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

    /// How many connections share the busier end of one: many workers meet at the port of one dedicated
    /// server. Without dedicated servers all ranks send to as many.
    #[must_use]
    pub fn peers_at_busier_end(&self) -> u32 {
        self.peers_sent_to(Rank(0)).max(self.peers_sent_to(Rank(self.world_size - 1)))
    }

    /// The root of a tensor; none where every rank gets all blocks, and of tensors
    /// without blocks.
    #[must_use]
    pub fn root(&self, tensor: TensorId) -> Option<Rank> {
        let planned = self.tensor(tensor);
        let first = self.slices.get(planned.slices.start as usize)?;
        (planned.scheme == Scheme::GatherToRoot).then_some(first.owner)
    }
}

// The sizes of a codec in a plan: how long an encoded slice is at most. Its contents are the driver's.

/// How the slices of one tensor travel after step 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodecPlan {
    /// The codec, in the canonical text of `gradlane-codec`.
    #[serde(rename = "codec")]
    pub name: String,
    /// Sizes of the tensor's dimensions in the order of its storage, which some codecs go by.
    pub sizes: Vec<u64>,
    /// Slices begin at multiples of this many elements.
    pub granule_elems: u64,
    /// Whether every encoding of a slice is equally long.
    pub fixed: bool,
    /// Numbers a value in the residual (error feedback); 0: no residual.
    pub residual_width: u32,
    /// For each length of a slice, in elements, the most bytes of its encoding.
    pub bytes: Vec<(u64, u64)>,
    /// On a ring that adds up codes as integers: for each length of a slice the bytes of its scales,
    /// which go round first. Else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scales: Vec<(u64, u64)>,
}

impl CodecPlan {
    /// The most bytes of an encoded slice of this length, or `None` for a length of no slice.
    #[must_use]
    pub fn bytes_max(&self, elements: u64) -> Option<u64> {
        of_length(&self.bytes, elements)
    }

    /// Bytes of the scales of a slice of this length, where they go round first.
    #[must_use]
    pub fn scale_bytes(&self, elements: u64) -> Option<u64> {
        of_length(&self.scales, elements)
    }
}

impl CodecPlan {
    /// The same on a ring, where codes may be added up as integers.
    ///
    /// # Errors
    /// When the codec cannot go round a ring of this size.
    pub(crate) fn round_ring(
        mut self,
        tensor: &str,
        codec: &dyn CodecSizes,
        world_size: u32,
    ) -> Result<CodecPlan, PlanError> {
        for (length, bytes) in &mut self.bytes {
            let on_ring = codec.ring_bytes(*length, world_size).map_err(|why| {
                let codec = &self.name;
                PlanError::new(format!(
                    "tensor {tensor:?} has scheme ring and codec {codec:?}: {why}"
                ))
            })?;
            if let Some(RingBytes { scales, sums }) = on_ring {
                self.scales.push((*length, scales));
                *bytes = sums;
            }
        }
        Ok(self)
    }
}

fn of_length(sizes: &[(u64, u64)], elements: u64) -> Option<u64> {
    sizes.iter().find(|(length, _)| *length == elements).map(|&(_, bytes)| bytes)
}

// How long a slice of a plan is in each form, and which frames may carry it encoded.

impl Plan {
    /// The most bytes of a slice in one form or the other.
    ///
    /// # Panics
    /// When the tensor has no encoding and is asked for as encoded.
    #[must_use]
    pub fn bytes_as(&self, slice: SliceId, form: PayloadForm) -> u64 {
        match form {
            PayloadForm::Raw => self.slice_bytes(slice),
            PayloadForm::Encoded => {
                let Some(encoding) = self.codec(slice) else {
                    unreachable!("{slice} is of a tensor without an encoding");
                };
                let elements = self.slice(slice).length;
                encoding.bytes_max(elements).expect("a plan has the size of each of its slices")
            }
        }
    }

    /// Bytes of the scales of a slice whose codes a ring adds up as integers; none where it does not.
    #[must_use]
    pub fn scale_bytes(&self, slice: SliceId) -> Option<u64> {
        self.codec(slice)?.scale_bytes(self.slice(slice).length)
    }

    /// Numbers a value in the residual of a tensor.
    #[must_use]
    pub fn residual_width(&self, tensor: TensorId) -> usize {
        let encoding = self.tensor(tensor).codec.as_ref();
        encoding.map_or(0, |encoding| encoding.residual_width as usize)
    }

    /// Whether the codec of a slice keeps what it has not sent.
    pub(crate) fn keeps_residual(&self, slice: SliceId) -> bool {
        self.codec(slice).is_some_and(|codec| codec.residual_width > 0)
    }

    /// The encoding of the tensor that a slice is part of.
    #[must_use]
    pub fn codec(&self, slice: SliceId) -> Option<&CodecPlan> {
        self.tensor(self.slice(slice).tensor).codec.as_ref()
    }

    /// Whether a frame of this kind may carry a slice as encoded bytes. Step 0 spreads exact values,
    /// and parameters that were updated on a server are exact as well.
    #[must_use]
    pub fn may_be_encoded(&self, kind: FrameKind, slice: SliceId, step: Step) -> bool {
        let carries = match kind {
            FrameKind::Push | FrameKind::RingReduce | FrameKind::RingBroadcast => true,
            FrameKind::RingScale => self.scale_bytes(slice).is_some(),
            FrameKind::Broadcast => self.update == Update::Worker,
            _ => false,
        };
        carries && !step.is_initial() && self.codec(slice).is_some()
    }
}
