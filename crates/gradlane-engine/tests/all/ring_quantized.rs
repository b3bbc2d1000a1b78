//! Rings whose sums travel encoded, hop by hop or as sums of codes, under random interleavings: all
//! ranks have the same, which is what the hops make one after another.

use crate::common::model::gradient;
use crate::common::toy::{encoded_plan, Toy};
use crate::common::{self, frame, round, tensors, Cluster};
use gradlane_engine::{
    CodecSizes, Input, Plan, PlanError, RingBytes, Strategy, TensorSpec, Update,
    RING_ENCODED_CHUNK_ELEMS,
};
use gradlane_units::{Rank, Rng, Step, TensorId, Time};
use gradlane_wire::{FrameHeader, FrameKind, PayloadForm};
use proptest::prelude::*;
use std::sync::Arc;

const HOPS: Toy = Toy { granule_elems: 4, varies: false, integer: false };
const CODES: Toy = Toy { integer: true, ..HOPS };

fn given(rank: u32, tensor: usize, step: u64, holes: bool) -> bool {
    let draw = Rng::new(tensor as u64 * 31 + step * 7 + 1).next_u64();
    !holes || (draw >> (rank % 11) & 1 == 1 && !draw.is_multiple_of(5))
}

/// All but the last tensor have the codec.
fn coded(sizes: &[u64], toy: Toy) -> Vec<(TensorSpec, Option<Toy>)> {
    let last = sizes.len() - 1;
    let specs = tensors(sizes).into_iter().enumerate();
    specs.map(|(index, spec)| (spec, (index < last).then_some(toy))).collect()
}

fn plan_of(sizes: &[u64], toy: Toy, slice_elems: u64, world: u32) -> Arc<Plan> {
    encoded_plan(coded(sizes, toy), "ring", slice_elems, world, Update::Worker)
}

fn give(cluster: &mut Cluster, rank: u32, tensor: usize, step: u64, holes: bool) {
    let node = &mut cluster.nodes[rank as usize];
    let id = TensorId(tensor as u32);
    if given(rank, tensor, step, holes) {
        let numel = node.engine.plan().tensor(id).spec.numel;
        node.tensors[tensor] = gradient(rank, tensor, step, numel);
        node.engine.handle(Input::GradientReady(id, Step(step))).expect("a gradient");
    } else {
        node.engine.handle(Input::TensorAbsent(id, Step(step))).expect("an absence");
    }
}

/// One step, in which ranks have their gradients in turns drawn from the seed.
fn run_step(cluster: &mut Cluster, step: u64, holes: bool, raw: bool) {
    let world = cluster.world();
    cluster.begin(Step(step));
    for node in cluster.nodes.iter_mut().filter(|_| raw) {
        node.engine.handle(Input::SendRaw(Step(step))).expect("a raw step");
    }
    let count = cluster.nodes[0].tensors.len();
    let mut next = vec![count; world as usize];
    while next.iter().any(|&left| left > 0) {
        let rank = cluster.rng.below(world);
        let Some(tensor) = next[rank as usize].checked_sub(1) else { continue };
        next[rank as usize] = tensor;
        give(cluster, rank, tensor, step, holes);
        if cluster.rng.below(3) == 0 {
            cluster.stir(30);
        }
    }
    cluster.run();
}

fn check(cluster: &Cluster, plan: &Plan, toy: Toy, step: u64, holes: bool, raw: bool) {
    let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|it| it.to_bits()).collect() };
    for node in &cluster.nodes {
        assert_eq!(node.completed.last(), Some(&Step(step)), "{}", node.engine.outstanding());
        for (index, tensor) in plan.tensors.iter().enumerate() {
            let id = TensorId(index as u32);
            let absent = !(0..plan.world_size).any(|rank| given(rank, index, step, holes));
            let ready: Vec<bool> = node
                .ready
                .iter()
                .filter(|it| (it.0, it.1) == (id, Step(step)))
                .map(|it| it.2)
                .collect();
            assert_eq!(ready, [absent], "{id}: absent only if nobody gave");
            if absent {
                continue;
            }
            let values = |rank: u32| {
                given(rank, index, step, holes)
                    .then(|| gradient(rank, index, step, tensor.spec.numel))
            };
            let right = if tensor.codec.is_none() || raw {
                common::model::mean(plan, id, values)
            } else {
                let part = |slice| {
                    let range = plan.slice(slice).start as usize;
                    let range = range..range + plan.slice(slice).length as usize;
                    round::expected(plan, slice, toy, |rank| {
                        values(rank).map(|all| all[range.clone()].to_vec())
                    })
                };
                plan.slices_of(id).flat_map(part).collect()
            };
            let who = node.engine.rank();
            assert_eq!(bits(&node.tensors[index]), bits(&right), "{who}, {id} in step {step}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, ..ProptestConfig::default() })]
    #[test]
    fn all_ranks_have_the_same_mean(
        sizes in proptest::collection::vec(prop_oneof![1..70_u64, Just(900_u64)], 2..6),
        world in 2..8_u32,
        slice_elems in 1..400_u64,
        granule_elems in prop_oneof![Just(1_u64), Just(7), Just(64)],
        varies in any::<bool>(),
        integer in any::<bool>(),
        frame_bytes in prop_oneof![Just(7_u32), Just(64), Just(1 << 16)],
        credit in prop_oneof![Just(0_u64), Just(300), Just(1 << 20)],
        holes in any::<bool>(),
        raw_step in 0..4_u64,
        seed in any::<u64>(),
    ) {
        let total = sizes.iter().sum::<u64>();
        let frame_bytes = frame_bytes.max(total as u32 / 16);
        let toy = Toy { granule_elems, varies: varies && !integer, integer };
        let plan = plan_of(&sizes, toy, slice_elems.max(total / 30), world);
        for (index, slice) in plan.slices.iter().enumerate() {
            let id = gradlane_units::SliceId(index as u32);
            prop_assert!(plan.codec(id).is_none() || slice.start % granule_elems == 0);
        }
        let mut cluster = Cluster::with_toy(&plan, toy, frame_bytes, credit, seed);
        cluster.nodes[0].tensors =
            sizes.iter().map(|&numel| vec![f32::from_bits(0x7fc0_1234); numel as usize]).collect();
        cluster.step_zero();
        for node in &cluster.nodes {
            let exact = |values: &Vec<f32>| values.iter().all(|it| it.to_bits() == 0x7fc0_1234);
            prop_assert!(node.tensors.iter().all(exact), "initial values are never encoded");
        }
        for step in 1..=3 {
            run_step(&mut cluster, step, holes, step == raw_step);
            check(&cluster, &plan, toy, step, holes, step == raw_step);
        }
        for header in cluster.nodes.iter().flat_map(|node| &node.log) {
            let coded = plan.tensor(header.tensor).codec.is_some();
            let raw = header.step.0 == 0 || header.step.0 == raw_step || !coded;
            if header.length > 0 && header.kind.is_ring() {
                prop_assert_eq!(header.form, if raw { PayloadForm::Raw } else { PayloadForm::Encoded });
            }
            prop_assert!(header.kind != FrameKind::RingScale || (integer && !raw));
        }
        for node in &cluster.nodes {
            prop_assert_eq!(node.engine.buffers_in_use(), 0, "every buffer is given back");
        }
        cluster.finish();
    }
}

#[test]
fn sums_are_sent_most_urgent_first_and_few_are_encoded_ahead() {
    // Where each sum begins, its gradient is encoded ahead of the socket: the cluster of the tests
    // checks how many.
    for (seed, toy) in (0..20).zip([HOPS, CODES].into_iter().cycle()) {
        let sizes = [400; 7];
        let plan = plan_of(&sizes, toy, 16, 3);
        let mut cluster = Cluster::with_toy(&plan, toy, 16, 16, seed);
        cluster.step_zero();
        run_step(&mut cluster, 1, false, false);
        check(&cluster, &plan, toy, 1, false, false);
    }
}

#[test]
fn slices_are_cut_at_granules_and_other_tensors_keep_their_owners() {
    let sizes = [3 * RING_ENCODED_CHUNK_ELEMS + 5, 50_000, 40_000];
    let with = plan_of(&sizes, Toy { granule_elems: 96, ..HOPS }, 50_000, 3);
    let without = common::plan(&sizes, "ring", 50_000, 3);
    let owners = |plan: &Plan, tensor: u32| -> Vec<u32> {
        let slices = plan.slices_of(TensorId(tensor)).map(|id| *plan.slice(id));
        slices.flat_map(|it| std::iter::repeat_n(it.owner.0, it.length as usize)).collect()
    };
    assert_eq!(owners(&with, 2), owners(&without, 2), "a tensor without a codec");
    // Bits under a codec do not depend on the slice size either.
    let small = plan_of(&sizes, Toy { granule_elems: 96, ..HOPS }, 1_000, 3);
    assert_eq!(owners(&with, 0), owners(&small, 0));
    for slice in with.slices_of(TensorId(0)) {
        let slice = with.slice(slice);
        assert!(slice.start.is_multiple_of(96) && slice.length <= 50_000, "{slice:?}");
    }
    let loads = |plan: &Plan| {
        let mut loads = [0; 3];
        for slice in plan.slices.iter().filter(|it| it.tensor.0 < 2) {
            loads[slice.owner.index()] += slice.length;
        }
        loads
    };
    let loads = loads(&with);
    assert!(loads.iter().max() < loads.iter().min().map(|it| it * 2).as_ref(), "{loads:?}");
}

#[test]
fn ranks_that_disagree_on_a_raw_step_fail_and_say_so() {
    for (seed, toy) in (0..20).zip([HOPS, CODES].into_iter().cycle()) {
        let plan = plan_of(&[100, 1], toy, 50, 3);
        let mut cluster = Cluster::with_toy(&plan, toy, 64, 64, seed);
        cluster.step_zero();
        cluster.begin(Step(1));
        cluster.nodes[0].engine.handle(Input::SendRaw(Step(1))).expect("a raw step");
        for rank in 0..3 {
            give(&mut cluster, rank, 0, 1, false);
        }
        let failures = cluster.run_to_failure();
        assert!(!failures.is_empty());
        let said = |text: &String| {
            text.contains("all ranks have to do the same")
                || text.contains("before its scales")
                || text.contains("adds to step 2")
        };
        assert!(failures.iter().any(said), "{failures:?}");
    }
}

#[test]
fn the_rank_that_does_not_take_part_is_named() {
    let plan = plan_of(&[200; 13], CODES, 50, 5);
    for missing in 0..5 {
        let mut cluster = Cluster::with_toy(&plan, CODES, 1 << 16, 1 << 20, 3);
        cluster.step_zero();
        cluster.begin(Step(1));
        for rank in (0..5).filter(|&rank| rank != missing) {
            (0..13).for_each(|tensor| give(&mut cluster, rank, tensor, 1, false));
        }
        cluster.run();
        for node in cluster.nodes.iter_mut().filter(|it| it.engine.rank() != Rank(missing)) {
            let deadline = node.engine.poll_timeout().expect("it waits");
            node.engine.tell(Input::Time(Time(deadline.0)));
            node.take_events();
            let failure = node.failure.as_ref().expect("a failure");
            assert_eq!(failure.outstanding.ranks, [Rank(missing)], "{failure}");
        }
    }
}

#[test]
fn scales_and_sums_that_nobody_expects_are_refused() {
    let plan = plan_of(&[40, 40, 40, 40, 4], CODES, 50, 4);
    let slice = plan.slices_of(TensorId(0)).next().expect("a slice");
    // Scales begin on the second rank after the owner; this is the third.
    let owner = plan.slice(slice).owner.0;
    let own = (owner + 3) % 4;
    let before = Rank((owner + 2) % 4);
    let header = FrameHeader {
        form: PayloadForm::Encoded,
        flags: gradlane_wire::FrameFlags::LAST,
        slice,
        length: 4,
        hop: 1,
        ..frame(FrameKind::RingScale, before)
    };
    let engine = || {
        let mut cluster = Cluster::with_toy(&plan, CODES, 64, 64, 1);
        cluster.step_zero();
        cluster.nodes.swap_remove(own as usize).engine
    };
    assert!(engine().handle(Input::Header(before, header)).is_ok());
    let sum = FrameHeader { kind: FrameKind::RingReduce, length: 164, hop: 2, ..header };
    let wrong = [
        (FrameHeader { hop: 2, ..header }, "at hop 2, this rank gets it at hop 1"),
        (FrameHeader { form: PayloadForm::Raw, ..header }, "share no scales"),
        (FrameHeader { step: Step(0), ..header }, "nothing is added"),
        (FrameHeader { length: 8, ..header }, "8 bytes at offset 0 of 4"),
        (sum, "before its scales had this rank's"),
        (FrameHeader { length: 160, ..sum }, "160 bytes at offset 0 of 164"),
    ];
    for (header, why) in wrong {
        let mut engine = engine();
        let error = engine.handle(Input::Header(before, header)).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
        assert_eq!(engine.buffers_in_use(), 0, "nothing was kept of it");
    }
    let mut engine = engine();
    engine.handle(Input::Header(before, header)).expect("scales");
    engine.handle(Input::Frame(before, header)).expect("scales");
    let error = engine.handle(Input::Header(before, header)).expect_err("twice").to_string();
    assert!(error.contains("a second time"), "{error}");
    // Without shared scales there is nothing to send them for.
    let hops = plan_of(&[40, 40, 40, 40, 4], HOPS, 50, 4);
    let mut cluster = Cluster::with_toy(&hops, HOPS, 64, 64, 1);
    cluster.step_zero();
    let engine = &mut cluster.nodes[own as usize].engine;
    let error = engine.handle(Input::Header(before, header)).expect_err("no scales").to_string();
    assert!(error.contains("RingScale") && error.contains("as encoded bytes"), "{error}");
}

/// A codec that no ring can have.
#[derive(Debug)]
struct Stationary;

impl CodecSizes for Stationary {
    fn name(&self) -> String {
        "stationary".to_owned()
    }
    fn sizes(&self) -> Vec<u64> {
        Vec::new()
    }
    fn granule_elems(&self) -> u64 {
        1
    }
    fn bytes_max(&self, elements: u64) -> u64 {
        elements
    }
    fn is_fixed(&self) -> bool {
        true
    }
    fn residual_width(&self) -> u32 {
        2
    }
    fn ring_bytes(&self, _: u64, world_size: u32) -> Result<Option<RingBytes>, String> {
        Err(format!("it stays where it is, on all {world_size} ranks"))
    }
}

#[test]
fn a_codec_that_cannot_go_round_is_refused_with_its_reason() {
    let build = |strategy: &str| -> Result<Plan, PlanError> {
        let codec: Box<dyn CodecSizes> = Box::new(Stationary);
        let strategy = Strategy::named(strategy, None, 0).expect("a strategy");
        Plan::build(vec![(tensors(&[10]).remove(0), Some(codec))], strategy, Update::Worker, 3)
    };
    assert!(build("p3").is_ok());
    let text = build("ring").expect_err("refused").to_string();
    assert!(text.contains("layer0.weight") && text.contains("on all 3 ranks"), "{text}");
}

#[test]
fn a_plan_says_what_scales_take() {
    let plan = plan_of(&[40, 4], CODES, 16, 3);
    let json = serde_json::to_string(plan.as_ref()).expect("JSON");
    assert!(json.contains(r#""bytes":[[12,52],[16,68]],"scales":[[12,4],[16,4]]"#), "{json}");
    let back: Plan = serde_json::from_str(&json).expect("the same plan");
    assert_eq!(&back, plan.as_ref());
    let servers = encoded_plan(coded(&[40, 4], CODES), "p3", 16, 3, Update::Worker);
    let json = serde_json::to_string(servers.as_ref()).expect("JSON");
    assert!(!json.contains("scales"), "servers decode: {json}");
}
