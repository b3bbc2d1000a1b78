//! How a plan is built: tensors are cut into slices, and slices placed on owners.

use crate::api::PlanError;
use crate::plan::{
    CodecPlan, Granularity, Placement, Plan, Roles, Scheme, Slice, Strategy, Synchrony, TensorKind,
    TensorPlan, TensorSetting, TensorSpec, Update, RING_CHUNK_ELEMS, RING_ENCODED_CHUNK_ELEMS,
};
use crate::rank_set::RankSet;
use alloc::collections::{BTreeMap, BTreeSet, BinaryHeap};
use alloc::format;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::ops::Range;
use gradlane_units::{CodecSizes, Dtype, Rank, Rng, TensorId};
use gradlane_wire::HEADER_BYTES;

impl Plan {
    /// Cuts tensors into slices and places them by the strategy's rules, as [`Plan::build_on`] does;
    /// every rank is a server.
    ///
    /// # Errors
    /// As [`Plan::build_on`].
    pub fn build<Tensor: Into<TensorSetting>>(
        tensors: Vec<Tensor>,
        strategy: Strategy,
        update: Update,
        world_size: u32,
    ) -> Result<Plan, PlanError> {
        Plan::build_on(tensors, strategy, update, world_size, world_size)
    }

    /// As [`Plan::build_for`], on the first `servers` ranks.
    ///
    /// # Errors
    /// As [`Plan::build_for`].
    pub fn build_on<Tensor: Into<TensorSetting>>(
        tensors: Vec<Tensor>,
        strategy: Strategy,
        update: Update,
        world_size: u32,
        servers: u32,
    ) -> Result<Plan, PlanError> {
        Plan::build_for(tensors, strategy, update, Roles::first(world_size, servers))
    }

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
        // A root runs the program that trains.
        let mut answers = LeastLoaded::new(if roles.dedicated { workers } else { servers });
        let mut ring = RingPlacer::new(workers);
        // Apart, so that no codec changes where the sums of other tensors begin.
        let mut encoded_ring = RingPlacer::new(workers);
        let dedicated_servers = roles.dedicated_servers();
        let (slices, none) = (Vec::new(), Vec::new());
        let lost = RankSet::default();
        let mut plan = Plan {
            world_size,
            dedicated_servers,
            strategy,
            update,
            tensors: none,
            slices,
            lost,
            whole: Vec::new(),
            lane: 0,
            other_lanes: 0,
        };
        plan.check_dedicated_servers()?;
        for (index, tensor) in tensors.into_iter().enumerate() {
            let TensorSetting { spec, scheme, codec } = tensor.into();
            let scheme = scheme.unwrap_or(plan.strategy.scheme);
            check_tensor(&spec, plan.strategy.synchrony)?;
            scheme.check(&spec, &plan.strategy, update, workers)?;
            if let Some(codec) = &codec {
                check_coding(&spec, scheme, codec.as_ref())?;
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
                        Some(_) => encoded_ring.deal(&spec, encoded_chunk_elems(granule)),
                        None => blocks,
                    };
                    let mut all = Vec::new();
                    for (block, owner) in blocks {
                        let pieces = plan.strategy.granularity.cut_chunk(&block, granule);
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
}

impl Slice {
    fn of(tensor: TensorId, piece: &Range<u64>, owner: Rank) -> Slice {
        Slice { tensor, start: piece.start, length: piece.end - piece.start, owner }
    }
}

impl Granularity {
    /// Parts of a ring tensor's block, as equal as multiples of the granule can be and none larger than a
    /// slice may be.
    pub(crate) fn cut_chunk(self, block: &Range<u64>, granule: u64) -> Vec<Range<u64>> {
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

fn check_tensor(spec: &TensorSpec, synchrony: Synchrony) -> Result<(), PlanError> {
    if spec.kind == TensorKind::Parameter && spec.dtype == Dtype::U8 {
        return Err(PlanError::new(format!(
            "tensor {:?} holds plain bytes and cannot be trained",
            spec.name
        )));
    }
    let is_async = synchrony == Synchrony::Async;
    if spec.kind == TensorKind::Parameter && spec.dtype == Dtype::F64 && is_async {
        return Err(PlanError::new(format!(
            "tensor {:?} is f64: asynchronous servers have kernels for f32, f16 and bf16",
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
    codec: &dyn CodecSizes,
) -> Result<(), PlanError> {
    let (name, codec) = (&spec.name, codec.name());
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

/// The sizes of a codec for these slices.
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

fn narrow(count: usize) -> Result<u32, PlanError> {
    u32::try_from(count).map_err(|_| PlanError::new("more than 2^32 tensors or slices"))
}

// Which server owns a slice.

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

// How the tensors of a ring are cut into chunks and dealt to ranks.

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
