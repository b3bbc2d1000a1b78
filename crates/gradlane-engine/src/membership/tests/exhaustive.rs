//! Every point at which a second rank, and a third one, can die while ranks agree.

use super::cluster::{Accident, Cluster, Conditions, InFlight, MS};
use alloc::vec::Vec;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// Runs a cluster in which ranks die at these events; returns how many events there were.
fn run(conditions: &Conditions, first: &Accident, kills: &[(u32, u32)]) -> u32 {
    let mut cluster = Cluster::new(conditions.clone(), 7);
    cluster.plan(MS, *first);
    if let Accident::Cut(one, other) = *first {
        cluster.plan(MS, Accident::Cut(other, one));
    }
    cluster.kills.extend(kills.iter().copied());
    cluster.run();
    cluster.check_end();
    let alive: Vec<u32> =
        (0..conditions.world).filter(|&rank| !cluster.nodes[rank as usize].is_dead).collect();
    let is_kill = matches!(first, Accident::Kill(_));
    if is_kill && 2 * alive.len() >= conditions.world as usize {
        assert_eq!(cluster.going_on(), alive, "enough are left");
    }
    cluster.ticks
}

/// Kills each rank at each event, and so on, `depth` times; returns the number of runs.
fn kill_everywhere(
    conditions: &Conditions,
    first: &Accident,
    kills: &mut Vec<(u32, u32)>,
    depth: u32,
) -> u32 {
    let ran = catch_unwind(AssertUnwindSafe(|| run(conditions, first, kills)));
    let events = ran.unwrap_or_else(|panic| {
        std::eprintln!("{first:?}, then (event, rank) {kills:?}, {conditions:?}");
        std::panic::resume_unwind(panic);
    });
    let mut runs = 1;
    let begin = kills.last().map_or(1, |&(event, _)| event + 1);
    let is_left = |rank: &u32| {
        kills.iter().all(|(_, killed)| killed != rank)
            && !matches!(first, Accident::Kill(killed) if killed == rank)
    };
    let left: Vec<u32> = (0..conditions.world).filter(is_left).collect();
    if depth == 0 {
        return runs;
    }
    for event in begin..=events {
        for &rank in &left {
            kills.push((event, rank));
            runs += kill_everywhere(conditions, first, kills, depth - 1);
            kills.pop();
        }
    }
    runs
}

fn everywhere(world: u32, depth: u32) -> u32 {
    let mut runs = 0;
    for in_flight in [InFlight::Arrive, InFlight::AreLost] {
        let conditions = Conditions { in_flight, ..Conditions::new(world) };
        for rank in 0..world {
            runs += kill_everywhere(&conditions, &Accident::Kill(rank), &mut Vec::new(), depth);
            let cut = Accident::Cut(rank, (rank + 1) % world);
            runs += kill_everywhere(&conditions, &cut, &mut Vec::new(), depth.min(1));
        }
    }
    runs
}

#[test]
fn all_of_three_die_at_any_two_events() {
    let runs = everywhere(3, 2);
    assert!(runs > 1_000, "{runs} runs");
}

/// With `GRADLANE_SWARM_DEPTH=2`, three of four: minutes.
#[test]
fn two_of_four_die_at_any_event() {
    let depth = std::env::var("GRADLANE_SWARM_DEPTH").ok().and_then(|it| it.parse().ok());
    let runs = everywhere(4, depth.unwrap_or(1));
    assert!(runs > 100, "{runs} runs");
}
