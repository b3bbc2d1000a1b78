//! The plan: every tensor, its slices and their owners; the same on every rank.
//!
//! A plan never changes after it is built. Priorities stand beside it (see `priority`), because
//! they are observed while training and switched at step boundaries.

use crate::encoding::CodecPlan;
use crate::error::PlanError;
use crate::placement::{Dealt, LeastLoaded, Placer};
use crate::roles::Roles;
use crate::scheme::{encoded_block_elems, RingPlacer, Scheme, RING_CHUNK_ELEMS};
use crate::strategy::{Granularity, Strategy, Synchrony};
use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;
use gradlane_units::{CodecSizes, Dtype, Rank, SliceId, TensorId};
use serde::{Deserialize, Serialize};

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
    /// The server that aggregates it; of a ring, the rank on which its sum ends; of blocks that
    /// all get, nobody (rank 0); of those that are answered, who answers.
    pub owner: Rank,
}

impl Slice {
    fn of(tensor: TensorId, piece: &Range<u64>, owner: Rank) -> Slice {
        Slice { tensor, start: piece.start, length: piece.end - piece.start, owner }
    }
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

/// Everything that the ranks must agree on before the first frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Number of ranks.
    pub world_size: u32,
    /// How many of them, the last ones, only serve: they own slices, and train nothing.
    #[serde(default, rename = "serving", skip_serializing_if = "is_zero")]
    pub dedicated_servers: u32,
    /// The strategy.
    pub strategy: Strategy,
    /// Where the optimizer runs.
    pub update: Update,
    /// All tensors.
    pub tensors: Vec<TensorPlan>,
    /// All slices; those of a tensor are consecutive and in the order of its elements.
    pub slices: Vec<Slice>,
}

impl Plan {
    /// Cuts tensors into slices and places them by the strategy's rules on the ranks that are servers;
    /// the others own nothing. The slices of servers are placed as if there were no others. A world
    /// of one sends nothing, and encodes nothing.
    ///
    /// # Errors
    /// When the world is empty, there are no servers or more than ranks, ranks that only serve do not
    /// go with the other rules, a trained tensor holds plain bytes, there are too many slices, the
    /// strategy's synchrony or a tensor's scheme does not go with the rest, or a codec is given for a
    /// tensor that is not added up, is not trained, or is not of f32, f16 or bf16, or is on a ring that
    /// the codec cannot go round.
    pub fn build_for<Tensor: Into<TensorSetting>>(
        tensors: Vec<Tensor>,
        strategy: Strategy,
        update: Update,
        roles: Roles,
    ) -> Result<Plan, PlanError> {
        roles.check()?;
        let (workers, servers, world_size) = (roles.workers, roles.servers, roles.world_size());
        strategy.validate(update, workers)?;
        let mut placer = Placer::new(strategy.placement, servers);
        // Who answers runs the program that trains.
        let mut answers = LeastLoaded::new(if roles.dedicated { workers } else { servers });
        let mut ring = RingPlacer::new(workers);
        // Apart, so that no codec changes where the sums of other tensors begin.
        let mut encoded_ring = RingPlacer::new(workers);
        let dedicated_servers = roles.dedicated_servers();
        let (slices, none) = (Vec::new(), Vec::new());
        let mut plan =
            Plan { world_size, dedicated_servers, strategy, update, tensors: none, slices };
        plan.check_dedicated_servers()?;
        for (index, tensor) in tensors.into_iter().enumerate() {
            let TensorSetting { spec, scheme, codec } = tensor.into();
            let scheme = scheme.unwrap_or(plan.strategy.scheme);
            check_tensor(&spec, update)?;
            scheme.check(&spec, &plan.strategy, update, workers)?;
            if let Some(codec) = &codec {
                check_coding(&spec, scheme, plan.strategy.synchrony, codec.as_ref())?;
            }
            let alone = if scheme == Scheme::Ps { world_size == 1 } else { workers == 1 };
            let codec = codec.filter(|_| !alone);
            let granule = codec.as_ref().map_or(1, |codec| codec.granule_elems());
            let tensor = TensorId(narrow(index)?);
            let first = narrow(plan.slices.len())?;
            let blocks = ring.deal(&spec, RING_CHUNK_ELEMS);
            let mut planned = None;
            match scheme {
                Scheme::Ps => {
                    let pieces = plan.strategy.granularity.cut(spec.numel, servers, granule);
                    let whole = pieces.len() == 1;
                    planned = codec.map(|codec| encoding_of(codec.as_ref(), &pieces));
                    for (part, piece) in pieces.into_iter().enumerate() {
                        let elems = piece.end - piece.start;
                        let encoded = planned.as_ref().and_then(|it| it.bytes_max(elems));
                        let bytes = encoded.unwrap_or(elems * spec.dtype.bytes());
                        let kind = spec.kind;
                        let server = placer.place(&Dealt { kind, bytes, part, whole });
                        let owner = roles.server(server);
                        plan.slices.push(Slice::of(tensor, &piece, owner));
                    }
                }
                Scheme::AllGather => {
                    let pieces = plan.strategy.granularity.cut(spec.numel, workers, 1);
                    let slices = pieces.iter().map(|it| Slice::of(tensor, it, Rank(0)));
                    plan.slices.extend(slices);
                }
                Scheme::GatherToRoot => {
                    let owner = answers.place(spec.numel * spec.dtype.bytes());
                    let pieces = plan.strategy.granularity.cut(spec.numel, workers, 1);
                    plan.slices.extend(pieces.iter().map(|it| Slice::of(tensor, it, owner)));
                }
                Scheme::Ring => {
                    let blocks = match &codec {
                        Some(_) => encoded_ring.deal(&spec, encoded_block_elems(granule)),
                        None => blocks,
                    };
                    let mut all = Vec::new();
                    for (block, owner) in blocks {
                        let pieces = plan.strategy.granularity.cut_block(&block, granule);
                        let slices = pieces.iter().map(|piece| Slice::of(tensor, piece, owner));
                        plan.slices.extend(slices);
                        all.extend(pieces);
                    }
                    if let Some(codec) = codec {
                        let found = encoding_of(codec.as_ref(), &all);
                        planned = Some(found.round_ring(&spec.name, codec.as_ref(), workers)?);
                    }
                }
            }
            let slices = first..narrow(plan.slices.len())?;
            plan.tensors.push(TensorPlan { spec, scheme, codec: planned, slices });
        }
        Ok(plan)
    }

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

    /// Whether a tensor takes part in a step: all but blocks in step 0, trained ones afterwards.
    #[must_use]
    pub fn takes_part(&self, tensor: TensorId, step: gradlane_units::Step) -> bool {
        let tensor = self.tensor(tensor);
        if step.0 == 0 {
            !tensor.scheme.has_blocks()
        } else {
            tensor.spec.kind == TensorKind::Parameter
        }
    }
}

impl Granularity {
    /// Element ranges that a tensor of `numel` elements is cut into, at multiples of `granule`. An
    /// empty tensor has one empty piece, so that it is accounted for like every other.
    fn cut(self, numel: u64, servers: u32, granule: u64) -> Vec<Range<u64>> {
        let granule = granule.max(1);
        match self {
            Granularity::Slices { elems } => {
                let elems = (elems / granule * granule).max(granule);
                let count = numel.div_ceil(elems).max(1);
                (0..count).map(|i| i * elems..((i + 1) * elems).min(numel)).collect()
            }
            Granularity::SplitAbove { elems } if numel >= elems.max(1) => {
                let granules = numel.div_ceil(granule);
                let parts = u64::from(servers).min(granules);
                let bound = |i: u64| {
                    let at = (u128::from(granules) * u128::from(i) / u128::from(parts)) as u64;
                    at.saturating_mul(granule).min(numel)
                };
                (0..parts).map(|i| bound(i)..bound(i + 1)).collect()
            }
            Granularity::SplitAbove { .. } => core::iter::once(0..numel).collect(),
        }
    }
}

fn check_tensor(spec: &TensorSpec, update: Update) -> Result<(), PlanError> {
    if spec.kind == TensorKind::Parameter && spec.dtype == Dtype::U8 {
        return Err(PlanError::new(format!(
            "tensor {:?} holds plain bytes and cannot be trained",
            spec.name
        )));
    }
    if spec.kind == TensorKind::Parameter && spec.dtype == Dtype::F64 && update == Update::Server {
        return Err(PlanError::new(format!(
            "tensor {:?} is f64: update=server has kernels for f32, f16 and bf16; use \
             update=worker",
            spec.name
        )));
    }
    if spec.numel.checked_mul(spec.dtype.bytes()).is_none() {
        return Err(PlanError::new(format!("tensor {:?} is larger than 2^64 bytes", spec.name)));
    }
    Ok(())
}

/// A codec for a tensor that cannot have one.
fn check_coding(
    spec: &TensorSpec,
    scheme: Scheme,
    synchrony: Synchrony,
    codec: &dyn CodecSizes,
) -> Result<(), PlanError> {
    let (name, codec) = (&spec.name, codec.name());
    if synchrony == Synchrony::Async {
        return Err(PlanError::new(format!(
            "tensor {name:?} has codec {codec:?}, but pushes that are applied alone cannot be encoded: \
             use synchronous training, or no codec"
        )));
    }
    if scheme.has_blocks() {
        return Err(PlanError::new(format!(
            "tensor {name:?} has scheme {} and codec {codec:?}, but only what is added up can be \
             encoded: use scheme ps or ring, or no codec",
            scheme.name()
        )));
    }
    let short = matches!(spec.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
    if spec.kind == TensorKind::Parameter && short {
        return Ok(());
    }
    let what = if short { "is not trained" } else { "is neither f32, f16 nor bf16" };
    Err(PlanError::new(format!("tensor {name:?} {what}: it cannot be encoded as {codec:?}")))
}

/// What the engine needs to know of a codec for these slices.
fn encoding_of(codec: &dyn CodecSizes, pieces: &[Range<u64>]) -> CodecPlan {
    let mut lengths: Vec<u64> = pieces.iter().map(|piece| piece.end - piece.start).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let bytes = lengths.iter().map(|&length| (length, codec.bytes_max(length))).collect();
    CodecPlan {
        name: codec.name(),
        sizes: codec.sizes(),
        granule_elems: codec.granule_elems(),
        fixed: codec.is_fixed(),
        residual_width: codec.residual_width(),
        bytes,
        scales: Vec::new(),
    }
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

fn narrow(count: usize) -> Result<u32, PlanError> {
    u32::try_from(count).map_err(|_| PlanError::new("more than 2^32 tensors or slices"))
}
