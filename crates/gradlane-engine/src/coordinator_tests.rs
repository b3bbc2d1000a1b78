//! Who is in, by hand.

use super::*;

fn members(set: &RankSet) -> Vec<u32> {
    set.iter().map(|rank| rank.0).collect()
}

fn coordinator(close: Close, ahead_steps: u32, world_size: u32) -> Coordinator {
    Coordinator::new(SetRule { close, ahead_steps }, world_size)
}

fn begin(it: &mut Coordinator, ranks: &[u32], step: u64) {
    for &rank in ranks {
        it.begun(Rank(rank), Step(step), false).expect("a rank that begins");
    }
}

fn complete(it: &mut Coordinator, rank: u32, step: u64, at: u64) -> Option<Duration> {
    it.completed(Rank(rank), Step(step), Time(at)).expect("a rank that is complete")
}

#[test]
fn backup_takes_the_first_and_tells_how_late_the_others_are() {
    let mut it = coordinator(Close::Backup { ranks: 1 }, 2, 3);
    begin(&mut it, &[0, 1, 2], 1);
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
    let mut it = coordinator(Close::Backup { ranks: 1 }, 2, 3);
    begin(&mut it, &[2], 1);
    for step in 1..=3 {
        begin(&mut it, &[0, 1], step);
        complete(&mut it, 0, step, step);
        complete(&mut it, 1, step, step);
        assert!(it.decide(Time(step)).is_some(), "step {step}");
    }
    begin(&mut it, &[0, 1], 4);
    complete(&mut it, 0, 4, 9);
    complete(&mut it, 1, 4, 9);
    assert!(it.decide(Time(9)).is_none(), "rank 2 is in step 1, and 4 would be 3 ahead");
    assert_eq!(members(&it.awaited()), [2]);
    begin(&mut it, &[2], 2);
    assert_eq!(it.decide(Time(9)).map(|(step, _)| step), Some(Step(4)));
}

#[test]
fn deadlines_follow_from_the_last_steps_and_late_ranks_are_waited_for_once() {
    let mut it = coordinator(Close::Deadline { percent: 125 }, 4, 3);
    let mut now = 0;
    for step in 1..=7 {
        begin(&mut it, &[0, 1, 2], step);
        now += 100;
        for rank in 0..3 {
            assert!(it.decide(Time(now)).is_none());
            complete(&mut it, rank, step, now);
        }
        assert!(it.decide(Time(now)).is_some());
    }
    begin(&mut it, &[0, 1, 2], 8);
    assert_eq!(it.poll_timeout(), None, "nobody is complete");
    complete(&mut it, 0, 8, now + 90);
    complete(&mut it, 2, 8, now + 95);
    assert_eq!(it.poll_timeout(), Some(Time(now + 125)));
    assert!(it.decide(Time(now + 124)).is_none());
    let (_, set) = it.decide(Time(now + 125)).expect("a decision");
    assert_eq!(members(&set), [0, 2]);
    // Rank 1 has not come to step 9: it is not waited for again.
    begin(&mut it, &[0, 2], 9);
    complete(&mut it, 0, 9, now + 200);
    assert!(it.decide(Time(now + 200)).is_none());
    complete(&mut it, 2, 9, now + 201);
    assert_eq!(it.decide(Time(now + 201)).map(|(step, _)| step), Some(Step(9)));
}

#[test]
fn who_was_in_cannot_pass_and_nobody_skips_or_repeats() {
    let mut it = coordinator(Close::Backup { ranks: 1 }, 2, 3);
    assert!(it.begun(Rank(0), Step(2), false).is_err());
    assert!(it.begun(Rank(0), Step(1), true).is_err(), "nobody was left out yet");
    begin(&mut it, &[0, 1, 2], 1);
    assert!(it.completed(Rank(0), Step(2), Time(0)).is_err());
    complete(&mut it, 0, 1, 1);
    assert!(it.completed(Rank(0), Step(1), Time(0)).is_err());
    complete(&mut it, 1, 1, 1);
    it.decide(Time(1)).expect("a decision");
    assert!(it.begun(Rank(0), Step(2), true).is_err(), "it is needed");
    assert!(it.begun(Rank(2), Step(2), true).is_ok());
    assert!(it.completed(Rank(2), Step(2), Time(2)).is_err(), "it passes");
}
