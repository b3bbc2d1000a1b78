//! Answers: whatever the order of events, a tensor's owner gets every rank's block and every rank gets
//! the owner's answer, once; what peers say of them is checked, and who holds them up is named.

use crate::common::{self, Cluster};
use gradlane_engine::{Input, Plan, Scheme, Strategy, Update};
use gradlane_units::{Rank, Rng, Step, TensorId};
use gradlane_wire::{FrameHeader, FrameKind};
use proptest::prelude::*;
use std::sync::Arc;

fn plan(tensors: &[(u64, Scheme)], slice_elems: u64, world: u32, servers: u32) -> Arc<Plan> {
    let sizes: Vec<u64> = tensors.iter().map(|&(numel, _)| numel).collect();
    let specs = common::tensors(&sizes).into_iter().zip(tensors.iter().map(|it| it.1)).collect();
    let strategy = Strategy::named("p3", Some(slice_elems), 0).expect("p3");
    Arc::new(Plan::build_on(specs, strategy, Update::Worker, world, servers).expect("a plan"))
}

/// A block of some size up to the plan's, or none; that of rank `world` is the owner's answer.
fn block(plan: &Plan, rank: u32, tensor: u32, step: u64) -> Option<Vec<f32>> {
    let mut rng = Rng::new(u64::from(rank) << 40 | u64::from(tensor) << 20 | step);
    let numel = plan.tensor(TensorId(tensor)).spec.numel;
    let is_answer = rank == plan.world_size;
    let elements = match rng.below(5) {
        0 | 4 if !is_answer => return None,
        1 => numel,
        2 => 0,
        _ => u64::from(rng.below(numel as u32 + 1)),
    };
    let value = move || (rng.next_u64() >> 40) as f32 / 7.0 - 1e6;
    Some(std::iter::repeat_with(value).take(elements as usize).collect())
}

fn bytes(block: Option<Vec<f32>>) -> Option<Vec<u8>> {
    block.map(|it| it.iter().flat_map(|it| it.to_le_bytes()).collect())
}

fn put(cluster: &mut Cluster, rank: u32, tensor: u32, block: &[f32]) -> u64 {
    cluster.nodes[rank as usize].tensors[tensor as usize][..block.len()].copy_from_slice(block);
    4 * block.len() as u64
}

fn give(cluster: &mut Cluster, plan: &Plan, rank: u32, tensor: u32, step: u64) {
    let (id, at) = (TensorId(tensor), Step(step));
    let given = block(plan, rank, tensor, step);
    let bytes = given.as_ref().map(|block| put(cluster, rank, tensor, block));
    let engine = &mut cluster.nodes[rank as usize].engine;
    match bytes {
        Some(bytes) => engine.handle(Input::BlockReady(id, at, bytes)),
        None => engine.handle(Input::TensorAbsent(id, at)),
    }
    .expect("a block");
}

/// Answers what a rank was asked last, after a look at what it was asked.
fn send_result(cluster: &mut Cluster, plan: &Plan, rank: u32) {
    let node = &mut cluster.nodes[rank as usize];
    let Some((id, step)) = node.root_requests.pop() else { return };
    assert_eq!(plan.root(id), Some(Rank(rank)));
    let found: Vec<_> =
        node.blocks[&(id, step)].iter().map(|it| it.as_ref().map(|it| it.1.clone())).collect();
    let given = (0..plan.world_size).map(|from| bytes(block(plan, from, id.0, step.0)));
    assert_eq!(found, given.collect::<Vec<_>>(), "{id} in {step}");
    node.release(id, step);
    let answer = block(plan, plan.world_size, id.0, step.0).expect("an answer");
    let bytes = put(cluster, rank, id.0, &answer);
    cluster.nodes[rank as usize]
        .engine
        .handle(Input::RootResultReady(id, step, bytes))
        .expect("an answer");
}

fn check(cluster: &mut Cluster, plan: &Plan, step: u64) {
    for node in &mut cluster.nodes {
        assert_eq!(node.completed.last(), Some(&Step(step)), "{}", node.engine.outstanding());
        let rank = node.engine.rank();
        for tensor in 0..plan.tensors.len() as u32 {
            let id = TensorId(tensor);
            let owner = plan.root(id).expect("an owner");
            let nobody = (0..plan.world_size).all(|it| block(plan, it, tensor, step).is_none());
            let ready: Vec<_> =
                node.ready.iter().filter(|it| (it.0, it.1) == (id, Step(step))).collect();
            assert_eq!(ready.len(), 1, "released once");
            assert_eq!(ready[0].2, nobody, "absent where nobody had a block");
            let blocks = node.blocks.get(&(id, Step(step)));
            assert_eq!(blocks.is_none(), rank == owner, "the owner has its own answer");
            if let Some(blocks) = blocks {
                let right = bytes(block(plan, plan.world_size, tensor, step)).filter(|_| !nobody);
                for (from, found) in blocks.iter().enumerate() {
                    let right = right.as_ref().filter(|_| from == owner.index());
                    assert_eq!(found.as_ref().map(|it| &it.1), right, "{id} in step {step}");
                }
                node.release(id, Step(step));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
    #[test]
    fn every_rank_gets_the_owners_answer(
        sizes in proptest::collection::vec(prop_oneof![Just(0_u64), 1..12_u64, 1..200_u64], 1..6),
        world in 1..6_u32,
        servers in 1..6_u32,
        slice_elems in 5..200_u64,
        frame_bytes in prop_oneof![Just(60_u32), Just(200), Just(1 << 16)],
        credit in prop_oneof![Just(0_u64), Just(300), Just(1 << 20)],
        seed in any::<u64>(),
    ) {
        let tensors: Vec<_> = sizes.iter().map(|&numel| (numel, Scheme::GatherToRoot)).collect();
        let plan = plan(&tensors, slice_elems, world, servers.min(world));
        let mut cluster = Cluster::new(&plan, frame_bytes, credit, seed);
        cluster.begin(Step(0));
        cluster.run();
        for step in 1..=4 {
            cluster.begin(Step(step));
            let mut left = vec![tensors.len() as u32; world as usize];
            while left.iter().any(|&tensors| tensors > 0) {
                let rank = cluster.rng.below(world);
                if let Some(tensor) = left[rank as usize].checked_sub(1) {
                    left[rank as usize] = tensor;
                    give(&mut cluster, &plan, rank, tensor, step);
                }
                if cluster.rng.below(3) == 0 {
                    cluster.run();
                    let rank = cluster.rng.below(world);
                    send_result(&mut cluster, &plan, rank);
                }
            }
            cluster.run();
            while let Some(asked) = cluster.nodes.iter().position(|it| !it.root_requests.is_empty()) {
                send_result(&mut cluster, &plan, asked as u32);
                if cluster.rng.below(2) == 0 {
                    cluster.run();
                }
            }
            cluster.run();
            check(&mut cluster, &plan, step);
        }
        cluster.finish();
    }
}

#[test]
fn whole_tensors_are_dealt_to_servers_by_bytes() {
    let sizes = [100, 30, 20, 9, 1, 200];
    let tensors: Vec<_> = sizes.iter().map(|&numel| (numel, Scheme::GatherToRoot)).collect();
    let owners = |servers| {
        let plan = plan(&tensors, 40, 4, servers);
        let owner = |tensor| plan.root(TensorId(tensor)).expect("an owner").0;
        (0..6).map(owner).collect::<Vec<_>>()
    };
    // Each to whoever has least, of equals to the first.
    assert_eq!(owners(4), [0, 1, 2, 3, 3, 3]);
    assert_eq!(owners(2), [0, 1, 1, 1, 1, 1]);
    assert_eq!(owners(1), [0; 6]);
}

/// A cluster of three after step 0, whose tensor of up to 100 elements has rank 0 as its root.
fn cluster() -> (Cluster, Arc<Plan>) {
    let plan = plan(&[(100, Scheme::GatherToRoot), (10, Scheme::Ps)], 40, 3, 3);
    let mut cluster = Cluster::new(&plan, 64, 64, 1);
    cluster.begin(Step(0));
    for node in &mut cluster.nodes {
        node.engine.handle(Input::GradientReady(TensorId(1), Step(0))).expect("values");
    }
    cluster.run();
    cluster.begin(Step(1));
    (cluster, plan)
}

#[test]
fn an_answer_that_nobody_waits_for_is_misuse() {
    let (mut cluster, _) = cluster();
    let tensor = TensorId(0);
    for node in &mut cluster.nodes {
        node.engine.handle(Input::BlockReady(tensor, Step(1), 40)).expect("a block");
        node.engine.handle(Input::TensorAbsent(TensorId(1), Step(1))).expect("an absence");
    }
    let early = cluster.nodes[0]
        .engine
        .handle(Input::RootResultReady(tensor, Step(1), 8))
        .expect_err("early");
    assert!(early.to_string().contains("no result of this rank is awaited"), "{early}");
    cluster.run();
    assert_eq!(cluster.nodes[0].root_requests, [(tensor, Step(1))]);
    let elsewhere = cluster.nodes[1]
        .engine
        .handle(Input::RootResultReady(tensor, Step(1), 8))
        .expect_err("no owner");
    assert!(elsewhere.to_string().contains("no result of this rank is awaited"), "{elsewhere}");
    cluster.nodes[0].release(tensor, Step(1));
    for (bytes, words) in [(404, "at most 400 bytes"), (6, "elements of 4")] {
        let engine = &mut cluster.nodes[0].engine;
        let error = engine
            .handle(Input::RootResultReady(tensor, Step(1), bytes))
            .expect_err(words)
            .to_string();
        assert!(error.contains(words), "{error}");
    }
    cluster.nodes[0]
        .engine
        .handle(Input::RootResultReady(tensor, Step(1), 400))
        .expect("an answer");
    let twice = cluster.nodes[0]
        .engine
        .handle(Input::RootResultReady(tensor, Step(1), 400))
        .expect_err("twice");
    assert!(twice.to_string().contains("no result of this rank is awaited"), "{twice}");
    cluster.run();
    assert!(cluster.nodes.iter().all(|node| node.completed.last() == Some(&Step(1))));
}

/// Names whom a rank blames when nothing has moved for too long.
fn blamed(cluster: &mut Cluster, rank: usize) -> Vec<Rank> {
    let node = &mut cluster.nodes[rank];
    let deadline = node.engine.poll_timeout().expect("a deadline");
    node.engine.tell(Input::Time(deadline));
    node.take_events();
    let failure = node.failure.as_ref().expect("a failure");
    assert!(failure.timed_out);
    failure.outstanding.ranks.clone()
}

#[test]
fn who_gives_no_block_is_named_and_elsewhere_the_owner_who_is_late() {
    for owner in [true, false] {
        let (mut cluster, plan) = cluster();
        for rank in [0, 2] {
            give(&mut cluster, &plan, rank, 0, 1);
        }
        cluster.nodes.iter_mut().for_each(|node| {
            node.engine.handle(Input::TensorAbsent(TensorId(1), Step(1))).expect("an absence");
        });
        cluster.run();
        let (rank, expected) = if owner { (0, Rank(1)) } else { (2, Rank(0)) };
        assert_eq!(blamed(&mut cluster, rank), [expected]);
    }
}

#[test]
fn frames_on_the_wrong_way_are_refused() {
    let (mut cluster, _) = cluster();
    let header = common::block_header();
    let mut refused = |rank: usize, from: u32, header: FrameHeader, words: &str| {
        let header = FrameHeader { sender: Rank(from), ..header };
        let engine = &mut cluster.nodes[rank].engine;
        let error = engine.handle(Input::Header(Rank(from), header)).expect_err(words).to_string();
        assert!(error.contains(words), "{error} without {words}");
        assert_eq!(engine.buffers_in_use(), 0, "nothing was kept of it");
    };
    refused(1, 2, header, "but rank 0 is its root");
    refused(1, 0, header, "as a result without a block of this rank");
    refused(1, 0, FrameHeader { step: Step(2), ..header }, "as a result without");
    refused(0, 1, FrameHeader { block_bytes: 404, ..header }, "at most 400");
    refused(
        0,
        1,
        FrameHeader { kind: FrameKind::Push, block_bytes: 0, ..header },
        "of scheme answer",
    );
    cluster.nodes[1].engine.handle(Input::BlockReady(TensorId(0), Step(1), 4)).expect("a block");
    let answer = FrameHeader { sender: Rank(0), ..header };
    cluster.nodes[1].engine.handle(Input::Header(Rank(0), answer)).expect("an answer may come now");
}
