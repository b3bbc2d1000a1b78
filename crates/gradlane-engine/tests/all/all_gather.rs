//! Blocks: whatever the order of events, every rank gets every rank's block, of any size, in rank
//! order, and keeps it until it is released; what peers say of blocks is checked.

use crate::common::{self, model, Cluster};
use gradlane_engine::{Input, Plan, Scheme, Strategy, Update};
use gradlane_units::{Rank, Rng, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind};
use proptest::prelude::*;
use std::sync::Arc;

fn plan(tensors: &[(u64, Scheme)], slice_elems: u64, world: u32) -> Arc<Plan> {
    let sizes: Vec<u64> = tensors.iter().map(|&(numel, _)| numel).collect();
    let specs = common::tensors(&sizes).into_iter().zip(tensors.iter().map(|it| it.1)).collect();
    let strategy = Strategy::named("p3", Some(slice_elems), 0).expect("p3");
    Arc::new(Plan::build(specs, strategy, Update::Worker, world).expect("a plan"))
}

/// What a rank gives in a step: a block of some size up to the plan's, or none.
fn given(plan: &Plan, rank: u32, tensor: u32, step: u64) -> Option<Vec<f32>> {
    let mut rng = Rng::new(u64::from(rank) << 40 | u64::from(tensor) << 20 | step);
    let numel = plan.tensor(TensorId(tensor)).spec.numel;
    let elements = match (plan.tensor(TensorId(tensor)).scheme, rng.below(5)) {
        (_, 0) => return None,
        (Scheme::AllGather, 1) => numel,
        (Scheme::AllGather, 2) => 0,
        (Scheme::AllGather, _) => u64::from(rng.below(numel as u32 + 1)),
        _ => numel,
    };
    let value = move || (rng.next_u64() >> 40) as f32 / 7.0 - 1e6;
    Some(std::iter::repeat_with(value).take(elements as usize).collect())
}

fn give(cluster: &mut Cluster, plan: &Plan, rank: u32, tensor: u32, step: u64) {
    let node = &mut cluster.nodes[rank as usize];
    let (id, at) = (TensorId(tensor), Step(step));
    match (given(plan, rank, tensor, step), plan.tensor(id).scheme) {
        (None, _) => {
            node.engine.handle(Input::TensorAbsent(id, at)).expect("an absence");
        }
        (Some(block), Scheme::AllGather) => {
            node.tensors[tensor as usize][..block.len()].copy_from_slice(&block);
            node.engine.handle(Input::BlockReady(id, at, 4 * block.len() as u64)).expect("a block");
        }
        (Some(gradient), _) => {
            node.tensors[tensor as usize] = gradient;
            node.engine.handle(Input::GradientReady(id, at)).expect("a gradient");
        }
    }
}

fn check(cluster: &Cluster, plan: &Plan, step: u64) {
    let world = plan.world_size;
    for node in &cluster.nodes {
        assert_eq!(node.completed.last(), Some(&Step(step)), "{}", node.engine.outstanding());
        for tensor in 0..plan.tensors.len() as u32 {
            let id = TensorId(tensor);
            let all: Vec<_> = (0..world).map(|rank| given(plan, rank, tensor, step)).collect();
            let ready: Vec<_> =
                node.ready.iter().filter(|it| (it.0, it.1) == (id, Step(step))).collect();
            assert_eq!(ready.len(), 1, "released once");
            if plan.tensor(id).scheme == Scheme::AllGather {
                assert_eq!(ready[0].2, all.iter().all(Option::is_none));
                let found = &node.blocks[&(id, Step(step))];
                let bytes = |block: &Option<Vec<f32>>| -> Option<Vec<u8>> {
                    block.as_ref().map(|it| it.iter().flat_map(|it| it.to_le_bytes()).collect())
                };
                let right: Vec<_> = all.iter().map(bytes).collect();
                let found: Vec<_> =
                    found.iter().map(|it| it.as_ref().map(|it| it.1.clone())).collect();
                assert_eq!(found, right, "{id} in step {step}");
            } else if all.iter().any(Option::is_some) && plan.tensor(id).spec.numel > 0 {
                let right = model::mean(plan, id, |rank| given(plan, rank, tensor, step));
                let bits = |it: &[f32]| it.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&node.tensors[tensor as usize]), bits(&right), "{id}");
            }
        }
    }
}

fn any_tensors() -> impl proptest::strategy::Strategy<Value = Vec<(u64, Scheme)>> {
    let numel = prop_oneof![Just(0_u64), 1..12_u64, 1..120_u64, Just(500_u64)];
    let scheme =
        prop_oneof![3 => Just(Scheme::AllGather), 1 => Just(Scheme::Ps), 1 => Just(Scheme::Ring)];
    proptest::collection::vec((numel, scheme), 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
    #[test]
    fn every_rank_gets_every_block(
        tensors in any_tensors(),
        world in 1..7_u32,
        slice_elems in 1..200_u64,
        frame_bytes in prop_oneof![Just(60_u32), Just(200), Just(1 << 16)],
        credit in prop_oneof![Just(0_u64), Just(300), Just(1 << 20)],
        switches in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let slice_elems = slice_elems.max(tensors.iter().map(|it| it.0).sum::<u64>() / 30);
        let plan = plan(&tensors, slice_elems, world);
        let mut cluster = Cluster::new(&plan, frame_bytes, credit, seed);
        cluster.nodes.iter_mut().for_each(|node| {
            node.tensors = tensors.iter().map(|it| vec![0.5; it.0 as usize]).collect();
        });
        cluster.begin(Step(0));
        for rank in 0..world {
            for (tensor, _) in tensors.iter().enumerate().filter(|it| it.1.1 != Scheme::AllGather) {
                let engine = &mut cluster.nodes[rank as usize].engine;
                engine.handle(Input::GradientReady(TensorId(tensor as u32), Step(0))).expect("values");
            }
        }
        cluster.run();
        for step in 1..=4 {
            cluster.begin(Step(step));
            if switches && step == 1 {
                let order: Vec<i32> = (0..tensors.len() as i32).collect();
                cluster.switch(&order);
            }
            let mut left = vec![tensors.len() as u32; world as usize];
            while left.iter().any(|&tensors| tensors > 0) {
                let rank = cluster.rng.below(world);
                let Some(tensor) = left[rank as usize].checked_sub(1) else { continue };
                left[rank as usize] = tensor;
                give(&mut cluster, &plan, rank, tensor, step);
                if cluster.rng.below(4) == 0 {
                    cluster.run();
                }
            }
            cluster.run();
            check(&cluster, &plan, step);
            // Some consumers take their time: their blocks stay while later steps go on.
            for rank in 0..world as usize {
                let held: Vec<_> = cluster.nodes[rank].blocks.keys().copied().collect();
                for (tensor, held_step) in held {
                    if held_step.0 + 2 <= step || cluster.rng.below(2) == 0 {
                        cluster.nodes[rank].release(tensor, held_step);
                    }
                }
            }
        }
        for node in &mut cluster.nodes {
            let held: Vec<_> = node.blocks.keys().copied().collect();
            held.into_iter().for_each(|(tensor, step)| node.release(tensor, step));
        }
        cluster.finish();
    }
}

/// A cluster of three with a tensor of blocks of up to 100 elements in slices of 40, after step 0.
fn cluster() -> (Cluster, Arc<Plan>) {
    let plan = plan(&[(100, Scheme::AllGather), (10, Scheme::Ps)], 40, 3);
    let mut cluster = Cluster::new(&plan, 64, 64, 1);
    cluster.begin(Step(0));
    for node in &mut cluster.nodes {
        node.engine.handle(Input::GradientReady(TensorId(1), Step(0))).expect("values");
    }
    cluster.run();
    assert!(cluster.nodes.iter().all(|node| node.completed == [Step(0)]), "blocks have no step 0");
    (cluster, plan)
}

#[test]
fn misuse_is_named_and_changes_nothing() {
    let (mut cluster, _) = cluster();
    cluster.begin(Step(1));
    let engine = &mut cluster.nodes[0].engine;
    let (blocks, gradient) = (TensorId(0), TensorId(1));
    for (result, words) in [
        (engine.handle(Input::GradientReady(blocks, Step(1))), "use block_ready"),
        (engine.handle(Input::BlockReady(gradient, Step(1), 40)), "use gradient_ready"),
        (engine.handle(Input::BlockReady(blocks, Step(1), 404)), "at most 400 bytes"),
        (engine.handle(Input::BlockReady(blocks, Step(1), 6)), "elements of 4"),
        (engine.handle(Input::BlockReady(blocks, Step(2), 4)), "current step is step 1"),
        (engine.handle(Input::ReleaseBlocks(blocks, Step(1))), "no blocks"),
    ] {
        let error = result.expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    }
    engine.handle(Input::BlockReady(blocks, Step(1), 400)).expect("a block");
    let again =
        engine.handle(Input::BlockReady(blocks, Step(1), 8)).expect_err("twice").to_string();
    assert!(again.contains("already has"), "{again}");
    for rank in [1, 2] {
        cluster.nodes[rank]
            .engine
            .handle(Input::TensorAbsent(blocks, Step(1)))
            .expect("an absence");
    }
    cluster.nodes.iter_mut().for_each(|node| {
        node.engine.handle(Input::TensorAbsent(gradient, Step(1))).expect("an absence");
    });
    cluster.run();
    let found = &cluster.nodes[2].blocks[&(blocks, Step(1))];
    let lengths: Vec<_> = found.iter().map(|it| it.as_ref().map(|it| it.1.len())).collect();
    assert_eq!(lengths, [Some(400), None, None], "the size of the first call counts");
}

#[test]
fn who_gives_no_block_is_named() {
    let (mut cluster, plan) = cluster();
    cluster.begin(Step(1));
    for rank in [0, 2] {
        give(&mut cluster, &plan, rank, 0, 1);
        give(&mut cluster, &plan, rank, 1, 1);
    }
    cluster.nodes[1].engine.handle(Input::TensorAbsent(TensorId(1), Step(1))).expect("an absence");
    cluster.run();
    let deadline = cluster.nodes[0].engine.poll_timeout().expect("a deadline");
    cluster.nodes[0].engine.tell(Input::Time(deadline));
    cluster.nodes[0].take_events();
    let failure = cluster.nodes[0].failure.as_ref().expect("a failure");
    assert!(failure.timed_out);
    assert_eq!(failure.outstanding.ranks, [Rank(1)], "{failure}");
}

#[test]
fn blocks_that_are_larger_than_the_plan_or_change_their_size_are_refused() {
    let (mut cluster, _) = cluster();
    let engine = &mut cluster.nodes[0].engine;
    let header = common::block_header();
    let last = FrameFlags::LAST;
    let second = SliceId(1);
    for (wrong, words) in [
        (FrameHeader { block_bytes: 404, ..header }, "at most 400"),
        (FrameHeader { block_bytes: 202, ..header }, "blocks are at most"),
        (FrameHeader { block_bytes: 80, ..header }, "100 bytes at offset 0"),
        (FrameHeader { offset: 4, ..header }, "at offset 4 after 0"),
        (FrameHeader { slice: second, offset: 160, length: 40, flags: last, ..header }, "after 0"),
        (FrameHeader { length: 160, ..header }, "last: false"),
        (FrameHeader { length: 200, flags: last, ..header }, "200 bytes"),
        (FrameHeader { flags: FrameFlags::ABSENT, ..header }, "100 bytes"),
        (FrameHeader { length: 0, ..header }, "0 bytes"),
        (FrameHeader { form: gradlane_wire::PayloadForm::Encoded, ..header }, "as encoded bytes"),
        (FrameHeader { step: Step(2), ..header }, "this rank is in step 0"),
        (FrameHeader { kind: FrameKind::Push, block_bytes: 0, ..header }, "of scheme gather"),
        (FrameHeader { tensor: TensorId(1), slice: SliceId(3), ..header }, "of scheme ps"),
    ] {
        let error = engine.handle(Input::Header(Rank(1), wrong)).expect_err(words).to_string();
        assert!(error.contains(words) && error.contains("rank 1"), "{error} without {words}");
        assert_eq!(engine.buffers_in_use(), 0, "nothing was kept of it");
    }
    engine.handle(Input::Header(Rank(1), header)).expect("an honest frame");
    engine.handle(Input::Frame(Rank(1), header)).expect("an honest frame");
    let more = FrameHeader { offset: 100, length: 60, flags: last, ..header };
    let grown = FrameHeader { block_bytes: 204, ..more };
    let error = engine.handle(Input::Header(Rank(1), grown)).expect_err("another size").to_string();
    assert!(error.contains("a block of 204 bytes, after 100 of 200"), "{error}");
    for frame in [more, FrameHeader { slice: second, offset: 160, length: 40, ..more }] {
        engine.handle(Input::Header(Rank(1), frame)).expect("an honest frame");
        engine.handle(Input::Frame(Rank(1), frame)).expect("an honest frame");
    }
    let error = engine.handle(Input::Header(Rank(1), more)).expect_err("again").to_string();
    assert!(error.contains("after the whole block"), "{error}");
}
