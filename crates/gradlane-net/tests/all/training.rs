//! Steps over loopback: results are those of a naive mean in rank order, bit by bit, whatever the
//! strategy, the dtype, the slices, the frames and the number of ranks.

use crate::support::{
    self, check_means, contribute, deadline, each_rank, never, plan, plan_for, run_step, specs,
    tensor, world, world_with, Tensor, TEST_TIMEOUT,
};
use gradlane_engine::{TensorKind, Update};
use gradlane_net::{
    AdamOptions, ChannelError, Direction, JobKind, SgdOptions, StateKind, StateRead, UpdateRule,
    UserMemory,
};
use gradlane_units::{Dtype, Priority, Step, TensorId};
use gradlane_wire::FrameKind;

fn model() -> Vec<gradlane_engine::TensorSpec> {
    let buffer = gradlane_engine::TensorSpec {
        kind: TensorKind::Initial,
        ..tensor("running", 77, Dtype::U8)
    };
    vec![
        tensor("first", 30_000, Dtype::F32),
        tensor("bias", 1, Dtype::F32),
        tensor("empty", 0, Dtype::F32),
        buffer,
        tensor("half", 12_345, Dtype::F16),
        tensor("brain", 4_321, Dtype::Bf16),
        tensor("double", 999, Dtype::F64),
        tensor("last", 7, Dtype::F32),
    ]
}

fn trains(strategy: &str, slice_elems: u64, world_size: u32, steps: u64, host: &str) {
    let plan = plan(model(), strategy, slice_elems, world_size);
    let channels = world_with(host, world_size, &plan, |_| {});
    each_rank(channels, move |channel| {
        let specs = specs(&channel);
        for step in 0..=steps {
            let tensors = run_step(&channel, step).expect("a step");
            check_means(world_size, step, &specs, &tensors);
            let mut ready = channel.take_ready(Step(step)).expect("news");
            ready.sort_unstable();
            // Whether an empty tensor counts as absent is the engine's choice.
            ready.retain(|(tensor, _)| specs[tensor.index()].numel > 0);
            let part = |index: &usize| {
                specs[*index].numel > 0
                    && (step == 0 || specs[*index].kind == TensorKind::Parameter)
            };
            let expected: Vec<(TensorId, bool)> =
                (0..specs.len()).filter(part).map(|it| (TensorId(it as u32), false)).collect();
            assert_eq!(ready, expected, "step {step}");
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        let metrics = channel.metrics();
        assert_eq!(metrics.outgoing_frames, 0);
        assert_eq!(metrics.jobs_in_flight, 0);
        assert!(metrics.tx_bytes > 0 && metrics.rx_bytes > 0, "{metrics:?}");
        let after = channel.step_begin(Step(steps + 1));
        assert!(matches!(after, Err(ChannelError::Closed(_))), "{after:?}");
    });
}

#[test]
fn p3_gives_the_mean_in_rank_order() {
    trains("p3", 1_000, 4, 4, "127.0.0.1");
}

#[test]
fn slicing_gives_the_mean_in_rank_order() {
    trains("slicing", 1_000, 3, 3, "127.0.0.1");
}

#[test]
fn wfbp_gives_the_mean_in_rank_order() {
    trains("wfbp", 500_000, 3, 3, "127.0.0.1");
}

#[test]
fn kvstore_gives_the_mean_in_rank_order() {
    trains("kvstore", 1_000, 3, 3, "127.0.0.1");
}

#[test]
fn deferred_pull_gives_the_mean_in_rank_order() {
    trains("deferred-pull", 1_000, 3, 3, "127.0.0.1");
}

#[test]
fn slices_of_three_elements_work_too() {
    trains("p3", 3, 2, 1, "127.0.0.1");
}

#[test]
fn ipv6_works_too() {
    trains("p3", 5_000, 2, 2, "::1");
}

#[test]
fn one_rank_alone_works_too() {
    let plan = plan(model(), "p3", 1_000, 1);
    let channels = world(1, &plan);
    each_rank(channels, |channel| {
        let specs = specs(&channel);
        for step in 0..3 {
            let tensors = run_step(&channel, step).expect("a step");
            check_means(1, step, &specs, &tensors);
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn large_slices_in_large_and_in_odd_frames_give_the_mean() {
    for (frame_bytes, work_threads, slice_elems) in
        [(4 << 20, 1, 1_500_000), (1_001, 0, 1_500_000), (65_536, 3, 50_000)]
    {
        let plan = plan(vec![tensor("large", 1_500_000, Dtype::F32)], "p3", slice_elems, 2);
        let channels = world_with("127.0.0.1", 2, &plan, |options| {
            options.frame_bytes = frame_bytes;
            options.work_threads = work_threads;
            options.send_buffer_bytes = 30_000;
            options.receive_buffer_bytes = 30_000;
        });
        each_rank(channels, |channel| {
            let specs = specs(&channel);
            for step in 0..2 {
                let tensors = run_step(&channel, step).expect("a step");
                check_means(2, step, &specs, &tensors);
            }
            channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        });
    }
}

#[test]
fn absent_tensors_count_as_zeros_and_all_absent_ones_stay_untouched() {
    let plan = plan(
        vec![tensor("sometimes", 5_000, Dtype::F32), tensor("never", 100, Dtype::F32)],
        "p3",
        1_000,
        2,
    );
    let channels = world(2, &plan);
    each_rank(channels, |channel| {
        run_step(&channel, 0).expect("step 0");
        let step = Step(1);
        let specs = specs(&channel);
        channel.step_begin(step).expect("a step");
        let mut sometimes = support::gradient(channel.rank().0, 1, 0, &specs[0]);
        let mut unused = Tensor { bytes: vec![0xAB; 400] };
        let memory = sometimes.memory();
        if channel.rank().0 == 0 {
            channel.gradient_ready(TensorId(0), step, memory).expect("a gradient");
        } else {
            channel.tensor_absent(TensorId(0), step, memory).expect("no gradient");
        }
        channel.tensor_absent(TensorId(1), step, unused.memory()).expect("no gradient");
        channel.step_end(step).expect("the end");
        channel.wait_step(step, &mut deadline()).expect("the step");
        for element in 0..5_000 {
            let expected = (support::value(0, 1, 0, element) + 0.0) / 2.0;
            let found = &sometimes.bytes[element as usize * 4..][..4];
            assert_eq!(found, expected.to_le_bytes(), "element {element}");
        }
        assert!(unused.bytes.iter().all(|&byte| byte == 0xAB));
        let mut ready = channel.take_ready(step).expect("news");
        ready.sort_unstable();
        assert_eq!(ready, vec![(TensorId(0), false), (TensorId(1), true)]);
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn misuse_is_an_error_of_the_very_call() {
    let plan = plan(vec![tensor("weight", 10, Dtype::F32)], "p3", 1_000, 2);
    let channels = world(2, &plan);
    each_rank(channels, |channel| {
        let usage = |result: Result<(), ChannelError>, text: &str| {
            let said = result.as_ref().map_err(ToString::to_string);
            let fits = matches!(&said, Err(said) if said.contains(text));
            assert!(fits && matches!(result, Err(ChannelError::Usage(_))), "{said:?} / {text}");
        };
        let mut weight = Tensor { bytes: vec![0; 40] };
        let memory = weight.memory();
        // SAFETY: the call is refused and the memory never used.
        let short = unsafe { UserMemory::new(memory.bytes(), 39) };
        usage(channel.step_begin(Step(1)), "current step is step 0");
        usage(channel.gradient_ready(TensorId(0), Step(0), memory), "gradient_ready");
        usage(channel.wait(&[TensorId(0)], Step(1), &mut never), "wait for step 1");
        let mut tensors = contribute(&channel, 0).expect("step 0");
        usage(channel.step_begin(Step(2)), "current step is step 1");
        let again = tensors[0].memory();
        usage(channel.gradient_ready(TensorId(0), Step(0), again), "already has a gradient");
        channel.wait_step(Step(0), &mut deadline()).expect("step 0");
        channel.step_begin(Step(1)).expect("step 1");
        usage(channel.gradient_ready(TensorId(0), Step(1), short), "39 bytes");
        usage(channel.gradient_ready(TensorId(1), Step(1), memory), "no tensor 1");
        usage(channel.step_begin(Step(2)), "1 tensors of step 1 are not complete");
        channel.gradient_ready(TensorId(0), Step(1), memory).expect("a gradient");
        channel.wait_step(Step(1), &mut deadline()).expect("step 1");
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn priorities_are_switched_on_all_ranks_while_training() {
    let plan = plan(model(), "p3", 500, 3);
    let channels = world_with("127.0.0.1", 3, &plan, |options| options.trace = true);
    each_rank(channels, |channel| {
        let specs = specs(&channel);
        for step in 0..6 {
            if step == 1 && channel.rank().0 == 0 {
                let priorities: Vec<_> = (0..specs.len() as i32).map(|it| Priority(-it)).collect();
                channel.switch_priorities(&priorities).expect("a switch");
            }
            let tensors = run_step(&channel, step).expect("a step");
            check_means(3, step, &specs, &tensors);
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        assert_eq!(channel.metrics().plan_version, 1);
        let trace = channel.take_trace();
        let switched = trace.iter().any(|entry| entry.header.priority == Priority(-7));
        assert!(switched, "no frame carries the new priority");
        assert!(trace.iter().all(|entry| entry.begin_ns <= entry.time_ns));
        // Frames on one connection follow each other.
        for (peer, direction) in
            (0..3).flat_map(|it| [(it, Direction::Sent), (it, Direction::Received)])
        {
            let own = trace.iter().filter(|it| it.peer.0 == peer && it.direction == direction);
            let own: Vec<_> = own.filter(|it| it.header.kind != FrameKind::Heartbeat).collect();
            assert!(own.windows(2).all(|pair| pair[0].time_ns <= pair[1].begin_ns));
        }
        let jobs = channel.take_jobs();
        assert!(jobs.iter().any(|job| job.kind == JobKind::Reduce && job.bytes > 0));
        assert!(jobs.iter().all(|job| job.begin_ns <= job.end_ns && job.step.0 < 6));
        assert_eq!(channel.trace_dropped(), 0);
        assert!(channel.take_trace().is_empty() && channel.take_jobs().is_empty());
    });
}

/// One step of SGD as torch's documentation writes it, without fused operations.
fn sgd(parameter: f32, gradient: f32, velocity: &mut Option<f32>) -> f32 {
    let (lr, momentum, weight_decay) = (0.1_f32, 0.9_f32, 0.01_f32);
    let gradient = gradient + weight_decay * parameter;
    let moved = velocity.map_or(gradient, |velocity| momentum * velocity + gradient);
    *velocity = Some(moved);
    parameter - lr * moved
}

#[test]
fn updates_on_the_server_are_those_of_sgd_and_the_same_everywhere() {
    let world_size = 3;
    let model = vec![tensor("weight", 2_500, Dtype::F32), tensor("bias", 5, Dtype::F32)];
    let plan = plan_for(model, "p3", 700, world_size, Update::Server);
    let channels = world(world_size, &plan);
    each_rank(channels, move |channel| {
        let specs = specs(&channel);
        let mut parameters = run_step(&channel, 0).expect("step 0");
        let mut expected: Vec<Vec<(f32, Option<f32>)>> = specs
            .iter()
            .enumerate()
            .map(|(index, spec)| {
                (0..spec.numel).map(|it| (support::value(0, 0, index, it), None)).collect()
            })
            .collect();
        let sgd_options = SgdOptions {
            lr: 0.1,
            momentum: 0.9,
            dampening: 0.0,
            weight_decay: 0.01,
            nesterov: false,
            maximize: false,
        };
        for (index, parameter) in parameters.iter_mut().enumerate() {
            let memory = parameter.memory();
            channel.set_parameter(TensorId(index as u32), memory).expect("a parameter");
        }
        for step in 1..5 {
            let rows: Vec<_> =
                (0..2).map(|it| (TensorId(it), UpdateRule::Sgd(sgd_options))).collect();
            channel.set_optimizer(&rows).expect("settings");
            let _gradients = run_step(&channel, step).expect("a step");
            for (index, elements) in expected.iter_mut().enumerate() {
                for (element, (parameter, velocity)) in elements.iter_mut().enumerate() {
                    let sum = (0..world_size)
                        .map(|rank| support::value(rank, step, index, element as u64))
                        .reduce(|sum, next| sum + next)
                        .unwrap_or(0.0);
                    *parameter = sgd(*parameter, sum / world_size as f32, velocity);
                    let found = &parameters[index].bytes[element * 4..][..4];
                    assert_eq!(found, parameter.to_le_bytes(), "step {step}, {index}, {element}");
                }
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

/// One step of AdamW as torch writes it, without fused operations, from the means before it.
fn adamw(
    options: AdamOptions,
    parameter: f32,
    gradient: f32,
    (mean, square): &mut (f32, f32),
    step: i32,
) -> f32 {
    let AdamOptions { lr, beta1, beta2, eps, weight_decay, .. } = options;
    let parameter = parameter * (1.0 - lr * weight_decay) as f32;
    *mean += (1.0 - beta1) as f32 * (gradient - *mean);
    *square = *square * beta2 as f32 + (((1.0 - beta2) as f32) * gradient) * gradient;
    let correction = (1.0 - beta2.powf(f64::from(step))).powf(0.5) as f32;
    let rate = -(lr / (1.0 - beta1.powf(f64::from(step)))) as f32;
    parameter + (rate * *mean) / (square.sqrt() / correction + eps as f32)
}

/// What a rank reads of a model's state, tensor by tensor, in a step of its own.
fn read_state(channel: &gradlane_net::Channel, step: u64, kind: StateKind) -> Vec<Vec<f32>> {
    let specs = specs(channel);
    let room = || -> Vec<Tensor> {
        specs.iter().map(|spec| Tensor { bytes: vec![0; 4 * spec.numel as usize] }).collect()
    };
    let (mut landings, mut dummies) = (room(), room());
    channel.step_begin(Step(step)).expect("a step");
    channel.read_state(StateRead { kind, part: 0 }).expect("a read");
    for (index, (landing, dummy)) in landings.iter_mut().zip(&mut dummies).enumerate() {
        let tensor = TensorId(index as u32);
        channel.set_parameter(tensor, landing.memory()).expect("a landing");
        let gives = index as u32 % channel.plan().world_size == channel.rank().0;
        let memory = dummy.memory();
        if gives {
            channel.gradient_ready(tensor, Step(step), memory).expect("a gradient");
        } else {
            channel.tensor_absent(tensor, Step(step), memory).expect("no gradient");
        }
    }
    channel.step_end(Step(step)).expect("the end of the step");
    channel.wait_step(Step(step), &mut never).expect("the state");
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|it| f32::from_le_bytes(it.try_into().expect("4"))).collect()
    };
    landings.iter().map(|landing| floats(&landing.bytes)).collect()
}

#[test]
fn adam_on_the_servers_with_state_that_goes_out_and_comes_in() {
    let world_size = 3;
    let model = vec![tensor("weight", 2_500, Dtype::F32), tensor("bias", 5, Dtype::F32)];
    let plan = plan_for(model, "p3", 700, world_size, Update::Server);
    let channels = world(world_size, &plan);
    each_rank(channels, move |channel| {
        let specs = specs(&channel);
        let mut parameters = run_step(&channel, 0).expect("step 0");
        let mut expected: Vec<Vec<(f32, (f32, f32))>> = specs
            .iter()
            .enumerate()
            .map(|(index, spec)| {
                (0..spec.numel).map(|it| (support::value(0, 0, index, it), (0.0, 0.0))).collect()
            })
            .collect();
        let options = AdamOptions {
            weight_decay: 0.1,
            decoupled_weight_decay: true,
            ..AdamOptions::with_lr(0.01)
        };
        let mut step = 0;
        for taken in 0..4_u64 {
            step += 1;
            for (index, parameter) in parameters.iter_mut().enumerate() {
                let memory = parameter.memory();
                channel.set_parameter(TensorId(index as u32), memory).expect("a parameter");
            }
            let rule = UpdateRule::Adam { options, steps: taken };
            let rows: Vec<_> = (0..2).map(|it| (TensorId(it), rule)).collect();
            channel.set_optimizer(&rows).expect("settings");
            let _gradients = run_step(&channel, step).expect("a step");
            for (index, elements) in expected.iter_mut().enumerate() {
                for (element, (parameter, means)) in elements.iter_mut().enumerate() {
                    let sum = (0..world_size)
                        .map(|rank| support::value(rank, step, index, element as u64))
                        .reduce(|sum, next| sum + next)
                        .unwrap_or(0.0);
                    let gradient = sum / world_size as f32;
                    *parameter = adamw(options, *parameter, gradient, means, taken as i32 + 1);
                    let found = &parameters[index].bytes[element * 4..][..4];
                    assert_eq!(found, parameter.to_le_bytes(), "step {step}, {index}, {element}");
                }
            }
            if taken != 1 {
                continue;
            }
            // State goes out on every rank alike, is forgotten, and comes in again.
            let mut states = Vec::new();
            for kind in [StateKind::ExpAvg, StateKind::ExpAvgSq] {
                step += 1;
                states.push((kind, read_state(&channel, step, kind)));
            }
            channel.clear_state().expect("no state");
            for (kind, tensors) in &states {
                for (index, values) in tensors.iter().enumerate() {
                    let wanted: Vec<f32> = expected[index]
                        .iter()
                        .map(|(_, means)| match kind {
                            StateKind::ExpAvg => means.0,
                            _ => means.1,
                        })
                        .collect();
                    assert_eq!(values, &wanted, "{kind:?} of tensor {index}");
                    let tensor = TensorId(index as u32);
                    channel.load_state(tensor, *kind, values).expect("state");
                    assert!(channel.load_state(tensor, *kind, &values[1..]).is_err());
                }
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn adam_without_its_state_fails_the_session() {
    let plan = plan_for(vec![tensor("weight", 50, Dtype::F32)], "p3", 700, 1, Update::Server);
    each_rank(world(1, &plan), move |channel| {
        let mut parameters = run_step(&channel, 0).expect("step 0");
        channel.set_parameter(TensorId(0), parameters[0].memory()).expect("a parameter");
        let rule = UpdateRule::Adam { options: AdamOptions::with_lr(0.1), steps: 3 };
        channel.set_optimizer(&[(TensorId(0), rule)]).expect("settings");
        let Err(error) = run_step(&channel, 1) else { panic!("a step without state") };
        let error = error.to_string();
        assert!(error.contains("exp_avg has 0 elements where the slice has 50"), "{error}");
    });
}

/// Owners then take a new buffer for each mean, while others become free.
#[test]
fn gradients_that_one_rank_alone_has_keep_their_bytes() {
    let world_size = 2;
    let model: Vec<_> =
        (0..6).map(|it| tensor(&format!("weight {it}"), 300_000, Dtype::F32)).collect();
    let plan = plan(model, "p3", 50_000, world_size);
    each_rank(world(world_size, &plan), move |channel| {
        run_step(&channel, 0).expect("step 0");
        let specs = specs(&channel);
        let gives = |index: usize, step: u64| (index as u64 + step) % u64::from(world_size);
        for step in 1..8 {
            let mut gradients: Vec<Tensor> = specs
                .iter()
                .enumerate()
                .map(|(index, spec)| support::gradient(channel.rank().0, step, index, spec))
                .collect();
            channel.step_begin(Step(step)).expect("a step");
            for (index, gradient) in gradients.iter_mut().enumerate() {
                let tensor = TensorId(index as u32);
                let memory = gradient.memory();
                if gives(index, step) == u64::from(channel.rank().0) {
                    channel.gradient_ready(tensor, Step(step), memory).expect("a gradient");
                } else {
                    channel.tensor_absent(tensor, Step(step), memory).expect("no gradient");
                }
            }
            channel.step_end(Step(step)).expect("the end of the step");
            channel.wait_step(Step(step), &mut never).expect("the means");
            for (index, (spec, found)) in specs.iter().zip(&gradients).enumerate() {
                let rank = gives(index, step) as u32;
                let mean = |it| support::value(rank, step, index, it) / world_size as f32;
                let expected: Vec<u8> =
                    (0..spec.numel).flat_map(|it| mean(it).to_le_bytes()).collect();
                assert!(found.bytes == expected, "tensor {index} in step {step}");
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn an_idle_session_sleeps() {
    let plan = plan(vec![tensor("weight", 1_000, Dtype::F32)], "p3", 1_000, 3);
    let channels = world_with("127.0.0.1", 3, &plan, |options| options.silence_timeout_s = 2.0);
    each_rank(channels, |channel| {
        run_step(&channel, 0).expect("step 0");
        let cpu_s = |channel: &gradlane_net::Channel| {
            let metrics = channel.metrics();
            metrics.io_cpu_s + metrics.work_cpu_s + metrics.acceptor_cpu_s
        };
        let before = cpu_s(&channel);
        std::thread::sleep(std::time::Duration::from_secs(3));
        let used = cpu_s(&channel) - before;
        assert!(used < 0.05, "{used} s of CPU in 3 idle seconds");
        // Heartbeats have kept the session alive longer than the silence timeout.
        run_step(&channel, 1).expect("a step after the pause");
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}
