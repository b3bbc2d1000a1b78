//! Sums of the squares of all means: exact, the same on all ranks, known before the means are
//! everywhere, and refused where nobody could add them up.

use crate::common::toy::{encoded_plan, Toy};
use crate::common::{self, plan, tensors, Cluster};
use gradlane_engine::{Input, Plan, Roles, Scheme, Strategy, Update};
use gradlane_units::{Rank, Rng, SquareSum, Step, TensorId};
use gradlane_wire::{FrameHeader, FrameKind};
use proptest::prelude::*;
use std::sync::Arc;

const SIZES: [u64; 4] = [40, 700, 3, 150];

fn gradient(rank: u32, tensor: usize, step: u64, numel: u64) -> Vec<f32> {
    let mut rng = Rng::new(u64::from(rank) << 40 | (tensor as u64) << 20 | step);
    let value = move |_| {
        let bits = rng.next_u64();
        let magnitude = 10.0_f32.powi((bits % 25) as i32 - 12);
        ((bits >> 32) as u32 as f32 / u32::MAX as f32 - 0.5) * magnitude
    };
    (0..numel).map(value).collect()
}

/// Begins a step in which the squares of the first tensors are added up.
fn begin(cluster: &mut Cluster, step: u64, tensors: usize) {
    cluster.begin(Step(step));
    for node in &mut cluster.nodes {
        let input = Input::MeasureSquares(TensorId(tensors as u32), Step(step));
        node.engine.handle(input).expect("squares that can be added up");
    }
}

/// Submits every tensor of every rank, some as absent; the last one of one rank after the others.
fn submit(cluster: &mut Cluster, sizes: &[u64], step: u64, holes: bool) {
    for rank in 0..cluster.world() {
        for tensor in (0..sizes.len()).rev() {
            let node = &mut cluster.nodes[rank as usize];
            let id = TensorId(tensor as u32);
            // One tensor has a gradient on no rank.
            if holes && (tensor == 1 || (tensor as u32 + rank).is_multiple_of(3)) {
                node.engine.handle(Input::TensorAbsent(id, Step(step))).expect("an absence");
            } else {
                node.tensors[tensor] = gradient(rank, tensor, step, sizes[tensor]);
                node.engine.handle(Input::GradientReady(id, Step(step))).expect("a gradient");
            }
        }
        cluster.stir(30);
    }
}

/// The sum over the means that a rank has; tensors that no rank had count nothing.
fn sum_of_means(cluster: &Cluster, step: u64, tensors: usize) -> SquareSum {
    let node = &cluster.nodes[0];
    let mut sum = SquareSum::default();
    for &(tensor, at, absent) in &node.ready {
        if at == Step(step) && !absent && tensor.index() < tensors {
            let values = &node.tensors[tensor.index()];
            values.iter().for_each(|&value| sum.add_square_of(f64::from(value)));
        }
    }
    sum
}

fn check_steps(cluster: &mut Cluster, sizes: &[u64], tensors: usize, holes: bool) {
    cluster.step_zero();
    for step in 1..4 {
        begin(cluster, step, tensors);
        submit(cluster, sizes, step, holes);
        cluster.run();
        for node in &mut cluster.nodes {
            node.engine.handle(Input::TensorNeeded(TensorId(0), Step(step))).expect("a wait");
        }
        cluster.run();
        let expected = sum_of_means(cluster, step, tensors).to_bytes();
        for node in &cluster.nodes {
            assert_eq!(node.completed.last(), Some(&Step(step)), "{:?}", node.engine.outstanding());
            let (at, sum) = node.squares.last().expect("a sum of squares");
            assert_eq!((*at, node.squares.len() as u64), (Step(step), step));
            assert_eq!(sum.to_bytes(), expected, "{} in step {step}", node.engine.rank());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn all_ranks_have_the_exact_sum(
        name in proptest::sample::select(Vec::from(Strategy::SYNCHRONOUS)),
        sizes in proptest::collection::vec(prop_oneof![1..70_u64, Just(1500_u64)], 1..6),
        world in 1..6_u32,
        slice_elems in 1..400_u64,
        frame_bytes in prop_oneof![Just(64_u32), Just(1 << 16)],
        credit in prop_oneof![Just(0_u64), Just(300), Just(1 << 20)],
        last_counts in any::<bool>(),
        holes in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let slice_elems = slice_elems.max(sizes.iter().sum::<u64>() / 40);
        let frame_bytes = frame_bytes.max(sizes.iter().sum::<u64>() as u32 / 16);
        let plan = plan(&sizes, name, slice_elems, world);
        let mut cluster = Cluster::new(&plan, frame_bytes, credit, seed);
        let tensors = sizes.len() - usize::from(!last_counts);
        check_steps(&mut cluster, &sizes, tensors, holes);
    }

    #[test]
    fn encoded_means_count_as_they_are_decoded(
        world in 2..5_u32,
        slice_elems in 20..400_u64,
        varies in any::<bool>(),
        holes in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let toy = Toy { granule_elems: 7, varies, integer: false };
        let specs = tensors(&SIZES).into_iter().map(|spec| (spec, Some(toy))).collect();
        let plan = encoded_plan(specs, "p3", slice_elems, world, Update::Worker);
        let mut cluster = Cluster::with_toy(&plan, toy, 1 << 16, 1 << 20, seed);
        check_steps(&mut cluster, &SIZES, SIZES.len(), holes);
    }
}

/// Rank 0 has queued everything: what is still to be reduced goes before what is reduced.
#[test]
fn pushes_go_before_broadcasts_while_squares_are_awaited() {
    for (measured, name) in [(true, "p3"), (false, "p3"), (true, "ring")] {
        let (first, second) = match name {
            "p3" => (FrameKind::Push, FrameKind::Broadcast),
            _ => (FrameKind::RingReduce, FrameKind::RingBroadcast),
        };
        let mut overtaken = false;
        for seed in 0..40 {
            let plan = plan(&SIZES, name, 10, 2);
            let mut cluster = Cluster::new(&plan, 64, 0, seed);
            cluster.step_zero();
            cluster.begin(Step(1));
            for node in cluster.nodes.iter_mut().filter(|_| measured) {
                let input = Input::MeasureSquares(TensorId(4), Step(1));
                node.engine.handle(input).expect("squares that can be added up");
            }
            submit(&mut cluster, &SIZES, 1, false);
            // All of rank 0's own contributions were queued before: frames from here on are in order.
            cluster.nodes[0].log.clear();
            cluster.run();
            let kinds = cluster.nodes[0].log.iter().map(|it| it.kind);
            let kinds: Vec<_> = kinds.filter(|&it| it == first || it == second).collect();
            let begins = kinds.iter().position(|&it| it == second);
            overtaken |= begins.is_some_and(|at| kinds[at..].contains(&first));
        }
        // In a ring, sums of others arrive later than means do.
        if name == "p3" {
            assert_eq!(overtaken, !measured, "{name}");
        }
    }
}

#[test]
fn squares_are_known_before_the_means_are_everywhere() {
    let plan = plan(&SIZES, "p3", 50, 3);
    let earlier = (0..30).any(|seed| {
        let mut cluster = Cluster::new(&plan, 64, 0, seed);
        cluster.step_zero();
        begin(&mut cluster, 1, SIZES.len());
        submit(&mut cluster, &SIZES, 1, false);
        (0..4000).any(|_| {
            cluster.stir(1);
            let mut nodes = cluster.nodes.iter();
            nodes.any(|node| !node.squares.is_empty() && node.completed.last() != Some(&Step(1)))
        })
    });
    assert!(earlier, "in no interleaving");
}

#[test]
fn a_rank_that_does_not_measure_is_named_at_once() {
    for name in ["p3", "ring", "wfbp"] {
        for seed in 0..20 {
            let mut cluster = Cluster::new(&plan(&SIZES, name, 50, 3), 64, 300, seed);
            cluster.step_zero();
            cluster.begin(Step(1));
            for node in &mut cluster.nodes[..2] {
                let input = Input::MeasureSquares(TensorId(4), Step(1));
                node.engine.handle(input).expect("squares that can be added up");
            }
            for node in &mut cluster.nodes {
                for tensor in 0..4 {
                    let input = Input::GradientReady(TensorId(tensor), Step(1));
                    node.engine.handle(input).expect("a gradient");
                }
            }
            let failures = cluster.run_to_failure();
            assert_eq!(failures.len(), 3, "seed {seed}: {failures:?}");
            for failure in failures {
                assert!(failure.contains("clips gradients by their norm in step 1"), "{failure}");
                assert!(failure.contains("rank 2 does not"), "{failure}");
            }
        }
    }
}

#[test]
fn plans_without_owners_that_wait_for_all_refuse() {
    let build = |strategy: Strategy, update, roles: Roles| {
        Plan::build_for(tensors(&SIZES), strategy, update, roles).expect("a plan")
    };
    let named = |name: &str| Strategy::named(name, Some(50), 0).expect("a strategy");
    let plans = [
        (build(named("p3"), Update::Server, Roles::shared(2)), "updates run on the servers"),
        (build(named("asgd"), Update::Server, Roles::shared(2)), "do not wait for all ranks"),
        (build(named("p3"), Update::Worker, Roles::dedicated(2, 1)), "dedicated servers"),
    ];
    for (plan, words) in plans {
        assert!(plan.check_measurable_squares(TensorId(4)).is_err(), "{words}");
        let plan = Arc::new(plan);
        let mut cluster = Cluster::new(&plan, 64, 300, 1);
        cluster.nodes[0].engine.handle(Input::StepBegin(Step(0))).expect("step 0 begins");
        let input = Input::MeasureSquares(TensorId(4), Step(0));
        let error = cluster.nodes[0].engine.handle(input).expect_err("refused").to_string();
        assert!(error.contains(words), "{error}");
    }
    let plan = plan(&SIZES, "p3", 50, 2);
    let error = plan.check_measurable_squares(TensorId(9)).expect_err("too many").to_string();
    assert!(error.contains("tensor 9"), "{error}");
    let mut cluster = Cluster::new(&plan, 64, 300, 1);
    cluster.step_zero();
    begin(&mut cluster, 1, 4);
    submit(&mut cluster, &SIZES, 1, false);
    let late = Input::MeasureSquares(TensorId(4), Step(1));
    let error = cluster.nodes[0].engine.handle(late).expect_err("too late").to_string();
    assert!(error.contains("before the step's first contribution"), "{error}");
}

/// What no correct peer sends is refused by name, and changes nothing.
#[test]
fn sums_that_make_no_sense_are_refused() {
    let plan = plan(&SIZES, "p3", 50, 3);
    let mut cluster = Cluster::new(&plan, 64, 300, 1);
    cluster.step_zero();
    begin(&mut cluster, 1, SIZES.len());
    let engine = &mut cluster.nodes[0].engine;
    let mut sum = SquareSum::default();
    sum.add_square_of(3.0);
    let payload = sum.to_bytes();
    let header = |step: u64, payload: &[u8]| FrameHeader {
        step: Step(step),
        length: payload.len() as u32,
        ..common::frame(FrameKind::SquareSum, Rank(1))
    };
    let too_long = vec![0; SquareSum::BYTES_MAX + 1];
    for payload in [&[][..], &[0; 3], &too_long] {
        let error = engine.handle(Input::Header(Rank(1), header(1, payload))).expect_err("refused");
        assert!(error.to_string().contains("a sum of squares of"), "{error}");
    }
    for wrong in [&[9, 0, 0, 0][..], &[0, 0, 1, 0], &[0, 200, 1, 0, 1, 0, 0, 0]] {
        engine.handle(Input::Header(Rank(1), header(1, wrong))).expect("of a possible length");
        let error = engine
            .handle(Input::Control(Rank(1), header(1, wrong), wrong.to_vec()))
            .expect_err("refused");
        assert!(error.to_string().contains("a sum of squares that is none"), "{error}");
    }
    for step in [0, 3, u64::MAX] {
        let taken =
            engine.handle(Input::Control(Rank(1), header(step, &payload), payload.to_vec()));
        // Steps before the current one are done with, whatever their sums.
        assert_eq!(taken.is_err(), step != 0, "step {step}");
    }
    engine
        .handle(Input::Control(Rank(1), header(1, &payload), payload.to_vec()))
        .expect("the first one");
    let error = engine.handle(Input::Control(Rank(1), header(1, &payload), payload.to_vec()));
    assert!(error.expect_err("twice").to_string().contains("this rank is in step 1"));
}

/// Blocks have no owner: their squares are in no sum, and whoever wants the norm adds them.
#[test]
fn blocks_are_in_no_sum() {
    let schemes = [Scheme::Ps, Scheme::AllGather, Scheme::Ring, Scheme::AllGather];
    let specs = tensors(&SIZES).into_iter().zip(schemes).collect();
    let strategy = Strategy::named("p3", Some(50), 0).expect("p3");
    let plan = Arc::new(Plan::build(specs, strategy, Update::Worker, 3).expect("a plan"));
    let is_block = |tensor: TensorId| plan.tensor(tensor).scheme.has_blocks();
    for seed in 0..20 {
        let mut cluster = Cluster::new(&plan, 64, 300, seed);
        cluster.begin(Step(0));
        for node in &mut cluster.nodes {
            node.tensors = SIZES.iter().map(|&numel| vec![0.5; numel as usize]).collect();
            for tensor in (0..4).map(TensorId).filter(|it| !is_block(*it)) {
                node.engine.handle(Input::GradientReady(tensor, Step(0))).expect("values");
            }
            node.engine.handle(Input::StepEnd(Step(0))).expect("an end");
        }
        cluster.run();
        begin(&mut cluster, 1, SIZES.len());
        for rank in 0..3 {
            for tensor in (0..4).rev() {
                let node = &mut cluster.nodes[rank as usize];
                let (id, values) =
                    (TensorId(tensor as u32), gradient(rank, tensor, 1, SIZES[tensor]));
                let bytes = 4 * values.len() as u64;
                node.tensors[tensor] = values;
                let input = match is_block(id) {
                    true => Input::BlockReady(id, Step(1), bytes),
                    false => Input::GradientReady(id, Step(1)),
                };
                node.engine.handle(input).expect("a contribution");
            }
            cluster.stir(30);
        }
        cluster.nodes.iter_mut().for_each(|node| {
            node.engine.handle(Input::StepEnd(Step(1))).expect("an end");
        });
        cluster.run();
        let mut expected = SquareSum::default();
        for tensor in [0, 2] {
            let mean = &cluster.nodes[0].tensors[tensor];
            mean.iter().for_each(|&value| expected.add_square_of(f64::from(value)));
        }
        for node in &cluster.nodes {
            assert_eq!(node.completed.last(), Some(&Step(1)), "{}", node.engine.outstanding());
            let (at, sum) = node.squares.last().expect("a sum of squares");
            assert_eq!((*at, sum.to_bytes()), (Step(1), expected.to_bytes()), "seed {seed}");
        }
    }
}
