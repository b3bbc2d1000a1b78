//! Steps over loopback with codecs: every rank has, bit by bit, what the encoded mean of encoded
//! contributions decodes to, whoever owns a slice and however a tensor is cut.

use crate::support::encoded::{odd_sizes, plan_encoded, trains_as, Aggregation, Oracle};
use crate::support::{
    self, deadline, each_rank, gradient, never, plan, run_step, specs, tensor, world, world_with,
    Tensor, TEST_TIMEOUT,
};
use gradlane_engine::Update;
use gradlane_net::{Channel, JobKind, SgdOptions, StateKind, StateRead, UpdateRule};
use gradlane_units::{Dtype, Step, TensorId};
use gradlane_wire::{FrameKind, PayloadForm};

/// Trains and compares every tensor on every rank with the oracle.
fn trains(codec: &'static str, dtype: Dtype, strategy: &str, slice_elems: u64, world_size: u32) {
    let update = Update::Worker;
    let plan = plan_encoded(odd_sizes(dtype), codec, strategy, slice_elems, world_size, update);
    trains_as(&plan, codec, move |index, plan| {
        Oracle::new(codec, index, &plan.tensor(TensorId(index)).spec, world_size)
    });
}

#[test]
fn two_ranks_with_few_bits() {
    trains("qsgd:bits=4", Dtype::F32, "p3", 5_000, 2);
    trains("qsgd:bits=2,levels=uniform", Dtype::F32, "kvstore", 5_000, 2);
}

#[test]
fn three_ranks_with_residuals() {
    trains("qsgd:bits=8,residual=on", Dtype::F32, "p3", 5_000, 3);
    trains("qsgd:bits=2,residual=on", Dtype::F32, "deferred-pull", 1, 3);
}

#[test]
fn five_ranks_with_half_the_bytes() {
    trains("bf16:residual=on", Dtype::F32, "p3", 30_000, 5);
    trains("f16", Dtype::F32, "wfbp", 500_000, 5);
}

#[test]
fn short_tensors_are_encoded_from_what_they_widen_to() {
    trains("qsgd:bits=4,residual=on", Dtype::F16, "p3", 5_000, 3);
    trains("qsgd:bits=8", Dtype::Bf16, "slicing", 5_000, 2);
}

#[test]
fn columns_buckets_and_minima() {
    trains("onebit:bucket=64", Dtype::F32, "p3", 5_000, 3);
    trains("onebit:bucket=64", Dtype::Bf16, "kvstore", 5_000, 2);
    trains("int8:bucket=64,residual=on", Dtype::F32, "p3", 1_000, 2);
    trains("fp8:bucket=64,residual=on", Dtype::F32, "p3", 1_000, 2);
}

/// Tensors are one slice each here: what is sent is chosen slice by slice.
#[test]
fn encodings_whose_lengths_differ() {
    trains("topk:ratio=0.01", Dtype::F32, "p3", 500_000, 3);
    trains("dgc:ratio=0.01,momentum=0.9", Dtype::F32, "wfbp", 500_000, 2);
}

/// Bytes of all memory after some steps, and what all ranks sent, step 0 and goodbyes included.
fn bits_of(
    codec: &'static str,
    slice_elems: u64,
    threads: usize,
    ahead: usize,
    steps: u64,
) -> (Vec<Vec<u8>>, u64) {
    let tensors = vec![tensor("weight", 200_000, Dtype::F32), tensor("bias", 10, Dtype::F32)];
    let plan = plan_encoded(tensors, codec, "p3", slice_elems, 3, Update::Worker);
    let channels = world_with("127.0.0.1", 3, &plan, |options| {
        options.work_threads = threads;
        options.work_depth = 2 * threads.max(1);
        options.encoded_ahead = ahead;
    });
    let mut ranks = each_rank(channels, move |channel| {
        let mut last = Vec::new();
        for step in 0..=steps {
            last = run_step(&channel, step).expect("a step");
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        let sent = channel.metrics().tx_bytes;
        (last.into_iter().map(|it| it.bytes).collect::<Vec<_>>(), sent)
    });
    assert!(ranks.windows(2).all(|pair| pair[0].0 == pair[1].0), "all ranks have the same");
    let sent = ranks.iter().map(|it| it.1).sum();
    (ranks.remove(0).0, sent)
}

#[test]
fn the_cut_the_threads_and_the_buffers_change_no_bit() {
    let codec = "qsgd:bits=4,residual=on";
    let (right, sent_bytes) = bits_of(codec, 50_000, 1, 4, 3);
    for (slice_elems, threads, ahead) in [(1_000, 3, 1), (512, 0, 2), (300_000, 2, 8)] {
        assert!(bits_of(codec, slice_elems, threads, ahead, 3).0 == right, "{slice_elems}");
    }
    let values_bytes = bits_of(codec, 50_000, 1, 4, 0).1;
    let raw_bytes = bits_of("f32", 50_000, 1, 4, 3).1;
    let ratio = (raw_bytes - values_bytes) as f64 / (sent_bytes - values_bytes) as f64;
    // 4 bits a value, and a scale of 4 bytes for each 512 of them.
    assert!((7.7..8.0).contains(&ratio), "{ratio}");
}

#[test]
fn what_is_not_a_number_reaches_everyone_and_stays_in_no_residual() {
    let codec = "qsgd:bits=4,residual=on";
    let numel = 3_000;
    let tensors = vec![tensor("weight", numel, Dtype::F32)];
    let plan = plan_encoded(tensors, codec, "p3", 1_024, 3, Update::Worker);
    each_rank(world(3, &plan), move |channel| {
        run_step(&channel, 0).expect("step 0");
        let specs = specs(&channel);
        let step = |step: u64, poison: Option<f32>| {
            let mut memory = gradient(channel.rank().0, step, 0, &specs[0]);
            if let (Some(poison), 1) = (poison, channel.rank().0) {
                memory.bytes[4 * 1_500..4 * 1_501].copy_from_slice(&poison.to_le_bytes());
            }
            channel.step_begin(Step(step)).expect("a step");
            channel.gradient_ready(TensorId(0), Step(step), memory.memory()).expect("a gradient");
            channel.step_end(Step(step)).expect("the end");
            channel.wait_step(Step(step), &mut deadline()).expect("the mean");
            let values = memory.bytes.chunks_exact(4);
            values.map(|it| f32::from_le_bytes(it.try_into().expect("4"))).collect::<Vec<f32>>()
        };
        for (number, poison) in [(1, f32::NAN), (2, f32::INFINITY), (3, f32::NEG_INFINITY)] {
            let values = step(number, Some(poison));
            assert!(!values[1_500].is_finite(), "{poison} became {}", values[1_500]);
            let carried: Vec<usize> =
                (0..values.len()).filter(|&it| !values[it].is_finite()).collect();
            // At most the bucket of the value itself, and nothing else, is lost.
            assert!(carried.iter().all(|it| (1_024..1_536).contains(it)), "{carried:?}");
        }
        let residual = channel.worker_residual(TensorId(0), &mut never).expect("a residual");
        assert!(residual.iter().all(|it| it.is_finite()));
        assert!(step(4, None).iter().all(|it| it.is_finite()), "the next step is sound");
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

/// What every rank reads of a residual in a step of its own.
fn read_owner_residual(channel: &Channel, step: u64, numel: usize) -> Vec<f32> {
    let mut landing = Tensor { bytes: vec![0xAB; 4 * numel] };
    channel.step_begin(Step(step)).expect("a step");
    let read = StateRead { kind: StateKind::OwnerResidual, part: 0 };
    channel.read_state(read).expect("a read");
    let memory = landing.memory();
    if channel.rank().0 == 0 {
        channel.gradient_ready(TensorId(0), Step(step), memory).expect("something");
    } else {
        channel.tensor_absent(TensorId(0), Step(step), memory).expect("nothing");
    }
    channel.step_end(Step(step)).expect("the end");
    channel.wait_step(Step(step), &mut deadline()).expect("the residual");
    let values = landing.bytes.chunks_exact(4);
    values.map(|it| f32::from_le_bytes(it.try_into().expect("4"))).collect()
}

#[test]
fn residuals_go_out_and_come_in_under_another_cut() {
    let codec = "qsgd:bits=2,residual=on";
    let numel = 5_000;
    let spec = tensor("weight", numel as u64, Dtype::F32);
    let first = plan_encoded(vec![spec.clone()], codec, "p3", 700, 3, Update::Worker);
    let saved = each_rank(world(3, &first), move |channel| {
        run_step(&channel, 0).expect("step 0");
        for step in 1..=2 {
            run_step(&channel, step).expect("a step");
        }
        let worker = channel.worker_residual(TensorId(0), &mut never).expect("a residual");
        let owner = read_owner_residual(&channel, 3, numel);
        let same = channel.worker_residual(TensorId(0), &mut never).expect("a residual");
        assert_eq!(worker, same, "reading changes nothing");
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        (worker, owner)
    });
    assert!(saved.windows(2).all(|pair| pair[0].1 == pair[1].1), "whole on every rank");
    assert!(saved[0].1.iter().any(|&it| it != 0.0));
    let second = plan_encoded(vec![spec.clone()], codec, "p3", 1_100, 3, Update::Worker);
    each_rank(world(3, &second), move |channel| {
        run_step(&channel, 0).expect("step 0");
        let (worker, owner) = &saved[channel.rank().index()];
        for (kind, values) in
            [(StateKind::WorkerResidual, worker), (StateKind::OwnerResidual, owner)]
        {
            channel.load_state(TensorId(0), kind, values).expect("it fits");
            assert!(channel.load_state(TensorId(0), kind, &values[1..]).is_err());
        }
        assert_eq!(channel.worker_residual(TensorId(0), &mut never).as_ref(), Ok(worker));
        assert_eq!(&read_owner_residual(&channel, 1, numel), owner);
        // Training goes on as if nothing had been between; draws follow the number of the step.
        let mut oracle = Oracle::new(codec, 0, &spec, 3);
        for step in [1, 2] {
            oracle.usual_step(step);
        }
        for step in [2, 3] {
            let tensors = run_step(&channel, step).expect("a step");
            assert!(tensors[0].bytes == oracle.usual_step(step), "step {step}");
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn a_raw_step_is_the_exact_mean_and_leaves_residuals_alone() {
    let codec = "qsgd:bits=4,residual=on";
    let plan = plan_encoded(odd_sizes(Dtype::F32), codec, "p3", 5_000, 3, Update::Worker);
    each_rank(world(3, &plan), |channel| {
        run_step(&channel, 0).expect("step 0");
        run_step(&channel, 1).expect("a lossy step");
        let large = TensorId(4);
        let before = channel.worker_residual(large, &mut never).expect("a residual");
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
        support::check_means(3, 2, &specs, &tensors);
        assert_eq!(channel.worker_residual(large, &mut never), Ok(before));
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn updates_on_the_servers_take_encoded_gradients_and_give_exact_parameters() {
    let codec = "qsgd:bits=8";
    let tensors = vec![tensor("weight", 2_500, Dtype::F32), tensor("bias", 5, Dtype::F32)];
    let plan = plan_encoded(tensors, codec, "p3", 700, 3, Update::Server);
    let channels = world_with("127.0.0.1", 3, &plan, |options| options.trace = true);
    let ranks = each_rank(channels, move |channel| {
        let specs = specs(&channel);
        let mut parameters = run_step(&channel, 0).expect("step 0");
        for (index, parameter) in parameters.iter_mut().enumerate() {
            let memory = parameter.memory();
            channel.set_parameter(TensorId(index as u32), memory).expect("a parameter");
        }
        let options = SgdOptions {
            lr: 0.5,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            maximize: false,
        };
        let rows: Vec<_> = (0..2).map(|it| (TensorId(it), UpdateRule::Sgd(options))).collect();
        channel.set_optimizer(&rows).expect("settings");
        let _gradients = run_step(&channel, 1).expect("a step");
        for (index, spec) in specs.iter().enumerate() {
            for element in 0..spec.numel {
                let at = |step, rank| support::value(rank, step, index, element);
                let mean = (at(1, 0) + at(1, 1) + at(1, 2)) / 3.0;
                let right = at(0, 0) - 0.5 * mean;
                let bytes = &parameters[index].bytes[element as usize * 4..][..4];
                let found = f32::from_le_bytes(bytes.try_into().expect("4"));
                // One of 127 levels up to 1.5, halved by the rate.
                assert!((found - right).abs() < 0.01, "{found} and {right}");
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        let trace = channel.take_trace();
        let carries = |kind, codec| {
            trace.iter().any(|it| {
                let header = it.header;
                header.kind == kind && header.form == codec && header.step.0 == 1
            })
        };
        assert!(
            carries(FrameKind::Push, PayloadForm::Encoded)
                && !carries(FrameKind::Push, PayloadForm::Raw)
        );
        assert!(!carries(FrameKind::Broadcast, PayloadForm::Encoded));
        parameters.into_iter().map(|it| it.bytes).collect::<Vec<_>>()
    });
    assert!(ranks.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn encoding_is_never_done_on_the_io_thread_and_is_in_the_trace() {
    let plan = plan_encoded(odd_sizes(Dtype::F32), "qsgd:bits=4", "p3", 5_000, 2, Update::Worker);
    let channels = world_with("127.0.0.1", 2, &plan, |options| options.trace = true);
    each_rank(channels, |channel| {
        for step in 0..3 {
            run_step(&channel, step).expect("a step");
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        let jobs = channel.take_jobs();
        for kind in [JobKind::Encode, JobKind::Recode, JobKind::Decode] {
            assert!(jobs.iter().any(|job| job.kind == kind && job.bytes > 0), "{kind:?}");
        }
        let raw = jobs.iter().filter(|job| job.kind == JobKind::Reduce);
        assert!(raw.into_iter().all(|job| job.step.0 == 0));
    });
}

#[test]
fn plans_whose_codecs_are_not_what_they_say_are_refused() {
    let specs = || vec![tensor("weight", 5_000, Dtype::F32)];
    let good = plan_encoded(specs(), "qsgd:bits=4", "p3", 1_000, 2, Update::Worker);
    let refused = |json: &str, named: &str| {
        let (listeners, addresses) = support::listeners("127.0.0.1", 2);
        for (rank, listener) in listeners.into_iter().enumerate() {
            let result = Channel::connect(
                listener,
                &support::options(rank as u32, 2),
                json,
                &addresses,
                b"secret",
                &mut never,
            );
            let text = result.map(|_| ()).map_err(|error| error.to_string());
            assert!(text.as_ref().is_err_and(|it| it.contains(named)), "{named}: {text:?}");
        }
    };
    assert!(good.contains("bits=4"), "{good}");
    refused(&good.replace("bits=4", "bits=5"), "bits");
    refused(&good.replace("bits=4", "bits=8"), "encoded in");
    refused(&good.replace("\"fixed\":true", "\"fixed\":false"), "is not as");
    refused(&good.replace("\"f32\"", "\"f64\""), "f64 cannot be encoded");
    let lossless = plan(specs(), "p3", 1_000, 2);
    assert!(!lossless.contains("codec"), "{lossless}");
}
