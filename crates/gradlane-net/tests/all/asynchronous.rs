//! Asynchronous training over loopback: ranks of their own pace, sums that lose no push, answers that
//! do not tear, an end that waits for everybody.

use crate::support::encoded::plan_encoded;
use crate::support::{deadline, each_rank, never, plan_for, tensor, world, Tensor, TEST_TIMEOUT};
use gradlane_engine::Update;
use gradlane_net::{Channel, SgdOptions, UpdateRule};
use gradlane_units::{Dtype, Step, TensorId};
use std::time::Duration;

const NUMELS: [u64; 3] = [40_000, 3, 2_500];

fn filled(numel: u64, value: f32) -> Tensor {
    Tensor { bytes: value.to_le_bytes().repeat(numel as usize) }
}

fn values(tensor: &Tensor) -> Vec<f32> {
    let floats = tensor.bytes.chunks(4).map(|it| f32::from_le_bytes(it.try_into().expect("4")));
    floats.collect()
}

/// One step; with gradients of `value`, or with none. The gradients' memory lives as long.
fn step(channel: &Channel, number: u64, value: Option<f32>) {
    let step = Step(number);
    channel.step_begin(step).expect("begins");
    let mut gradients: Vec<Tensor> =
        NUMELS.iter().map(|&numel| filled(numel, value.unwrap_or(0.0))).collect();
    for (index, gradient) in gradients.iter_mut().enumerate().rev() {
        let tensor = TensorId(index as u32);
        if value.is_some() {
            channel.gradient_ready(tensor, step, gradient.memory()).expect("a gradient");
        } else {
            channel.tensor_absent(tensor, step, gradient.memory()).expect("an absence");
        }
    }
    channel.step_end(step).expect("ends");
    channel.wait_step(step, &mut deadline()).expect("a step");
}

#[test]
fn every_push_counts_once_and_ranks_end_alike_after_steps_of_their_own() {
    counts_every_push_once("f32");
}

/// Codecs that lose nothing of powers of two, of a fixed and of a varying size.
#[test]
fn every_encoded_push_counts_once() {
    counts_every_push_once("bf16");
    counts_every_push_once("topk:ratio=1");
}

fn counts_every_push_once(codec: &str) {
    const STEPS: [u64; 3] = [40, 3, 17];
    let specs = NUMELS.iter().enumerate();
    let specs = specs.map(|(index, &numel)| tensor(&format!("t{index}"), numel, Dtype::F32));
    let plan = plan_encoded(specs.collect(), codec, "asgd", 900, 3, Update::Server);
    let slices: u64 = NUMELS.iter().map(|numel| numel.div_ceil(900)).sum();
    let channels = world(3, &plan);
    let pulled = std::sync::Arc::new(std::sync::Barrier::new(3));
    let readings = each_rank(channels, move |channel| {
        let rank = channel.rank().0 as usize;
        let mut parameters: Vec<Tensor> = NUMELS.iter().map(|&numel| filled(numel, 0.0)).collect();
        channel.step_begin(Step(0)).expect("step 0");
        for (index, parameter) in parameters.iter_mut().enumerate() {
            let tensor = TensorId(index as u32);
            channel.gradient_ready(tensor, Step(0), parameter.memory()).expect("values");
        }
        channel.step_end(Step(0)).expect("ends");
        channel.wait_step(Step(0), &mut deadline()).expect("step 0");
        for (index, parameter) in parameters.iter_mut().enumerate() {
            channel.set_parameter(TensorId(index as u32), parameter.memory()).expect("memory");
        }
        let rule = UpdateRule::Sgd(SgdOptions {
            lr: 1.0,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            maximize: false,
        });
        channel.set_optimizer(&[0, 1, 2].map(|it| (TensorId(it), rule))).expect("rules");
        for number in 1..=STEPS[rank] {
            step(&channel, number, Some(2.0_f32.powi(rank as i32)));
            if rank == 1 {
                std::thread::sleep(Duration::from_millis(20));
            }
            for parameter in &parameters {
                let values = values(parameter);
                for slice in values.chunks(900) {
                    assert!(slice.iter().all(|it| *it == slice[0]), "a state is whole");
                }
            }
        }
        pulled.wait();
        step(&channel, STEPS[rank] + 1, None);
        let sum: f32 = (0..3).map(|it| 2.0_f32.powi(it) * STEPS[it as usize] as f32).sum();
        for parameter in &parameters {
            assert!(values(parameter).iter().all(|it| *it == -sum), "{:?}", parameter.bytes);
        }
        // One rank leaves at once; the others still ask for what it owns.
        pulled.wait();
        if rank == 2 {
            for extra in 2..6 {
                step(&channel, STEPS[rank] + extra, Some(1.0));
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        channel.metrics().staleness
    });
    for (rank, &steps) in STEPS.iter().enumerate() {
        let pushes: u64 = readings.iter().map(|it| it[rank].pushes).sum();
        let extra = if rank == 2 { 4 } else { 0 };
        assert_eq!(pushes, (steps + extra) * slices);
    }
}

#[test]
fn a_rank_that_dies_after_its_goodbye_is_named() {
    let specs = vec![tensor("weights", 5_000, Dtype::F32)];
    let plan = plan_for(specs, "asgd", 900, 2, Update::Server);
    let channels = world(2, &plan);
    let errors = each_rank(channels, |channel| {
        let mut parameter = filled(5_000, 0.0);
        channel.step_begin(Step(0)).expect("step 0");
        channel.gradient_ready(TensorId(0), Step(0), parameter.memory()).expect("values");
        channel.wait_step(Step(0), &mut deadline()).expect("step 0");
        if channel.rank().0 == 1 {
            // It says goodbye, waits in vain for the other's, and gives up.
            return channel.finish(Duration::from_millis(300), &mut never).err();
        }
        std::thread::sleep(Duration::from_millis(900));
        channel.step_begin(Step(1)).err()
    });
    let texts: Vec<String> = errors.into_iter().map(|it| format!("{it:?}")).collect();
    assert!(texts[0].contains("rank 1"), "{texts:?}");
    assert!(texts[1].contains("not every rank"), "{texts:?}");
}
