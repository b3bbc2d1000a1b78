//! Ranks that only serve, in virtual time: their ports carry what the bound says, and no step is
//! shorter.

use gradlane_sim::{simulate, Costs, Network, Profile, ProfiledTensor, Report, Scenario};
use gradlane_units::Dtype;

const NUMEL: u64 = 2_000_000;

/// A step that computes next to nothing.
fn profile() -> Profile {
    let tensor = |index: u64| ProfiledTensor {
        name: format!("layer{index}.weight"),
        numel: NUMEL / 4,
        dtype: Dtype::F32,
        need_s: 0.0,
        ready_s: 0.001,
    };
    Profile { tensors: (0..4).map(tensor).collect(), forward_s: 0.0, compute_s: 0.001 }
}

fn scenario(workers: u32, serving: u32, strategy: &str) -> Scenario {
    let network = Network {
        goodput_share: 1.0,
        send_buffer_bytes: 20_000,
        share_spread: 0.0,
        ..Network::new(1e9)
    };
    Scenario {
        costs: Costs::FREE,
        serving,
        slice_elems: Some(2_500),
        frame_bytes: 10_000,
        ..Scenario::new(profile(), workers, strategy, network)
    }
}

fn run(scenario: &Scenario) -> Report {
    simulate(scenario).expect("the scenario runs").report
}

#[test]
fn a_servers_port_carries_its_part_of_what_every_worker_sends() {
    let model_s = NUMEL as f64 * 4.0 * 8.0 / 1e9;
    for strategy in ["p3", "slicing", "wfbp", "kvstore", "deferred-pull"] {
        for (workers, serving) in [(2, 1), (4, 2), (2, 3), (3, 3), (1, 2)] {
            let report = run(&scenario(workers, serving, strategy));
            let busiest = (f64::from(workers) / f64::from(serving)).max(1.0) * model_s;
            assert!((report.port_bound_s - busiest).abs() < 1e-9, "{strategy}: {report:?}");
            assert!(report.step_s >= report.port_bound_s, "{strategy}: {report:?}");
            if strategy == "p3" {
                // Sums follow a slice behind the gradients, and both ways are used at once.
                assert!(report.step_s < 1.3 * busiest, "{workers}+{serving}: {report:?}");
            }
            assert_eq!((report.workers, report.serving), (workers, serving));
            assert_eq!(report.simulated_ranks, workers + serving);
            // Each worker's gradients once, and as many results; headers are little.
            let all = report.tx_bytes_per_step_mean * f64::from(workers + serving);
            let payload = 2.0 * f64::from(workers) * NUMEL as f64 * 4.0;
            assert!((1.0..1.03).contains(&(all / payload)), "{strategy}: {all} of {payload}");
        }
    }
}

#[test]
fn updates_on_servers_cost_a_few_bytes_more() {
    let mut updates = scenario(3, 2, "p3");
    updates.update = gradlane_engine::Update::Server;
    let (with, without) = (run(&updates), run(&scenario(3, 2, "p3")));
    let more = with.tx_bytes_per_step_mean - without.tx_bytes_per_step_mean;
    // Each worker tells each server: a header and some sixty bytes.
    assert!((0.0..1_000.0).contains(&more) && more > 0.0, "{more}");
    assert!((with.step_s / without.step_s - 1.0).abs() < 0.01, "{with:?} {without:?}");
}

#[test]
fn acknowledgements_of_a_server_do_not_wait_behind_the_buffers_of_those_that_meet_at_its_port() {
    let mut crowded = Scenario { network: Network::new(1e9), ..scenario(4, 1, "p3") };
    (crowded.slice_elems, crowded.frame_bytes) = (None, 65_096);
    crowded.profile.tensors.iter_mut().for_each(|it| it.numel *= 20);
    for paces in [true, false] {
        crowded.network.paces = paces;
        let report = run(&crowded);
        assert!(report.step_s < 1.08 * report.port_bound_s, "{report:?}");
    }
}

#[test]
fn the_same_scenario_gives_the_same_report() {
    let mut noisy = scenario(3, 2, "p3");
    noisy.compute_jitter = 0.3;
    noisy.network.share_spread = 0.3;
    assert_eq!(run(&noisy), run(&noisy));
    let text = serde_json::to_string(&run(&scenario(3, 0, "p3"))).expect("JSON");
    assert!(!text.contains("serving"), "reports without are what they were");
}

#[test]
fn what_it_does_not_go_with_is_refused_by_name() {
    let refused = |change: fn(&mut Scenario)| {
        let mut changed = scenario(4, 2, "p3");
        change(&mut changed);
        simulate(&changed).expect_err("refused").to_string()
    };
    assert!(refused(|it| it.servers = Some(2)).contains("serving is 2"));
    assert!(refused(|it| it.representatives = 1).contains("serving is 2"));
    assert!(refused(|it| it.serving = u32::MAX).contains("serving"));
}
