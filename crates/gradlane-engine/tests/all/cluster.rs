//! Whole clusters under random interleavings: whatever the order of events, every strategy gives the
//! mean to the last bit, in rank order where there are servers, every slice once, and comes to an end.

use crate::common::model::{self, gradient};
use crate::common::{self, plan, Cluster};
use gradlane_engine::{Input, Plan, Strategy, TensorKind, Update};
use gradlane_units::{Rank, Rng, Step, TensorId};
use gradlane_wire::FrameKind;
use proptest::prelude::*;
use std::sync::Arc;

fn expected(present: &[u32], world: u32, tensor: usize, step: u64, numel: usize) -> Vec<f32> {
    let mut sum = vec![-0.0_f32; numel];
    for rank in 0..world {
        let part = if present.contains(&rank) {
            gradient(rank, tensor, step, numel as u64)
        } else {
            vec![0.0; numel]
        };
        for (total, value) in sum.iter_mut().zip(part) {
            *total += value;
        }
    }
    sum.iter().map(|total| total / world as f32).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|it| it.to_bits()).collect()
}

/// Which ranks have a gradient: all, some or none, by a hash of tensor and step.
fn present(tensor: usize, step: u64, world: u32, holes: bool) -> Vec<u32> {
    let mask = if holes { Rng::new(tensor as u64 * 31 + step).next_u64() } else { u64::MAX };
    (0..world).filter(|rank| mask >> (rank % 7) & 1 == 1 && !(holes && mask % 5 == 0)).collect()
}

fn train(cluster: &mut Cluster, sizes: &[u64], steps: u64, holes: bool) {
    let world = cluster.world();
    for step in 1..=steps {
        cluster.begin(Step(step));
        // Ranks produce their gradients in turns drawn from the seed, last layer first.
        let mut next = vec![sizes.len(); world as usize];
        while next.iter().any(|&left| left > 0) {
            let rank = cluster.rng.below(world);
            let Some(tensor) = next[rank as usize].checked_sub(1) else {
                continue;
            };
            next[rank as usize] = tensor;
            let node = &mut cluster.nodes[rank as usize];
            let id = TensorId(tensor as u32);
            if present(tensor, step, world, holes).contains(&rank) {
                node.tensors[tensor] = gradient(rank, tensor, step, sizes[tensor]);
                node.engine.handle(Input::GradientReady(id, Step(step))).expect("a gradient");
            } else {
                node.engine.handle(Input::TensorAbsent(id, Step(step))).expect("an absence");
            }
        }
        cluster.run();
        for node in &mut cluster.nodes {
            node.engine.handle(Input::TensorNeeded(TensorId(0), Step(step))).expect("a wait");
        }
        cluster.run();
        check(cluster, sizes, step, holes);
    }
}

fn check(cluster: &mut Cluster, sizes: &[u64], step: u64, holes: bool) {
    let world = cluster.world();
    for node in &mut cluster.nodes {
        assert_eq!(node.completed.last(), Some(&Step(step)), "{:?}", node.engine.outstanding());
        for (tensor, &numel) in sizes.iter().enumerate() {
            let ready = (TensorId(tensor as u32), Step(step));
            let times = node.ready.iter().filter(|it| (it.0, it.1) == ready).count();
            assert_eq!(times, 1, "tensor {tensor} was released {times} times");
            let ranks = present(tensor, step, world, holes);
            if ranks.is_empty() || numel == 0 {
                continue;
            }
            let given = |rank| gradient(rank, tensor, step, numel);
            let right = model::mean(node.engine.plan(), TensorId(tensor as u32), |rank| {
                ranks.contains(&rank).then(|| given(rank))
            });
            assert_eq!(
                bits(&node.tensors[tensor]),
                bits(&right),
                "{} in {step}",
                node.engine.rank()
            );
        }
    }
}

fn any_sizes() -> impl proptest::strategy::Strategy<Value = Vec<u64>> {
    proptest::collection::vec(prop_oneof![Just(0_u64), 1..40_u64, Just(1500_u64)], 1..7)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]
    #[test]
    fn every_strategy_gives_the_mean_of_its_plan(
        name in proptest::sample::select(&Strategy::SYNCHRONOUS[..]),
        sizes in any_sizes(),
        world in 1..6_u32,
        slice_elems in 1..400_u64,
        frame_bytes in prop_oneof![Just(4_u32), Just(64), Just(1 << 16)],
        credit in prop_oneof![Just(0_u64), Just(300), Just(1 << 20)],
        holes in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let slice_elems = slice_elems.max(sizes.iter().sum::<u64>() / 40);
        let frame_bytes = frame_bytes.max(sizes.iter().sum::<u64>() as u32 / 16);
        let plan = plan(&sizes, name, slice_elems, world);
        let mut cluster = Cluster::new(&plan, frame_bytes, credit, seed);
        cluster.nodes[0].tensors =
            sizes.iter().map(|&numel| vec![f32::from_bits(0x7fc0_1234); numel as usize]).collect();
        cluster.step_zero();
        for node in &cluster.nodes {
            for values in &node.tensors {
                prop_assert!(values.iter().all(|it| it.to_bits() == 0x7fc0_1234));
            }
        }
        train(&mut cluster, &sizes, 3, holes);
        cluster.finish();
    }
}

#[test]
fn large_tensors_are_split_over_all_servers_by_kvstore() {
    let specs = common::tensors(&[2_000_001, 10]);
    let strategy = Strategy::named("kvstore", None, 7).expect("a strategy");
    let plan = Plan::build(specs, strategy, Update::Worker, 4).expect("a plan");
    let owners: Vec<u32> = plan.slices.iter().map(|slice| slice.owner.0).collect();
    assert_eq!(owners[..4], [0, 1, 2, 3]);
    let lengths: Vec<u64> = plan.slices.iter().map(|slice| slice.length).collect();
    assert_eq!(lengths.iter().sum::<u64>(), 2_000_011);
    assert!(lengths[..4].iter().all(|&length| length == 500_000 || length == 500_001));
}

#[test]
fn the_size_from_which_on_tensors_are_split_can_be_set() {
    for name in ["kvstore", "deferred-pull"] {
        let plan = plan(&[100, 99], name, 100, 4);
        let lengths: Vec<u64> = plan.slices.iter().map(|slice| slice.length).collect();
        assert_eq!(lengths, [25, 25, 25, 25, 99], "{name}");
    }
}

#[test]
fn slices_are_dealt_to_servers_alone_within_one_slice() {
    for name in ["p3", "kvstore"] {
        for servers in 1..=4_u32 {
            let strategy = Strategy::named(name, Some(50), 3).expect("a strategy");
            let specs = common::tensors(&[301, 20, 5_000, 2_000_000]);
            let plan = Plan::build_on(specs, strategy, Update::Worker, 4, servers).expect("a plan");
            let counts: Vec<usize> = (0..4)
                .map(|rank| plan.slices.iter().filter(|it| it.owner == Rank(rank)).count())
                .collect();
            let (owning, idle) = counts.split_at(servers as usize);
            assert!(idle.iter().all(|&count| count == 0), "{name} on {servers}: {counts:?}");
            if name == "p3" {
                let (least, most) = (owning.iter().min(), owning.iter().max());
                assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 1));
            }
        }
    }
    let strategy = Strategy::named("p3", None, 0).expect("p3");
    for servers in [0, 4] {
        let specs = common::tensors(&[10]);
        let refused = Plan::build_on(specs, strategy.clone(), Update::Worker, 3, servers);
        assert!(refused.is_err_and(|error| error.to_string().contains("of 3 ranks")));
    }
}

#[test]
fn workers_that_own_nothing_get_the_same_mean() {
    let sizes = [300, 20, 500];
    for servers in 1..4 {
        let strategy = Strategy::named("p3", Some(50), 0).expect("p3");
        let specs = common::tensors(&sizes);
        let plan = Plan::build_on(specs, strategy, Update::Worker, 4, servers).expect("a plan");
        let mut cluster = Cluster::new(&Arc::new(plan), 64, 64, u64::from(servers));
        cluster.step_zero();
        train(&mut cluster, &sizes, 2, true);
        cluster.finish();
    }
}

#[test]
fn only_rank_0_spreads_tensors_that_are_not_trained() {
    let mut specs = common::tensors(&[10, 20]);
    specs[1].kind = TensorKind::Initial;
    let strategy = Strategy::named("p3", None, 0).expect("p3");
    let plan = Arc::new(Plan::build(specs, strategy, Update::Worker, 3).expect("a plan"));
    let mut cluster = Cluster::new(&plan, 64, 64, 1);
    cluster.nodes[0].tensors[1] = vec![3.5; 20];
    cluster.step_zero();
    assert!(cluster.nodes.iter().all(|node| node.tensors[1] == [3.5; 20]));
    train(&mut cluster, &[10], 2, false);
    let refused = cluster.nodes[1].engine.handle(Input::GradientReady(TensorId(1), Step(2)));
    assert!(refused.is_err_and(|error| error.to_string().contains("not trained")));
    cluster.finish();
}

#[test]
fn priorities_are_switched_at_the_same_step_on_all_ranks() {
    for seed in 0..40 {
        let sizes = [300, 20, 500];
        let plan = plan(&sizes, "p3", 50, 3);
        let mut cluster = Cluster::new(&plan, 64, 64, seed);
        cluster.step_zero();
        cluster.begin(Step(1));
        cluster.switch(&[-2, -1, 0]);
        assert!(cluster.nodes[0].engine.handle(Input::SwitchPriorities(vec![])).is_err());
        for rank in 0..3 {
            for tensor in 0..3 {
                let node = &mut cluster.nodes[rank];
                node.engine
                    .handle(Input::TensorAbsent(TensorId(tensor), Step(1)))
                    .expect("an absence");
            }
        }
        cluster.run();
        let from = 2;
        let mut clone = |steps: std::ops::RangeInclusive<u64>| {
            for step in steps {
                cluster.begin(Step(step));
                for rank in 0..3_u32 {
                    for (tensor, &numel) in sizes.iter().enumerate() {
                        let node = &mut cluster.nodes[rank as usize];
                        node.tensors[tensor] = gradient(rank, tensor, step, numel);
                        node.engine
                            .handle(Input::GradientReady(TensorId(tensor as u32), Step(step)))
                            .expect("ok");
                    }
                }
                cluster.run();
                check(&mut cluster, &sizes, step, false);
            }
        };
        clone(from..=5);
        for node in &cluster.nodes {
            assert_eq!(node.switched, [(1, Step(3))]);
            let late = node.log.iter().filter(|it| it.kind == FrameKind::Push && it.step.0 >= 3);
            assert!(late.clone().count() > 0);
            assert!(late.clone().all(|it| it.plan_version == 1));
            assert!(late.clone().all(|it| it.priority.0 == it.tensor.0 as i32 - 2));
        }
        cluster.finish();
    }
}

#[test]
fn updates_on_the_server_land_only_after_the_step_has_ended() {
    for seed in 0..40 {
        let sizes = [130_u64, 40];
        let strategy = Strategy::named("p3", Some(30), 0).expect("p3");
        let specs = common::tensors(&sizes);
        let plan = Arc::new(Plan::build(specs, strategy, Update::Server, 3).expect("a plan"));
        let mut cluster = Cluster::new(&plan, 64, 64, seed);
        cluster.step_zero();
        let mut model: Vec<Vec<f32>> = sizes.iter().map(|&it| vec![0.0; it as usize]).collect();
        for step in 1..=3 {
            cluster.begin(Step(step));
            for rank in 0..3_u32 {
                for (tensor, &numel) in sizes.iter().enumerate() {
                    let node = &mut cluster.nodes[rank as usize];
                    node.tensors[tensor] = gradient(rank, tensor, step, numel);
                    node.engine
                        .handle(Input::GradientReady(TensorId(tensor as u32), Step(step)))
                        .expect("ok");
                }
            }
            cluster.nodes[1].engine.handle(Input::StepEnd(Step(step))).expect("ended");
            cluster.run();
            assert!(cluster.nodes[0].completed.last() != Some(&Step(step)));
            assert_eq!(cluster.nodes[0].parameters, model, "written before the step ended");
            assert_eq!(cluster.nodes[1].completed.last(), Some(&Step(step)));
            for rank in [0, 2] {
                cluster.nodes[rank].engine.handle(Input::StepEnd(Step(step))).expect("ended");
            }
            cluster.run();
            for (tensor, values) in model.iter_mut().enumerate() {
                let mean = expected(&[0, 1, 2], 3, tensor, step, values.len());
                values.iter_mut().zip(mean).for_each(|(value, mean)| *value -= mean);
            }
            for node in &cluster.nodes {
                assert_eq!(node.parameters, model, "{} in step {step}", node.engine.rank());
            }
        }
        cluster.finish();
    }
}

#[test]
fn wfbp_releases_nothing_before_the_whole_step_is_there() {
    let plan = plan(&[10, 10], "wfbp", 10, 2);
    common::releases_nothing_before_the_whole_step(&plan);
}

#[test]
fn deferred_pull_sends_nothing_back_before_the_next_iteration() {
    let plan = plan(&[10, 10], "deferred-pull", 10, 2);
    let mut cluster = Cluster::new(&plan, 64, 64, 5);
    cluster.step_zero();
    cluster.begin(Step(1));
    for node in &mut cluster.nodes {
        node.log.clear();
        for tensor in [1, 0] {
            node.engine.handle(Input::GradientReady(TensorId(tensor), Step(1))).expect("ok");
        }
    }
    cluster.run();
    let kinds = |cluster: &Cluster| -> Vec<FrameKind> {
        cluster.nodes.iter().flat_map(|node| node.log.iter().map(|it| it.kind)).collect()
    };
    assert!(kinds(&cluster).iter().all(|&kind| kind == FrameKind::Push));
    for node in &mut cluster.nodes {
        node.engine.handle(Input::TensorNeeded(TensorId(0), Step(1))).expect("ok");
    }
    cluster.run();
    assert!(kinds(&cluster).contains(&FrameKind::Pull));
    assert!(cluster.nodes.iter().all(|node| node.completed.last() == Some(&Step(1))));
}

#[test]
fn requests_and_notices_pass_data_that_waits() {
    for (strategy, short) in [("deferred-pull", FrameKind::Pull), ("kvstore", FrameKind::Notify)] {
        let tensors = 0..8_u32;
        let plan = plan(&[10; 8], strategy, 10, 2);
        let mut cluster = Cluster::new(&plan, 64, 64, 5);
        cluster.step_zero();
        cluster.begin(Step(1));
        cluster.nodes[0].silent = true;
        for node in &mut cluster.nodes {
            node.log.clear();
            for tensor in tensors.clone().rev() {
                node.engine.handle(Input::GradientReady(TensorId(tensor), Step(1))).expect("ok");
            }
        }
        for tensor in tensors {
            cluster.nodes[0]
                .engine
                .handle(Input::TensorNeeded(TensorId(tensor), Step(1)))
                .expect("ok");
        }
        cluster.run();
        cluster.nodes[0].silent = false;
        cluster.run();
        let kinds: Vec<FrameKind> = cluster.nodes[0].log.iter().map(|it| it.kind).collect();
        let last_short = kinds.iter().rposition(|&kind| kind == short).expect("a short message");
        let first_push = kinds.iter().position(|&kind| kind == FrameKind::Push).expect("a push");
        assert!(last_short < first_push, "{strategy}: {kinds:?}");
    }
}

#[test]
fn a_lost_rank_is_named_by_all_others_whatever_the_moment() {
    for seed in 0..60 {
        let sizes = [300, 20, 500];
        let plan = plan(&sizes, Strategy::SYNCHRONOUS[seed as usize % 6], 50, 4);
        let mut cluster = Cluster::new(&plan, 64, 64, seed);
        cluster.step_zero();
        train(&mut cluster, &sizes, 1, false);
        cluster.begin(Step(2));
        for rank in 0..4_u32 {
            let tensors = if rank == 3 { 1..3 } else { 0..3 };
            for tensor in tensors.rev() {
                let node = &mut cluster.nodes[rank as usize];
                node.tensors[tensor] = gradient(rank, tensor, 2, sizes[tensor]);
                node.engine
                    .handle(Input::GradientReady(TensorId(tensor as u32), Step(2)))
                    .expect("ok");
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
fn an_abort_reaches_everyone_with_its_reason() {
    let plan = plan(&[100], "p3", 50, 3);
    let mut cluster = Cluster::new(&plan, 64, 64, 3);
    cluster.step_zero();
    cluster.begin(Step(1));
    cluster.nodes[2].engine.tell(Input::Abort("the loss is not a number".to_owned()));
    cluster.run();
    for node in &cluster.nodes[..2] {
        let failure = node.failure.as_ref().expect("a failure");
        assert_eq!(failure.peer, Some(Rank(2)));
        let text = failure.to_string();
        assert!(text.contains("rank 2 gave up: the loss is not a number"), "{text}");
    }
    assert!(cluster.nodes[0].engine.handle(Input::GradientReady(TensorId(0), Step(1))).is_err());
}

#[test]
fn an_abort_reaches_a_rank_that_has_said_goodbye_and_waits() {
    let plan = plan(&[100], "p3", 50, 3);
    let mut cluster = Cluster::new(&plan, 64, 64, 3);
    cluster.step_zero();
    cluster.nodes[1].engine.handle(Input::Finish).expect("always taken");
    cluster.run();
    cluster.nodes[0].engine.tell(Input::Abort("its data has ended".to_owned()));
    cluster.run();
    for rank in [1, 2] {
        let failure = cluster.nodes[rank].failure.as_ref().expect("a failure");
        assert_eq!(failure.peer, Some(Rank(0)));
        assert!(failure.reason.starts_with("rank 0 gave up: its data has ended"), "{failure}");
    }
}

#[test]
fn a_cut_link_is_blamed_alike_by_those_who_hear_both_ends() {
    let plan = plan(&[100], "p3", 50, 3);
    let mut cluster = Cluster::new(&plan, 64, 64, 3);
    cluster.step_zero();
    cluster.begin(Step(1));
    assert!(cluster.nodes[1].engine.handle(Input::Suspect(Rank(2))).is_ok());
    cluster.run();
    assert_eq!(cluster.nodes[0].suspicions, [(Rank(1), Rank(2))]);
    assert!(cluster.nodes[2].suspicions.is_empty());
    cluster.nodes[0].engine.tell(Input::BlameLink(Rank(2), Rank(1)));
    cluster.run();
    let said = |node: &common::Node| {
        let failure = node.failure.as_ref().expect("a failure");
        assert_eq!(failure.peer, None);
        failure.reason.clone()
    };
    let first = said(&cluster.nodes[0]);
    assert!(first.starts_with("the link between rank 1 and rank 2 is cut"), "{first}");
    assert!(cluster.nodes.iter().all(|node| said(node) == first));
    assert!(cluster.nodes[1].engine.handle(Input::Suspect(Rank(2))).is_err(), "it has ended");
}

#[test]
fn a_rank_that_left_early_is_named() {
    let plan = plan(&[100], "p3", 50, 3);
    let mut cluster = Cluster::new(&plan, 64, 64, 3);
    cluster.step_zero();
    cluster.nodes[1].engine.handle(Input::Finish).expect("always taken");
    cluster.run();
    for rank in [0, 2] {
        let node = &mut cluster.nodes[rank];
        assert!(node.failure.is_none());
        node.engine.handle(Input::StepBegin(Step(1))).expect("begins");
        node.take_events();
        let failure = node.failure.as_ref().expect("a failure");
        assert_eq!(failure.peer, Some(Rank(1)));
        assert!(failure.to_string().contains("left in good order after step 0"), "{failure}");
    }
}

#[test]
fn ranks_that_do_not_take_part_are_named_after_the_progress_timeout() {
    let plan = plan(&[100, 100], "p3", 50, 3);
    let mut cluster = Cluster::new(&plan, 64, 64, 3);
    cluster.step_zero();
    cluster.begin(Step(1));
    for rank in [0_usize, 2] {
        for tensor in 0..2 {
            cluster.nodes[rank]
                .engine
                .handle(Input::GradientReady(TensorId(tensor), Step(1)))
                .expect("ok");
        }
    }
    cluster.run();
    assert_eq!(cluster.nodes[1].engine.poll_timeout(), None, "it is its own turn");
    let deadline = cluster.nodes[0].engine.poll_timeout().expect("a deadline");
    let node = &mut cluster.nodes[0];
    node.engine.tell(Input::Time(gradlane_units::Time(deadline.0 - 1)));
    node.take_events();
    assert!(node.failure.is_none());
    node.engine.tell(Input::Time(deadline));
    node.take_events();
    let failure = node.failure.as_ref().expect("a failure");
    assert!(failure.timed_out);
    assert_eq!(failure.peer, Some(Rank(1)));
    assert!(failure.reason.contains("rank 1"), "{failure}");
}
