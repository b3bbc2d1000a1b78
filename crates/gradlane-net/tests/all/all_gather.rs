//! Blocks over loopback: every rank gets every rank's bytes, of sizes that differ from rank to rank and
//! step to step, beside tensors that are averaged.

use crate::support::{
    self, deadline, each_rank, gradient, never, ring_mean, tensor, world, world_with, TEST_TIMEOUT,
};
use gradlane_engine::{Plan, Scheme, Strategy, TensorSpec, Update};
use gradlane_net::{Block, Blocks, Channel, ChannelError, UserMemory};
use gradlane_units::{Dtype, Rank, Step, TensorId};

/// Blocks of up to 60,000 elements, a ring, and small blocks.
fn plan(world_size: u32) -> String {
    let tensors: Vec<(TensorSpec, Scheme)> = vec![
        (tensor("factors", 60_000, Dtype::F32), Scheme::AllGather),
        (tensor("weight", 20_000, Dtype::F32), Scheme::Ring),
        (tensor("rows", 9, Dtype::Bf16), Scheme::AllGather),
    ];
    let strategy = Strategy::named("p3", Some(7_000), 0).expect("p3");
    let plan = Plan::build(tensors, strategy, Update::Worker, world_size).expect("a plan");
    serde_json::to_string(&plan).expect("JSON")
}

/// A rank's block in a step: any number of bytes up to the bound, none now and then.
fn block(rank: u32, step: u64, index: usize, spec: &TensorSpec) -> Option<Vec<u8>> {
    let draw = (u64::from(rank) * 7 + step * 3 + index as u64 * 5) % 8;
    let elements = match draw {
        0 => return None,
        1 => 0,
        2 => spec.numel,
        _ => spec.numel * draw / 9,
    };
    let whole = gradient(rank, step, index, spec).bytes;
    Some(whole[..(elements * spec.dtype.bytes()) as usize].to_vec())
}

fn check(blocks: &Blocks, rank: Rank, step: u64, index: usize, spec: &TensorSpec) {
    for other in 0..blocks.world_size() {
        let right = block(other, step, index, spec);
        let found = blocks.of(Rank(other));
        if Rank(other) == rank {
            let bytes = right.map(|it| it.len() as u64);
            assert_eq!(found, bytes.map_or(Block::Absent, Block::Own), "own, step {step}");
        } else {
            assert!(found == right.as_deref().map_or(Block::Absent, Block::Other), "{other}");
        }
    }
}

/// Gives everything of a step; what has to be kept until it is complete.
fn give(channel: &Channel, step: u64) -> Result<Vec<Vec<u8>>, ChannelError> {
    let specs = support::specs(channel);
    let rank = channel.rank().0;
    channel.step_begin(Step(step))?;
    let mut kept = Vec::new();
    for (index, spec) in specs.iter().enumerate().rev() {
        let id = TensorId(index as u32);
        let is_block = channel.plan().tensor(id).scheme == Scheme::AllGather;
        let bytes = if is_block {
            if step == 0 {
                continue;
            }
            block(rank, step, index, spec)
        } else {
            Some(gradient(rank, step, index, spec).bytes)
        };
        let Some(mut bytes) = bytes else {
            channel.block_absent(id, Step(step))?;
            continue;
        };
        let (address, length) = (bytes.as_mut_ptr().expose_provenance(), bytes.len());
        // SAFETY: the caller keeps the bytes until the step is complete.
        let memory = unsafe { UserMemory::new(address, length) };
        kept.push(bytes);
        if is_block {
            channel.block_ready(id, Step(step), memory)?;
        } else {
            channel.gradient_ready(id, Step(step), memory)?;
        }
    }
    channel.step_end(Step(step))?;
    Ok(kept)
}

fn gathers(world_size: u32, steps: u64, frame_bytes: u32) {
    let plan = plan(world_size);
    let channels =
        world_with("127.0.0.1", world_size, &plan, |options| options.frame_bytes = frame_bytes);
    each_rank(channels, move |channel| {
        let specs = support::specs(&channel);
        let (rank, mut late) = (channel.rank(), None);
        for step in 0..=steps {
            let kept = give(&channel, step).expect("a step");
            channel.wait_step(Step(step), &mut deadline()).expect("blocks");
            // The ring's tensor is the only one that is written.
            let index = 1;
            let at = kept
                .iter()
                .position(|it| it.len() == 80_000 && *it == ring_mean(channel.plan(), step, index));
            assert!(at.is_some(), "the mean in step {step}");
            if step == 0 {
                continue;
            }
            for (index, spec) in [(0, &specs[0]), (2, &specs[2])] {
                let id = TensorId(index as u32);
                let blocks = channel.take_blocks(id, Step(step)).expect("open").expect("ready");
                check(&blocks, rank, step, index, spec);
                assert!(channel.take_blocks(id, Step(step)).expect("open").is_none(), "once");
                if index == 0 {
                    // Blocks may be kept while later steps go on.
                    if let Some((step, blocks)) = late.replace((step, blocks)) {
                        check(&blocks, rank, step, index, spec);
                    }
                }
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        let (step, blocks) = late.expect("the last step's");
        check(&blocks, rank, step, 0, &specs[0]);
    });
}

#[test]
fn one_rank_has_its_own_block() {
    gathers(1, 3, 65_536);
}

#[test]
fn two_ranks_exchange_blocks() {
    gathers(2, 9, 65_536);
}

#[test]
fn three_ranks_exchange_blocks_in_odd_frames() {
    gathers(3, 9, 1_001);
}

#[test]
fn five_ranks_exchange_blocks() {
    gathers(5, 5, 65_536);
}

#[test]
fn misuse_is_named_at_the_call() {
    let channels = world(1, &plan(1));
    each_rank(channels, |channel| {
        let _kept = give(&channel, 0).expect("step 0");
        channel.wait_step(Step(0), &mut deadline()).expect("step 0");
        channel.step_begin(Step(1)).expect("step 1");
        let mut bytes = vec![0_u8; 240_004];
        let (address, length) = (bytes.as_mut_ptr().expose_provenance(), bytes.len());
        // SAFETY: the bytes outlive the channel.
        let memory = |length| unsafe { UserMemory::new(address, length) };
        let (factors, weight) = (TensorId(0), TensorId(1));
        for (result, words) in [
            (channel.block_ready(factors, Step(1), memory(length)), "at most 240000 bytes"),
            (channel.block_ready(factors, Step(1), memory(6)), "elements of 4"),
            (channel.block_ready(weight, Step(1), memory(8)), "use gradient_ready"),
            (channel.gradient_ready(factors, Step(1), memory(240_000)), "use block_ready"),
            (channel.block_absent(factors, Step(0)), "current step is step 1"),
        ] {
            let error = result.expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
        channel.block_ready(factors, Step(1), memory(8)).expect("a block");
        let again = channel.block_absent(factors, Step(1)).expect_err("twice").to_string();
        assert!(again.contains("already has"), "{again}");
        channel.abort("the test is over");
        drop(bytes);
    });
}
