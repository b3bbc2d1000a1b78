//! Training goes on over sockets when ranks are lost: those that are left have the same bits in every step, and
//! each slice is the mean over the ranks of before or of after.

use crate::support::encoded::{plan_encoded, Oracle};
use crate::support::ring_quantized::RingOracle;
use crate::support::{
    contribute, deadline, each_rank, listeners, never, options, plan, run_step, specs, tensor,
    value, world, world_at, world_with, Proxy, Tensor,
};
use gradlane_engine::{Plan, Scheme, Slice, Update};
use gradlane_net::{
    Channel, ChannelOptions, GoingOnOptions, MembershipEvent, StateKind, StateRead,
};
use gradlane_units::{Dtype, Rank, Step, TensorId};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Barrier};
use std::time::Duration;

const STEPS: u64 = 12;

fn goes_on(options: &mut ChannelOptions) {
    options.going_on = Some(GoingOnOptions { min_ranks: 1, collect_s: 0.2, answer_s: 5.0 });
}

fn model() -> Vec<gradlane_engine::TensorSpec> {
    vec![tensor("weight", 40_000, Dtype::F32), tensor("bias", 10, Dtype::F32)]
}

/// Steps until the last one; the tensors of each.
fn train(channel: &Channel, first: u64, last: u64) -> Vec<Vec<Tensor>> {
    (first..=last).map(|step| run_step(channel, step).expect("a step")).collect()
}

/// The members that training goes on with at the end.
fn members(channel: &Channel) -> Vec<u32> {
    let changes = channel.take_changes().expect("the session goes on");
    let last = changes.into_iter().rev().find_map(|event| match event {
        MembershipEvent::Changed { members, .. } => Some(members),
        MembershipEvent::ClaimNeeded { .. } => None,
    });
    last.expect("a change").into_iter().map(|rank| rank.0).collect()
}

fn mean_over(ranks: &[u32], step: u64, tensor: usize, element: u64) -> f32 {
    let values = ranks.iter().map(|&rank| value(rank, step, tensor, element));
    values.reduce(|sum, next| sum + next).expect("ranks") / ranks.len() as f32
}

/// All ranks in the order in which a slice's contributions are added while none is lost.
fn in_order(plan: &Plan, slice: &Slice) -> Vec<u32> {
    let mut ranks: Vec<u32> = (0..plan.world_size).collect();
    if plan.tensor(slice.tensor).scheme == Scheme::Ring {
        ranks.rotate_left((slice.owner.index() + 1) % plan.world_size as usize);
    }
    ranks
}

/// Checks the tensors of all ranks that are left, step by step from 1 on.
fn check(plan_of: &Channel, all: &[Vec<Vec<Tensor>>], after: &[u32]) {
    let mut is_after = false;
    for step in 1..=STEPS {
        let of_step = |steps: &Vec<Vec<Tensor>>| {
            steps[step as usize - 1].iter().map(|it| it.bytes.clone()).collect::<Vec<_>>()
        };
        let first = of_step(&all[0]);
        assert!(all.iter().all(|steps| of_step(steps) == first), "step {step} differs by rank");
        let plan = plan_of.plan();
        let mut all_after = true;
        for (index, bytes) in first.iter().enumerate() {
            for slice in plan.slices_of(TensorId(index as u32)).map(|id| *plan.slice(id)) {
                let found = |element: u64| {
                    let at = element as usize * 4;
                    f32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
                };
                let is_over = |ranks: &[u32]| {
                    let mut elements = slice.start..slice.start + slice.length;
                    elements.all(|it| {
                        found(it).to_bits() == mean_over(ranks, step, index, it).to_bits()
                    })
                };
                let over_after = is_over(after);
                assert!(
                    over_after || (!is_after && is_over(&in_order(plan, &slice))),
                    "step {step}, {slice:?}"
                );
                all_after &= over_after;
            }
        }
        is_after |= all_after;
    }
    assert!(is_after, "the lost rank was never missed");
}

/// Four ranks, of which one gives up in the middle of a step.
fn without(lost: u32, strategy: &str, seal: bool) {
    let plan = plan(model(), strategy, 1_000, 4);
    let channels = world_with("127.0.0.1", 4, &plan, |options| {
        goes_on(options);
        options.seal = seal;
    });
    let results = each_rank(channels, move |channel| {
        run_step(&channel, 0).expect("step 0");
        if channel.rank().0 == lost {
            let mut tensors = train(&channel, 1, 4);
            tensors.push(contribute(&channel, 5).expect("gradients"));
            channel.abort("it was killed");
            return None;
        }
        let tensors = train(&channel, 1, STEPS);
        let members = members(&channel);
        channel.finish(Duration::from_secs(20), &mut deadline()).expect("a good end");
        Some((channel, tensors, members))
    });
    let left: Vec<_> = results.into_iter().flatten().collect();
    let after: Vec<u32> = (0..4).filter(|&rank| rank != lost).collect();
    assert_eq!(left.len(), 3);
    assert!(left.iter().all(|(_, _, members)| *members == after));
    let (channels, rest): (Vec<_>, Vec<_>) =
        left.into_iter().map(|(channel, tensors, _)| (channel, tensors)).unzip();
    check(&channels[0], &rest, &after);
}

#[test]
fn three_ranks_go_on_without_the_fourth() {
    without(3, "p3", false);
}

#[test]
fn three_ranks_go_on_without_rank_0_over_sealed_connections() {
    without(0, "wfbp", true);
}

#[test]
fn three_ranks_of_a_ring_go_on_without_the_fourth() {
    (0..4).for_each(|lost| without(lost, "ring", lost == 1));
}

/// Elements of the tensors that codecs encode; each tensor is one slice.
const SIZES: [u64; 6] = [700, 65, 9_000, 3_000, 20_000, 128];

fn encoded(codec: &str, strategy: &str, ranks: u32) -> Vec<Channel> {
    let tensors = SIZES.map(|numel| tensor(&format!("of {numel}"), numel, Dtype::F32)).to_vec();
    let json = plan_encoded(tensors, codec, strategy, 500_000, ranks, Update::Worker);
    world_with("127.0.0.1", ranks, &json, goes_on)
}

/// Checks a tensor of each step, which is over all ranks until one is lost, and over the others from then on.
/// Returns what all have held back afterwards.
fn check_encoded(
    channel: &Channel,
    codec: &str,
    index: usize,
    lost: u32,
    found: impl Fn(u64) -> Vec<u8>,
) -> Oracle {
    let plan = channel.plan();
    let tensor = plan.tensor(TensorId(index as u32));
    let owner = plan.slices[tensor.slices.start as usize].owner;
    let before: Vec<u32> = (0..plan.world_size).collect();
    let after: Vec<u32> = before.iter().copied().filter(|&rank| rank != lost).collect();
    let mut oracle = Oracle::new(codec, index as u32, &tensor.spec, plan.world_size);
    let mut ring = RingOracle::new(codec, index as u32, plan);
    let mut is_after = false;
    for step in 1..=STEPS {
        let given =
            |rank| (0..SIZES[index]).map(|it| value(rank, step, index, it)).collect::<Vec<f32>>();
        let (mut over_all, mut over_left) = (oracle.clone(), oracle.clone());
        if owner.0 == lost && !is_after {
            // What the lost owner held back of the means is lost.
            over_left.owner_residual.fill(0.0);
        }
        let mean_over_all = match tensor.scheme {
            Scheme::Ring => ring.step(step, |rank| Some(given(rank))),
            _ => over_all.step_of(&before, step, given),
        };
        let mean_over_left = over_left.step_of(&after, step, given);
        let is_over_left = found(step) == mean_over_left;
        let is_right = is_over_left || (!is_after && found(step) == mean_over_all);
        assert!(is_right, "{codec}, step {step}, tensor {index}");
        is_after = is_over_left;
        oracle = if is_after { over_left } else { over_all };
    }
    assert!(is_after, "the lost rank was never missed");
    oracle
}

/// Four ranks with a codec, of which one gives up in the middle of a step.
fn without_encoded(lost: u32, codec: &'static str, strategy: &str) {
    let results = each_rank(encoded(codec, strategy, 4), move |channel| {
        run_step(&channel, 0).expect("step 0");
        if channel.rank().0 == lost {
            train(&channel, 1, 4);
            let _gradients = contribute(&channel, 5).expect("gradients");
            channel.abort("it was killed");
            return None;
        }
        let tensors = train(&channel, 1, STEPS);
        assert_eq!(members(&channel).len(), 3);
        let held_back = |index: usize| channel.worker_residual(TensorId(index as u32), &mut never);
        let held_back: Vec<Vec<f32>> =
            (0..SIZES.len()).map(|index| held_back(index).expect("a residual")).collect();
        channel.finish(Duration::from_secs(20), &mut deadline()).expect("a good end");
        Some((channel, tensors, held_back))
    });
    let left: Vec<_> = results.into_iter().flatten().collect();
    assert_eq!(left.len(), 3);
    for index in 0..SIZES.len() {
        let of_step =
            |steps: &Vec<Vec<Tensor>>, step: u64| steps[step as usize - 1][index].bytes.clone();
        for step in 1..=STEPS {
            let first = of_step(&left[0].1, step);
            assert!(left.iter().all(|(_, steps, _)| of_step(steps, step) == first), "step {step}");
        }
        let found = |step| of_step(&left[0].1, step);
        let oracle = check_encoded(&left[0].0, codec, index, lost, found);
        for (channel, _, held_back) in &left {
            // Each of its contributions has counted once, and nothing else.
            assert_eq!(
                held_back[index],
                oracle.worker_residuals[channel.rank().index()],
                "{codec}"
            );
        }
    }
}

#[test]
fn three_ranks_go_on_with_codecs_that_keep_nothing() {
    without_encoded(3, "qsgd:bits=4", "p3");
    without_encoded(0, "bf16", "wfbp");
    without_encoded(1, "int8:bucket=64", "slicing");
    without_encoded(2, "f16", "p3");
}

#[test]
fn three_ranks_of_a_ring_go_on_with_codecs() {
    without_encoded(3, "qsgd:bits=4", "ring");
    without_encoded(0, "bf16", "ring");
    without_encoded(1, "topk:ratio=0.05,residual=off", "ring");
}

#[test]
fn three_ranks_go_on_with_what_they_have_held_back() {
    without_encoded(0, "onebit:bucket=64", "p3");
    without_encoded(1, "qsgd:bits=2,residual=on", "slicing");
    without_encoded(2, "topk:ratio=0.05", "wfbp");
    without_encoded(3, "dgc:ratio=0.05,momentum=0.9", "p3");
}

#[test]
fn a_silent_rank_is_left_out_and_ends() {
    let (listeners, addresses) = listeners("127.0.0.1", 3);
    // Ranks call those below them: all of rank 0's connections pass the proxy.
    let proxy = Proxy::start(&addresses[0]);
    let mut seen = addresses;
    seen[0] = proxy.address;
    let plan = plan(model(), "p3", 1_000, 3);
    let channels = world_at(listeners, &seen, &plan, |options| {
        goes_on(options);
        options.silence_timeout_s = 1.0;
    });
    let stalled = proxy.stalled;
    let results = each_rank(channels, move |channel| {
        run_step(&channel, 0).expect("step 0");
        let mut tensors = Vec::new();
        for step in 1..=STEPS {
            // Rank 0 may still wait for the means of step 3 when its connections fall silent.
            tensors.push(run_step(&channel, step).map_err(|error| error.to_string())?);
            if step == 3 && channel.rank() == Rank(1) {
                stalled.store(true, Ordering::SeqCst);
            }
        }
        let members = members(&channel);
        channel.finish(Duration::from_secs(20), &mut deadline()).expect("a good end");
        Ok::<_, String>((channel, tensors, members))
    });
    let mut left = Vec::new();
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Err(error) => {
                assert_eq!(rank, 0, "{error}");
                assert!(error.contains("no majority") && error.contains("rank 1"), "{error}");
            }
            Ok((channel, tensors, members)) => {
                assert_eq!(members, [1, 2]);
                left.push((channel, tensors));
            }
        }
    }
    let (channels, rest): (Vec<_>, Vec<_>) = left.into_iter().unzip();
    check(&channels[0], &rest, &[1, 2]);
}

/// A step in which the other one of two ranks is lost; the job's store decides for this one.
fn outlive_the_other(channel: &Channel, step: u64) -> Vec<Tensor> {
    let gradients = contribute(channel, step).expect("gradients");
    let mut deadline = deadline();
    let asked = channel.next_changes(&mut deadline).expect("a claim");
    let [MembershipEvent::ClaimNeeded { generation: 1, value }] = &asked[..] else {
        panic!("{asked:?}");
    };
    channel.answer_claim(1, Some(value.clone()));
    channel.wait_step(Step(step), &mut deadline).expect("the step");
    gradients
}

fn the_register_decides(strategy: &str) {
    let plan = plan(model(), strategy, 1_000, 2);
    let channels = world_with("127.0.0.1", 2, &plan, goes_on);
    // What rank 0 has not sent of a step that it has, is lost with it.
    let through = Arc::new(Barrier::new(2));
    each_rank(channels, move |channel| {
        train(&channel, 0, 3);
        through.wait();
        if channel.rank() == Rank(0) {
            return channel.abort("it was killed");
        }
        outlive_the_other(&channel, 4);
        train(&channel, 5, STEPS);
        assert_eq!(members(&channel), [1]);
        channel.finish(Duration::from_secs(20), &mut deadline()).expect("a good end");
    });
}

#[test]
fn the_register_decides_between_two_ranks() {
    the_register_decides("p3");
    the_register_decides("ring");
}

/// What the owners that are left have held back of a tensor, read in a step of its own.
fn read_owner_residual(channel: &Channel, step: u64, index: usize) -> Vec<f32> {
    let mut landings = SIZES.map(|numel| Tensor { bytes: vec![0xAB; 4 * numel as usize] });
    channel.step_begin(Step(step)).expect("a step");
    let read = StateRead { kind: StateKind::OwnerResidual, part: 0 };
    channel.read_state(read).expect("a read");
    for (tensor, landing) in landings.iter_mut().enumerate() {
        let (tensor, memory) = (TensorId(tensor as u32), landing.memory());
        channel.gradient_ready(tensor, Step(step), memory).expect("something");
    }
    channel.step_end(Step(step)).expect("the end");
    channel.wait_step(Step(step), &mut deadline()).expect("the residual");
    let values = landings[index].bytes.chunks_exact(4);
    values.map(|it| f32::from_le_bytes(it.try_into().expect("4"))).collect()
}

#[test]
fn the_last_rank_has_what_it_has_held_back_of_means() {
    const CODEC: &str = "onebit:bucket=64";
    let through = Arc::new(Barrier::new(2));
    each_rank(encoded(CODEC, "p3", 2), move |channel| {
        let mut tensors = train(&channel, 0, 3);
        through.wait();
        if channel.rank() == Rank(0) {
            return channel.abort("it was killed");
        }
        tensors.push(outlive_the_other(&channel, 4));
        tensors.extend(train(&channel, 5, STEPS));
        let mut is_some = false;
        for (index, numel) in SIZES.into_iter().enumerate() {
            let found = |step: u64| tensors[step as usize][index].bytes.clone();
            let oracle = check_encoded(&channel, CODEC, index, 0, found);
            let held_back = read_owner_residual(&channel, STEPS + 1 + index as u64, index);
            assert!(held_back == oracle.owner_residual, "tensor of {numel}");
            is_some |= held_back.iter().any(|&value| value != 0.0);
        }
        assert!(is_some);
        channel.finish(Duration::from_secs(20), &mut deadline()).expect("a good end");
    });
}

#[test]
fn what_cannot_go_on_is_refused_by_name() {
    let options = ChannelOptions {
        going_on: Some(GoingOnOptions { min_ranks: 1, collect_s: 0.2, answer_s: 5.0 }),
        lanes: 1,
        ..options(0, 2)
    };
    let refusal = |codec: &str| {
        let ring = plan_encoded(model(), codec, "ring", 1_000, 2, Update::Worker);
        let listener = gradlane_net::Listener::bind("127.0.0.1", 0..=0).expect("a port");
        let peers = ["127.0.0.1:1".to_owned(), "127.0.0.1:2".to_owned()];
        let refused = Channel::connect(listener, &options, &ring, &peers, b"", &mut || false);
        refused.err().map(|error| error.to_string()).unwrap_or_default()
    };
    for (codec, why) in [
        ("onebit:bucket=64", "holds back parts of sums"),
        ("qsgd:bits=8,ring=integer", "added up by scales of all ranks"),
    ] {
        let error = refusal(codec);
        assert!(error.contains("cannot go on") && error.contains(why), "{error}");
        assert!(error.contains("scheme ring and codec") && error.contains("weight"), "{error}");
    }
    let channels = world(1, &plan(model(), "p3", 1_000, 1));
    assert!(!channels[0].goes_on() && !specs(&channels[0]).is_empty());
}
