//! Clusters whose tensors travel encoded, under random interleavings: every rank, the owner included,
//! has what the encoded mean decodes to, whoever owns the slice, however it is cut, and whether all
//! encodings are equally long or not.

use crate::common::toy::{encoded_plan, Toy};
use crate::common::{self, tensors, Cluster};
use gradlane_engine::{Input, Plan, Scheme, Strategy, TensorKind, Update};
use gradlane_units::{Dtype, Rng, Step, TensorId};
use gradlane_wire::{FrameKind, PayloadForm};
use proptest::prelude::*;
use std::sync::Arc;

/// Values whose sum depends on the order of addition; some are zeros.
fn gradient(rank: u32, tensor: usize, step: u64, numel: u64) -> Vec<f32> {
    let mut rng = Rng::new(u64::from(rank) << 40 | (tensor as u64) << 20 | step);
    let value = move |_| {
        let bits = rng.next_u64();
        let magnitude = 10.0_f32.powi((bits % 9) as i32 - 4);
        let zero = if bits >> 20 & 3 == 0 { 0.0 } else { 1.0 };
        zero * ((bits >> 32) as u32 as f32 / u32::MAX as f32 - 0.5) * magnitude
    };
    (0..numel).map(value).collect()
}

/// Which ranks have a gradient.
fn present(tensor: usize, step: u64, world: u32, holes: bool) -> Vec<u32> {
    let mask = if holes { Rng::new(tensor as u64 * 31 + step).next_u64() } else { u64::MAX };
    (0..world).filter(|rank| mask >> (rank % 7) & 1 == 1).collect()
}

/// What all ranks must have: encoded contributions, summed in rank order, encoded.
fn expected(
    ranks: &[u32],
    world: u32,
    tensor: usize,
    step: u64,
    numel: u64,
    lossy: bool,
) -> Vec<u32> {
    let keep = |value: f32| if lossy { Toy::keep(value) } else { value };
    let mut sum: Option<Vec<f32>> = None;
    for &rank in ranks {
        let part = gradient(rank, tensor, step, numel).into_iter().map(keep);
        sum = Some(match sum {
            None => part.collect(),
            Some(sum) => sum.iter().zip(part).map(|(total, value)| total + value).collect(),
        });
    }
    let zero = if ranks.len() < world as usize { 0.0 } else { -0.0 };
    let sum = sum.unwrap_or_default();
    sum.iter().map(|total| keep((total + zero) / world as f32).to_bits()).collect()
}

/// The strategies whose tensors have servers, which alone can be encoded.
fn served() -> Vec<&'static str> {
    let scheme_of = |name: &str| Strategy::named(name, None, 0).expect("a strategy").scheme;
    Strategy::SYNCHRONOUS.into_iter().filter(|&name| scheme_of(name) == Scheme::Ps).collect()
}

/// The codec for every second tensor.
fn mixed(sizes: &[u64], toy: Toy) -> Vec<(gradlane_engine::TensorSpec, Option<Toy>)> {
    let tensors = tensors(sizes).into_iter().enumerate();
    tensors.map(|(index, spec)| (spec, (index % 2 == 0).then_some(toy))).collect()
}

/// One step, in which ranks have their gradients in turns drawn from the seed.
fn run_step(cluster: &mut Cluster, sizes: &[u64], step: u64, holes: bool, raw: bool) {
    let world = cluster.world();
    cluster.begin(Step(step));
    for node in cluster.nodes.iter_mut().filter(|_| raw) {
        node.engine.handle(Input::SendRaw(Step(step))).expect("a raw step");
    }
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
    for node in &cluster.nodes {
        assert_eq!(node.completed.last(), Some(&Step(step)), "{:?}", node.engine.outstanding());
        for (tensor, &numel) in sizes.iter().enumerate() {
            let ranks = present(tensor, step, world, holes);
            if ranks.is_empty() {
                continue;
            }
            let lossy = tensor % 2 == 0 && !raw;
            let right = expected(&ranks, world, tensor, step, numel, lossy);
            let found: Vec<u32> = node.tensors[tensor].iter().map(|it| it.to_bits()).collect();
            assert_eq!(found, right, "tensor {tensor}, {}, {step}", node.engine.rank());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn all_ranks_have_the_decoded_broadcast(
        name in proptest::sample::select(served()),
        sizes in proptest::collection::vec(prop_oneof![1..70_u64, Just(1500_u64)], 1..6),
        world in 2..6_u32,
        slice_elems in 1..400_u64,
        granule_elems in prop_oneof![Just(1_u64), Just(7), Just(64)],
        varies in any::<bool>(),
        frame_bytes in prop_oneof![Just(5_u32), Just(64), Just(1 << 16)],
        credit in prop_oneof![Just(0_u64), Just(300), Just(1 << 20)],
        holes in any::<bool>(),
        raw_step in 0..4_u64,
        seed in any::<u64>(),
    ) {
        let slice_elems = slice_elems.max(sizes.iter().sum::<u64>() / 40);
        let frame_bytes = frame_bytes.max(sizes.iter().sum::<u64>() as u32 / 16);
        let toy = Toy { granule_elems, varies, integer: false };
        let plan = encoded_plan(mixed(&sizes, toy), name, slice_elems, world, Update::Worker);
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
            run_step(&mut cluster, &sizes, step, holes, step == raw_step);
        }
        let mut encoded = 0;
        for header in cluster.nodes.iter().flat_map(|node| &node.log) {
            let even = header.tensor.0 % 2 == 0;
            let is_raw = header.step.0 == 0 || header.step.0 == raw_step || !even;
            let carries = matches!(header.kind, FrameKind::Push | FrameKind::Broadcast);
            if carries && header.length > 0 {
                let right = if is_raw { PayloadForm::Raw } else { PayloadForm::Encoded };
                prop_assert_eq!(header.form, right);
                encoded += u32::from(!is_raw);
            }
        }
        prop_assert!(encoded > 0 || holes);
        cluster.finish();
    }
}

#[test]
fn contributions_to_updates_on_the_server_are_encoded_and_parameters_are_not() {
    for seed in 0..30 {
        let sizes = [130_u64, 40, 300];
        let toy = Toy { granule_elems: 8, varies: seed % 2 == 0, integer: false };
        let plan = encoded_plan(mixed(&sizes, toy), "p3", 30, 3, Update::Server);
        let mut cluster = Cluster::with_toy(&plan, toy, 64, 64, seed);
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
                cluster.nodes[rank as usize]
                    .engine
                    .handle(Input::StepEnd(Step(step)))
                    .expect("ended");
            }
            cluster.run();
            for (tensor, values) in model.iter_mut().enumerate() {
                let mut sum = vec![-0.0_f32; values.len()];
                for rank in 0..3 {
                    let part = gradient(rank, tensor, step, sizes[tensor]);
                    for (total, value) in sum.iter_mut().zip(part) {
                        *total += if tensor % 2 == 0 { Toy::keep(value) } else { value };
                    }
                }
                values.iter_mut().zip(sum).for_each(|(value, sum)| *value -= sum / 3.0);
            }
            for node in &cluster.nodes {
                assert_eq!(node.parameters, model, "{} in step {step}", node.engine.rank());
            }
        }
        let headers: Vec<_> = cluster.nodes.iter().flat_map(|node| &node.log).collect();
        let encoded = |kind| {
            headers.iter().filter(|it| it.kind == kind && it.form == PayloadForm::Encoded).count()
        };
        assert!(encoded(FrameKind::Push) > 0);
        assert_eq!(encoded(FrameKind::Broadcast), 0);
        cluster.finish();
    }
}

#[test]
fn a_world_of_one_encodes_nothing() {
    let toy = Toy { granule_elems: 1, varies: false, integer: false };
    let plan = encoded_plan(mixed(&[100], toy), "p3", 50, 1, Update::Worker);
    assert!(plan.tensors.iter().all(|tensor| tensor.codec.is_none()));
}

#[test]
fn ranks_that_disagree_on_a_raw_step_fail_and_say_so() {
    let toy = Toy { granule_elems: 1, varies: false, integer: false };
    let plan = encoded_plan(mixed(&[100], toy), "p3", 50, 3, Update::Worker);
    for seed in 0..20 {
        let mut cluster = Cluster::with_toy(&plan, toy, 64, 64, seed);
        cluster.step_zero();
        cluster.begin(Step(1));
        let late = cluster.nodes[0].engine.handle(Input::SendRaw(Step(1)));
        assert!(late.is_ok());
        cluster.nodes[0]
            .engine
            .handle(Input::GradientReady(TensorId(0), Step(1)))
            .expect("a gradient");
        assert!(
            cluster.nodes[0].engine.handle(Input::SendRaw(Step(1))).is_err(),
            "after a contribution"
        );
        assert!(cluster.nodes[0].engine.handle(Input::SendRaw(Step(2))).is_err(), "another step");
        // Both forms meet at the owners of both slices, ranks 0 and 1.
        cluster.nodes[1]
            .engine
            .handle(Input::GradientReady(TensorId(0), Step(1)))
            .expect("a gradient");
        let failures = cluster.run_to_failure();
        assert_eq!(failures.len(), 3);
        let said = |text: &String| {
            text.contains("all ranks have to do the same") || text.contains("unlike other")
        };
        assert!(failures.iter().all(said), "{failures:?}");
    }
}

#[test]
fn only_short_floats_that_are_trained_have_codecs() {
    let toy = || -> Option<Box<dyn gradlane_engine::CodecSizes>> {
        Some(Box::new(Toy { granule_elems: 1, varies: false, integer: false }))
    };
    let build = |change: &dyn Fn(&mut gradlane_engine::TensorSpec)| {
        let mut spec = tensors(&[10]).remove(0);
        change(&mut spec);
        let strategy = Strategy::named("p3", None, 0).expect("p3");
        Plan::build(vec![(spec, toy())], strategy, Update::Worker, 2)
            .map(Arc::new)
            .map_err(|error| error.to_string())
    };
    assert!(build(&|_| {}).is_ok());
    assert!(build(&|spec| spec.dtype = Dtype::Bf16).is_ok());
    let f64 = build(&|spec| spec.dtype = Dtype::F64);
    assert!(f64.is_err_and(|text| text.contains("layer0.weight") && text.contains("neither f32")));
    let initial = build(&|spec| spec.kind = TensorKind::Initial);
    assert!(initial.is_err_and(|text| text.contains("not trained")));
}

#[test]
fn blocks_that_nobody_adds_up_have_no_codecs() {
    let spec = tensors(&[10]).remove(0);
    let toy: Box<dyn gradlane_engine::CodecSizes> =
        Box::new(Toy { granule_elems: 1, varies: false, integer: false });
    let strategy = Strategy::named("p3", None, 0).expect("p3");
    let setting =
        gradlane_engine::TensorSetting { spec, scheme: Some(Scheme::AllGather), codec: Some(toy) };
    let plan = Plan::build(vec![setting], strategy, Update::Worker, 2);
    let text = plan.expect_err("refused").to_string();
    assert!(text.contains("layer0.weight") && text.contains("scheme gather"), "{text}");
}

#[test]
fn a_plan_without_codecs_reads_as_before() {
    let plan = common::plan(&[10, 20], "p3", 5, 3);
    let json = serde_json::to_string(plan.as_ref()).expect("JSON");
    assert!(!json.contains("encoding"), "{json}");
    let toy = Toy { granule_elems: 4, varies: false, integer: false };
    let plan = encoded_plan(mixed(&[10, 20], toy), "p3", 5, 3, Update::Worker);
    let json = serde_json::to_string(plan.as_ref()).expect("JSON");
    let back: Plan = serde_json::from_str(&json).expect("the same plan");
    assert_eq!(&back, plan.as_ref());
    assert!(json.contains(r#""bytes":[[2,4],[4,8]]"#), "{json}");
}
