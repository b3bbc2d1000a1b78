//! Random accidents in virtual time. `GRADLANE_SWARM=1000000 cargo test --release -p gradlane-engine
//! membership::tests::swarm` runs as many seeds; `GRADLANE_SWARM_FIRST=N` begins with seed N.

use super::cluster::{Accident, Cluster, Conditions, InFlight, ANSWER, COLLECT, MS, SILENCE};
use super::Fault;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use gradlane_units::Rng;
use std::panic::{catch_unwind, AssertUnwindSafe};

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|it| it.parse().ok()).unwrap_or(default)
}

struct Dice(Rng);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.next_u64() % bound
    }

    fn rank(&mut self, world: u32) -> u32 {
        self.0.below(world)
    }

    fn pair(&mut self, world: u32) -> (u32, u32) {
        let one = self.rank(world);
        (one, (one + 1 + self.rank(world - 1)) % world)
    }
}

fn cut_both(cluster: &mut Cluster, at: u64, (one, other): (u32, u32)) {
    cluster.plan(at, Accident::Cut(one, other));
    cluster.plan(at, Accident::Cut(other, one));
}

/// Runs one seed.
fn run(seed: u64, fault: Fault) {
    let mut dice = Dice(Rng::new(seed));
    let world = [2, 3, 3, 4, 4, 4, 5, 5, 6, 6, 7, 8][dice.below(12) as usize];
    let mut conditions = Conditions { fault, ..Conditions::new(world) };
    if dice.below(4) == 0 {
        conditions.min_ranks = 1 + dice.rank(world);
    }
    conditions.in_flight = match dice.below(4) {
        0 => InFlight::Arrive,
        1 => InFlight::AreLost,
        _ => InFlight::Some,
    };
    conditions.delay_max = [MS / 10, 5 * MS, 20 * MS][dice.below(3) as usize];
    conditions.has_store = dice.below(8) > 0;
    match dice.below(8) {
        0 => halves(&mut dice, conditions, seed),
        1 => kills(&mut dice, conditions, seed),
        2 => one_cut_link(&mut dice, conditions, seed),
        3 => partition(&mut dice, conditions, seed),
        _ => anything(&mut dice, conditions, seed),
    }
}

/// Ranks die at random events, and in the middle of telling others: those that are left go on.
fn kills(dice: &mut Dice, conditions: Conditions, seed: u64) {
    let world = conditions.world;
    let mut cluster = Cluster::new(conditions, seed);
    let first = dice.rank(world);
    let mut killed = BTreeSet::from([first]);
    cluster.plan(dice.below(10 * MS), Accident::Kill(first));
    for _ in 0..dice.rank(world) {
        let rank = dice.rank(world);
        killed.insert(rank);
        match dice.below(3) {
            0 => {
                cluster.kills.insert(1 + dice.rank(150), rank);
            }
            1 => cluster.plan(dice.below(100 * MS), Accident::Kill(rank)),
            _ => cluster.plan(dice.below(1000 * MS), Accident::Crash(rank)),
        }
    }
    cluster.run();
    cluster.check_end();
    let alive: Vec<u32> =
        (0..world).filter(|&rank| !cluster.nodes[rank as usize].is_dead).collect();
    let (count, conditions) = (alive.len() as u32, &cluster.conditions);
    if count < conditions.min_ranks {
        assert_eq!(cluster.going_on(), [], "fewer than {}", conditions.min_ranks);
    } else if 2 * count > world || (2 * count == world && conditions.has_store) {
        assert_eq!(cluster.going_on(), alive, "killed {killed:?}");
    }
}

/// One pair of ranks is cut off from each other: the higher one leaves, and the link is named.
fn one_cut_link(dice: &mut Dice, conditions: Conditions, seed: u64) {
    let world = conditions.world;
    let min_ranks = conditions.min_ranks;
    let mut cluster = Cluster::new(conditions, seed);
    let (one, other) = dice.pair(world);
    let at = dice.below(10 * MS);
    if dice.below(3) == 0 {
        cluster.plan(at, Accident::Cut(one, other));
    } else {
        cut_both(&mut cluster, at, (one, other));
    }
    cluster.run();
    cluster.check_end();
    let (low, high) = (one.min(other), one.max(other));
    let rest: Vec<u32> = (0..world).filter(|&rank| rank != high).collect();
    if min_ranks == world {
        assert_eq!(cluster.going_on(), []);
    } else if world == 2 {
        assert_eq!(cluster.going_on().len(), usize::from(cluster.conditions.has_store));
    } else {
        assert_eq!(cluster.going_on(), rest);
        let (_, reason) = &cluster.decided[&1];
        let link = alloc::format!("the link between rank {low} and rank {high} is cut");
        assert!(reason.starts_with(&link) && !reason.contains(';'), "{reason}");
        let told = cluster.nodes[high as usize].ended.as_deref().unwrap_or_default();
        assert!(told.contains("go on without") && told.contains(&link), "{told}");
    }
}

/// The world falls apart into groups: the one with a majority goes on, or one of two halves.
fn partition(dice: &mut Dice, conditions: Conditions, seed: u64) {
    let world = conditions.world;
    let groups = 2 + u64::from(dice.below(4) == 0);
    let mut group: Vec<u64> = (0..world).map(|_| dice.below(groups)).collect();
    if world.is_multiple_of(2) && dice.below(2) == 0 {
        // Even splits are rare by themselves.
        (0..world).for_each(|rank| group[rank as usize] = 0);
        while 2 * group.iter().filter(|&&it| it == 1).count() < world as usize {
            group[dice.rank(world) as usize] = 1;
        }
    }
    let mut conditions = conditions;
    conditions.jitter = [1, 20 * MS, 300 * MS][dice.below(3) as usize];
    let mut cluster = Cluster::new(conditions, seed);
    let at = dice.below(10 * MS);
    for one in 0..world {
        for other in (0..one).filter(|&other| group[one as usize] != group[other as usize]) {
            cut_both(&mut cluster, at, (one, other));
        }
    }
    cluster.run();
    cluster.check_end();
    let members =
        |it: u64| -> Vec<u32> { (0..world).filter(|&rank| group[rank as usize] == it).collect() };
    let all: Vec<Vec<u32>> = (0..groups).map(members).collect();
    let largest = all.iter().map(Vec::len).max().unwrap_or(0) as u32;
    let going_on = cluster.going_on();
    let conditions = &cluster.conditions;
    if largest < conditions.min_ranks || 2 * largest < world {
        assert_eq!(going_on, [], "groups {group:?}");
    } else if 2 * largest > world || conditions.has_store {
        let is_largest = going_on.len() as u32 == largest && all.contains(&going_on);
        assert!(is_largest, "{going_on:?} of groups {group:?}");
    } else {
        assert_eq!(going_on, [], "groups {group:?} without a store");
    }
}

/// Two halves that do not hear each other for a while, and a store that is slow.
fn halves(dice: &mut Dice, mut conditions: Conditions, seed: u64) {
    let world = [4, 4, 4, 6][dice.below(4) as usize];
    let store_delay_max = [300 * MS, 1_000 * MS][dice.below(2) as usize];
    conditions = Conditions { world, min_ranks: 1, store_delay_max, ..conditions };
    let mut cluster = Cluster::new(conditions, seed);
    cluster.plan(0, Accident::Reset(dice.rank(world / 2), world / 2 + dice.rank(world / 2)));
    for one in 0..world {
        for other in (0..world).filter(|&other| other != one) {
            let is_across = (one < world / 2) != (other < world / 2);
            if is_across {
                let span = SILENCE - 1 - dice.below(200 * MS);
                cluster.plan(0, Accident::Stall(one, other, span));
            } else if dice.below(8) == 0 {
                cluster.plan(dice.below(SILENCE), Accident::Stall(one, other, dice.below(SILENCE)));
            }
        }
    }
    cluster.run();
    cluster.check_end();
}

/// Anything at any time: nobody goes on with others than all think, and nobody waits for ever.
fn anything(dice: &mut Dice, mut conditions: Conditions, seed: u64) {
    let world = conditions.world;
    conditions.jitter = [1, 20 * MS, 300 * MS][dice.below(3) as usize];
    if dice.below(6) == 0 {
        conditions.delay_max = 150 * MS;
    }
    let span = [20 * MS, SILENCE + 2 * COLLECT, 2 * SILENCE + 6 * ANSWER][dice.below(3) as usize];
    let mut cluster = Cluster::new(conditions, seed);
    for _ in 0..1 + dice.below(5) {
        let (at, rank, pair) = (dice.below(span), dice.rank(world), dice.pair(world));
        match dice.below(9) {
            0 => cluster.plan(at, Accident::Kill(rank)),
            1 => cluster.plan(at, Accident::Crash(rank)),
            2 => {
                cluster.kills.insert(1 + dice.rank(200), rank);
            }
            3 => cluster.plan(at, Accident::Pause(rank, dice.below(4 * SILENCE))),
            4 => cut_both(&mut cluster, at, pair),
            5 => cluster.plan(at, Accident::Cut(pair.0, pair.1)),
            6 => cluster.plan(at, Accident::Reset(pair.0, pair.1)),
            7 => cluster.plan(at, Accident::Stall(pair.0, pair.1, dice.below(2 * SILENCE))),
            _ => {
                let group: u64 = dice.below(1 << world);
                let side = |rank: u32| group >> rank & 1;
                for one in 0..world {
                    for other in (0..one).filter(|&other| side(one) != side(other)) {
                        cut_both(&mut cluster, at, (one, other));
                    }
                }
            }
        }
    }
    cluster.run();
    cluster.check_end();
}

#[test]
fn no_accident_leads_to_two_memberships_or_a_wait_without_end() {
    let first = number("GRADLANE_SWARM_FIRST", 0);
    let seeds = number("GRADLANE_SWARM", 2_000);
    for seed in first..first + seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed, Fault::None))) {
            std::eprintln!(
                "seed {seed}: GRADLANE_SWARM_FIRST={seed} GRADLANE_SWARM=1 runs it alone"
            );
            std::panic::resume_unwind(panic);
        }
    }
}

/// Whether a thousand seeds find a mistake.
fn is_found(run: impl Fn(u64)) -> bool {
    (0..1_000).any(|seed| catch_unwind(AssertUnwindSafe(|| run(seed))).is_err())
}

#[test]
fn finds_halves_that_decide() {
    assert!(is_found(|seed| run(seed, Fault::HalfDecides)));
}

#[test]
fn finds_decisions_that_are_not_passed_on() {
    assert!(is_found(|seed| run(seed, Fault::NoForward)));
}

#[test]
fn finds_majorities_without_regard_to_halves() {
    let conditions = Conditions { fault: Fault::NoMark, ..Conditions::new(4) };
    assert!(is_found(|seed| halves(&mut Dice(Rng::new(seed)), conditions.clone(), seed)));
}
