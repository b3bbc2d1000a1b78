//! Nodes of several ranks: bytes through each port worked out by hand, what adding up on a node takes,
//! and what must hold for every such cluster.

use gradlane_sim::{simulate, Costs, Network, Nodes, Profile, ProfiledTensor, Report, Scenario};
use gradlane_units::Dtype;
use gradlane_wire::HEADER_BYTES;
use proptest::prelude::{prop_assert, proptest, ProptestConfig};

const COMPUTE_S: f64 = 0.1;

fn tensor(name: &str, numel: u64, need_s: f64, ready_s: f64) -> ProfiledTensor {
    ProfiledTensor { name: name.into(), numel, dtype: Dtype::F32, need_s, ready_s }
}

/// One layer, needed when the step begins and ready when it ends.
fn layer(numel: u64) -> Profile {
    let tensors = vec![tensor("layer", numel, 0.0, COMPUTE_S)];
    Profile { tensors, forward_s: 0.0, compute_s: COMPUTE_S }
}

/// A host and a network that take no time but for the wire.
fn free(profile: Profile, workers: u32, nodes: Nodes) -> Scenario {
    let network = Network { goodput_share: 1.0, share_spread: 0.0, ..Network::new(1e12) };
    let scenario = Scenario::new(profile, workers, "p3", network);
    Scenario { nodes: Some(nodes), costs: Costs::FREE, ..scenario }
}

fn flat(ranks: u32) -> Nodes {
    Nodes { ranks, carried: Vec::new(), rate_bps: None }
}

/// The first rank of each node carries everything.
fn led(ranks: u32, profile: &Profile) -> Nodes {
    let whole = (0..).zip(&profile.tensors).map(|(index, it)| (index, it.numel));
    Nodes { carried: vec![whole.collect()], ..flat(ranks) }
}

/// Every rank of a node carries an equal part of every tensor.
fn shared(ranks: u32, profile: &Profile) -> Nodes {
    let part = |local: u32, numel: u64| {
        let bound = |index: u32| numel * u64::from(index) / u64::from(ranks);
        bound(local + 1) - bound(local)
    };
    let of = |local| {
        (0..).zip(&profile.tensors).map(|(index, it)| (index, part(local, it.numel))).collect()
    };
    Nodes { carried: (0..ranks).map(of).collect(), ..flat(ranks) }
}

fn run(scenario: &Scenario) -> Report {
    simulate(scenario).expect("the scenario runs").report
}

fn near(found: f64, expected: f64, tolerance: f64) {
    assert!((found - expected).abs() <= tolerance, "{found} instead of {expected}");
}

/// Frames of 10,000 bytes that a port sends a step, and those that its node is bound to send.
fn frames(workers: u32, nodes: Nodes, numel: u64) -> (f64, f64) {
    let mut scenario = free(layer(numel), workers, nodes);
    scenario.slice_elems = Some(2_500);
    scenario.frame_bytes = 10_000;
    // So that the port is the bound, not the compute.
    scenario.network.rate_bps = 1e6;
    scenario.steps = 2;
    let report = run(&scenario);
    let bound_bytes = report.port_bound_s * 1e6 / 8.0;
    near(report.tx_bytes_per_step_max, report.tx_bytes_per_step_mean, 1e-6);
    let frame = 10_000.0 + HEADER_BYTES as f64;
    (report.tx_bytes_per_step_mean / frame, bound_bytes / 10_000.0)
}

#[test]
fn bytes_through_ports_are_those_worked_out_by_hand() {
    // Four ranks on two nodes, a gradient of four slices, each rank owns one. The two ranks of a node
    // push two slices each to the other node, and each of their own two slices goes to two ranks there:
    // 2 * 2 + 2 * 2 = 8 frames, 2 k (N k - k) / (N k) = 2 of the gradient.
    assert_eq!(frames(4, flat(2), 10_000), (8.0, 8.0));
    // Added up first, the nodes are the ranks: two slices pushed, two sent back, 2 (N - 1) / N = 1.
    assert_eq!(frames(4, led(2, &layer(10_000)), 10_000), (4.0, 4.0));
    // Eight ranks on two nodes of four, eight slices: each of four ranks pushes four slices, each
    // of four slices goes to four ranks: 16 + 16 = 32, four gradients. Added up first: eight.
    assert_eq!(frames(8, flat(4), 20_000), (32.0, 32.0));
    assert_eq!(frames(8, led(4, &layer(20_000)), 20_000), (8.0, 8.0));
    // All four carry: a gradient of 32 slices, so eight in each of four channels, of which a node
    // pushes four and sends four back: 4 * (4 + 4) = 32, one gradient.
    assert_eq!(frames(8, shared(4, &layer(80_000)), 80_000), (32.0, 32.0));
    // Eight ranks on four nodes of two: each rank pushes six of eight slices, and sends its own to
    // six: 24. Added up first, eight slices on four nodes: six pushed, two sent to three each.
    assert_eq!(frames(8, flat(2), 20_000), (24.0, 24.0));
    assert_eq!(frames(8, led(2, &layer(20_000)), 20_000), (12.0, 12.0));
}

#[test]
fn nothing_leaves_a_node_alone() {
    let report = run(&free(layer(100_000), 4, flat(4)));
    assert_eq!((report.tx_bytes_per_step_max, report.ranks_per_node), (0.0, 4));
    assert!(report.bytes > 0, "what goes from rank to rank is counted all the same");
    let led = run(&free(layer(100_000), 4, led(4, &layer(100_000))));
    assert_eq!(led.bytes, 0);
}

#[test]
fn a_ring_crosses_each_port_once() {
    let mut scenario = free(layer(4_096 * 8), 8, flat(4));
    scenario.strategy = gradlane_sim::StrategyChoice::Named("ring".into());
    let gradient_bytes = 4.0 * 4_096.0 * 8.0;
    let report = run(&scenario);
    // 2 (N - 1) / N for eight ranks, whatever the nodes, and headers.
    near(report.tx_bytes_per_step_mean / gradient_bytes, 1.75, 0.05);
    near(report.port_bound_s, COMPUTE_S, 1e-9);
}

#[test]
fn adding_up_on_a_node_takes_its_copies_its_sums_and_its_words() {
    // A gradient of 1 MB, two ranks on each of two nodes: a copy, a word, a sum of two, and back a
    // word and a copy; the network takes some ten microseconds.
    let profile = layer(250_000);
    let mut scenario = free(profile.clone(), 4, led(2, &profile));
    let without_s = run(&scenario).steps_s[1];
    scenario.costs.local_copy_byte_s = 1e-9;
    near(run(&scenario).steps_s[1] - without_s, 0.002, 1e-5);
    scenario.costs.local_sum_byte_s = 2e-9;
    near(run(&scenario).steps_s[1] - without_s, 0.002 + 0.004, 1e-5);
    scenario.costs.local_word_s = 0.003;
    near(run(&scenario).steps_s[1] - without_s, 0.006 + 0.006, 1e-5);
    // Over a collective of 1 Gbit/s, which adds up on its way: 8 ms there and 8 ms back.
    scenario.nodes.as_mut().expect("nodes").rate_bps = Some(1e9);
    near(run(&scenario).steps_s[1] - without_s, 0.016 + 0.006, 1e-5);
}

#[test]
fn shares_halve_the_sums() {
    // Each of two ranks adds up its half, at the same time.
    let profile = layer(500_000);
    let sums = |nodes| {
        let mut scenario = free(profile.clone(), 4, nodes);
        let without_s = run(&scenario).steps_s[1];
        scenario.costs.local_sum_byte_s = 1e-9;
        run(&scenario).steps_s[1] - without_s
    };
    near(sums(led(2, &profile)), 0.004, 1e-5);
    near(sums(shared(2, &profile)), 0.002, 1e-5);
}

#[test]
fn a_node_waits_for_its_slowest_rank() {
    let profile = layer(1_000);
    let mut scenario = free(profile.clone(), 4, led(2, &profile));
    scenario.compute_spread = 0.5;
    scenario.seed = 3;
    scenario.steps = 5;
    let alone = free(profile, 4, flat(1));
    let alone = run(&Scenario { compute_spread: 0.5, seed: 3, steps: 5, ..alone });
    near(run(&scenario).step_s, alone.step_s, 1e-4);
}

#[test]
fn nodes_that_make_no_sense_are_refused() {
    let refused = |workers, nodes: Nodes, named: &str| {
        let mut scenario = free(layer(1_000), workers, nodes);
        let text = simulate(&scenario).map(|_| ()).map_err(|error| error.to_string());
        assert!(text.as_ref().is_err_and(|text| text.contains(named)), "{named}: {text:?}");
        scenario.nodes = None;
        assert!(simulate(&scenario).is_ok());
    };
    refused(4, flat(3), "4 workers do not fill");
    refused(4, Nodes { carried: vec![vec![(0, 999)]], ..flat(2) }, "nobody carries all");
    refused(4, Nodes { carried: vec![vec![(0, 1_001)]], ..flat(2) }, "no such 1001");
    refused(4, Nodes { carried: vec![vec![(1, 1)]], ..flat(2) }, "tensor 1 has no such");
    refused(4, Nodes { carried: vec![vec![(0, 1_000)], vec![], vec![]], ..flat(2) }, "2 ranks");
    refused(4, Nodes { rate_bps: Some(0.0), ..flat(2) }, "rate_bps");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_cluster_of_nodes_finishes_and_keeps_to_its_bound(
        sizes in proptest::collection::vec(1_u64..60_000, 1..6),
        nodes in 1_u32..4,
        ranks in 1_u32..4,
        way in 0_u32..3,
        spread in 0.0_f64..0.5,
        seed in 0_u64..1_000,
    ) {
        let count = sizes.len() as f64;
        let tensors = (0..).zip(&sizes).map(|(index, &numel)| {
            let at_s = f64::from(index) / count * 0.01;
            tensor(&format!("layer{index}"), numel, at_s, 0.03 - at_s)
        });
        let profile = Profile { tensors: tensors.collect(), forward_s: 0.01, compute_s: 0.03 };
        let on_nodes = match way {
            0 => flat(ranks),
            1 => led(ranks, &profile),
            _ => shared(ranks, &profile),
        };
        let mut scenario = Scenario::new(profile, nodes * ranks, "p3", Network::new(5e7));
        scenario.nodes = Some(on_nodes);
        scenario.compute_spread = spread;
        scenario.compute_jitter = spread / 2.0;
        scenario.seed = seed;
        scenario.network.background_share = spread / 2.0;
        let report = run(&scenario);
        // A port may be ahead of the mean by what its slices are not even.
        prop_assert!(report.step_s >= report.compute_s * 0.999, "{report:?}");
        if nodes == 1 {
            prop_assert!(report.tx_bytes_per_step_max == 0.0);
        }
        prop_assert!(simulate(&scenario).expect("it runs").report == report);
    }
}

/// A layer that travels as factors of 4,000 bytes a rank, and a gradient of 40,000 bytes.
fn factored() -> (Profile, gradlane_sim::TensorScheme) {
    let tensors = vec![tensor("fc", 250_000, 0.0, COMPUTE_S), tensor("conv", 10_000, 0.0, 0.05)];
    let profile = Profile { tensors, forward_s: 0.0, compute_s: COMPUTE_S };
    (profile, gradlane_sim::TensorScheme::Sfb { block_bytes: 4_000, rebuild_s: 0.0 })
}

#[test]
fn factors_leave_a_node_once_for_each_other_node() {
    // Eight ranks on two nodes of four. By themselves each rank sends its block to the four ranks of
    // the other node, and a port carries 4 * 4 blocks; collected, one block of four, and the
    // gradient of 10,000 elements once there and once back in halves.
    let (profile, sfb) = factored();
    let sent = |nodes: Nodes, share: f64, blocks: f64| {
        let mut scenario = free(profile.clone(), 8, nodes);
        scenario.schemes.insert("fc".into(), sfb);
        scenario.network.rate_bps = 1e6;
        scenario.steps = 2;
        let report = run(&scenario);
        let expected = blocks * 4_000.0 + share * 40_000.0;
        near(report.port_bound_s * 1e6 / 8.0, expected, 1.0);
        near(report.tx_bytes_per_step_mean / expected, 1.01, 0.01);
        near(report.tx_bytes_per_step_max, report.tx_bytes_per_step_mean, 1.0);
    };
    sent(flat(4), 4.0, 16.0);
    sent(led(4, &profile), 1.0, 4.0);
    // Of four leaders the first has the factors whole, and each a quarter of the gradient.
    let mut nodes = shared(4, &profile);
    nodes.carried.iter_mut().for_each(|it| it.retain(|it| it.0 == 1));
    nodes.carried[0].insert(0, (0, 250_000));
    sent(nodes, 1.0, 4.0);
}

#[test]
fn factors_are_copied_within_a_node_and_not_added_up() {
    // Two ranks on each of two nodes: a block in, both blocks below one another, and those of both
    // nodes out: 1 + 2 + 4 blocks at 100 ns a byte.
    let (profile, sfb) = factored();
    let mut scenario = free(profile.clone(), 4, led(2, &profile));
    scenario.schemes.insert("fc".into(), sfb);
    let without_s = run(&scenario).steps_s[1];
    scenario.costs.local_copy_byte_s = 1e-7;
    // The gradient's own copies are over before the factors are there.
    let took_s = run(&scenario).steps_s[1] - without_s;
    near(took_s, 7.0 * 4_000.0 * 1e-7, 1e-4);
    let mut owned = scenario.clone();
    let adam = gradlane_sim::TensorScheme::Adam { block_bytes: 4_000, rebuild_s: 0.0 };
    owned.schemes.insert("fc".into(), adam);
    assert!(simulate(&owned).is_err_and(|error| error.to_string().contains("has one owner")));
}
