//! What a channel counts: bytes, waits, and who the others wait for.

use crate::support::{
    contribute, deadline, each_rank, never, plan, run_step, tensor, world, TEST_TIMEOUT,
};
use gradlane_engine::Plan;
use gradlane_net::{Channel, MetricsSnapshot};
use gradlane_units::{Dtype, Rank, Step, TensorId};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

const WORLD: u32 = 3;
const STEPS: u64 = 10;

/// Bytes of slices that a rank sends to another one in steps 1 to `STEPS`, and in step 0.
fn expected_payload(plan: &Plan, from: Rank, to: Rank) -> u64 {
    let owned_by = |rank| {
        let slices = (0..plan.slices.len() as u32).map(gradlane_units::SliceId);
        let owned = slices.filter(move |&it| plan.slice(it).owner == rank);
        owned.map(|it| plan.slice_bytes(it)).sum::<u64>()
    };
    let pushed_at_first = if from == Rank(0) { owned_by(to) } else { 0 };
    pushed_at_first + owned_by(from) + STEPS * (owned_by(to) + owned_by(from))
}

fn received_pushes(metrics: &MetricsSnapshot) -> u64 {
    metrics.rx_payload_bytes
}

#[test]
fn payloads_waits_and_late_ranks_are_counted() {
    let tensors = vec![tensor("first", 40_000, Dtype::F32), tensor("second", 777, Dtype::F16)];
    let plan = plan(tensors, "p3", 3_000, WORLD);
    let waiting = Arc::new(AtomicU64::new(0));
    each_rank(world(WORLD, &plan), move |channel| {
        run_step(&channel, 0).expect("step 0");
        for step in 1..=STEPS {
            if channel.rank() == Rank(2) {
                hold_back(&channel, step, &waiting);
            }
            let _tensors = contribute(&channel, step).expect("gradients");
            if channel.rank() == Rank(0) {
                waiting.store(step, Ordering::SeqCst);
                channel.wait(&[TensorId(1)], Step(step), &mut never).expect("a tensor");
            }
            channel.wait_step(Step(step), &mut never).expect("a step");
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        check(&channel);
    });
}

/// Rank 2 contributes when the others have contributed to its slices, and rank 0 waits.
fn hold_back(channel: &Channel, step: u64, waiting: &AtomicU64) {
    let mut late = deadline();
    let own: u64 = {
        let slices = channel.plan().slices.iter().enumerate();
        let own = slices.filter(|(_, slice)| slice.owner == Rank(2));
        let bytes = |index| channel.plan().slice_bytes(gradlane_units::SliceId(index as u32));
        own.map(|(index, _)| bytes(index)).sum()
    };
    let all: u64 = (0..channel.plan().slices.len() as u32)
        .map(|it| channel.plan().slice_bytes(gradlane_units::SliceId(it)))
        .sum();
    // Step 0 brings everything, each step all results of others and two pushes.
    let expected = all + (step - 1) * (all - own) + step * 2 * own;
    while received_pushes(&channel.metrics()) < expected || waiting.load(Ordering::SeqCst) < step {
        assert!(!late(), "{} of {expected} bytes", received_pushes(&channel.metrics()));
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(5));
}

fn check(channel: &Channel) {
    let (metrics, rank) = (channel.metrics(), channel.rank());
    let plan = channel.plan();
    for peer in (0..WORLD).map(Rank).filter(|&peer| peer != rank) {
        let row = &metrics.peers[peer.index()];
        assert_eq!(row.tx_payload_bytes, expected_payload(plan, rank, peer), "to {peer}");
        assert_eq!(row.rx_payload_bytes, expected_payload(plan, peer, rank), "from {peer}");
        assert_eq!(row.tx_bytes, row.tx_payload_bytes + 64 * row.tx_frames);
        assert_eq!((row.queued_messages, row.queued_bytes, row.in_flight_bytes), (0, 0, 0));
    }
    assert_eq!(metrics.raw_bytes, metrics.tx_payload_bytes);
    assert_eq!(metrics.encoded_bytes, metrics.tx_payload_bytes);
    let bytes_of = |rank| {
        let slices = (0..plan.slices.len() as u32).map(gradlane_units::SliceId);
        slices
            .filter(|&it| plan.slice(it).owner == rank)
            .map(|it| plan.slice_bytes(it))
            .sum::<u64>()
    };
    for (peer, row) in metrics.peers.iter().enumerate() {
        assert_eq!(row.owned_bytes, bytes_of(Rank(peer as u32)), "of rank {peer}");
    }
    // Its means go to two others in each step; in step 0 rank 0 alone has values to push.
    let (others, own) = (u64::from(WORLD) - 1, bytes_of(rank));
    assert_eq!(metrics.served_tx_bytes, others * own * (STEPS + 1));
    let at_first = if rank == Rank(0) { 0 } else { own };
    assert_eq!(metrics.served_rx_bytes, others * own * STEPS + at_first);
    let owned = plan.slices.iter().filter(|slice| slice.owner == rank).count() as u64;
    assert_eq!(metrics.gathered_slices, STEPS * owned);
    let last: u64 = metrics.stragglers.iter().map(|row| row.last_count).sum();
    assert_eq!(last + metrics.tied_slices, metrics.gathered_slices);
    if rank == Rank(2) {
        assert_eq!(metrics.stragglers[2].last_count, metrics.gathered_slices, "{metrics:?}");
        assert!(metrics.stragglers[2].late_s_max > 0.0);
    }
    let by_name: f64 = metrics.waits.iter().map(|it| it.wait_s + it.last_of_step_wait_s).sum();
    assert!((by_name - metrics.wait_s).abs() < 1e-6, "{metrics:?}");
    if rank == Rank(0) {
        let second = metrics.waits.iter().find(|row| row.name == "second");
        let second = second.expect("rank 0 has waited for it");
        assert!((1..=STEPS).contains(&second.wait_step_max), "{second:?}");
        assert!(second.count <= STEPS && second.wait_s >= second.wait_s_max, "{second:?}");
    }
    if rank == Rank(1) {
        // It waits for whole steps alone, and rank 2 holds each of them back.
        let longest =
            metrics.waits.iter().max_by(|one, other| one.wait_s_max.total_cmp(&other.wait_s_max));
        let longest = longest.expect("rank 1 has waited");
        assert!(
            longest.wait_s_max > 0.0 && (1..=STEPS).contains(&longest.wait_step_max),
            "{metrics:?}"
        );
        assert!(longest.last_of_step_wait_s >= longest.wait_s_max, "{longest:?}");
    }
}

/// The turns of a rank's lanes in 100 announcements that it waits for a tensor, which another rank holds back.
fn turns_of_waits(strategy: &str) -> u64 {
    let plan = plan(vec![tensor("weight", 4_000, Dtype::F32)], strategy, 100, 2);
    let holds_back = Arc::new(Barrier::new(2));
    let turns = each_rank(world(2, &plan), move |channel| {
        run_step(&channel, 0).expect("step 0");
        if channel.rank() == Rank(1) {
            holds_back.wait();
            run_step(&channel, 1).expect("step 1");
            channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
            return 0;
        }
        let _tensors = contribute(&channel, 1).expect("gradients");
        std::thread::sleep(Duration::from_millis(100));
        let before = channel.metrics().turns;
        for _announced in 0..100 {
            channel.needed(TensorId(0), Step(1)).expect("a tensor of the step");
            std::thread::sleep(Duration::from_millis(1));
        }
        let turns = channel.metrics().turns - before;
        holds_back.wait();
        channel.wait_step(Step(1), &mut never).expect("a step");
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        turns
    });
    turns[0]
}

#[test]
fn a_wait_wakes_no_lane_but_where_it_sends_pulls() {
    let (pushed, pulled) = (turns_of_waits("p3"), turns_of_waits("deferred-pull"));
    assert!(2 * pushed < pulled, "{pushed} turns where results are sent unasked, {pulled} else");
}
