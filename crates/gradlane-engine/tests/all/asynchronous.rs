//! Asynchronous training under random interleavings: every push is applied once, in the order of its
//! rank's steps; an answer is the state right after its update, whole; ranks run as many steps as they
//! like, at any speed, and come to an end together.

use crate::common::{plan, Cluster};
use gradlane_engine::{Input, PullRule, Strategy as Setting, Update};
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::FrameKind;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// What a rank pushes in a step, every element: whole numbers, so that sums are exact in any order.
fn push(rank: u32, step: u64) -> f32 {
    (1 + step * 8 + u64::from(rank)) as f32
}

/// Whether a rank has a gradient for a tensor in a step.
fn has(rank: u32, step: u64, tensor: usize, holes: bool) -> bool {
    !holes || !(u64::from(rank) + step + tensor as u64).is_multiple_of(3)
}

/// One rank's way through its steps.
#[derive(Clone, Copy, Debug)]
struct Walk {
    steps: u64,
    /// Chances in so many that it does something when it may.
    lazy: u32,
    /// The step that it is in.
    step: u64,
    /// Tensors still to be given in the step.
    left: usize,
    ended: bool,
}

struct Run {
    cluster: Cluster,
    sizes: Vec<u64>,
    walks: Vec<Walk>,
    holes: bool,
    /// What each rank held of each slice after each of its steps.
    held: BTreeMap<(u32, u64, u32), Vec<f32>>,
}

impl Run {
    fn tell_all(&mut self, input: &Input) {
        for node in &mut self.cluster.nodes {
            node.engine.handle(input.clone()).expect("always taken");
        }
    }

    fn new(sizes: &[u64], slice_elems: u64, frame: u32, walks: &[(u64, u32)], seed: u64) -> Run {
        let plan = plan(sizes, "asgd", slice_elems, walks.len() as u32);
        let mut cluster = Cluster::new(&plan, frame, 1 << 16, seed);
        for node in &mut cluster.nodes {
            node.tensors = sizes.iter().map(|&numel| vec![0.0; numel as usize]).collect();
        }
        cluster.step_zero();
        cluster.nodes.iter_mut().for_each(|node| node.completed.clear());
        let walk =
            |&(steps, lazy): &(u64, u32)| Walk { steps, lazy, step: 0, left: 0, ended: true };
        let walks = walks.iter().map(walk).collect();
        Run { cluster, sizes: sizes.to_vec(), walks, holes: false, held: BTreeMap::new() }
    }

    /// Lets every rank run its steps, and finish when it has.
    fn go(&mut self) {
        let world = self.cluster.world();
        let mut finished = vec![false; world as usize];
        while finished.iter().any(|&it| !it) {
            let rank = self.cluster.rng.below(world);
            let walk = self.walks[rank as usize];
            self.cluster.stir(6);
            if !finished[rank as usize] && self.cluster.rng.below(walk.lazy) == 0 {
                finished[rank as usize] = self.act(rank);
            }
            let failure = self.cluster.nodes[rank as usize].failure.as_ref();
            assert!(failure.is_none(), "{failure:?}");
        }
        self.cluster.run();
    }

    /// One rank does its next thing, if it can; whether it has finished.
    fn act(&mut self, rank: u32) -> bool {
        let walk = &mut self.walks[rank as usize];
        let node = &mut self.cluster.nodes[rank as usize];
        node.take_events();
        let step = Step(walk.step);
        if walk.left > 0 {
            walk.left -= 1;
            let tensor = walk.left;
            let id = TensorId(tensor as u32);
            node.tensors[tensor].fill(push(rank, step.0));
            if has(rank, step.0, tensor, self.holes) {
                node.engine.handle(Input::GradientReady(id, step)).expect("a gradient");
            } else {
                node.engine.handle(Input::TensorAbsent(id, step)).expect("an absence");
            }
        } else if !walk.ended {
            walk.ended = true;
            node.engine.handle(Input::StepEnd(step)).expect("the end");
        } else if node.engine.handle(Input::StepBegin(step.next())).is_ok() {
            self.note(rank, step.0);
            let walk = &mut self.walks[rank as usize];
            let node = &mut self.cluster.nodes[rank as usize];
            if step.0 == walk.steps {
                // One step too many was begun, to see that the last one is complete.
                for tensor in 0..self.sizes.len() as u32 {
                    node.engine
                        .handle(Input::TensorAbsent(TensorId(tensor), step.next()))
                        .expect("an absence");
                }
                node.engine.handle(Input::StepEnd(step.next())).expect("the end");
                node.engine.handle(Input::Finish).expect("always taken");
                node.take_events();
                return true;
            }
            walk.step += 1;
            walk.left = self.sizes.len();
            walk.ended = false;
        }
        false
    }

    fn note(&mut self, rank: u32, step: u64) {
        let node = &self.cluster.nodes[rank as usize];
        for (index, slice) in node.engine.plan().slices.iter().enumerate() {
            let range = slice.start as usize..(slice.start + slice.length) as usize;
            let values = node.parameters[slice.tensor.index()][range].to_vec();
            self.held.insert((rank, step, index as u32), values);
        }
    }

    fn check(&self) {
        let plan = self.cluster.nodes[0].engine.plan().clone();
        for (index, slice) in plan.slices.iter().enumerate() {
            let id = SliceId(index as u32);
            let owner = &self.cluster.nodes[slice.owner.index()];
            let applied: Vec<_> = owner.applied.iter().filter(|it| it.slice == id).collect();
            let mut state = 0.0;
            let mut version = 0;
            let mut received = BTreeMap::new();
            let mut steps: BTreeMap<Rank, Vec<u64>> = BTreeMap::new();
            for it in applied {
                assert_eq!(it.version, version + 1, "versions go up one by one");
                let had = received.insert(it.rank, it.version);
                if !self.holes {
                    assert_eq!(it.staleness, version - had.unwrap_or(0));
                }
                assert!(it.staleness <= version - had.unwrap_or(0));
                version = it.version;
                state -= push(it.rank.0, it.step.0);
                steps.entry(it.rank).or_default().push(it.step.0);
                let held = self.held.get(&(it.rank.0, it.step.0, id.0));
                let whole = held.expect("the step was completed");
                assert!(whole.iter().all(|&it| it == state), "{id} after {version} is {state}");
            }
            for (rank, walk) in self.walks.iter().enumerate() {
                let rank = rank as u32;
                let tensor = slice.tensor.index();
                // Of an empty slice there is nothing to apply.
                let given = |&it: &u64| slice.length > 0 && has(rank, it, tensor, self.holes);
                let expected: Vec<u64> = (1..=walk.steps).filter(given).collect();
                let found = steps.remove(&Rank(rank)).unwrap_or_default();
                assert_eq!(found, expected, "pushes of rank {rank} to {id}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn every_push_is_applied_once_and_answered_with_the_state_after_it(
        sizes in proptest::collection::vec(prop_oneof![Just(0_u64), 1..40_u64, Just(300)], 1..5),
        slice_elems in 20..200_u64,
        frame in prop_oneof![Just(64_u32), Just(1 << 16)],
        walks in proptest::collection::vec((0..6_u64, 1..6_u32), 1..5),
        holes in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut run = Run::new(&sizes, slice_elems, frame, &walks, seed);
        run.holes = holes;
        run.tell_all(&Input::UpdatesReady);
        run.go();
        for node in &run.cluster.nodes {
            prop_assert!(node.closed, "{}: {:?}", node.engine.rank(), node.failure);
            prop_assert_eq!(node.engine.buffers_in_use(), 0);
        }
        run.check();
    }
}

#[test]
fn a_rank_without_gradients_gets_the_newest_state_and_everyone_ends_alike() {
    let mut run = Run::new(&[90, 7], 25, 64, &[(5, 1), (2, 3), (0, 1)], 11);
    run.tell_all(&Input::UpdatesReady);
    // Steps without gradients, once all are there, are how ranks come to hold the same.
    for (rank, walk) in [(0_usize, 5_u64), (1, 2)] {
        for step in 1..=walk {
            let node = &mut run.cluster.nodes[rank];
            node.engine.handle(Input::StepBegin(Step(step))).expect("begins");
            for tensor in 0..2 {
                node.tensors[tensor].fill(push(rank as u32, step));
                node.engine
                    .handle(Input::GradientReady(TensorId(tensor as u32), Step(step)))
                    .expect("ok");
            }
            node.engine.handle(Input::StepEnd(Step(step))).expect("ended");
            run.cluster.run();
        }
    }
    for (rank, step) in [(0_usize, 6), (1, 3), (2, 1)] {
        let node = &mut run.cluster.nodes[rank];
        node.log.clear();
        node.engine.handle(Input::StepBegin(Step(step))).expect("begins");
        for tensor in 0..2 {
            node.engine.handle(Input::TensorAbsent(TensorId(tensor), Step(step))).expect("ok");
        }
        node.engine.handle(Input::StepEnd(Step(step))).expect("ended");
        run.cluster.run();
    }
    let sum: f32 = (1..=5).map(|it| push(0, it)).sum::<f32>() + push(1, 1) + push(1, 2);
    for node in &run.cluster.nodes {
        assert!(node.parameters.iter().flatten().all(|&it| it == -sum), "{:?}", node.parameters);
    }
    run.cluster.finish();
}

#[test]
fn nothing_is_applied_before_the_owner_knows_how() {
    let mut run = Run::new(&[60], 20, 64, &[(1, 1), (1, 1)], 3);
    run.cluster.nodes[0].engine.handle(Input::UpdatesReady).expect("always taken");
    run.cluster.begin(Step(1));
    for node in &mut run.cluster.nodes {
        node.tensors[0].fill(1.0);
        node.engine.handle(Input::GradientReady(TensorId(0), Step(1))).expect("ok");
        node.engine.handle(Input::StepEnd(Step(1))).expect("ok");
    }
    run.cluster.run();
    assert!(run.cluster.nodes[1].applied.is_empty());
    assert!(run.cluster.nodes.iter().all(|node| node.completed.is_empty()));
    run.cluster.nodes[1].engine.handle(Input::UpdatesReady).expect("always taken");
    run.cluster.run();
    assert!(run.cluster.nodes.iter().all(|node| node.completed == [Step(1)]));
    run.cluster.finish();
}

#[test]
fn while_updates_are_paused_answers_change_nothing() {
    let mut run = Run::new(&[40], 20, 64, &[(2, 1), (2, 1)], 5);
    run.tell_all(&Input::UpdatesReady);
    for step in 1..=3 {
        if step == 2 {
            run.tell_all(&Input::UpdatesPaused);
        } else {
            run.tell_all(&Input::UpdatesReady);
        }
        run.cluster.begin(Step(step));
        for node in &mut run.cluster.nodes {
            node.tensors[0].fill(1.0);
            node.engine.handle(Input::GradientReady(TensorId(0), Step(step))).expect("ok");
            node.engine.handle(Input::StepEnd(Step(step))).expect("ok");
        }
        run.cluster.run();
    }
    for node in &run.cluster.nodes {
        assert!(node.applied.iter().all(|it| it.step != Step(2)));
        assert_eq!(node.applied.iter().map(|it| it.version).max(), Some(4));
    }
    run.cluster.finish();
}

#[test]
fn a_lost_rank_is_named_also_after_its_goodbye() {
    for seed in 0..20 {
        let mut run = Run::new(&[300, 20], 50, 64, &[(9, 1), (9, 1), (9, 1)], seed);
        run.tell_all(&Input::UpdatesReady);
        if seed % 2 == 0 {
            // It has no more steps of its own, but the others need what it owns.
            run.cluster.nodes[2].engine.handle(Input::Finish).expect("always taken");
            run.cluster.run();
        }
        for rank in [0_usize, 1] {
            let node = &mut run.cluster.nodes[rank];
            node.engine.handle(Input::StepBegin(Step(1))).expect("begins");
            node.engine.handle(Input::GradientReady(TensorId(0), Step(1))).expect("ok");
        }
        run.cluster.run();
        run.cluster.kill(2);
        run.cluster.run();
        for node in &run.cluster.nodes[..2] {
            let failure = node.failure.as_ref().expect("a failure");
            assert_eq!(failure.peer, Some(Rank(2)), "{failure}");
            assert_eq!(failure.last_complete, Some(Step(0)));
            let names = &failure.outstanding.tensors;
            assert!(names.contains(&"layer1.weight".to_string()), "{failure}");
            assert!(failure.outstanding.bytes > 0, "{failure}");
        }
    }
}

#[test]
fn an_order_is_in_force_on_each_rank_from_its_next_step_on() {
    let mut run = Run::new(&[60, 60], 20, 64, &[(3, 1), (3, 1)], 8);
    run.tell_all(&Input::UpdatesReady);
    for step in 1..=3 {
        // Rank 1 is a step behind where rank 0 announces the order.
        for rank in 0..2 {
            let node = &mut run.cluster.nodes[rank];
            node.engine.handle(Input::StepBegin(Step(step))).expect("begins");
            node.take_events();
            if rank == 0 && step == 1 {
                node.engine
                    .handle(Input::SwitchPriorities(vec![Priority(-1), Priority(0)]))
                    .expect("a switch");
            }
            for tensor in 0..2 {
                node.tensors[tensor].fill(1.0);
                node.engine
                    .handle(Input::GradientReady(TensorId(tensor as u32), Step(step)))
                    .expect("ok");
            }
            node.engine.handle(Input::StepEnd(Step(step))).expect("ok");
            run.cluster.run();
        }
    }
    assert_eq!(run.cluster.nodes[0].switched, [(1, Step(2))]);
    assert_eq!(run.cluster.nodes[1].switched.len(), 1);
    for node in &run.cluster.nodes {
        let late = node.log.iter().filter(|it| it.kind == FrameKind::Push && it.step.0 == 3);
        assert!(late.clone().count() > 0 && late.clone().all(|it| it.plan_version == 1));
    }
    run.cluster.finish();
}

#[test]
fn it_asks_for_updates_on_the_server_and_answers_unasked() {
    let strategy = Setting::named("asgd", None, 0).expect("asgd");
    assert!(strategy.validate(Update::Server, 2).is_ok());
    let refused = strategy.validate(Update::Worker, 2);
    assert!(refused.is_err_and(|error| error.to_string().contains("update=server")));
    let pulls = Setting { pull: PullRule::NextStep, ..strategy };
    assert!(pulls.validate(Update::Server, 2).is_err());
}
