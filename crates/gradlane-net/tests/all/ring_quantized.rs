//! Rings over loopback whose sums are encoded: every rank has, bit by bit, what the hops make one after
//! another, or what sums of codes stand for.

use crate::support::encoded::{odd_sizes, plan_encoded, trains_as, Aggregation};
use crate::support::ring_quantized::RingOracle;
use crate::support::{
    self, deadline, each_rank, gradient, never, run_step, specs, tensor, world, world_with, Tensor,
    TEST_TIMEOUT,
};
use gradlane_engine::{TensorSpec, Update};
use gradlane_net::{Channel, JobKind, StateKind, StateRead};
use gradlane_units::{Dtype, Step, TensorId};
use gradlane_wire::{FrameKind, HEADER_BYTES};

fn ring_plan(tensors: Vec<TensorSpec>, codec: &str, slice_elems: u64, world_size: u32) -> String {
    plan_encoded(tensors, codec, "ring", slice_elems, world_size, Update::Worker)
}

/// Trains and compares every tensor and residual on every rank with the oracle.
fn trains(codec: &'static str, dtype: Dtype, slice_elems: u64, world_size: u32) {
    let plan = ring_plan(odd_sizes(dtype), codec, slice_elems, world_size);
    trains_as(&plan, codec, move |index, plan| RingOracle::new(codec, index, plan));
}

#[test]
fn two_ranks_hop_by_hop() {
    trains("qsgd:bits=4", Dtype::F32, 5_000, 2);
    trains("bf16:residual=on", Dtype::F32, 50_000, 2);
}

#[test]
fn three_ranks_hop_by_hop_with_residuals() {
    trains("qsgd:bits=8,residual=on", Dtype::F32, 5_000, 3);
    trains("onebit:bucket=64", Dtype::F32, 30_000, 3);
}

#[test]
fn five_ranks_hop_by_hop_in_short_floats() {
    trains("qsgd:bits=4,residual=on", Dtype::F16, 20_000, 5);
    trains("qsgd:bits=8", Dtype::Bf16, 50_000, 5);
}

#[test]
fn seven_ranks_hop_by_hop() {
    trains("qsgd:bits=2,bucket=96,levels=uniform", Dtype::F32, 50_000, 7);
    trains("int8:bucket=64,residual=on", Dtype::F32, 50_000, 7);
    trains("fp8:format=e5m2,bucket=64", Dtype::Bf16, 50_000, 7);
}

#[test]
fn encodings_whose_lengths_differ_go_round_too() {
    trains("topk:ratio=0.01", Dtype::F32, 50_000, 3);
    trains("topk:ratio=0.01", Dtype::F32, 50_000, 5);
}

#[test]
fn two_ranks_add_codes() {
    trains("qsgd:bits=8,ring=integer", Dtype::F32, 5_000, 2);
    trains("qsgd:bits=16,ring=integer,bucket=512", Dtype::F32, 50_000, 2);
}

#[test]
fn three_ranks_add_codes_with_residuals() {
    trains("qsgd:bits=4,ring=integer,residual=on", Dtype::F32, 5_000, 3);
    trains("qsgd:bits=2,ring=integer,norm=l2,residual=on", Dtype::Bf16, 30_000, 3);
}

#[test]
fn five_ranks_add_codes_of_short_floats() {
    trains("qsgd:bits=8,ring=integer", Dtype::F16, 20_000, 5);
}

#[test]
fn seven_ranks_add_codes() {
    trains("qsgd:bits=8,ring=integer,residual=on", Dtype::F32, 50_000, 7);
}

/// Steps in which some ranks, or all, have no gradient.
fn trains_with_holes(codec: &'static str) {
    let world_size = 4;
    let model: Vec<TensorSpec> =
        (0..4).map(|it| tensor(&format!("weight {it}"), 3_000, Dtype::F32)).collect();
    let plan = ring_plan(model, codec, 1_024, world_size);
    // Which ranks have a gradient, as bits: none, one, some or all of them.
    let given = |index: usize, step: u64| (index as u64 * 5 + step * 7) % 16;
    each_rank(world(world_size, &plan), move |channel| {
        run_step(&channel, 0).expect("step 0");
        let (specs, rank) = (specs(&channel), channel.rank().0);
        let mut oracles: Vec<RingOracle> = (0..specs.len() as u32)
            .map(|index| RingOracle::new(codec, index, channel.plan()))
            .collect();
        for step in 1..14 {
            let mut own: Vec<Tensor> = specs
                .iter()
                .enumerate()
                .map(|(index, spec)| gradient(rank, step, index, spec))
                .collect();
            let before: Vec<Vec<u8>> = own.iter().map(|it| it.bytes.clone()).collect();
            channel.step_begin(Step(step)).expect("a step");
            for (index, memory) in own.iter_mut().enumerate() {
                let tensor = TensorId(index as u32);
                let hand_over = match given(index, step) >> rank & 1 {
                    1 => Channel::gradient_ready,
                    _ => Channel::tensor_absent,
                };
                hand_over(&channel, tensor, Step(step), memory.memory()).expect("a part");
            }
            channel.step_end(Step(step)).expect("the end");
            channel.wait_step(Step(step), &mut deadline()).expect("the means");
            for (index, oracle) in oracles.iter_mut().enumerate() {
                let mask = given(index, step);
                let right = match mask {
                    0 => before[index].clone(),
                    _ => {
                        let all: Vec<Option<Vec<f32>>> = (0..world_size)
                            .map(|it| (mask >> it & 1 == 1).then(|| oracle.usual_values(it, step)))
                            .collect();
                        oracle.step(step, |it| all[it as usize].clone())
                    }
                };
                assert!(own[index].bytes == right, "{codec}, step {step}, ranks {mask:#b}");
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn gradients_that_some_ranks_lack_count_as_zeros() {
    trains_with_holes("qsgd:bits=4,residual=on");
    trains_with_holes("onebit:bucket=64");
    trains_with_holes("qsgd:bits=4,ring=integer,residual=on");
}

#[test]
fn the_cut_the_threads_and_the_buffers_change_no_bit() {
    for codec in ["qsgd:bits=4,residual=on", "qsgd:bits=4,ring=integer,residual=on"] {
        let results: Vec<Vec<Vec<u8>>> = [(50_000, 1, 4), (1_000, 3, 1), (512, 0, 2)]
            .into_iter()
            .map(|(slice_elems, threads, ahead)| {
                let tensors =
                    vec![tensor("weight", 150_000, Dtype::F32), tensor("bias", 10, Dtype::F32)];
                let plan = ring_plan(tensors, codec, slice_elems, 3);
                let channels = world_with("127.0.0.1", 3, &plan, |options| {
                    options.work_threads = threads;
                    options.work_depth = 2 * threads.max(1);
                    options.encoded_ahead = ahead;
                });
                let mut ranks = each_rank(channels, |channel| {
                    let mut last = Vec::new();
                    for step in 0..=2 {
                        last = run_step(&channel, step).expect("a step");
                    }
                    channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
                    last.into_iter().map(|it| it.bytes).collect::<Vec<_>>()
                });
                assert!(ranks.windows(2).all(|pair| pair[0] == pair[1]), "ranks differ");
                ranks.swap_remove(0)
            })
            .collect();
        assert!(results.iter().all(|it| *it == results[0]), "{codec}");
    }
}

#[test]
fn what_is_not_a_number_reaches_everyone_and_stays_in_no_residual() {
    for codec in ["qsgd:bits=4,residual=on", "qsgd:bits=4,ring=integer,residual=on"] {
        let plan = ring_plan(vec![tensor("weight", 3_000, Dtype::F32)], codec, 1_024, 3);
        each_rank(world(3, &plan), move |channel| {
            run_step(&channel, 0).expect("step 0");
            let specs = specs(&channel);
            let step = |step: u64, poison: Option<f32>| {
                let mut memory = gradient(channel.rank().0, step, 0, &specs[0]);
                if let (Some(poison), 1) = (poison, channel.rank().0) {
                    memory.bytes[4 * 1_500..4 * 1_501].copy_from_slice(&poison.to_le_bytes());
                }
                channel.step_begin(Step(step)).expect("a step");
                let given = channel.gradient_ready(TensorId(0), Step(step), memory.memory());
                given.expect("a gradient");
                channel.step_end(Step(step)).expect("the end");
                channel.wait_step(Step(step), &mut deadline()).expect("the mean");
                let values = memory.bytes.chunks_exact(4);
                values.map(|it| f32::from_le_bytes(it.try_into().expect("4"))).collect::<Vec<f32>>()
            };
            for (number, poison) in [(1, f32::NAN), (2, f32::INFINITY), (3, f32::NEG_INFINITY)] {
                let values = step(number, Some(poison));
                // The bucket of the value itself, and nothing else, is lost.
                for (index, value) in values.iter().enumerate() {
                    assert_eq!(value.is_nan(), (1_024..1_536).contains(&index), "{index}");
                }
            }
            let residual = channel.worker_residual(TensorId(0), &mut never).expect("a residual");
            assert!(residual.iter().all(|it| it.is_finite()));
            assert!(step(4, None).iter().all(|it| it.is_finite()), "the next step is sound");
            channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        });
    }
}

/// What every rank reads of the owners' residuals in a step of its own.
fn read_owner_residual(channel: &Channel, step: u64, numel: usize, giver: u32) -> Vec<f32> {
    let mut landing = Tensor { bytes: vec![0xAB; 4 * numel] };
    channel.step_begin(Step(step)).expect("a step");
    let read = StateRead { kind: StateKind::OwnerResidual, part: 0 };
    channel.read_state(read).expect("a read");
    let memory = landing.memory();
    let hand_over = match channel.rank().0 {
        rank if rank == giver => Channel::gradient_ready,
        _ => Channel::tensor_absent,
    };
    hand_over(channel, TensorId(0), Step(step), memory).expect("something, or nothing");
    channel.step_end(Step(step)).expect("the end");
    channel.wait_step(Step(step), &mut deadline()).expect("the residual");
    let values = landing.bytes.chunks_exact(4);
    values.map(|it| f32::from_le_bytes(it.try_into().expect("4"))).collect()
}

#[test]
fn residuals_go_out_and_come_in() {
    let (codec, numel) = ("qsgd:bits=2,residual=on", 5_000);
    let spec = tensor("weight", numel as u64, Dtype::F32);
    let first = ring_plan(vec![spec.clone()], codec, 700, 3);
    let saved = each_rank(world(3, &first), move |channel| {
        let mut oracle = RingOracle::new(codec, 0, channel.plan());
        run_step(&channel, 0).expect("step 0");
        for step in 1..=2 {
            run_step(&channel, step).expect("a step");
            oracle.usual_step(step);
        }
        let worker = channel.worker_residual(TensorId(0), &mut never).expect("a residual");
        let owner = read_owner_residual(&channel, 3, numel, 0);
        assert_eq!(owner, oracle.owner_residual, "whole, on every rank");
        assert_eq!(owner, read_owner_residual(&channel, 4, numel, 1), "whoever gives something");
        let same = channel.worker_residual(TensorId(0), &mut never).expect("a residual");
        assert_eq!(worker, same, "reading changes nothing");
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        (worker, owner)
    });
    // Every rank starts with what rank 0 says, the owners of sums as well, which have no turn for it
    // but with the mean.
    let second = ring_plan(vec![spec], codec, 1_100, 3);
    each_rank(world(3, &second), move |channel| {
        let mut oracle = RingOracle::new(codec, 0, channel.plan());
        run_step(&channel, 0).expect("step 0");
        let (worker, owner) = &saved[0];
        oracle.worker_residuals = vec![worker.clone(); 3];
        oracle.owner_residual.clone_from(owner);
        for (kind, values) in
            [(StateKind::WorkerResidual, worker), (StateKind::OwnerResidual, owner)]
        {
            channel.load_state(TensorId(0), kind, values).expect("it fits");
        }
        for step in 1..=2 {
            let tensors = run_step(&channel, step).expect("a step");
            assert!(tensors[0].bytes == oracle.usual_step(step), "step {step}");
        }
        let worker = channel.worker_residual(TensorId(0), &mut never).expect("a residual");
        assert_eq!(worker, oracle.worker_residuals[channel.rank().index()]);
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn a_raw_step_is_the_exact_mean_of_the_ring() {
    for codec in ["qsgd:bits=4,residual=on", "qsgd:bits=4,ring=integer,residual=on"] {
        let plan = ring_plan(odd_sizes(Dtype::F32), codec, 5_000, 3);
        each_rank(world(3, &plan), |channel| {
            run_step(&channel, 0).expect("step 0");
            run_step(&channel, 1).expect("a lossy step");
            let before = channel.worker_residual(TensorId(4), &mut never).expect("a residual");
            let specs = specs(&channel);
            channel.step_begin(Step(2)).expect("a step");
            channel.send_raw(Step(2)).expect("a raw step");
            let mut tensors: Vec<Tensor> = (0..specs.len())
                .map(|index| gradient(channel.rank().0, 2, index, &specs[index]))
                .collect();
            for (index, memory) in tensors.iter_mut().enumerate() {
                let tensor = TensorId(index as u32);
                channel.gradient_ready(tensor, Step(2), memory.memory()).expect("a gradient");
            }
            channel.step_end(Step(2)).expect("the end");
            channel.wait_step(Step(2), &mut deadline()).expect("the means");
            support::check_ring_means(channel.plan(), 2, &tensors);
            assert_eq!(channel.worker_residual(TensorId(4), &mut never), Ok(before));
            channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        });
    }
}

#[test]
fn ring_jobs_are_in_the_trace_and_never_on_the_io_thread() {
    for (codec, scales) in [("qsgd:bits=4", false), ("qsgd:bits=4,ring=integer", true)] {
        let plan = ring_plan(odd_sizes(Dtype::F32), codec, 5_000, 3);
        let channels = world_with("127.0.0.1", 3, &plan, |options| options.trace = true);
        each_rank(channels, move |channel| {
            for step in 0..3 {
                run_step(&channel, step).expect("a step");
            }
            channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
            let jobs = channel.take_jobs();
            for kind in [JobKind::Encode, JobKind::Recode, JobKind::Decode] {
                assert!(jobs.iter().any(|job| job.kind == kind && job.bytes > 0), "{kind:?}");
            }
            let trace = channel.take_trace();
            let of_scales = |kind: FrameKind| kind == FrameKind::RingScale;
            assert_eq!(trace.iter().any(|it| of_scales(it.header.kind)), scales);
        });
    }
}

/// Encoded bytes of a step over those of f32, headers included, and whether all ranks have the same.
fn ratio_of_ten_million(codec: &'static str, world_size: u32) -> f64 {
    let numel = 10_000_000_usize;
    let spec = tensor("weight", numel as u64, Dtype::F32);
    let plan = ring_plan(vec![spec], codec, 50_000, world_size);
    let channels = world(world_size, &plan);
    let raw_bytes: u64 = {
        let plan = channels[0].plan();
        let frames = |bytes: u64| bytes.div_ceil(64 << 10) * HEADER_BYTES as u64 + bytes;
        plan.slices.iter().map(|slice| frames(4 * slice.length)).sum()
    };
    let ranks = each_rank(channels, move |channel| {
        let period: Vec<u8> = (0..65_521_u32)
            .flat_map(|it| {
                let draw = it.wrapping_mul(2_654_435_761).rotate_left(channel.rank().0) as i32;
                (draw as f32 * 1e-12).to_le_bytes()
            })
            .collect();
        let mut memory = Tensor { bytes: period.into_iter().cycle().take(4 * numel).collect() };
        for step in 0..=1 {
            channel.step_begin(Step(step)).expect("a step");
            let given = channel.gradient_ready(TensorId(0), Step(step), memory.memory());
            given.expect("a gradient");
            channel.step_end(Step(step)).expect("the end");
            channel.wait_step(Step(step), &mut deadline()).expect("the mean");
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        (memory.bytes, channel.metrics().tx_bytes)
    });
    assert!(ranks.windows(2).all(|pair| pair[0].0 == pair[1].0), "ranks differ");
    let zeros = ranks[0].0.chunks_exact(4).filter(|it| **it == [0; 4]).count();
    assert!(zeros < numel / 2, "{zeros} zeros");
    // Step 0 went once round, as it is.
    let hops = f64::from(world_size - 1);
    let sent: u64 = ranks.iter().map(|it| it.1).sum();
    let sent = sent as f64 - hops * raw_bytes as f64;
    2.0 * hops * 4.0 * numel as f64 / sent
}

#[test]
fn ten_million_elements_in_few_bits_round_seven_ranks() {
    // 4 bits a value, and a scale of 4 bytes for each 512 of them: 7.877 without headers.
    let ratio = ratio_of_ten_million("qsgd:bits=4,bucket=512", 7);
    assert!((7.8..7.88).contains(&ratio), "{ratio}");
}

#[test]
fn ten_million_elements_in_one_bit() {
    // A bit a value, and two averages for each 64 of them.
    let ratio = ratio_of_ten_million("onebit:bucket=64", 3);
    assert!((16.0 * 0.98..16.0).contains(&ratio), "{ratio}");
}

#[test]
fn ten_million_elements_as_sums_of_codes() {
    // 10 bits a value and a scale for each 512 of them, and the scales once more: 1.5 times over two
    // laps.
    let theory = 4.0 / (10.0 / 8.0 + 1.5 * 4.0 / 512.0);
    let ratio = ratio_of_ten_million("qsgd:bits=8,ring=integer", 3);
    assert!((theory * 0.98..theory).contains(&ratio), "{ratio} of {theory}");
}
