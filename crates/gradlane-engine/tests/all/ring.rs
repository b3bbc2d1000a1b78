//! Rings: whatever the order of events, all ranks get the mean that the plan says, to the last bit;
//! nobody believes a frame of another rank, hop or step; who is missing is named.

use crate::common::model::{self, gradient};
use crate::common::{self, Cluster};
use gradlane_engine::{
    Input, Memory, PayloadDest, Plan, Scheme, Strategy, TensorKind, TensorSpec, Update,
    RING_CHUNK_ELEMS,
};
use gradlane_units::{Dtype, Rank, Rng, SliceId, Step, TensorId, Time};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind};
use proptest::prelude::*;
use std::sync::Arc;

/// Whether a rank has a gradient: drawn for each tensor and step.
fn has_gradient(rank: u32, tensor: u32, step: u64, holes: bool) -> bool {
    let draw = Rng::new(u64::from(tensor) * 31 + step * 7 + 1).next_u64();
    !holes || (draw >> (rank % 11) & 1 == 1 && !draw.is_multiple_of(5))
}

/// A plan of tensors with a scheme each, whose ring slices end on ranks drawn from a seed.
fn mixed(tensors: &[(u64, Scheme)], slice_elems: u64, world: u32, seed: u64) -> Arc<Plan> {
    let sizes: Vec<u64> = tensors.iter().map(|&(numel, _)| numel).collect();
    let specs = common::tensors(&sizes).into_iter().zip(tensors.iter().map(|it| it.1)).collect();
    let strategy = Strategy::named("p3", Some(slice_elems), 0).expect("p3");
    let mut plan = Plan::build(specs, strategy, Update::Worker, world).expect("a plan");
    let mut rng = Rng::new(seed);
    for slice in &mut plan.slices {
        slice.owner = Rank(rng.below(world));
    }
    Arc::new(plan)
}

fn ring(sizes: &[u64], slice_elems: u64, world: u32, seed: u64) -> Arc<Plan> {
    let tensors: Vec<(u64, Scheme)> = sizes.iter().map(|&numel| (numel, Scheme::Ring)).collect();
    mixed(&tensors, slice_elems, world, seed)
}

/// Ranks give their gradients in turns drawn from the seed, last tensor first, while frames move.
fn train(cluster: &mut Cluster, plan: &Plan, step: u64, holes: bool) {
    let world = cluster.world();
    cluster.begin(Step(step));
    let mut left = vec![plan.tensors.len() as u32; world as usize];
    while left.iter().any(|&tensors| tensors > 0) {
        let rank = cluster.rng.below(world);
        let Some(tensor) = left[rank as usize].checked_sub(1) else { continue };
        left[rank as usize] = tensor;
        give(cluster, plan, rank, tensor, step, holes);
        if cluster.rng.below(4) == 0 {
            cluster.run();
        }
    }
    cluster.run();
    check(cluster, plan, step, holes);
}

fn give(cluster: &mut Cluster, plan: &Plan, rank: u32, tensor: u32, step: u64, holes: bool) {
    let numel = plan.tensor(TensorId(tensor)).spec.numel;
    let node = &mut cluster.nodes[rank as usize];
    if has_gradient(rank, tensor, step, holes) {
        node.tensors[tensor as usize] = gradient(rank, tensor as usize, step, numel);
        node.engine.handle(Input::GradientReady(TensorId(tensor), Step(step))).expect("a gradient");
    } else {
        node.engine.handle(Input::TensorAbsent(TensorId(tensor), Step(step))).expect("an absence");
    }
}

fn check(cluster: &Cluster, plan: &Plan, step: u64, holes: bool) {
    let bits = |values: &[f32]| -> Vec<u32> { values.iter().map(|it| it.to_bits()).collect() };
    for node in &cluster.nodes {
        assert_eq!(node.completed.last(), Some(&Step(step)), "{}", node.engine.outstanding());
        for (index, tensor) in plan.tensors.iter().enumerate() {
            let (id, numel) = (TensorId(index as u32), tensor.spec.numel);
            let given = |rank| has_gradient(rank, id.0, step, holes);
            let ready: Vec<bool> = node
                .ready
                .iter()
                .filter(|it| (it.0, it.1) == (id, Step(step)))
                .map(|it| it.2)
                .collect();
            let absent = !(0..plan.world_size).any(given);
            if numel > 0 {
                assert_eq!(ready, [absent], "released once, and absent only if nobody gave");
            }
            if absent || numel == 0 {
                continue;
            }
            let right = model::mean(plan, id, |rank| {
                given(rank).then(|| gradient(rank, id.index(), step, numel))
            });
            let who = node.engine.rank();
            assert_eq!(bits(&node.tensors[index]), bits(&right), "{who}, {id} in step {step}");
        }
    }
}

fn any_tensors() -> impl proptest::strategy::Strategy<Value = Vec<(u64, Scheme)>> {
    let numel = prop_oneof![Just(0_u64), 1..12_u64, 1..120_u64, Just(700_u64)];
    let scheme = prop_oneof![3 => Just(Scheme::Ring), 1 => Just(Scheme::Ps)];
    proptest::collection::vec((numel, scheme), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]
    #[test]
    fn every_rank_gets_the_mean_of_the_plan(
        tensors in any_tensors(),
        world in 1..8_u32,
        slice_elems in 1..300_u64,
        frame_bytes in prop_oneof![Just(60_u32), Just(200), Just(1 << 16)],
        credit in prop_oneof![Just(0_u64), Just(300), Just(1 << 20)],
        holes in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let slice_elems = slice_elems.max(tensors.iter().map(|it| it.0).sum::<u64>() / 30);
        let plan = mixed(&tensors, slice_elems, world, seed);
        let mut cluster = Cluster::new(&plan, frame_bytes, credit, seed);
        let initial = |it: &(u64, Scheme)| vec![f32::from_bits(0x7fc0_1234); it.0 as usize];
        cluster.nodes[0].tensors = tensors.iter().map(initial).collect();
        cluster.step_zero();
        for node in &cluster.nodes {
            for values in &node.tensors {
                prop_assert!(values.iter().all(|it| it.to_bits() == 0x7fc0_1234));
            }
        }
        for step in 1..=3 {
            train(&mut cluster, &plan, step, holes);
        }
        cluster.finish();
    }
}

#[test]
fn two_ranks_get_the_bits_of_servers() {
    // Payloads of NaNs and signs of zeros show the order of two operands.
    let odd = [f32::from_bits(0x7fc0_0001), -0.0, 0.0, 1.5, f32::INFINITY, f32::NEG_INFINITY];
    let other = [f32::from_bits(0x7fc0_0002), -0.0, -0.0, 0.1, f32::NEG_INFINITY, 1.0];
    let results = [Scheme::Ps, Scheme::Ring].map(|scheme| {
        let specs = common::tensors(&[6, 6]).into_iter().map(|spec| (spec, scheme)).collect();
        let strategy = Strategy::named("p3", Some(2), 0).expect("p3");
        let plan = Plan::build(specs, strategy, Update::Worker, 2).expect("a plan");
        let mut cluster = Cluster::new(&Arc::new(plan), 64, 64, 3);
        cluster.step_zero();
        cluster.begin(Step(1));
        for (rank, values) in [odd, other].iter().enumerate() {
            for tensor in 0..2 {
                let node = &mut cluster.nodes[rank];
                node.tensors[tensor] = values.to_vec();
                let (engine, id) = (&mut node.engine, TensorId(tensor as u32));
                if rank == 1 && tensor == 1 {
                    engine.handle(Input::TensorAbsent(id, Step(1))).expect("an absence");
                } else {
                    engine.handle(Input::GradientReady(id, Step(1))).expect("a gradient");
                }
            }
        }
        cluster.run();
        let values = cluster.nodes[1].tensors.concat();
        values.iter().map(|it| it.to_bits()).collect::<Vec<u32>>()
    });
    assert_eq!(results[0], results[1]);
}

#[test]
fn each_port_carries_twice_its_share_of_the_bytes() {
    let (world, numel) = (5, 8 * RING_CHUNK_ELEMS + 77);
    let plan = common::plan(&[numel, 900, 30], "ring", 5_000, world);
    let mut sent = vec![0_u64; world as usize];
    for slice in &plan.slices {
        let owner = slice.owner.0;
        for rank in 0..world {
            // Neither the owner sends the sum on, nor the rank before it the mean.
            let silent = u64::from(rank == owner) + u64::from((rank + 1) % world == owner);
            sent[rank as usize] += (2 - silent) * slice.length;
        }
    }
    let share = 2 * u64::from(world - 1) * (numel + 930) / u64::from(world);
    assert!(sent.iter().all(|bytes| bytes.abs_diff(share) <= 2 * RING_CHUNK_ELEMS), "{sent:?}");
}

#[test]
fn the_order_of_addition_does_not_depend_on_slices_or_on_other_tensors_schemes() {
    let sizes = [3 * RING_CHUNK_ELEMS + 5, 10, 2 * RING_CHUNK_ELEMS];
    let owners = |plan: &Plan, tensor: u32| -> Vec<u32> {
        let slices = plan.slices_of(TensorId(tensor)).map(|id| *plan.slice(id));
        slices.flat_map(|it| std::iter::repeat_n(it.owner.0, it.length as usize)).collect()
    };
    let whole = common::plan(&sizes, "ring", 1 << 30, 3);
    for slice_elems in [1_000, 4_097, RING_CHUNK_ELEMS, 50_000] {
        let plan = common::plan(&sizes, "ring", slice_elems, 3);
        assert!(plan.slices.iter().all(|it| it.length <= slice_elems.min(RING_CHUNK_ELEMS)));
        for tensor in 0..3 {
            assert_eq!(owners(&plan, tensor), owners(&whole, tensor), "{slice_elems}");
        }
    }
    let schemes = [Scheme::Ps, Scheme::Ps, Scheme::Ring];
    let tensors: Vec<(TensorSpec, Scheme)> =
        common::tensors(&sizes).into_iter().zip(schemes).collect();
    let strategy = Strategy::named("p3", None, 0).expect("p3");
    let some = Plan::build(tensors, strategy, Update::Worker, 3).expect("a plan");
    assert_eq!(owners(&some, 2), owners(&whole, 2));
}

#[test]
fn rules_that_need_servers_refuse_a_ring() {
    let refused = |name: &str, update: Update, world: u32| -> String {
        let strategy = Strategy::named(name, None, 0).expect("a strategy");
        let tensors = common::tensors(&[10]).into_iter().map(|it| (it, Scheme::Ring)).collect();
        Plan::build(tensors, strategy, update, world).expect_err("refused").to_string()
    };
    for (name, update, world, why) in [
        ("p3", Update::Server, 2, "update=worker"),
        ("kvstore", Update::Worker, 2, "pull"),
        ("deferred-pull", Update::Worker, 2, "pull"),
        ("p3", Update::Worker, 70_000, "65536 ranks"),
    ] {
        let text = refused(name, update, world);
        assert!(text.contains(why) && text.contains("layer0.weight"), "{text}");
    }
    let mut plan = (*common::plan(&[10], "ring", 5, 2)).clone();
    assert!(plan.validate().is_ok());
    plan.update = Update::Server;
    assert!(plan.validate().is_err());
}

#[test]
fn only_rank_0_spreads_tensors_that_are_not_trained() {
    let mut specs = common::tensors(&[10, 20]);
    specs[1].kind = TensorKind::Initial;
    specs[1].dtype = Dtype::U8;
    specs[1].numel = 80;
    let strategy = Strategy::named("ring", Some(7), 0).expect("ring");
    let plan = Arc::new(Plan::build(specs, strategy, Update::Worker, 3).expect("a plan"));
    let mut cluster = Cluster::new(&plan, 64, 64, 1);
    for node in &mut cluster.nodes {
        node.tensors[1] = vec![0.0; 20];
    }
    cluster.nodes[0].tensors[1] = vec![3.5; 20];
    cluster.step_zero();
    assert!(cluster.nodes.iter().all(|node| node.tensors[1] == [3.5; 20]));
    let refused = cluster.nodes[1].engine.handle(Input::GradientReady(TensorId(1), Step(0)));
    assert!(refused.is_err());
    cluster.finish();
}

#[test]
fn priorities_are_switched_at_the_same_step_on_all_ranks() {
    for seed in 0..30 {
        let plan = ring(&[300, 20, 500], 50, 4, seed);
        let mut cluster = Cluster::new(&plan, 64, 64, seed);
        cluster.step_zero();
        for step in 1..=5 {
            if step == 2 {
                cluster.switch(&[-2, -1, 0]);
            }
            train(&mut cluster, &plan, step, false);
        }
        for node in &cluster.nodes {
            assert_eq!(node.switched.len(), 1, "seed {seed}");
            let from = node.switched[0].1;
            let late = node.log.iter().filter(|it| it.kind.is_ring() && it.step >= from);
            assert!(late.clone().count() > 0);
            assert!(late.clone().all(|it| it.plan_version == 1));
            assert!(late.clone().all(|it| it.priority.0 == it.tensor.0 as i32 - 2));
        }
        cluster.finish();
    }
}

#[test]
fn a_barrier_between_steps_holds_ring_tensors_too() {
    let strategy =
        Strategy { scheme: Scheme::Ring, ..Strategy::named("wfbp", None, 0).expect("wfbp") };
    let specs = common::tensors(&[10, 10]);
    let plan = Arc::new(Plan::build(specs, strategy, Update::Worker, 3).expect("a plan"));
    common::releases_nothing_before_the_whole_step(&plan);
}

#[test]
fn a_lost_rank_is_named_by_all_others_whatever_the_moment() {
    for seed in 0..40 {
        let sizes = [300, 20, 500];
        let plan = ring(&sizes, 50, 4, seed);
        let mut cluster = Cluster::new(&plan, 64, 64, seed);
        cluster.step_zero();
        train(&mut cluster, &plan, 1, false);
        cluster.begin(Step(2));
        for rank in 0..4 {
            for tensor in (u32::from(rank == 3)..3).rev() {
                give(&mut cluster, &plan, rank, tensor, 2, false);
            }
        }
        cluster.run();
        cluster.kill(3);
        cluster.run();
        for node in &cluster.nodes[..3] {
            common::names_the_lost(node, Rank(3), seed);
        }
    }
}

#[test]
fn the_rank_that_does_not_take_part_is_named_after_the_progress_timeout() {
    // Blocks end on every rank, so that the missing one is the only one that explains it all.
    let plan = common::plan(&[200; 12], "ring", 50, 5);
    for missing in 0..5 {
        let mut cluster = Cluster::new(&plan, 1 << 16, 1 << 20, 3);
        cluster.step_zero();
        cluster.begin(Step(1));
        for rank in (0..5).filter(|&rank| rank != missing) {
            for tensor in 0..12 {
                give(&mut cluster, &plan, rank, tensor, 1, false);
            }
        }
        cluster.run();
        for node in &mut cluster.nodes {
            let Some(deadline) = node.engine.poll_timeout() else {
                assert_eq!(node.engine.rank(), Rank(missing), "it is its own turn");
                continue;
            };
            node.engine.tell(Input::Time(Time(deadline.0)));
            node.take_events();
            let failure = node.failure.as_ref().expect("a failure");
            assert!(failure.timed_out);
            assert_eq!(failure.outstanding.ranks, [Rank(missing)], "{failure}");
            assert!(failure.reason.contains(&format!("rank {missing}")), "{failure}");
        }
    }
}

/// A frame that rank 1 of 4 expects in step 1: a slice that ends on rank 2 began on rank 3.
fn honest(plan: &Plan) -> FrameHeader {
    let slice = plan.slices.iter().position(|it| it.owner == Rank(2)).expect("a slice");
    let slice = SliceId(slice as u32);
    FrameHeader {
        flags: FrameFlags::LAST,
        tensor: plan.slice(slice).tensor,
        slice,
        length: plan.slice_bytes(slice) as u32,
        hop: 2,
        ..common::frame(FrameKind::RingReduce, Rank(0))
    }
}

#[test]
fn frames_of_another_rank_hop_step_or_slice_are_refused() {
    let plan = common::plan(&[40; 4], "ring", 50, 4);
    let header = honest(&plan);
    let engine = |plan: &Arc<Plan>| {
        let mut cluster = Cluster::new(plan, 64, 64, 1);
        cluster.step_zero();
        cluster.nodes.swap_remove(1).engine
    };
    let landing = engine(&plan).handle(Input::Header(Rank(0), header)).expect("an honest frame");
    assert!(matches!(landing, PayloadDest::Region(region)
        if matches!(region.memory, Memory::Buffer(_)) && region.length == 160));
    let other = |owner: u32| {
        let at = plan.slices.iter().position(|it| it.owner == Rank(owner)).expect("a slice");
        (SliceId(at as u32), plan.slices[at].tensor)
    };
    let (begins_here, begins_tensor) = other(0);
    let gather = FrameHeader { kind: FrameKind::RingBroadcast, hop: 3, ..header };
    let wrong: Vec<(Rank, FrameHeader, &str)> = vec![
        (Rank(2), FrameHeader { sender: Rank(2), ..header }, "rank 0 is before this rank"),
        (Rank(3), FrameHeader { sender: Rank(3), ..header }, "rank 0 is before this rank"),
        (Rank(0), FrameHeader { hop: 1, ..header }, "at hop 1, this rank gets it at hop 2"),
        (Rank(0), FrameHeader { hop: 3, ..header }, "at hop 3, this rank gets it at hop 2"),
        (Rank(0), FrameHeader { step: Step(0), ..header }, "nothing is added"),
        (Rank(0), FrameHeader { step: Step(2), ..header }, "this rank adds to step 1"),
        (Rank(0), FrameHeader { offset: 4, ..header }, "160 bytes at offset 4"),
        (
            Rank(0),
            FrameHeader { slice: begins_here, tensor: begins_tensor, ..header },
            "begins on this rank",
        ),
        (
            Rank(0),
            FrameHeader { kind: FrameKind::Push, hop: 0, ..header },
            "a tensor of scheme ring",
        ),
        (Rank(0), FrameHeader { kind: FrameKind::Broadcast, hop: 0, ..header }, "of scheme ring"),
        (Rank(0), gather, "but this rank is in step 0"),
        (Rank(0), FrameHeader { hop: 2, ..gather }, "at hop 2, this rank gets it at hop 3"),
    ];
    for (from, header, why) in wrong {
        let mut engine = engine(&plan);
        let error = engine.handle(Input::Header(from, header)).expect_err(why).to_string();
        assert!(error.contains(why), "{error}");
        assert!(error.contains(&from.to_string()), "{error}");
        assert_eq!(engine.buffers_in_use(), 0, "nothing was kept of it");
    }
    // A result before this rank's own part, and a sum that comes twice.
    let mut engine = engine(&plan);
    engine.handle(Input::StepBegin(Step(1))).expect("begins");
    let error = engine.handle(Input::Header(Rank(0), gather)).expect_err("too early").to_string();
    assert!(error.contains("without a contribution of this rank"), "{error}");
    engine.handle(Input::Header(Rank(0), header)).expect("an honest frame");
    engine.handle(Input::Frame(Rank(0), header)).expect("an honest frame");
    let error = engine.handle(Input::Header(Rank(0), header)).expect_err("twice").to_string();
    assert!(error.contains("a second time"), "{error}");
    let servers = common::plan(&[40; 4], "p3", 50, 4);
    let mut cluster = Cluster::new(&servers, 64, 64, 1);
    cluster.step_zero();
    let error =
        cluster.nodes[1].engine.handle(Input::Header(Rank(0), header)).expect_err("no ring");
    assert!(error.to_string().contains("a tensor of scheme ps"), "{error}");
}
