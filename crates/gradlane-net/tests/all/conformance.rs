//! What the engine decided over real sockets follows from what it heard: the journal of a run on
//! loopback, told to a new engine, gives the same landings, frames, works and events.

use crate::support::encoded::{plan_encoded, plan_encoded_by};
use crate::support::{
    check_means, check_ring_means, contribute, deadline, each_rank, gradient, never, plan,
    run_step, specs, tensor, world_with, TEST_TIMEOUT,
};
use gradlane_engine::{
    Cutoff, Entry, Input, JobResult, Journal, StragglerPolicy, Strategy, Synchrony, Update,
};
use gradlane_units::{Dtype, Priority, Step, TensorId};

const WORLD: u32 = 3;

fn journals(strategy: &'static str) -> Vec<Journal> {
    let tensors = vec![
        tensor("first", 40_000, Dtype::F32),
        tensor("second", 25_000, Dtype::F32),
        tensor("last", 90_000, Dtype::F32),
    ];
    let plan = plan(tensors, strategy, 10_000, WORLD);
    let channels = world_with("127.0.0.1", WORLD, &plan, |options| {
        options.journal = true;
        options.frame_bytes = 7_000;
        options.credit_bytes = 7_000;
    });
    let journals = each_rank(channels, move |channel| {
        for step in 0..5 {
            if step == 2 && channel.rank().0 == 0 {
                let order = vec![Priority(-2), Priority(0), Priority(-1)];
                channel.switch_priorities(&order).expect("a switch");
            }
            let tensors = run_step(&channel, step).expect("a step");
            if strategy == "ring" {
                check_ring_means(channel.plan(), step, &tensors);
            } else {
                check_means(WORLD, step, &specs(&channel), &tensors);
            }
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        channel.take_journals()
    });
    journals.into_iter().flatten().collect()
}

fn conforms(strategy: &'static str) {
    let journals = journals(strategy);
    let count = |wanted: fn(&&Entry) -> bool| {
        journals.iter().flat_map(Journal::entries).filter(wanted).count()
    };
    // Three tensors, five steps: each is reduced once and leaves its owner and its workers.
    assert!(count(|it| matches!(it, Entry::Job(Some(_)))) >= 15);
    assert!(count(|it| matches!(it, Entry::Transmit(Some(_)))) >= 15 * 4);
    for journal in &journals {
        journal.replay().unwrap_or_else(|divergence| panic!("{strategy}: {divergence}"));
    }
}

#[test]
fn a_replay_of_p3_decides_the_same() {
    conforms("p3");
}

#[test]
fn a_replay_of_slicing_decides_the_same() {
    conforms("slicing");
}

#[test]
fn a_replay_of_kvstore_decides_the_same() {
    conforms("kvstore");
}

#[test]
fn a_replay_of_deferred_pull_decides_the_same() {
    conforms("deferred-pull");
}

#[test]
fn a_replay_of_ring_decides_the_same() {
    conforms("ring");
}

#[test]
fn a_replay_of_encoded_tensors_decides_the_same() {
    let tensors = vec![tensor("first", 40_000, Dtype::F32), tensor("last", 90_000, Dtype::F32)];
    let codec = "qsgd:bits=4,residual=on";
    let plan = plan_encoded(tensors, codec, "p3", 10_000, WORLD, Update::Worker);
    let channels = world_with("127.0.0.1", WORLD, &plan, |options| {
        options.journal = true;
        options.frame_bytes = 2_000;
        options.credit_bytes = 2_000;
        options.encoded_ahead = 1;
    });
    let journals = each_rank(channels, |channel| {
        for step in 0..4 {
            run_step(&channel, step).expect("a step");
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        channel.take_journals()
    });
    for of_rank in journals {
        let encoded = of_rank.iter().flat_map(Journal::entries);
        let encoded = encoded
            .filter(|it| matches!(it, Entry::Input(Input::JobDone(_, JobResult::Encoded(_)), _)));
        // Fifteen slices of at most 19 buckets, three steps: contributions, and the five it owns.
        assert_eq!(encoded.count(), 3 * (15 + 5));
        replay(&of_rank);
    }
}

#[test]
fn a_replay_of_steps_that_leave_an_encoding_rank_out_decides_the_same() {
    let tensors = vec![tensor("first", 40_000, Dtype::F32), tensor("last", 90_000, Dtype::F32)];
    let strategy = Strategy::named("p3", Some(10_000), 7).expect("p3");
    let close = Cutoff::Backup { ranks: 1 };
    let ready = Synchrony::BackupWorkers(StragglerPolicy { cutoff: close, ahead_steps: 2 });
    let codec = "qsgd:bits=4,residual=on";
    let strategy = Strategy { synchrony: ready, ..strategy };
    let plan = plan_encoded_by(tensors, codec, strategy, WORLD, Update::Worker);
    let channels = world_with("127.0.0.1", WORLD, &plan, |options| {
        options.journal = true;
        options.frame_bytes = 2_000;
        options.credit_bytes = 2_000;
    });
    let journals = each_rank(channels, |channel| {
        run_step(&channel, 0).expect("step 0");
        for step in 1..=5_u64 {
            let number = Step(step);
            let begun = match step {
                3 => channel.step_barrier(number),
                _ => channel.step_begin(number),
            };
            begun.expect("a step");
            let late = channel.rank().0 == 2 && step != 3;
            let specs = specs(&channel);
            let gradients = specs.iter().enumerate();
            let mut memory: Vec<_> = gradients
                .map(|(index, spec)| gradient(channel.rank().0, step, index, spec))
                .collect();
            for index in [1, 0] {
                if late && index == 0 {
                    channel.wait_decided(number, &mut deadline()).expect("a decision");
                }
                let lent = memory[index].memory();
                channel.gradient_ready(TensorId(index as u32), number, lent).expect("a gradient");
            }
            channel.step_end(number).expect("the end");
            channel.wait_step(number, &mut deadline()).expect("a result");
            assert_eq!(channel.participation(number).participated, Some(!late));
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        channel.take_journals()
    });
    for of_rank in journals {
        let gathered = of_rank
            .iter()
            .flat_map(Journal::entries)
            .filter(|it| matches!(it, Entry::Input(Input::StepBarrier(_), _)));
        assert_eq!(gathered.count(), 1);
        replay(&of_rank);
    }
}

#[test]
fn a_replay_notices_an_input_that_is_missing() {
    let journal = journals("p3").remove(1);
    let mut decided = journal.entries().iter().enumerate().filter(|(_, entry)| match entry {
        Entry::Input(input, _) => {
            matches!(input, Input::Frame(..) | Input::JobDone(..) | Input::GradientReady(..))
        }
        _ => false,
    });
    let (entry, _) = decided.nth(20).expect("a run of many frames");
    assert!(journal.without(entry).replay().is_err());
}

#[test]
fn the_end_of_a_failed_session_is_replayed_too() {
    let plan = plan(vec![tensor("only", 50_000, Dtype::F32)], "p3", 10_000, WORLD);
    let channels = world_with("127.0.0.1", WORLD, &plan, |options| options.journal = true);
    let journals = each_rank(channels, |channel| {
        // Rank 2 may give up before another rank has all of its initial values.
        let _values = run_step(&channel, 0);
        if channel.rank().0 == 2 {
            channel.abort("this rank has had enough");
        } else if let Ok(_memory) = contribute(&channel, 1) {
            let ended = channel.wait_step(Step(1), &mut deadline());
            assert!(ended.is_err(), "rank 2 never contributed");
        }
        assert!(channel.failure().is_some());
        channel.take_journals()
    });
    for of_rank in journals {
        replay(&of_rank);
    }
}

fn replay(journals: &[Journal]) {
    for journal in journals {
        journal.replay().unwrap_or_else(|divergence| panic!("{divergence}"));
    }
}
