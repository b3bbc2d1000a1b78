//! Updates on ranks that only serve: each starts from rank 0's values and from the update before, under any
//! interleaving, and no push counts without its rank's command.

use crate::common::model::{self, gradient};
use crate::common::toy::Toy;
use crate::common::{frame, tensors, Cluster};
use gradlane_engine::{Input, PayloadDest, Plan, Roles, Strategy, Update};
use gradlane_units::{Rank, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind};
use proptest::prelude::*;
use std::sync::Arc;

const STRATEGIES: [&str; 5] = ["p3", "slicing", "wfbp", "kvstore", "deferred-pull"];
/// The step whose results are no parameters.
const PAUSED: u64 = 3;

fn plan_for(sizes: &[u64], name: &str, slice_elems: u64, roles: Roles) -> Arc<Plan> {
    let strategy = Strategy::named(name, Some(slice_elems), 7).expect("a strategy");
    let plan = Plan::build_for(tensors(sizes), strategy, Update::Server, roles);
    Arc::new(plan.expect("a plan"))
}

/// Whether a rank has no gradient: sometimes no rank has.
fn is_absent(rank: u32, tensor: usize, step: u64) -> bool {
    (u64::from(rank / 2) + tensor as u64 + step).is_multiple_of(4)
}

/// Runs step 0 with values that are not zero, and returns these.
fn start(cluster: &mut Cluster, sizes: &[u64]) -> Vec<Vec<f32>> {
    let named = sizes.iter().enumerate();
    let values: Vec<_> = named.map(|(tensor, &numel)| gradient(0, tensor, 0, numel)).collect();
    for node in &mut cluster.nodes {
        node.parameters.clone_from(&values);
    }
    cluster.nodes[0].tensors.clone_from(&values);
    cluster.step_zero();
    values
}

/// Trains a step on all ranks, and checks the results. `kept` are the parameters that servers have.
fn train(cluster: &mut Cluster, sizes: &[u64], step: u64, kept: &mut [Vec<f32>]) {
    let workers = cluster.workers() as usize;
    for node in &mut cluster.nodes[workers..] {
        let pauses = if step == PAUSED { Input::UpdatesPaused } else { Input::UpdatesReady };
        node.engine.handle(pauses).expect("always taken");
    }
    cluster.begin(Step(step));
    for rank in 0..workers as u32 {
        let node = &mut cluster.nodes[rank as usize];
        node.engine.handle(Input::ServerCommand(vec![7; 5])).expect("a command");
        let again = node.engine.handle(Input::ServerCommand(vec![7; 5]));
        assert!(again.is_err_and(|it| it.to_string().contains("once a step")));
        for (tensor, &numel) in sizes.iter().enumerate() {
            let id = TensorId(tensor as u32);
            let input = if is_absent(rank, tensor, step) {
                Input::TensorAbsent(id, Step(step))
            } else {
                node.tensors[tensor] = gradient(rank, tensor, step, numel);
                Input::GradientReady(id, Step(step))
            };
            node.engine.handle(input).expect("a contribution");
        }
        node.engine.handle(Input::StepEnd(Step(step))).expect("the end of the step");
    }
    cluster.run();
    for node in &mut cluster.nodes[..workers] {
        node.engine.handle(Input::TensorNeeded(TensorId(0), Step(step))).expect("a wait");
    }
    cluster.run();
    let mut shown = kept.to_vec();
    for (tensor, values) in shown.iter_mut().enumerate() {
        let given = |rank: u32| {
            let absent = is_absent(rank, tensor, step);
            (!absent).then(|| gradient(rank, tensor, step, sizes[tensor]))
        };
        if (0..workers as u32).any(|rank| given(rank).is_some()) {
            let plan = cluster.nodes[0].engine.plan();
            let mean = model::mean(plan, TensorId(tensor as u32), given);
            values.iter_mut().zip(mean).for_each(|(value, mean)| *value -= mean);
            if step != PAUSED {
                kept[tensor].clone_from(values);
            }
        } else {
            // Nothing lands.
            values.clone_from(&cluster.nodes[0].parameters[tensor]);
        }
    }
    for node in &cluster.nodes[..workers] {
        assert_eq!(node.completed.last(), Some(&Step(step)), "{:?}", node.engine.outstanding());
        assert_eq!(node.parameters, shown, "{} in step {step}", node.engine.rank());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn each_update_starts_from_the_one_before(
        name in proptest::sample::select(&STRATEGIES[..]),
        sizes in proptest::collection::vec(prop_oneof![Just(0_u64), 1..40_u64, Just(900_u64)], 1..5),
        workers in 1..4_u32,
        servers in 1..4_u32,
        slice_elems in 20..400_u64,
        frame_bytes in prop_oneof![Just(64_u32), Just(1 << 16)],
        seed in any::<u64>(),
    ) {
        let plan = plan_for(&sizes, name, slice_elems, Roles::dedicated(workers, servers));
        let mut cluster = Cluster::new(&plan, frame_bytes, 300, seed);
        let mut kept = start(&mut cluster, &sizes);
        for step in 1..6 {
            train(&mut cluster, &sizes, step, &mut kept);
        }
        cluster.finish();
    }
}

#[test]
fn a_push_without_a_command_is_refused_and_so_is_a_command_that_no_rank_sends() {
    let plan = plan_for(&[100], "p3", 100, Roles::dedicated(2, 2));
    let mut cluster = Cluster::new(&plan, 1024, 1024, 3);
    start(&mut cluster, &[100]);
    let command = |sender: u32, step: u64, length: u32| FrameHeader {
        step: Step(step),
        length,
        flags: FrameFlags::LAST,
        ..frame(FrameKind::ServerCommand, Rank(sender))
    };
    let mut told = |to: usize, header: FrameHeader| {
        let engine = &mut cluster.nodes[to].engine;
        let landed = engine.handle(Input::Header(header.sender, header));
        if landed == Ok(PayloadDest::Control) {
            let taken = engine.handle(Input::Control(
                header.sender,
                header,
                vec![0; header.length as usize],
            ));
            return taken.map(drop).map_err(|error| error.to_string());
        }
        landed.map(drop).map_err(|error| error.to_string())
    };
    let refused = |result: Result<(), String>| result.expect_err("refused");
    let push =
        FrameHeader { length: 400, flags: FrameFlags::LAST, ..frame(FrameKind::Push, Rank(0)) };
    assert!(refused(told(2, push)).contains("before the settings of its update"));
    assert!(refused(told(2, command(3, 1, 4))).contains("from rank 3 to rank 2"));
    assert!(refused(told(0, command(1, 1, 4))).contains("from rank 1 to rank 0"));
    assert!(refused(told(2, command(0, 0, 4))).contains("after that for step 0"));
    assert!(refused(told(2, command(0, 1, 100_000))).contains("100000 bytes"));
    assert_eq!(told(2, command(0, 1, 4)), Ok(()));
    assert!(refused(told(2, command(0, 1, 4))).contains("after that for step 1"));
    assert_eq!(told(2, push), Ok(()));
    let of_another = FrameHeader { sender: Rank(1), ..push };
    assert!(refused(told(2, of_another)).contains("before the settings of its update"));
}

#[test]
fn a_command_without_servers_that_update_is_refused() {
    let shared = plan_for(&[10], "p3", 10, Roles::shared(2));
    let engine = &mut Cluster::new(&shared, 64, 64, 1).nodes[0].engine;
    engine.handle(Input::StepBegin(Step(0))).expect("a step");
    let refused = engine.handle(Input::ServerCommand(vec![1]));
    assert!(refused.is_err_and(|it| it.to_string().contains("no dedicated ones")));
}

#[test]
fn rank_0_has_a_value_of_each_parameter() {
    let plan = plan_for(&[10], "p3", 10, Roles::dedicated(1, 1));
    let engine = &mut Cluster::new(&plan, 64, 64, 1).nodes[0].engine;
    engine.handle(Input::StepBegin(Step(0))).expect("a step");
    let refused = engine.handle(Input::TensorAbsent(TensorId(0), Step(0)));
    assert!(refused.is_err_and(|it| it.to_string().contains("no value to start from")));
}

#[test]
fn encoded_gradients_update_too() {
    let toy = Toy { granule_elems: 4, varies: false, integer: false };
    let sizes = [300, 40];
    let coded = |spec| -> gradlane_engine::TensorSetting {
        let codec: Box<dyn gradlane_engine::CodecSizes> = Box::new(toy);
        (spec, Some(codec)).into()
    };
    for seed in 0..10 {
        let settings = tensors(&sizes).into_iter().map(coded).collect();
        let strategy = Strategy::named("p3", Some(60), 0).expect("p3");
        let roles = Roles::dedicated(2, 1 + (seed % 2) as u32);
        let plan = Plan::build_for::<gradlane_engine::TensorSetting>(
            settings,
            strategy,
            Update::Server,
            roles,
        );
        let mut cluster = Cluster::with_toy(&Arc::new(plan.expect("a plan")), toy, 64, 64, seed);
        let mut kept = start(&mut cluster, &sizes);
        for step in 1..4_u64 {
            cluster.begin(Step(step));
            for rank in 0..2_u32 {
                let node = &mut cluster.nodes[rank as usize];
                node.engine.handle(Input::ServerCommand(vec![0])).expect("a command");
                for (tensor, &numel) in sizes.iter().enumerate() {
                    node.tensors[tensor] = gradient(rank, tensor, step, numel);
                    let id = TensorId(tensor as u32);
                    node.engine.handle(Input::GradientReady(id, Step(step))).expect("a gradient");
                }
                node.engine.handle(Input::StepEnd(Step(step))).expect("the end of the step");
            }
            cluster.run();
            for (tensor, values) in kept.iter_mut().enumerate() {
                let given = |rank: u32| {
                    let values = gradient(rank, tensor, step, sizes[tensor]);
                    Some(values.into_iter().map(Toy::keep).collect::<Vec<f32>>())
                };
                let plan = cluster.nodes[0].engine.plan();
                let mean = model::mean(plan, TensorId(tensor as u32), given);
                values.iter_mut().zip(mean).for_each(|(value, mean)| *value -= mean);
            }
            for node in &cluster.nodes[..2] {
                assert_eq!(node.parameters, kept, "step {step}");
            }
        }
        cluster.finish();
    }
}
