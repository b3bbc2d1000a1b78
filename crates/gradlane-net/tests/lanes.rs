//! Several lanes for one rank: the same bits, inputs that each lane's engine can be told again, and an
//! end that leaves no thread behind.
//!
//! A binary of its own: it counts the I/O threads of its process.

#[path = "all/support/mod.rs"]
mod support;

use gradlane_engine::Journal;
use gradlane_net::{Channel, ChannelError};
use gradlane_units::{Dtype, Step};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use support::{
    check_means, check_ring_means, contribute, deadline, each_rank, never, plan, run_step, specs,
    tensor, world_with, TEST_TIMEOUT,
};

const WORLD: u32 = 5;

/// One test at a time: threads are counted over the whole process.
static ALONE: Mutex<()> = Mutex::new(());

/// Waits until this process has so many I/O threads: they start, and leave the kernel's books, a
/// moment later.
fn has_io_threads(wanted: usize) {
    let end = Instant::now() + TEST_TIMEOUT;
    while io_threads() != wanted {
        assert!(Instant::now() < end, "{} I/O threads instead of {wanted}", io_threads());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// I/O threads of all ranks in this process.
fn io_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("this process");
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        // A thread that has just ended has no name any more.
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(name).filter(|name| name.trim() == "gradlane-io").count()
}

fn world(strategy: &str, lanes: u16) -> Vec<Channel> {
    let sizes = [40_000, 1, 777, 90_000, 5_000];
    let tensors = sizes.iter().enumerate();
    let tensors = tensors.map(|(index, &numel)| tensor(&format!("t{index}"), numel, Dtype::F32));
    let plan = plan(tensors.collect(), strategy, 3_000, WORLD);
    world_with("127.0.0.1", WORLD, &plan, |options| {
        options.lanes = lanes;
        options.journal = true;
        // Many frames, of which few fit the kernel.
        options.frame_bytes = 1_000;
        options.credit_bytes = 4_000;
        options.send_buffer_bytes = 10_000;
    })
}

fn trains(strategy: &'static str, lanes: u16) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let channels = world(strategy, lanes);
    has_io_threads(usize::from(lanes) * WORLD as usize);
    let journals: Vec<Vec<Journal>> = each_rank(channels, move |channel| {
        for step in 0..6 {
            let tensors = run_step(&channel, step).expect("a step");
            if strategy == "ring" {
                check_ring_means(channel.plan(), step, &tensors);
            } else {
                check_means(WORLD, step, &specs(&channel), &tensors);
            }
        }
        let metrics = channel.metrics();
        assert_eq!(metrics.peers.len(), WORLD as usize);
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        channel.take_journals()
    });
    has_io_threads(0);
    assert!(journals.iter().all(|of_rank| of_rank.len() == usize::from(lanes)));
    for journal in journals.into_iter().flatten() {
        journal.replay().unwrap_or_else(|divergence| panic!("{strategy}: {divergence}"));
    }
}

#[test]
fn two_lanes_give_the_mean_in_an_order_that_the_engines_can_be_told_again() {
    trains("p3", 2);
}

#[test]
fn more_lanes_than_slices_of_most_tensors_are_in_order() {
    trains("kvstore", 16);
}

#[test]
fn a_ring_turns_in_three_lanes() {
    trains("ring", 3);
}

#[test]
fn a_rank_that_gives_up_in_a_step_ends_all_threads_everywhere() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for round in 0..10 {
        let channels = world("p3", 1 + round as u16 % 4);
        each_rank(channels, |channel| {
            // The rank that gives up may do so before another one has all initial values.
            let _values = run_step(&channel, 0);
            if channel.rank().0 == 3 {
                let _gradients = contribute(&channel, 1);
                channel.abort("this rank has had enough");
                return;
            }
            let ended = match contribute(&channel, 1) {
                Ok(_gradients) => channel.wait_step(Step(1), &mut deadline()),
                Err(error) => Err(error),
            };
            // The step may have been whole before.
            if let Err(ChannelError::Failed(failure)) = ended {
                assert!(failure.message.contains("had enough"), "{failure:?}");
            }
            channel.abort("nothing comes any more");
        });
        has_io_threads(0);
    }
}
