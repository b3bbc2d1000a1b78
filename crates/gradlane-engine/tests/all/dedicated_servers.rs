//! Ranks that only serve, under random interleavings: the means are those of the ranks that train, to
//! the last bit, whatever serves them; who only serves leaves last, and everybody names the same
//! culprit when a rank is lost or stands still.

use crate::common::model::{self, gradient};
use crate::common::toy::Toy;
use crate::common::{block_header, names_the_lost, tensors, Cluster};
use gradlane_engine::{
    CodecSizes, Cutoff, Input, Plan, Roles, Scheme, StragglerPolicy, Strategy, Synchrony,
    TensorSetting, Update,
};
use gradlane_units::{Rank, Step, TensorId, Time};
use gradlane_wire::{FrameHeader, FrameKind};
use proptest::prelude::*;
use std::sync::Arc;

const STRATEGIES: [&str; 5] = ["p3", "slicing", "wfbp", "kvstore", "deferred-pull"];

fn plan_for(sizes: &[u64], name: &str, slice_elems: u64, roles: Roles) -> Arc<Plan> {
    let strategy = Strategy::named(name, Some(slice_elems), 7).expect("a strategy");
    let plan = Plan::build_for(tensors(sizes), strategy, Update::Worker, roles);
    Arc::new(plan.expect("a plan"))
}

/// Gives all gradients of a step on the ranks that train, in turns drawn from the seed.
fn give(cluster: &mut Cluster, sizes: &[u64], step: u64) {
    cluster.begin(Step(step));
    let workers = cluster.workers();
    let mut next = vec![sizes.len(); workers as usize];
    while next.iter().any(|&left| left > 0) {
        let rank = cluster.rng.below(workers);
        let Some(tensor) = next[rank as usize].checked_sub(1) else {
            continue;
        };
        next[rank as usize] = tensor;
        let node = &mut cluster.nodes[rank as usize];
        let id = TensorId(tensor as u32);
        // Every fifth gradient is missing.
        if (u64::from(rank) + tensor as u64 + step).is_multiple_of(5) {
            node.engine.handle(Input::TensorAbsent(id, Step(step))).expect("an absence");
        } else {
            node.tensors[tensor] = gradient(rank, tensor, step, sizes[tensor]);
            node.engine.handle(Input::GradientReady(id, Step(step))).expect("a gradient");
        }
    }
}

fn train(cluster: &mut Cluster, sizes: &[u64], step: u64, through: fn(f32) -> f32) {
    give(cluster, sizes, step);
    cluster.run();
    let workers = cluster.workers() as usize;
    for node in &mut cluster.nodes[..workers] {
        node.engine.handle(Input::TensorNeeded(TensorId(0), Step(step))).expect("a wait");
    }
    cluster.run();
    for node in &cluster.nodes[..workers] {
        assert_eq!(node.completed.last(), Some(&Step(step)), "{:?}", node.engine.outstanding());
        for (tensor, &numel) in sizes.iter().enumerate() {
            let id = TensorId(tensor as u32);
            let given = |rank: u32| {
                let missing = (u64::from(rank) + tensor as u64 + step).is_multiple_of(5);
                let values = gradient(rank, tensor, step, numel);
                (!missing).then(|| values.into_iter().map(through).collect::<Vec<f32>>())
            };
            if (0..workers as u32).all(|rank| given(rank).is_none()) {
                continue;
            }
            let right = model::mean(node.engine.plan(), id, given);
            let right: Vec<u32> = right.into_iter().map(|it| through(it).to_bits()).collect();
            let found: Vec<u32> = node.tensors[tensor].iter().map(|it| it.to_bits()).collect();
            assert_eq!(found, right, "{} in {step}", node.engine.rank());
        }
    }
    for node in &cluster.nodes[workers..] {
        assert!(node.completed.is_empty() && node.ready.is_empty());
    }
}

fn same(value: f32) -> f32 {
    value
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn means_are_those_of_the_ranks_that_train(
        name in proptest::sample::select(&STRATEGIES[..]),
        sizes in proptest::collection::vec(prop_oneof![Just(0_u64), 1..40_u64, Just(900_u64)], 1..5),
        workers in 1..4_u32,
        servers in 1..4_u32,
        slice_elems in 20..400_u64,
        frame_bytes in prop_oneof![Just(64_u32), Just(1 << 16)],
        seed in any::<u64>(),
    ) {
        let plan = plan_for(&sizes, name, slice_elems, Roles::dedicated(workers, servers));
        prop_assert_eq!(plan.world_size, workers + servers);
        prop_assert!(plan.slices.iter().all(|slice| slice.owner.0 >= workers));
        let mut cluster = Cluster::new(&plan, frame_bytes, 300, seed);
        cluster.step_zero();
        for step in 1..4 {
            train(&mut cluster, &sizes, step, same);
        }
        cluster.finish();
    }
}

#[test]
fn slices_are_cut_and_dealt_as_to_servers_that_train() {
    let sizes = [301, 20, 5_000, 2_000_000];
    for (name, servers) in [("p3", 2), ("kvstore", 3)] {
        let apart = plan_for(&sizes, name, 50, Roles::dedicated(3, servers));
        let shared = plan_for(&sizes, name, 50, Roles::first(3, servers));
        assert_eq!(apart.slices.len(), shared.slices.len());
        for (apart, shared) in apart.slices.iter().zip(&shared.slices) {
            let moved = gradlane_engine::Slice { owner: Rank(shared.owner.0 + 3), ..*shared };
            assert_eq!(*apart, moved, "{name}");
        }
    }
    let text = serde_json::to_string(&*plan_for(&sizes, "p3", 500, Roles::shared(3)));
    assert!(!text.expect("JSON").contains("serving"), "plans without are what they were");
}

#[test]
fn encoded_gradients_are_served_too() {
    let toy = Toy { granule_elems: 4, varies: false, integer: false };
    let settings = || {
        let coded = |spec| -> TensorSetting {
            let codec: Box<dyn CodecSizes> = Box::new(toy);
            (spec, Some(codec)).into()
        };
        tensors(&[300, 40]).into_iter().map(coded).collect::<Vec<TensorSetting>>()
    };
    for seed in 0..20 {
        let strategy = Strategy::named("p3", Some(60), 0).expect("p3");
        let roles = Roles::dedicated(1 + (seed % 3) as u32, 2);
        let plan = Plan::build_for(settings(), strategy, Update::Worker, roles).expect("a plan");
        let mut cluster = Cluster::with_toy(&Arc::new(plan), toy, 64, 64, seed);
        cluster.step_zero();
        for step in 1..4 {
            train(&mut cluster, &[300, 40], step, Toy::keep);
        }
        cluster.finish();
    }
}

#[test]
fn rings_and_blocks_go_between_the_ranks_that_train() {
    let with = |scheme| {
        let specs = tensors(&[300, 40]);
        let mut settings: Vec<TensorSetting> = specs.into_iter().map(Into::into).collect();
        settings[0].scheme = Some(scheme);
        let strategy = Strategy::named("p3", Some(60), 0).expect("p3");
        let roles = Roles::dedicated(3, 2);
        let plan = Plan::build_for(settings, strategy, Update::Worker, roles);
        Arc::new(plan.expect("a plan"))
    };
    for seed in 0..20 {
        let mut cluster = Cluster::new(&with(Scheme::Ring), 64, 64, seed);
        cluster.step_zero();
        for step in 1..4 {
            train(&mut cluster, &[300, 40], step, same);
        }
        cluster.finish();
    }
    for scheme in [Scheme::AllGather, Scheme::GatherToRoot] {
        let plan = with(scheme);
        assert!(plan.slices_of(TensorId(0)).all(|slice| plan.trains(plan.slice(slice).owner)));
    }
    let mut cluster = Cluster::new(&with(Scheme::AllGather), 64, 64, 5);
    for rank in 0..3 {
        let engine = &mut cluster.nodes[rank].engine;
        engine.handle(Input::StepBegin(Step(0))).expect("step 0");
        engine.handle(Input::GradientReady(TensorId(1), Step(0))).expect("values");
    }
    cluster.run();
    cluster.begin(Step(1));
    for rank in 0..3 {
        let engine = &mut cluster.nodes[rank].engine;
        engine.handle(Input::BlockReady(TensorId(0), Step(1), 100)).expect("a block");
        engine.handle(Input::GradientReady(TensorId(1), Step(1))).expect("a gradient");
    }
    cluster.run();
    for rank in 0..3 {
        let node = &mut cluster.nodes[rank];
        let blocks = &node.blocks[&(TensorId(0), Step(1))];
        assert_eq!(blocks.iter().flatten().count(), 3, "one of each rank that trains");
        node.release(TensorId(0), Step(1));
    }
    cluster.finish();
}

#[test]
fn priorities_are_switched_on_ranks_that_serve() {
    for seed in 0..20 {
        let sizes = [300, 20];
        let plan = plan_for(&sizes, "p3", 50, Roles::dedicated(2, 2));
        let mut cluster = Cluster::new(&plan, 64, 64, seed);
        cluster.step_zero();
        cluster.begin(Step(1));
        cluster.switch(&[0, 5]);
        for rank in 0..2 {
            for tensor in (0..2).map(TensorId) {
                cluster.nodes[rank]
                    .engine
                    .handle(Input::GradientReady(tensor, Step(1)))
                    .expect("a gradient");
            }
        }
        cluster.run();
        for step in 2..6 {
            train(&mut cluster, &sizes, step, same);
        }
        assert!(cluster.nodes.iter().all(|node| node.switched == [(1, Step(3))]));
        cluster.finish();
    }
}

#[test]
fn who_only_serves_begins_no_step_and_leaves_last() {
    let plan = plan_for(&[100], "p3", 50, Roles::dedicated(2, 1));
    let mut cluster = Cluster::new(&plan, 64, 64, 3);
    let refused = cluster.nodes[2].engine.handle(Input::StepBegin(Step(0)));
    assert!(refused.is_err_and(|error| error.to_string().contains("only serves")));
    cluster.step_zero();
    cluster.nodes[0].engine.handle(Input::Finish).expect("always taken");
    cluster.run();
    assert!(!cluster.nodes[2].closed && !cluster.nodes[0].closed, "rank 1 may go on");
    // It does, and hears that rank 0 has left, not the server.
    cluster.nodes[1].engine.handle(Input::StepBegin(Step(1))).expect("a step");
    cluster.nodes[1].take_events();
    let failure = cluster.nodes[1].failure.as_ref().expect("a failure");
    assert_eq!(failure.peer, Some(Rank(0)), "{failure}");
    cluster.run();
    let failure = cluster.nodes[2].failure.as_ref().expect("told by rank 1");
    assert_eq!(failure.peer, Some(Rank(0)), "{failure}");
}

#[test]
fn a_lost_rank_is_named_by_all_whatever_it_did() {
    for seed in 0..20 {
        for lost in [1, 2, 3] {
            let sizes = [300, 20];
            let plan = plan_for(&sizes, "p3", 50, Roles::dedicated(2, 2));
            let mut cluster = Cluster::new(&plan, 64, 64, seed);
            cluster.step_zero();
            train(&mut cluster, &sizes, 1, same);
            cluster.begin(Step(2));
            // Rank 1 gives nothing, so that the step cannot be complete.
            for tensor in (0..2).map(TensorId) {
                cluster.nodes[0]
                    .engine
                    .handle(Input::GradientReady(tensor, Step(2)))
                    .expect("a gradient");
            }
            cluster.run();
            cluster.kill(lost);
            cluster.run();
            for rank in (0..4).filter(|&rank| rank != lost) {
                let node = &cluster.nodes[rank as usize];
                let failure = node.failure.as_ref().expect("a failure");
                assert_eq!(failure.peer, Some(Rank(lost)), "{failure}");
                if rank == 0 {
                    names_the_lost(node, Rank(lost), seed);
                }
            }
        }
    }
}

#[test]
fn who_holds_up_a_step_is_named_by_the_servers_before_workers_blame_these() {
    let plan = plan_for(&[300], "p3", 50, Roles::dedicated(3, 2));
    let mut cluster = Cluster::new(&plan, 64, 64, 9);
    cluster.step_zero();
    let at = |seconds: u64| Time(seconds * 1_000_000_000);
    // Half an hour between two steps is nobody's fault.
    for node in &mut cluster.nodes {
        node.engine.tell(Input::Time(at(3600)));
    }
    cluster.begin(Step(1));
    for rank in [0, 2] {
        cluster.nodes[rank]
            .engine
            .handle(Input::GradientReady(TensorId(0), Step(1)))
            .expect("a gradient");
    }
    cluster.run();
    let due = cluster.nodes[3].engine.poll_timeout().expect("a deadline");
    let later = cluster.nodes[0].engine.poll_timeout().expect("a deadline");
    assert!(due < later, "{due:?} {later:?}");
    for node in &mut cluster.nodes {
        node.engine.tell(Input::Time(due));
    }
    cluster.run();
    // Rank 1 itself hears of it from a server.
    for node in cluster.nodes.iter().filter(|node| node.engine.rank() != Rank(1)) {
        let failure = node.failure.as_ref().expect("a failure");
        assert_eq!(failure.peer, Some(Rank(1)), "{failure}");
        assert!(failure.reason.contains("rank 1"), "{failure}");
    }
    let failure = cluster.nodes[3].failure.as_ref().expect("a failure");
    assert!(failure.timed_out && failure.outstanding.tensor_count == 1, "{failure}");
    assert_eq!(failure.last_complete, Some(Step(0)));
}

#[test]
fn frames_that_no_role_sends_are_refused() {
    let plan = plan_for(&[100, 100], "p3", 100, Roles::dedicated(2, 2));
    let mut cluster = Cluster::new(&plan, 1024, 1024, 3);
    let header = |kind, slice: u32, sender: u32| FrameHeader {
        kind,
        slice: gradlane_units::SliceId(slice),
        tensor: TensorId(slice),
        sender: Rank(sender),
        step: Step(0),
        block_bytes: 0,
        length: 400,
        flags: gradlane_wire::FrameFlags::LAST,
        ..block_header()
    };
    // Slice 0 is rank 2's, slice 1 rank 3's.
    for (to, kind, slice, from) in [
        (2, FrameKind::Push, 0, 3),
        (3, FrameKind::Broadcast, 0, 2),
        (2, FrameKind::Pull, 0, 3),
        (3, FrameKind::RingReduce, 0, 0),
    ] {
        let engine = &mut cluster.nodes[to as usize].engine;
        let refused = engine.handle(Input::Header(Rank(from), header(kind, slice, from)));
        let text = refused.expect_err("no correct peer sends it").to_string();
        assert!(text.contains("only serves"), "{kind:?}: {text}");
    }
}

#[test]
fn what_does_not_go_with_ranks_that_only_serve_is_refused_by_name() {
    let build = |name, update, ready: Option<Synchrony>, roles| {
        let mut strategy = Strategy::named(name, None, 0).expect("a strategy");
        strategy.synchrony = ready.unwrap_or(strategy.synchrony);
        Plan::build_for(tensors(&[10]), strategy, update, roles).map(|_| ())
    };
    let rule = StragglerPolicy { cutoff: Cutoff::Backup { ranks: 1 }, ahead_steps: 2 };
    let apart = Roles::dedicated(2, 2);
    for (refused, named) in [
        (build("asgd", Update::Server, None, apart), "wait for all ranks"),
        (
            build("p3", Update::Worker, Some(Synchrony::BackupWorkers(rule)), apart),
            "wait for all ranks",
        ),
        (
            build("p3", Update::Worker, None, Roles::dedicated(0, 2)),
            "at least one rank that trains",
        ),
        (build("p3", Update::Worker, None, Roles::dedicated(2, 0)), "0 servers of 2 ranks"),
        (build("p3", Update::Worker, None, Roles::dedicated(u32::MAX, 2)), "2^32"),
    ] {
        let text = refused.expect_err("refused").to_string();
        assert!(text.contains(named), "{text}");
    }
}
