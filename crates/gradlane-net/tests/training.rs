//! Steps over loopback: results are those of a naive mean in rank order, bit by bit, whatever the
//! strategy, the dtype, the slices, the frames and the number of ranks.

mod support;

use gradlane_engine::{Role, Update};
use gradlane_net::{ChannelError, SgdOptions, UserMemory};
use gradlane_units::{Dtype, Priority, Step, TensorId};
use support::{
    check_means, contribute, deadline, each_rank, never, plan, plan_for, run_step, specs, tensor,
    world, world_with, Tensor, PATIENCE,
};

fn model() -> Vec<gradlane_engine::TensorSpec> {
    let buffer =
        gradlane_engine::TensorSpec { role: Role::Initial, ..tensor("running", 77, Dtype::U8) };
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
                specs[*index].numel > 0 && (step == 0 || specs[*index].role == Role::Parameter)
            };
            let expected: Vec<(TensorId, bool)> =
                (0..specs.len()).filter(part).map(|it| (TensorId(it as u32), false)).collect();
            assert_eq!(ready, expected, "step {step}");
        }
        channel.finish(PATIENCE, &mut never).expect("an orderly end");
        let metrics = channel.metrics();
        assert_eq!(metrics.outgoing_frames, 0);
        assert_eq!(metrics.works_in_flight, 0);
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
        channel.finish(PATIENCE, &mut never).expect("an orderly end");
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
            channel.finish(PATIENCE, &mut never).expect("an orderly end");
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
        channel.finish(PATIENCE, &mut never).expect("an orderly end");
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
        channel.finish(PATIENCE, &mut never).expect("an orderly end");
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
                let priorities = (0..specs.len() as i32).map(|it| Priority(-it)).collect();
                channel.switch_priorities(priorities).expect("a switch");
            }
            let tensors = run_step(&channel, step).expect("a step");
            check_means(3, step, &specs, &tensors);
        }
        channel.finish(PATIENCE, &mut never).expect("an orderly end");
        assert_eq!(channel.metrics().plan_version, 1);
        let trace = channel.take_trace();
        let switched = trace.iter().any(|entry| entry.header.priority == Priority(-7));
        assert!(switched, "no frame carries the new priority");
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
            let rows = (0..2).map(|it| (TensorId(it), sgd_options)).collect();
            channel.set_optimizer(rows).expect("settings");
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
        channel.finish(PATIENCE, &mut never).expect("an orderly end");
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
            metrics.io_cpu_s + metrics.work_cpu_s + metrics.doorman_cpu_s
        };
        let before = cpu_s(&channel);
        std::thread::sleep(std::time::Duration::from_secs(3));
        let used = cpu_s(&channel) - before;
        assert!(used < 0.05, "{used} s of CPU in 3 idle seconds");
        // Heartbeats have kept the session alive longer than the silence timeout.
        run_step(&channel, 1).expect("a step after the pause");
        channel.finish(PATIENCE, &mut never).expect("an orderly end");
    });
}
