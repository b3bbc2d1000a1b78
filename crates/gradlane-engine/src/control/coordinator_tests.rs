//! Decisions, computed by hand.

use super::*;

fn members(set: &RankSet) -> Vec<u32> {
    set.iter().map(|rank| rank.0).collect()
}

fn coordinator(cutoff: Cutoff, ahead_steps: u32, world_size: u32) -> Coordinator {
    Coordinator::new(StragglerPolicy { cutoff, ahead_steps }, world_size)
}

fn begin(it: &mut Coordinator, ranks: &[u32], step: u64, at: u64) {
    for &rank in ranks {
        it.begun(Rank(rank), Step(step), StepEntry::Train, Time(at)).expect("a rank that begins");
    }
}

fn complete(it: &mut Coordinator, rank: u32, step: u64, at: u64) -> Option<Duration> {
    it.completed(Rank(rank), Step(step), Time(at)).expect("a rank that is complete")
}

#[test]
fn backup_takes_the_first_and_tells_how_late_the_others_are() {
    let mut it = coordinator(Cutoff::Backup { ranks: 1 }, 2, 3);
    begin(&mut it, &[0, 1, 2], 1, 0);
    complete(&mut it, 2, 1, 10);
    assert!(it.decide(Time(10)).is_none());
    assert_eq!(members(&it.awaited()), [0, 1]);
    complete(&mut it, 0, 1, 20);
    let (step, set) = it.decide(Time(20)).expect("a decision");
    assert_eq!((step, members(&set)), (Step(1), alloc::vec![0, 2]));
    assert_eq!(complete(&mut it, 1, 1, 27), Some(Duration::from_nanos(7)));
}

#[test]
fn a_rank_that_is_behind_holds_the_others_back() {
    let mut it = coordinator(Cutoff::Backup { ranks: 1 }, 2, 3);
    begin(&mut it, &[2], 1, 0);
    for step in 1..=3 {
        begin(&mut it, &[0, 1], step, step);
        complete(&mut it, 0, step, step);
        complete(&mut it, 1, step, step);
        assert!(it.decide(Time(step)).is_some(), "step {step}");
    }
    begin(&mut it, &[0, 1], 4, 4);
    complete(&mut it, 0, 4, 9);
    complete(&mut it, 1, 4, 9);
    assert!(it.decide(Time(9)).is_none(), "rank 2 is in step 1, and 4 would be 3 ahead");
    assert_eq!(members(&it.awaited()), [2]);
    begin(&mut it, &[2], 2, 9);
    assert_eq!(it.decide(Time(9)).map(|(step, _)| step), Some(Step(4)));
}

#[test]
fn deadlines_follow_from_the_last_steps_and_late_ranks_are_waited_for_once() {
    let mut it = coordinator(Cutoff::Deadline { percent: 125 }, 4, 3);
    let mut now = 0;
    for step in 1..=7 {
        begin(&mut it, &[0, 1, 2], step, now);
        now += 100;
        for rank in 0..3 {
            assert!(it.decide(Time(now)).is_none());
            complete(&mut it, rank, step, now);
        }
        assert!(it.decide(Time(now)).is_some());
    }
    begin(&mut it, &[0, 1, 2], 8, now);
    assert_eq!(it.poll_timeout(), None, "nobody is complete");
    complete(&mut it, 0, 8, now + 90);
    complete(&mut it, 2, 8, now + 95);
    assert_eq!(it.poll_timeout(), Some(Time(now + 125)));
    assert!(it.decide(Time(now + 124)).is_none());
    let (_, set) = it.decide(Time(now + 125)).expect("a decision");
    assert_eq!(members(&set), [0, 2]);
    // Rank 1 has not come to step 9: it is not waited for again.
    begin(&mut it, &[0, 2], 9, now + 126);
    complete(&mut it, 0, 9, now + 200);
    assert!(it.decide(Time(now + 200)).is_none());
    complete(&mut it, 2, 9, now + 201);
    assert_eq!(it.decide(Time(now + 201)).map(|(step, _)| step), Some(Step(9)));
}

/// Steps of 100, in which ranks 0 and 1 are complete 2 before ranks 2 and 3.
fn steady(cutoff: Cutoff, steps: u64) -> (Coordinator, u64) {
    let mut it = coordinator(cutoff, 4, 4);
    let mut now = 0;
    for step in 1..=steps {
        begin(&mut it, &[0, 1, 2, 3], step, now + 30);
        now += 100;
        for (rank, at) in [(0, now - 3), (1, now - 2), (2, now), (3, now)] {
            complete(&mut it, rank, step, at);
        }
        assert!(it.decide(Time(now)).is_some());
    }
    (it, now)
}

#[test]
fn the_deadline_of_spread_runs_from_half_of_the_ranks_and_is_a_twentieth_at_least() {
    let (mut it, now) = steady(Cutoff::Adaptive, 7);
    begin(&mut it, &[0, 1, 2, 3], 8, now + 30);
    complete(&mut it, 0, 8, now + 140);
    assert_eq!(it.poll_timeout(), None, "one of four is not half");
    complete(&mut it, 1, 8, now + 150);
    // A long step for all: what counts is how far apart they are. Half take 98 from a decision.
    let due = now + 150 + 98 / 20;
    assert_eq!(it.poll_timeout(), Some(Time(due)));
    complete(&mut it, 2, 8, now + 151);
    assert!(it.decide(Time(due - 1)).is_none());
    let (_, set) = it.decide(Time(due)).expect("a decision");
    assert_eq!(members(&set), [0, 1, 2]);
}

#[test]
fn the_deadline_of_spread_is_later_where_ranks_or_steps_differ() {
    let mut it = coordinator(Cutoff::Adaptive, 4, 4);
    let mut now = 0;
    for step in 1..=7 {
        begin(&mut it, &[0, 1, 2, 3], step, now);
        let middle = now + 100 + 8 * (step % 3);
        now = middle + 10;
        for (rank, at) in [(0, middle - 6), (1, middle), (2, now - 5), (3, now)] {
            complete(&mut it, rank, step, at);
        }
        assert!(it.decide(Time(now)).is_some());
    }
    begin(&mut it, &[0, 1, 2, 3], 8, now);
    complete(&mut it, 0, 8, now + 104);
    complete(&mut it, 1, 8, now + 110);
    // Three times the deviation of 8 is more than twice the lead of 6.
    assert_eq!(it.poll_timeout(), Some(Time(now + 110 + 24)));
}

#[test]
fn who_begins_too_late_to_be_in_time_is_not_waited_for() {
    for close in [Cutoff::Adaptive, Cutoff::Deadline { percent: 110 }] {
        let (mut it, now) = steady(close, 7);
        begin(&mut it, &[0, 1, 2], 8, now + 30);
        begin(&mut it, &[3], 8, now + 60);
        complete(&mut it, 0, 8, now + 97);
        assert!(
            it.decide(Time(now + 97)).is_none(),
            "what is late is known with half of the ranks"
        );
        complete(&mut it, 1, 8, now + 98);
        assert!(it.decide(Time(now + 98)).is_none(), "rank 2 is in time");
        complete(&mut it, 2, 8, now + 100);
        let (_, set) = it.decide(Time(now + 100)).expect("a decision");
        assert_eq!(members(&set), [0, 1, 2]);
    }
}

#[test]
fn who_was_in_cannot_pass_and_nobody_skips_or_repeats() {
    let mut it = coordinator(Cutoff::Backup { ranks: 1 }, 2, 3);
    assert!(it.begun(Rank(0), Step(2), StepEntry::Train, Time(1)).is_err());
    assert!(
        it.begun(Rank(0), Step(1), StepEntry::Pass, Time(1)).is_err(),
        "nobody was left out yet"
    );
    begin(&mut it, &[0, 1, 2], 1, 0);
    assert!(it.completed(Rank(0), Step(2), Time(0)).is_err());
    complete(&mut it, 0, 1, 1);
    assert!(it.completed(Rank(0), Step(1), Time(0)).is_err());
    complete(&mut it, 1, 1, 1);
    it.decide(Time(1)).expect("a decision");
    assert!(it.begun(Rank(0), Step(2), StepEntry::Pass, Time(1)).is_err(), "it is needed");
    assert!(it.begun(Rank(2), Step(2), StepEntry::Pass, Time(1)).is_ok());
    assert!(it.completed(Rank(2), Step(2), Time(2)).is_err(), "it passes");
}

#[test]
fn nobody_is_left_out_of_a_step_that_gathers_all_and_it_says_nothing_of_steps() {
    for close in [Cutoff::Backup { ranks: 1 }, Cutoff::Adaptive, Cutoff::Deadline { percent: 110 }]
    {
        let mut it = coordinator(close, 4, 3);
        let mut now = 0;
        for step in 1..=8 {
            begin(&mut it, &[0, 1, 2], step, now);
            now += 100;
            for rank in 0..3 {
                complete(&mut it, rank, step, now);
            }
            assert!(it.decide(Time(now)).is_some());
        }
        let before = it.spans.median();
        for rank in 0..2 {
            it.begun(Rank(rank), Step(9), StepEntry::Barrier, Time(now))
                .expect("a rank that begins");
            complete(&mut it, rank, 9, now + 1);
        }
        assert!(it.decide(Time(now + 100_000)).is_none(), "{close:?}");
        assert_eq!(it.poll_timeout(), None, "no deadline wakes anybody");
        assert_eq!(members(&it.awaited()), [2]);
        it.begun(Rank(2), Step(9), StepEntry::Barrier, Time(now + 200_000)).expect("the last");
        complete(&mut it, 2, 9, now + 200_001);
        let (step, set) = it.decide(Time(now + 200_001)).expect("a decision");
        assert_eq!((step, members(&set)), (Step(9), alloc::vec![0, 1, 2]));
        assert_eq!(it.spans.median(), before);
    }
}

#[test]
fn ranks_that_gather_at_different_steps_are_told() {
    let mut it = coordinator(Cutoff::Backup { ranks: 1 }, 4, 3);
    begin(&mut it, &[0], 1, 0);
    let refused = it.begun(Rank(1), Step(1), StepEntry::Barrier, Time(1)).expect_err("a refusal").0;
    assert!(refused.contains("rank 1 gathers all ranks and rank 0 trains"), "{refused}");
    begin(&mut it, &[1], 1, 1);
    complete(&mut it, 0, 1, 2);
    complete(&mut it, 1, 1, 2);
    assert!(it.decide(Time(2)).is_some());
    let refused = it.begun(Rank(2), Step(1), StepEntry::Barrier, Time(3)).expect_err("a refusal").0;
    assert!(refused.contains("rank 2 gathers all ranks and rank 0 trains"), "{refused}");
    begin(&mut it, &[0, 1], 2, 3);
    let refused = it.begun(Rank(2), Step(1), StepEntry::Barrier, Time(4)).expect_err("a refusal").0;
    assert!(refused.contains("others have gone on"), "{refused}");
}
