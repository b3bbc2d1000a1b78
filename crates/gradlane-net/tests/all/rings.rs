//! Rings over loopback: all ranks hold the mean that is added up naively here, hop by hop, bit by bit;
//! at two ranks it is that of servers.

use crate::support::{
    self, check_means, check_ring_means, contribute, deadline, each_rank, gradient, never, plan,
    plan_for, run_step, specs, tensor, world, world_with, TEST_TIMEOUT,
};
use gradlane_engine::{Plan, Scheme, Strategy, TensorKind, TensorSpec, Update};
use gradlane_net::{ChannelError, Direction, JobKind};
use gradlane_units::{Dtype, Step, TensorId};
use gradlane_wire::FrameKind;
use std::sync::Barrier;

fn model() -> Vec<TensorSpec> {
    let buffer = TensorSpec { kind: TensorKind::Initial, ..tensor("running", 77, Dtype::U8) };
    vec![
        tensor("first", 70_000, Dtype::F32),
        tensor("bias", 1, Dtype::F32),
        tensor("empty", 0, Dtype::F32),
        buffer,
        tensor("half", 12_345, Dtype::F16),
        tensor("brain", 40_321, Dtype::Bf16),
        tensor("double", 999, Dtype::F64),
        tensor("last", 7, Dtype::F32),
    ]
}

fn trains(slice_elems: u64, world_size: u32, steps: u64, frame_bytes: u32) {
    let plan = plan(model(), "ring", slice_elems, world_size);
    let channels =
        world_with("127.0.0.1", world_size, &plan, |options| options.frame_bytes = frame_bytes);
    each_rank(channels, move |channel| {
        for step in 0..=steps {
            let tensors = run_step(&channel, step).expect("a step");
            check_ring_means(channel.plan(), step, &tensors);
            if world_size <= 2 {
                check_means(world_size, step, &specs(&channel), &tensors);
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        let metrics = channel.metrics();
        assert_eq!((metrics.outgoing_frames, metrics.jobs_in_flight), (0, 0));
    });
}

#[test]
fn one_rank_alone_keeps_its_gradients() {
    trains(1_000, 1, 2, 65_536);
}

#[test]
fn two_ranks_get_the_mean_of_servers() {
    trains(50_000, 2, 3, 65_536);
}

#[test]
fn three_ranks_get_the_mean_of_the_ring() {
    trains(3_000, 3, 3, 7_001);
}

#[test]
fn five_ranks_get_the_mean_of_the_ring() {
    trains(20_000, 5, 3, 65_536);
}

#[test]
fn seven_ranks_and_tiny_tensors() {
    let world_size = 7;
    let sizes = [1, 2, 6, 7, 8, 63, 64, 65];
    let tensors = sizes.map(|numel| tensor(&format!("of {numel}"), numel, Dtype::Bf16));
    let plan = plan(tensors.to_vec(), "ring", 3, world_size);
    each_rank(world(world_size, &plan), move |channel| {
        for step in 0..4 {
            let tensors = run_step(&channel, step).expect("a step");
            check_ring_means(channel.plan(), step, &tensors);
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn slices_and_frames_of_any_size_give_the_same_bits() {
    let world_size = 3;
    let results: Vec<Vec<u8>> = [(50_000, 65_536), (700, 1_000), (5_000, 1 << 20)]
        .into_iter()
        .map(|(slice_elems, frame_bytes)| {
            let plan = plan(vec![tensor("t", 60_001, Dtype::F32)], "ring", slice_elems, world_size);
            let channels = world_with("127.0.0.1", world_size, &plan, |options| {
                options.frame_bytes = frame_bytes;
            });
            let bytes = each_rank(channels, |channel| {
                run_step(&channel, 0).expect("step 0");
                let bytes = run_step(&channel, 1).expect("step 1").swap_remove(0).bytes;
                channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
                bytes
            });
            assert!(bytes.iter().all(|it| *it == bytes[0]), "ranks differ");
            bytes[0].clone()
        })
        .collect();
    assert!(results.iter().all(|it| *it == results[0]));
}

#[test]
fn gradients_that_some_ranks_lack_count_as_zeros() {
    let world_size = 3;
    let model: Vec<TensorSpec> =
        (0..5).map(|it| tensor(&format!("weight {it}"), 40_000, Dtype::F32)).collect();
    let plan = plan(model, "ring", 9_000, world_size);
    // Which ranks have a gradient, as bits: none, one, two or all of them.
    let given = |index: usize, step: u64| (index as u64 * 3 + step * 5) % 8;
    each_rank(world(world_size, &plan), move |channel| {
        run_step(&channel, 0).expect("step 0");
        let specs = specs(&channel);
        let rank = channel.rank().0;
        for step in 1..9 {
            let mut own: Vec<_> = specs
                .iter()
                .enumerate()
                .map(|(index, spec)| gradient(rank, step, index, spec))
                .collect();
            channel.step_begin(Step(step)).expect("a step");
            for (index, gradient) in own.iter_mut().enumerate().rev() {
                let (id, memory) = (TensorId(index as u32), gradient.memory());
                if given(index, step) >> rank & 1 == 1 {
                    channel.gradient_ready(id, Step(step), memory).expect("a gradient");
                } else {
                    channel.tensor_absent(id, Step(step), memory).expect("no gradient");
                }
            }
            channel.step_end(Step(step)).expect("the end of the step");
            channel.wait_step(Step(step), &mut deadline()).expect("the means");
            let ready = channel.take_ready(Step(step)).expect("news");
            for (index, found) in own.iter().enumerate() {
                let ranks = given(index, step);
                let absent = ready.iter().find(|it| it.0.index() == index).map(|it| it.1);
                assert_eq!(absent, Some(ranks == 0), "tensor {index} in step {step}");
                if ranks == 0 {
                    continue;
                }
                let mut expected: Vec<u8> = Vec::new();
                for slice in channel.plan().slices_of(TensorId(index as u32)) {
                    let slice = *channel.plan().slice(slice);
                    for element in slice.start..slice.start + slice.length {
                        let part = |turn: u32| {
                            let from = (slice.owner.0 + 1 + turn) % world_size;
                            let has = ranks >> from & 1 == 1;
                            if has {
                                support::value(from, step, index, element)
                            } else {
                                0.0
                            }
                        };
                        let sum = (1..world_size).fold(part(0), |sum, turn| sum + part(turn));
                        expected.extend((sum / world_size as f32).to_le_bytes());
                    }
                }
                assert!(found.bytes == expected, "tensor {index} in step {step}");
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn rings_and_servers_share_one_step() {
    let world_size = 3;
    let schemes = [Scheme::Ring, Scheme::Ps].into_iter().cycle();
    let strategy = Strategy::named("p3", Some(2_000), 0).expect("p3");
    let tensors = model().into_iter().zip(schemes).collect();
    let plan = Plan::build(tensors, strategy, Update::Worker, world_size).expect("a plan");
    let json = serde_json::to_string(&plan).expect("JSON");
    let channels = world_with("127.0.0.1", world_size, &json, |options| options.trace = true);
    each_rank(channels, move |channel| {
        for step in 0..3 {
            let tensors = run_step(&channel, step).expect("a step");
            for (index, (planned, found)) in channel.plan().tensors.iter().zip(&tensors).enumerate()
            {
                if planned.spec.kind == TensorKind::Initial && step > 0 {
                    continue;
                }
                let right = match planned.scheme {
                    Scheme::Ps => support::mean(world_size, step, index, &planned.spec),
                    _ => support::ring_mean(channel.plan(), step, index),
                };
                assert!(found.bytes == right, "{:?} in step {step}", planned.spec.name);
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        let trace = channel.take_trace();
        let next = (channel.rank().0 + 1) % world_size;
        let round = trace.iter().filter(|it| it.header.kind.is_ring());
        let sent: Vec<_> = round.filter(|it| it.direction == Direction::Sent).collect();
        assert!(sent.iter().all(|it| it.peer.0 == next), "only the next rank is spoken to");
        for kind in [FrameKind::RingReduce, FrameKind::RingBroadcast] {
            assert!(sent.iter().any(|it| it.header.kind == kind), "{kind:?}");
        }
        assert!(trace.iter().any(|it| it.header.kind == FrameKind::Push));
        assert!(channel.take_jobs().iter().any(|job| job.kind == JobKind::Reduce));
    });
}

#[test]
fn a_ring_that_breaks_fails_every_rank_with_the_culprit() {
    let world_size = 4;
    let plan = plan(vec![tensor("weight", 200_000, Dtype::F32)], "ring", 5_000, world_size);
    let all_are_here = Barrier::new(world_size as usize);
    each_rank(world(world_size, &plan), move |channel| {
        run_step(&channel, 0).expect("step 0");
        run_step(&channel, 1).expect("step 1");
        all_are_here.wait();
        if channel.rank().0 == 2 {
            channel.abort("this rank has had enough");
            return;
        }
        let error = match contribute(&channel, 2) {
            Ok(_memory) => channel.wait_step(Step(2), &mut deadline()).expect_err("rank 2 left"),
            Err(error) => error,
        };
        let ChannelError::Failed(failure) = error else { panic!("{error}") };
        assert_eq!(failure.peer.map(|it| it.0), Some(2), "{failure:?}");
        assert_eq!(failure.last_complete, Some(Step(1)), "{failure:?}");
    });
}

#[test]
fn a_plan_whose_rules_a_ring_cannot_keep_is_refused() {
    let json = plan_for(vec![tensor("weight", 50, Dtype::F32)], "ring", 10, 1, Update::Worker);
    let json = json.replace(r#""update":"worker""#, r#""update":"server""#);
    let (listeners, addresses) = support::listeners("127.0.0.1", 1);
    let joining = support::Joining {
        options: support::options(0, 1),
        plan: json,
        secret: b"secret".to_vec(),
    };
    let refused = support::join(listeners, &addresses, vec![joining]).remove(0);
    let error = refused.err().expect("refused").to_string();
    assert!(error.contains("\"weight\"") && error.contains("update=worker"), "{error}");
}
