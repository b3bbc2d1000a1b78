//! Training goes on when ranks are lost: clusters whose ranks are killed, stopped and cut off from each other
//! at any moment, in virtual time. Whatever is lost and when, those that are left finish every step with
//! the same bits, and each mean is over one membership.
//!
//! `GRADLANE_SWARM=1000000` runs as many seeds (`make swarm`), `GRADLANE_SWARM_FIRST=N` begins with seed N;
//! a failure prints its own.

mod news;
mod world;

use gradlane_units::Rng;
use std::ops::Range;
use world::{Fault, Setting, World};

/// Chooses the form that a drawn cluster's tensors are sent in, by the seed.
type Form = fn(Setting, u64) -> Setting;

/// A number from the environment.
fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|it| it.parse().ok())
}

/// The seeds of a swarm that has usually so many.
fn seeds(usual: u64) -> Range<u64> {
    let first = number("GRADLANE_SWARM_FIRST").unwrap_or(0);
    first..first + number("GRADLANE_SWARM").unwrap_or(usual)
}

/// Runs clusters with drawn faults; tensors are sent in the form that `form` chooses.
fn swarm(form: Form) {
    for seed in seeds(1_500) {
        World::with_drawn_faults(&form(Setting::drawn(seed), seed), seed).run_and_check(seed);
        if seed % 100_000 == 99_999 {
            eprintln!("{} seeds", seed + 1);
        }
    }
}

/// Kills each rank at every moment, or at every seventeenth.
fn kills(setting: &Setting) {
    let mut world = World::new(setting, 1);
    world.run();
    world.check(1);
    let actions = world.actions();
    let stride = if number("GRADLANE_SWARM").is_some() { 1 } else { 17 };
    for rank in 0..setting.ranks {
        for action in (u64::from(rank)..actions).step_by(stride) {
            let mut world = World::new(setting, 1);
            world.plan_fault(action, Fault::Kill(rank));
            world.run();
            world.check(action);
        }
    }
}

/// Whether a canary is found.
fn finds(canary: fn(&mut World), form: Form) -> bool {
    (0..1_000).any(|seed| {
        let run = || {
            let setting = form(Setting::drawn(seed), seed);
            let mut world = World::with_drawn_faults(&setting, seed);
            canary(&mut world);
            world.run_and_check(seed);
        };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err()
    })
}

fn as_it_is(setting: Setting, _: u64) -> Setting {
    setting
}

/// In one lane or in several.
fn some_lanes(setting: Setting, seed: u64) -> Setting {
    if seed.is_multiple_of(2) {
        setting
    } else {
        setting.with_lanes(seed)
    }
}

/// As any of the others, in several lanes.
fn in_lanes(setting: Setting, seed: u64) -> Setting {
    let forms: [Form; 4] = [as_it_is, Setting::encoded, Setting::with_rings, encoded_rings];
    forms[(seed % 4) as usize](setting, seed).with_lanes(seed)
}

fn encoded_rings(setting: Setting, seed: u64) -> Setting {
    setting.encoded(seed).with_rings(seed)
}

#[test]
fn nothing_is_lost_when_nothing_fails() {
    for seed in 0..20 {
        let forms: [Form; 5] =
            [as_it_is, Setting::encoded, Setting::with_rings, encoded_rings, in_lanes];
        for setting in forms.map(|form| form(Setting::drawn(seed), seed)) {
            let mut world = World::new(&setting, seed);
            world.run();
            world.check(seed);
            assert!(world.memberships(0).len() == 1, "seed {seed}");
        }
    }
}

#[test]
fn swarm_of_faults() {
    swarm(as_it_is);
}

#[test]
fn swarm_of_faults_with_codecs() {
    swarm(Setting::encoded);
}

#[test]
fn swarm_of_faults_round_rings() {
    swarm(Setting::with_rings);
}

#[test]
fn swarm_of_faults_round_rings_with_codecs() {
    swarm(encoded_rings);
}

#[test]
fn swarm_of_faults_in_lanes() {
    swarm(in_lanes);
}

/// Seeds beyond those of each run: a rank that all others had left was asked to agree, and found no majority;
/// a link was cut in the last step, and the rank with its results left; the only rank with them was killed.
#[test]
fn seeds_that_found_faults() {
    let found: [(Form, u64); 5] = [
        (Setting::encoded, 25_470),
        (Setting::encoded, 141_841),
        (as_it_is, 93_778),
        (Setting::with_rings, 26_016),
        (encoded_rings, 10_235),
    ];
    for (form, seed) in found {
        World::with_drawn_faults(&form(Setting::drawn(seed), seed), seed).run_and_check(seed);
    }
}

/// Rank 0 is killed, stands still or gives up while its values spread, perhaps with the store.
#[test]
fn swarm_of_starts_without_rank_0() {
    for seed in seeds(1_000) {
        let drawn = some_lanes(Setting::drawn(seed), seed);
        let sizes = drawn.sizes.iter().map(|size| 4 * size).collect();
        let setting = Setting { sizes, steps: 1, ..drawn };
        let mut rng = Rng::new(seed ^ 0x5742);
        let at = u64::from(rng.below(1_500));
        let fault = [Fault::Kill(0), Fault::Stop(0), Fault::GiveUp(0)][rng.below(3) as usize];
        let mut world = World::new(&setting, seed);
        if rng.below(3) == 0 {
            world.lose_store();
        }
        world.plan_fault(at, fault);
        world.run();
        world.check_start(seed);
    }
}

/// From some moment on everything that one rank sends of slices is corrupted.
#[test]
fn swarm_of_ranks_that_send_corrupted_payloads() {
    for seed in seeds(1_000) {
        let mut rng = Rng::new(seed ^ 0x5b01);
        let drawn = some_lanes(Setting::drawn(seed), seed);
        let sizes = drawn.sizes.iter().map(|size| 8 + size).collect();
        let setting = Setting { sizes, ranks: 4 + rng.below(3), steps: 5, ..drawn };
        let spoiled = rng.below(setting.ranks);
        let mut world = World::new(&setting, seed);
        world.plan_fault(u64::from(300 + rng.below(1_000)), Fault::Spoil(spoiled));
        world.run();
        world.check_spoiled(seed, spoiled);
    }
}

#[test]
fn every_moment_at_which_any_rank_can_die() {
    kills(&Setting::small());
}

#[test]
fn every_moment_at_which_any_rank_with_lanes_can_die() {
    kills(&Setting { lanes: 2, ..Setting::small() });
}

#[test]
fn every_moment_at_which_any_rank_can_die_with_codecs() {
    kills(&Setting::small().with_codec(1, true, false));
    kills(&Setting::small().with_codec(2, false, true));
}

#[test]
fn every_moment_at_which_any_rank_of_a_ring_can_die() {
    for ranks in [2, 3, 4] {
        let ring = Setting { ranks, rings: Some(1), ..Setting::small() };
        kills(&ring);
        kills(&ring.with_codec(1, true, false));
    }
}

#[test]
fn a_network_that_mixes_memberships_is_found() {
    assert!(finds(World::mix_memberships, as_it_is), "an old membership's frames were taken");
}

#[test]
fn a_network_that_mixes_memberships_is_found_with_codecs() {
    let found = finds(World::mix_memberships, Setting::encoded);
    assert!(found, "an old membership's frames were taken");
}

#[test]
fn a_network_that_mixes_memberships_is_found_round_rings() {
    let found = finds(World::mix_memberships, Setting::with_rings);
    assert!(found, "an old membership's frames were taken");
}

#[test]
fn a_network_that_mixes_memberships_is_found_in_lanes() {
    assert!(finds(World::mix_memberships, in_lanes), "an old membership's frames were taken");
}

#[test]
fn a_result_of_a_ring_that_is_not_spread_is_found() {
    let found = finds(World::hide_results, Setting::with_rings);
    assert!(found, "a result that some had was made again");
}
