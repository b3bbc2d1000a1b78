//! Steps that go on without late ranks, over loopback and with codecs: every rank has, bit by bit, what
//! the encoded mean over those that were in decodes to; what encoding lost of a contribution that did not
//! count is neither kept nor lost.

use crate::support::encoded::{plan_encoded_by, Oracle};
use crate::support::{
    deadline, each_rank, gradient, never, run_step, tensor, value, world_with, Tensor, TEST_TIMEOUT,
};
use gradlane_engine::{Cutoff, Plan, StragglerPolicy, Strategy, Synchrony, Update};
use gradlane_net::{Channel, StateKind, StateRead};
use gradlane_units::{Dtype, Rng, Step, TensorId};
use std::sync::Arc;
use std::time::{Duration, Instant};

const STEPS: u64 = 14;
/// After this step all ranks read what the owners have lost, in a step of the channel that is no training.
const READ_AFTER: u64 = 7;
const AHEAD_STEPS: u32 = 4;
const SIZES: [u64; 3] = [700, 65, 9_000];

/// What one rank does in a step that goes on without it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Late {
    /// It has all gradients but that of the first layer, and that one too late.
    Holds,
    /// It has none, or has not even begun, before the step is decided, and others may be in later
    /// steps by then.
    Sleeps,
    /// It takes no part.
    Passes,
}

/// Who is left out of which step, and how; the same for everybody.
#[derive(Clone, Debug)]
struct Schedule {
    /// By step from 1 on: the one rank that is left out.
    out: Vec<(u32, Late)>,
    carries: bool,
}

impl Schedule {
    fn draw(seed: u64, world_size: u32, carries: bool) -> Schedule {
        let mut rng = Rng::new(seed);
        let mut out: Vec<(u32, Late)> = Vec::new();
        while (out.len() as u64) < STEPS {
            let rank = rng.below(world_size);
            let run = 1 + rng.below(AHEAD_STEPS - 1);
            let first = if rng.below(2) == 0 { Late::Holds } else { Late::Sleeps };
            for turn in 0..run {
                // Nobody is late in the step that all gather in.
                let is_next = out.len() as u64 != READ_AFTER;
                let before = is_next && out.last().is_some_and(|&(it, _)| it == rank);
                let passes = before && turn > 0 && rng.below(2) == 0;
                out.push((rank, if passes { Late::Passes } else { first }));
            }
        }
        out.truncate(STEPS as usize);
        Schedule { out, carries }
    }

    fn late(&self, rank: u32, step: u64) -> Option<Late> {
        let (out, late) = self.out[step as usize - 1];
        (out == rank).then_some(late)
    }

    /// The last step of the run of steps that go on without a rank, as far as others may go ahead.
    fn run_end(&self, rank: u32, step: u64) -> u64 {
        let furthest = (step + u64::from(AHEAD_STEPS) - 1).min(STEPS);
        let furthest = if step <= READ_AFTER { furthest.min(READ_AFTER) } else { furthest };
        (step..=furthest).take_while(|&it| self.late(rank, it).is_some()).last().unwrap_or(step)
    }

    fn contributors(&self, step: u64, world_size: u32) -> Vec<u32> {
        (0..world_size).filter(|&rank| self.late(rank, step).is_none()).collect()
    }

    /// What each rank gives of a tensor in each step, carried gradients included.
    fn given(&self, rank: u32, index: usize, numel: u64) -> Vec<Vec<f32>> {
        let mut carried = vec![0.0; numel as usize];
        let mut all = Vec::new();
        for step in 1..=STEPS {
            let own = (0..numel).map(|it| value(rank, step, index, it));
            let given: Vec<f32> = own.zip(&carried).map(|(value, it)| value + it).collect();
            match self.late(rank, step) {
                Some(Late::Passes) => {}
                Some(_) if self.carries => carried = given.clone(),
                Some(_) => {}
                None => carried = vec![0.0; numel as usize],
            }
            all.push(given);
        }
        all
    }
}

fn plan_for(codec: &str, slice_elems: u64, world_size: u32) -> String {
    let tensors = SIZES.map(|numel| tensor(&format!("of {numel}"), numel, Dtype::F32)).to_vec();
    let strategy = Strategy::named("p3", Some(slice_elems), 7).expect("p3");
    let close = Cutoff::Backup { ranks: 1 };
    let ready =
        Synchrony::BackupWorkers(StragglerPolicy { cutoff: close, ahead_steps: AHEAD_STEPS });
    let strategy = Strategy { synchrony: ready, ..strategy };
    plan_encoded_by(tensors, codec, strategy, world_size, Update::Worker)
}

fn wait_until_decided(channel: &Channel, step: Step) {
    let end = Instant::now() + TEST_TIMEOUT;
    while channel.participation(Step(0)).decided < step {
        assert!(Instant::now() < end, "{step} is never decided");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// The channel's number of a step of training.
fn in_channel(step: u64) -> Step {
    Step(step + u64::from(step > READ_AFTER))
}

/// What all ranks read of the owners' residuals of the first tensor.
fn read_owners(channel: &Channel, numel: u64) -> Vec<f32> {
    let step = in_channel(READ_AFTER).next();
    channel.step_barrier(step).expect("a step for all");
    let read = StateRead { kind: StateKind::OwnerResidual, part: 0 };
    channel.read_state(read).expect("a read");
    let mut memory = SIZES.map(|numel| Tensor { bytes: vec![0xAB; 4 * numel as usize] });
    for (index, tensor) in memory.iter_mut().enumerate() {
        let (id, gives) = (TensorId(index as u32), index == 0 && channel.rank().0 == 0);
        let give = if gives { Channel::gradient_ready } else { Channel::tensor_absent };
        give(channel, id, step, tensor.memory()).expect("something");
    }
    channel.step_end(step).expect("the end");
    channel.wait_step(step, &mut deadline()).expect("the residual");
    assert_eq!(channel.participation(step).participated, Some(true), "nobody is left out");
    let values = memory[0].bytes.chunks_exact(4);
    let values = values.map(|it| f32::from_le_bytes(it.try_into().expect("4")));
    values.take(numel as usize).collect()
}

/// One step of a rank by the schedule; the memory afterwards.
fn follow(
    channel: &Channel,
    schedule: &Schedule,
    step: u64,
    given: &[Vec<Vec<f32>>],
) -> Vec<Tensor> {
    let rank = channel.rank().0;
    let late = schedule.late(rank, step);
    let number = in_channel(step);
    let mut memory: Vec<Tensor> = given
        .iter()
        .map(|steps| steps[step as usize - 1].iter().flat_map(|it| it.to_le_bytes()).collect())
        .map(|bytes| Tensor { bytes })
        .collect();
    let awaited = in_channel(schedule.run_end(rank, step));
    if late == Some(Late::Sleeps) && step.is_multiple_of(2) {
        wait_until_decided(channel, awaited);
    }
    if late == Some(Late::Passes) {
        channel.step_pass(number).expect("it was left out");
    } else {
        channel.step_begin(number).expect("a step");
    }
    if late == Some(Late::Sleeps) {
        wait_until_decided(channel, awaited);
    }
    for index in (0..memory.len()).rev() {
        if late == Some(Late::Holds) && index == 0 {
            wait_until_decided(channel, number);
        }
        let (id, memory) = (TensorId(index as u32), memory[index].memory());
        if late == Some(Late::Passes) {
            channel.tensor_absent(id, number, memory).expect("nothing");
        } else {
            channel.gradient_ready(id, number, memory).expect("a gradient");
        }
    }
    channel.step_end(number).expect("the end");
    channel.wait_step(number, &mut deadline()).expect("the result");
    memory
}

fn trains(codec: &'static str, slice_elems: u64, world_size: u32, seed: u64, carries: bool) {
    let json = plan_for(codec, slice_elems, world_size);
    let schedule = Arc::new(Schedule::draw(seed, world_size, carries));
    let channels = world_with("127.0.0.1", world_size, &json, |options| {
        options.encoded_ahead = 1 + (seed % 3) as usize;
        options.frame_bytes = 700;
        options.credit_bytes = 700;
        options.work_threads = 1 + (seed % 2) as usize;
        options.work_depth = 4;
    });
    each_rank(channels, move |channel| {
        let rank = channel.rank().0;
        let plan: &Plan = channel.plan();
        let given = |rank: u32| -> Vec<Vec<Vec<f32>>> {
            (0..).zip(SIZES).map(|(index, numel)| schedule.given(rank, index, numel)).collect()
        };
        let given: Vec<_> = (0..world_size).map(given).collect();
        let spec = |index: usize| plan.tensor(TensorId(index as u32)).spec.clone();
        let mut oracles: Vec<Oracle> = (0..SIZES.len())
            .map(|index| Oracle::new(codec, index as u32, &spec(index), world_size))
            .collect();
        let initial = run_step(&channel, 0).expect("step 0");
        assert_eq!(initial[0].bytes, gradient(0, 0, 0, &spec(0)).bytes, "exact");
        for step in 1..=STEPS {
            let found = follow(&channel, &schedule, step, &given[rank as usize]);
            let was_in = schedule.late(rank, step).is_none();
            assert_eq!(
                channel.participation(in_channel(step)).participated,
                Some(was_in),
                "{schedule:?}"
            );
            let set = schedule.contributors(step, world_size);
            for (index, oracle) in oracles.iter_mut().enumerate() {
                let right = oracle.step_of(&set, in_channel(step).0, |rank| {
                    given[rank as usize][index][step as usize - 1].clone()
                });
                let same = found[index].bytes == right;
                assert!(same, "{codec}, seed {seed}, rank {rank}, step {step}, tensor {index}");
                let kept = channel.worker_residual(TensorId(index as u32), &mut never);
                let kept = kept.expect("a residual");
                let right = &oracle.worker_residuals[rank as usize];
                let same =
                    kept.iter().map(|it| it.to_bits()).eq(right.iter().map(|it| it.to_bits()));
                assert!(same, "residual, {codec}, seed {seed}, rank {rank}, step {step}");
            }
            if step == READ_AFTER {
                // Of what an owner keeps only the first number of each value is not zero.
                let kept = &oracles[0].owner_residual;
                let width = (kept.len() / SIZES[0] as usize).max(1);
                let right: Vec<f32> = match kept.len() {
                    0 => vec![0.0; SIZES[0] as usize],
                    _ => kept.iter().step_by(width).copied().collect(),
                };
                assert_eq!(read_owners(&channel, SIZES[0]), right, "{codec}, seed {seed}");
            }
        }
        // Nothing that counted is lost, and nothing counts twice. (With momentum there is no such sum.)
        for (index, oracle) in oracles.iter().enumerate().filter(|_| !codec.contains("momentum")) {
            let kept = channel.worker_residual(TensorId(index as u32), &mut never);
            let kept = kept.expect("a residual");
            if kept.is_empty() {
                continue;
            }
            for element in 0..SIZES[index] as usize {
                let counted: f64 = (1..=STEPS)
                    .filter(|&step| schedule.late(rank, step).is_none())
                    .map(|step| f64::from(given[rank as usize][index][step as usize - 1][element]))
                    .sum();
                let sent = oracle.sent[rank as usize][element] + f64::from(kept[element]);
                assert!((counted - sent).abs() < 1e-4, "{counted} came to {sent}");
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        let metrics = channel.metrics();
        assert_eq!((metrics.outgoing_frames, metrics.jobs_in_flight), (0, 0));
    });
}

#[test]
fn few_bits_with_residuals() {
    for seed in 0..6 {
        trains("qsgd:bits=8,residual=on", 1_000, 3, seed, seed % 2 == 0);
    }
}

#[test]
fn one_bit_with_residuals() {
    for seed in 10..14 {
        trains("onebit:bucket=64", 512, 4, seed, seed % 2 == 0);
    }
}

#[test]
fn encodings_whose_lengths_differ() {
    // One slice each: what is sent is chosen slice by slice.
    for seed in 20..23 {
        trains("topk:ratio=0.05", 500_000, 3, seed, seed % 2 == 0);
        trains("dgc:ratio=0.05,momentum=0.9", 500_000, 3, seed, seed % 2 == 1);
    }
}

#[test]
fn codecs_that_keep_nothing() {
    trains("qsgd:bits=4", 1_000, 3, 30, true);
    trains("f16", 1_000, 2, 31, false);
}
