//! Ports of other rates, slow links, racks, switches that add up, and several lanes, against
//! times that follow by hand.

use gradlane_sim::{
    simulate, Costs, Link, Network, PortRate, Profile, ProfiledTensor, Racks, Scenario,
};
use gradlane_units::Dtype;

const RATE_BPS: f64 = 1e9;

/// Equal tensors whose gradients all come at the end of a compute time that hardly counts.
fn burst() -> Profile {
    let tensor = |index: u64| ProfiledTensor {
        name: format!("layer{index}.weight"),
        numel: 250_000,
        dtype: Dtype::F32,
        need_s: 0.0,
        ready_s: 0.001,
    };
    Profile { tensors: (0..48).map(tensor).collect(), forward_s: 0.0005, compute_s: 0.001 }
}

fn free(workers: u32, strategy: &str) -> Scenario {
    let network = Network { goodput_share: 1.0, share_spread: 0.0, ..Network::new(RATE_BPS) };
    let mut scenario = Scenario::new(burst(), workers, strategy, network);
    scenario.costs = Costs::FREE;
    scenario
}

fn step_s(scenario: &Scenario) -> f64 {
    simulate(scenario).expect("a run").report.step_s
}

/// Seconds of the burst's bytes at a rate.
fn travels_s(share: f64, rate_bps: f64) -> f64 {
    48e6 * 8.0 * share / rate_bps
}

#[track_caller]
fn assert_about(found: f64, expected: f64) {
    assert!((0.98..1.12).contains(&(found / expected)), "{found} s, by hand {expected} s");
}

#[test]
fn paths_that_are_the_networks_own_change_nothing() {
    let mut scenario = free(4, "p3");
    let plain = simulate(&scenario).expect("a run").report;
    scenario.paths.ports.push(PortRate { machine: 2, rate_bps: RATE_BPS });
    let same = simulate(&scenario).expect("a run").report;
    assert_eq!(format!("{plain:?}"), format!("{same:?}"));
    scenario.paths.links.push(Link { between: (0, 2), rate_bps: 1e15 });
    scenario.paths.racks = Some(Racks { machines: 2, uplink_bps: 1e15 });
    let wide = simulate(&scenario).expect("a run").report;
    assert!((wide.step_s / plain.step_s - 1.0).abs() < 0.01, "{} {}", wide.step_s, plain.step_s);
}

#[test]
fn the_slowest_port_sets_the_pace() {
    for slow_bps in [5e8, 2.5e8] {
        let mut scenario = free(4, "p3");
        scenario.paths.ports.push(PortRate { machine: 3, rate_bps: slow_bps });
        assert_about(step_s(&scenario), travels_s(1.5, slow_bps));
    }
}

#[test]
fn a_link_carries_two_shares_of_what_its_machines_exchange() {
    // A quarter is pushed over it and a quarter comes back, in each direction.
    for slow_bps in [1e8, 5e7] {
        let mut scenario = free(4, "p3");
        scenario.paths.links.push(Link { between: (2, 0), rate_bps: slow_bps });
        assert_about(step_s(&scenario), travels_s(0.5, slow_bps));
    }
    // It is as wide as the ports.
    let mut scenario = free(4, "p3");
    scenario.paths.links.push(Link { between: (0, 2), rate_bps: RATE_BPS });
    assert_about(step_s(&scenario), travels_s(1.5, RATE_BPS));
}

#[test]
fn a_ring_takes_no_notice_of_a_link_that_it_does_not_use() {
    let plain = step_s(&free(4, "ring"));
    for (between, factor) in [((0, 2), 1.0), ((1, 2), 10.0)] {
        let mut scenario = free(4, "ring");
        scenario.paths.links.push(Link { between, rate_bps: 1e8 });
        assert_about(step_s(&scenario), factor * plain);
    }
}

#[test]
fn a_rack_sends_what_its_machines_send_to_others_over_one_line() {
    // Each of two machines exchanges half of its bytes with each of the other two.
    for uplink_bps in [5e8, 1e9] {
        let mut scenario = free(4, "p3");
        scenario.paths.racks = Some(Racks { machines: 2, uplink_bps });
        assert_about(step_s(&scenario), travels_s(2.0, uplink_bps));
    }
}

#[test]
fn a_switch_that_adds_up_halves_the_bytes() {
    for workers in [4, 8] {
        let mut scenario = free(workers, "p3");
        scenario.serving = 1;
        scenario.switch_sums = true;
        // The workers' own hosts still count, the switch's does not.
        assert_about(step_s(&scenario), travels_s(1.0, RATE_BPS));
        scenario.costs.send_byte_s = 4e-8;
        assert_about(step_s(&scenario), travels_s(5.0, RATE_BPS));
    }
}

#[test]
fn lanes_share_the_frames() {
    let mut scenario = free(4, "p3");
    scenario.network.rate_bps = 1e12;
    scenario.costs.send_byte_s = 4e-9;
    scenario.costs.receive_byte_s = 4e-9;
    let one = step_s(&scenario);
    // 1.5 times the bytes are sent, and as many received, at 4 ns each.
    assert_about(one, 1.5 * 48e6 * 8e-9);
    scenario.lanes = 3;
    let three = step_s(&scenario);
    // Lanes wait for what the same lane of another rank sends.
    assert!(three > one / 3.0 && three < one / 2.0, "{three} s, {one} s with one");
}

#[test]
fn what_makes_no_sense_is_refused() {
    type Change = fn(&mut Scenario);
    let changes: [(Change, &str); 8] = [
        (|it| it.lanes = 0, "lanes is 0"),
        (|it| it.switch_sums = true, "switch_sums"),
        (|it| it.paths.ports.push(PortRate { machine: 4, rate_bps: 1e9 }), "machine 4 of 4"),
        (|it| it.paths.ports.push(PortRate { machine: 0, rate_bps: 0.0 }), "ports.rate_bps is 0"),
        (|it| it.paths.links.push(Link { between: (1, 1), rate_bps: 1e9 }), "links joins 1 and 1"),
        (|it| it.paths.links.push(Link { between: (0, 9), rate_bps: 1e9 }), "links joins 0 and 9"),
        (|it| it.paths.links.push(Link { between: (0, 1), rate_bps: -1.0 }), "links.rate_bps"),
        (|it| it.paths.racks = Some(Racks { machines: 0, uplink_bps: 1e9 }), "racks has 0"),
    ];
    for (change, named) in changes {
        let mut scenario = free(4, "p3");
        change(&mut scenario);
        let error = simulate(&scenario).expect_err(named).to_string();
        assert!(error.contains(named), "{error}");
    }
}
