//! Schemes of single tensors: cases worked out by hand, and that they are the engine's own.

use gradlane_engine::{Plan, Scheme, Strategy};
use gradlane_sim::{
    simulate, Costs, Lane, Network, Outputs, Profile, ProfiledTensor, Report, Scenario,
    TensorScheme,
};
use gradlane_units::Dtype;

/// A convolution, then a fully connected layer, of 0.1 s each in forward.
fn two_layers() -> Profile {
    let tensor = |name: &str, numel, need_s, ready_s| ProfiledTensor {
        name: name.into(),
        numel,
        dtype: Dtype::F32,
        need_s,
        ready_s,
    };
    Profile {
        tensors: vec![
            tensor("conv.weight", 10_000, 0.0, 0.4),
            tensor("fc.weight", 1_000_000, 0.1, 0.3),
        ],
        forward_s: 0.2,
        compute_s: 0.4,
    }
}

fn factors(block_bytes: u64, rebuild_s: f64) -> [(&'static str, TensorScheme); 1] {
    [("fc.weight", TensorScheme::Sfb { block_bytes, rebuild_s })]
}

fn scenario(workers: u32, schemes: &[(&str, TensorScheme)]) -> Scenario {
    let network =
        Network { goodput_share: 1.0, share_spread: 0.0, piece_bytes: 10_000, ..Network::new(1e9) };
    Scenario {
        costs: Costs::FREE,
        schemes: schemes.iter().map(|(name, it)| ((*name).into(), *it)).collect(),
        ..Scenario::new(two_layers(), workers, "p3", network)
    }
}

fn run(scenario: &Scenario) -> Report {
    simulate(scenario).expect("the scenario runs").report
}

fn near(found: f64, expected: f64, tolerance: f64) {
    assert!((found - expected).abs() <= tolerance, "{found} instead of {expected}");
}

#[test]
fn only_factors_travel_for_a_layer_that_has_them() {
    let report = run(&scenario(4, &factors(80_000, 0.0)));
    let servers = 2.0 * 3.0 / 4.0 * 40_000.0;
    near(report.tx_bytes_per_step_mean / (3.0 * 80_000.0 + servers), 1.0, 0.02);
    let port_s = (3.0 * 80_000.0 + servers) * 8.0 / 1e9;
    near(report.port_bound_s, 0.4_f64.max(port_s), 1e-9);
}

#[test]
fn rebuilding_takes_the_accelerators_time() {
    let free = run(&scenario(4, &factors(80_000, 0.0)));
    let report = run(&scenario(4, &factors(80_000, 0.05)));
    near(report.step_s - free.step_s, 0.05, 1e-6);
    near(report.rebuild_s, 0.05, 1e-9);
    near(report.port_bound_s, 0.45, 1e-9);
    let slow = Scenario { compute_spread: 1.0, ..scenario(4, &factors(80_000, 0.05)) };
    assert!(run(&slow).step_s > report.step_s + 0.05, "slow ranks rebuild slowly");
}

/// The norm needs the blocks of the layer with factors, which are there 120 ms after its gradient. Without
/// clipping only the convolution's own exchange, some milliseconds, is not hidden.
#[test]
fn clipping_waits_for_all_blocks() {
    let plain = scenario(4, &factors(5_000_000, 0.0));
    near(run(&plain).step_s, 0.405, 0.005);
    near(run(&Scenario { clips: true, ..plain }).step_s, 0.4225, 0.0025);
}

fn answered(block_bytes: u64, rebuild_s: f64) -> [(&'static str, TensorScheme); 1] {
    [("fc.weight", TensorScheme::Adam { block_bytes, rebuild_s })]
}

#[test]
fn one_owner_gets_factors_and_sends_the_whole_to_all() {
    let report = run(&scenario(4, &answered(80_000, 0.0)));
    let servers = 2.0 * 3.0 / 4.0 * 40_000.0;
    let (block, whole) = (80_000.0, 4e6);
    // Of four ranks three send a block, and one the whole to three.
    let mean = 3.0 / 4.0 * (block + whole) + servers;
    near(report.tx_bytes_per_step_mean / mean, 1.0, 0.02);
    near(report.tx_bytes_per_step_max / (3.0 * whole + servers), 1.0, 0.02);
    near(report.port_bound_s, 0.4_f64.max((3.0 * whole + servers) * 8.0 / 1e9), 1e-9);
    near(report.rebuild_s, 0.0, 1e-9);
}

#[test]
fn the_owner_makes_the_sum_beside_its_accelerator_and_all_wait_for_it() {
    let slow = |rebuild_s| run(&scenario(2, &answered(80_000_000, rebuild_s)));
    // Blocks take 0.64 s to the owner, the answer 0.032 s; forward comes 0.2 s after they are ready.
    near(slow(0.0).waits[1].wait_s, 0.472, 0.02);
    near(slow(0.3).waits[1].wait_s, 0.772, 0.02);
    let hidden = run(&scenario(2, &answered(80_000, 0.1)));
    near(hidden.step_s, run(&scenario(2, &answered(80_000, 0.0))).step_s, 1e-6);
}

#[test]
fn forward_waits_for_the_factors_of_all() {
    let waits = run(&scenario(2, &factors(80_000_000, 0.0))).waits;
    // 80 MB take 0.64 s, and forward comes to them 0.2 s after they are ready.
    near(waits[1].wait_s, 0.44, 0.02);
}

#[test]
fn rings_and_servers_go_together() {
    let report = run(&scenario(4, &[("fc.weight", TensorScheme::Ring)]));
    let all = 4.0 * (10_000.0 + 1_000_000.0);
    near(report.tx_bytes_per_step_mean / (2.0 * 3.0 / 4.0 * all), 1.0, 0.01);
    let ring = Scenario {
        strategy: gradlane_sim::StrategyChoice::Named("ring".into()),
        ..scenario(4, &[("conv.weight", TensorScheme::Ps)])
    };
    near(run(&ring).tx_bytes_per_step_mean, report.tx_bytes_per_step_mean, 20_000.0);
}

/// What a scenario says in schemes is what a plan of the engine says.
#[test]
fn schemes_are_those_of_the_engines_plans() {
    let mixed = [
        ("fc.weight", TensorScheme::Sfb { block_bytes: 80_000, rebuild_s: 0.0 }),
        ("conv.weight", TensorScheme::Ring),
    ];
    let by_schemes = simulate(&scenario(4, &mixed)).expect("it runs");
    let mut given = scenario(4, &[]);
    given.profile.tensors[1].numel = 20_000;
    let schemes = [Scheme::Ring, Scheme::AllGather];
    let tensors = given.profile.specs().into_iter().zip(schemes).collect();
    let strategy = Strategy::named("p3", None, 0).expect("p3");
    given.plan = Some(Plan::build(tensors, strategy, Default::default(), 4).expect("a plan"));
    let by_plan = simulate(&given).expect("it runs");
    assert_eq!(by_schemes.report, by_plan.report);
    assert_eq!(by_schemes.plan, by_plan.plan);
}

#[test]
fn a_trace_shows_the_rebuilding() {
    let outputs = Outputs { trace: true, ..Outputs::default() };
    let traced = Scenario { outputs, ..scenario(2, &factors(80_000, 0.05)) };
    let trace = simulate(&traced).expect("it runs").trace.expect("a trace");
    let rebuilds: Vec<u64> = trace
        .spans
        .iter()
        .filter(|span| span.lane == Lane::Rebuild)
        .map(|span| span.end_ns - span.begin_ns)
        .collect();
    // Two ranks, and in each step's forward but the first one, the last one's wait included.
    assert_eq!(rebuilds, vec![50_000_000; 6]);
}

#[test]
fn schemes_that_make_no_sense_are_refused() {
    let sfb = |block_bytes, rebuild_s| TensorScheme::Sfb { block_bytes, rebuild_s };
    for (name, scheme, said) in [
        ("fc2.weight", TensorScheme::Ring, "no tensor \"fc2.weight\""),
        ("fc.weight", sfb(0, 0.0), "block_bytes is 0"),
        ("fc.weight", sfb(1 << 32, 0.0), "block_bytes is 4294967296"),
        ("fc.weight", sfb(1, -1.0), "rebuild_s is -1"),
        ("fc.weight", sfb(1, f64::NAN), "rebuild_s is NaN"),
    ] {
        let error = simulate(&scenario(2, &[(name, scheme)])).expect_err("refused").to_string();
        assert!(error.starts_with("schemes") && error.contains(said), "{error}");
    }
    let folded = Scenario { representatives: 2, ..scenario(8, &factors(80_000, 0.0)) };
    let error = simulate(&folded).expect_err("refused").to_string();
    assert!(error.contains("representatives"), "{error}");
}
