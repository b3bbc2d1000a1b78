//! Runs that are longer than any test: clusters that skip to steps around 2^16, 2^31, 2^32 and 2^53, whose
//! messages and jobs are numbered as high, and then train on. Nothing in a step may be narrower than 64 bits.

use crate::common::model::{self, gradient};
use crate::common::{plan, tensors, Cluster};
use gradlane_engine::{
    Cutoff, Input, Plan, StragglerPolicy, Strategy as Setting, Synchrony, Update,
};
use gradlane_units::{Step, TensorId};
use std::sync::Arc;

const SIZES: [u64; 3] = [37, 0, 260];
/// The last step before a number of so many bits is full.
const WRAPS: [u64; 5] = [1 << 16, 1 << 31, 1 << 32, 1 << 53, 1 << 63];

/// All ranks hand over everything in a step, and nothing is left to do.
fn step_all(cluster: &mut Cluster, step: Step) {
    cluster.begin(step);
    for rank in 0..cluster.world() {
        let node = &mut cluster.nodes[rank as usize];
        for (tensor, &numel) in SIZES.iter().enumerate() {
            node.tensors[tensor] = gradient(rank, tensor, step.0, numel);
            node.engine
                .handle(Input::GradientReady(TensorId(tensor as u32), step))
                .expect("a gradient");
        }
        node.engine.handle(Input::StepEnd(step)).expect("an end");
    }
    cluster.run();
    for node in &mut cluster.nodes {
        node.engine.handle(Input::TensorNeeded(TensorId(0), step)).expect("a wait");
    }
    cluster.run();
    for node in &cluster.nodes {
        assert_eq!(node.completed.last(), Some(&step), "{:?}", node.engine.outstanding());
        assert!(node.failure.is_none(), "{:?}", node.failure);
    }
}

/// Trains across every wrap; `check` sees the cluster after each step.
fn across(plan: &Arc<Plan>, check: impl Fn(&Cluster, Step)) {
    let mut cluster = Cluster::new(plan, 64, 1 << 10, 11);
    cluster.step_zero();
    // Where pushes are applied alone, these wait for the settings of the optimizer.
    for node in &mut cluster.nodes {
        node.engine.handle(Input::UpdatesReady).expect("always taken");
    }
    step_all(&mut cluster, Step(1));
    for wrap in WRAPS {
        let start = Step(wrap - 3);
        cluster.nodes.iter_mut().for_each(|node| node.engine.fast_forward(start));
        for offset in 1..=6 {
            let step = Step(start.0 + offset);
            step_all(&mut cluster, step);
            check(&cluster, step);
        }
    }
    cluster.finish();
}

fn has_means(cluster: &Cluster, step: Step) {
    for node in &cluster.nodes {
        for (tensor, &numel) in SIZES.iter().enumerate() {
            let id = TensorId(tensor as u32);
            let right = model::mean(node.engine.plan(), id, |rank| {
                Some(gradient(rank, tensor, step.0, numel))
            });
            assert_eq!(node.tensors[tensor], right, "{} in {step}", node.engine.rank());
        }
    }
}

#[test]
fn every_synchronous_strategy_trains_on_where_numbers_of_fewer_bits_end() {
    for name in Setting::SYNCHRONOUS {
        across(&plan(&SIZES, name, 40, 3), has_means);
    }
}

#[test]
fn pushes_are_applied_one_by_one_there() {
    across(&plan(&SIZES, "asgd", 40, 3), |cluster, step| {
        let node = &cluster.nodes[0];
        let last = node.applied.last().expect("something was applied");
        assert!(last.step == step && last.version > step.0, "{last:?} in {step}");
        assert!(last.staleness < 5, "{last:?}: the others, this step and the last");
    });
}

#[test]
fn contributors_are_chosen_there() {
    let rule = StragglerPolicy { cutoff: Cutoff::Backup { ranks: 1 }, ahead_steps: 4 };
    let strategy = Setting::named("p3", Some(40), 7).expect("a known strategy");
    let strategy = Setting { synchrony: Synchrony::BackupWorkers(rule), ..strategy };
    let plan = Plan::build(tensors(&SIZES), strategy, Update::Worker, 3).expect("a plan");
    across(&Arc::new(plan), |cluster, step| {
        for node in &cluster.nodes {
            let (decided, contributors) = node.decided.last().expect("a decision");
            assert_eq!((*decided, contributors.len() >= 2), (step, true));
        }
    });
}

#[test]
fn orders_are_switched_there() {
    let plan = plan(&SIZES, "p3", 40, 3);
    let mut cluster = Cluster::new(&plan, 64, 1 << 10, 3);
    cluster.step_zero();
    step_all(&mut cluster, Step(1));
    for (version, wrap) in (1..).zip(WRAPS) {
        cluster.nodes.iter_mut().for_each(|node| node.engine.fast_forward(Step(wrap - 2)));
        cluster.switch(&[3, 2, i32::try_from(version).expect("a small number")]);
        for offset in 0..3 {
            step_all(&mut cluster, Step(wrap - 1 + offset));
        }
        // Asked for after step 2^n - 2: in force from the step after the next.
        for node in &cluster.nodes {
            assert_eq!(node.switched.last(), Some(&(version, Step(wrap))));
        }
    }
    cluster.finish();
}
