//! Clusters in virtual time: the papers' examples, cases worked out by hand, and what must hold for
//! every scenario.

use gradlane_engine::{Granularity, Order, Plan, Scheme, Strategy, Update, RING_CHUNK_ELEMS};
use gradlane_sim::{
    simulate, Costs, Lane, Network, Outputs, Profile, ProfiledTensor, Report, Scenario,
    StrategyChoice, Subject,
};
use gradlane_units::{Dtype, Rank};
use gradlane_wire::{sealed_bytes, HEADER_BYTES};
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest, ProptestConfig};
use proptest::strategy::Strategy as Generator;

/// One unit of time in the papers' figures.
const UNIT_S: f64 = 0.1;

fn tensor(name: &str, numel: u64, need_s: f64, ready_s: f64) -> ProfiledTensor {
    ProfiledTensor { name: name.into(), numel, dtype: Dtype::F32, need_s, ready_s }
}

/// A network that loses nothing to headers of packets, and keeps its queues short: a connection holds
/// two frames of 10,000 bytes, so that the next one follows without waiting for an acknowledgement.
fn ideal(rate_bps: f64) -> Network {
    Network {
        goodput_share: 1.0,
        send_buffer_bytes: 20_000,
        share_spread: 0.0,
        ..Network::new(rate_bps)
    }
}

fn free(profile: Profile, workers: u32, strategy: &str, network: Network) -> Scenario {
    Scenario { costs: Costs::FREE, ..Scenario::new(profile, workers, strategy, network) }
}

fn run(scenario: &Scenario) -> Report {
    simulate(scenario).expect("the scenario runs").report
}

fn near(found: f64, expected: f64, tolerance: f64) {
    assert!((found - expected).abs() <= tolerance, "{found} instead of {expected}");
}

/// Layers of equal times: forward and backward take one unit each.
fn layers(sizes: &[u64]) -> Profile {
    let count = sizes.len() as f64;
    let tensors = sizes.iter().enumerate().map(|(index, &numel)| {
        let index_s = index as f64 * UNIT_S;
        let ready_s = 2.0 * count * UNIT_S - index_s;
        tensor(&format!("layer{}", index + 1), numel, index_s, ready_s)
    });
    Profile {
        tensors: tensors.collect(),
        forward_s: count * UNIT_S,
        compute_s: 2.0 * count * UNIT_S,
    }
}

/// The last layer travels last, is used last, and is needed for the norm: only its first leg delays the
/// first layer, where owners add up squares; its second one as well, where all means are waited for.
#[test]
fn clipping_waits_for_first_legs_alone() {
    let profile = layers(&[100_000, 100_000, 300_000]);
    let mut steps_s = Vec::new();
    for (name, clips) in [("p3", false), ("p3", true), ("slicing", true), ("wfbp", true)] {
        let network = ideal(32.0 * 100_000.0 / UNIT_S);
        let scenario = Scenario { clips, steps: 6, ..free(profile.clone(), 2, name, network) };
        steps_s.push(run(&scenario).step_s);
    }
    let [plain, clipped, slicing, wfbp] = steps_s[..] else { unreachable!() };
    assert!(plain <= clipped && clipped < slicing && slicing <= wfbp + 1e-9, "{steps_s:?}");
    // Backward ends after 6 units, the last first leg half a unit later, and the first layer's second
    // one another half; the third layer's is over a unit and a half after the second's.
    near(clipped, 7.5 * UNIT_S, 0.01 * UNIT_S);
    near(plain, clipped, 0.01 * UNIT_S);
}

#[test]
fn clipping_with_updates_on_servers_is_refused() {
    let scenario = Scenario {
        clips: true,
        update: Update::Server,
        ..free(layers(&[10]), 2, "p3", ideal(1e6))
    };
    let error = simulate(&scenario).expect_err("refused").to_string();
    assert!(error.contains("clips cannot be used with updates on servers"), "{error}");
}

#[test]
fn p3_halves_the_delay_of_the_three_layer_example() {
    // P3, figure 4: forward and backward of each of three layers take 1, synchronization takes 2.
    // Two ranks: a layer of S bytes is S bytes through every port, S/2 as gradients, S/2 as results.
    let numel = 2_500_000;
    let rate_bps = (numel * 4 * 8) as f64 / (2.0 * UNIT_S);
    let delay = |strategy: &str| {
        let mut scenario = free(layers(&[numel; 3]), 2, strategy, ideal(rate_bps));
        scenario.slice_elems = Some(2_500);
        scenario.frame_bytes = 10_000;
        let report = run(&scenario);
        (report.step_s - report.compute_s) / UNIT_S
    };
    // First come, first served: twice the synchronization of the first layer.
    near(delay("slicing"), 4.0, 0.1);
    near(delay("p3"), 2.0, 0.1);
}

#[test]
fn slicing_saves_thirty_percent_of_the_second_example() {
    // P3, figure 6: sending, updating and receiving take 1 each, and 3 for the middle layer. One
    // server has all layers, and updates are not in each other's way.
    let unit = 250_000;
    let sizes = [unit, 3 * unit, unit];
    let communication = |granularity: Granularity| {
        let mut profile = layers(&sizes);
        // All parameters are needed at once, so the step shows when the last one is there.
        profile.forward_s = 0.0;
        profile.compute_s = 3.0 * UNIT_S;
        for (index, tensor) in profile.tensors.iter_mut().enumerate() {
            tensor.need_s = 0.0;
            tensor.ready_s = (3 - index) as f64 * UNIT_S;
        }
        let strategy = Strategy {
            granularity,
            ..Strategy::named("slicing", None, 0).expect("a known strategy")
        };
        let mut plan =
            Plan::build(profile.specs(), strategy.clone(), Default::default(), 2).expect("a plan");
        plan.slices.iter_mut().for_each(|slice| slice.owner = Rank(1));
        let rate_bps = (unit * 4 * 8) as f64 / UNIT_S;
        let mut scenario = free(profile, 2, "slicing", ideal(rate_bps));
        scenario.strategy = StrategyChoice::Rules(strategy);
        scenario.plan = Some(plan);
        scenario.frame_bytes = 10_000;
        scenario.work_depth = 4;
        scenario.work_threads = 4;
        // Two contributions of a unit are reduced in one unit of time.
        scenario.costs.reduce_byte_s = UNIT_S / (2 * unit * 4) as f64;
        // The first gradient is there after one unit.
        run(&scenario).step_s / UNIT_S - 1.0
    };
    let whole = communication(Granularity::Slices { elems: 3 * unit });
    let sliced = communication(Granularity::Slices { elems: unit });
    near(whole, 10.0, 0.1);
    near(sliced, 7.0, 0.1);
    near(1.0 - sliced / whole, 0.3, 0.01);
}

#[test]
fn one_slice_goes_there_and_back() {
    // Rank 0 owns the only slice; rank 1 pushes 1 MB, and gets 1 MB back.
    let profile = layers(&[250_000]);
    let mut scenario = free(profile, 2, "p3", ideal(1e9));
    scenario.slice_elems = Some(250_000);
    scenario.frame_bytes = 100_000;
    let wire_s = (1_000_000 + 10 * HEADER_BYTES) as f64 * 8.0 / 1e9;
    // The owner has the result earlier, at the end of the push, and so begins its next step
    // earlier; in every later step its forward has passed when rank 1's push comes.
    let report = run(&scenario);
    // Acknowledgements take the wire, too: 66 bytes for every frame.
    near(report.steps_s[1], 2.0 * UNIT_S + 2.0 * wire_s, 40.0 * 66.0 * 8.0 / 1e9);
    scenario.network.latency_s = 0.003;
    scenario.network.send_buffer_bytes = 10_000_000;
    near(run(&scenario).steps_s[1], 2.0 * UNIT_S + 2.0 * wire_s + 2.0 * 0.003, 1e-4);
}

#[test]
fn sealing_costs_its_tags_and_its_bytes() {
    // One frame of 1 MB each way.
    let mut scenario = free(layers(&[250_000]), 2, "p3", ideal(1e9));
    scenario.slice_elems = Some(250_000);
    scenario.frame_bytes = 1_000_000;
    let without = run(&scenario).steps_s[1];
    scenario.seal = true;
    let tags_bytes = sealed_bytes(1_000_000) - HEADER_BYTES - 1_000_000;
    let sealed = run(&scenario).steps_s[1];
    near(sealed - without, 2.0 * tags_bytes as f64 * 8.0 / 1e9, 1e-6);
    scenario.costs.seal_byte_s = 2e-9;
    scenario.costs.open_byte_s = 3e-9;
    near(run(&scenario).steps_s[1] - sealed, 2.0 * 5e-9 * sealed_bytes(1_000_000) as f64, 1e-6);
}

#[test]
fn senders_that_meet_at_a_port_share_it() {
    // Four ranks, one slice: three pushes of 1 MB meet at the owner, three results leave it.
    let mut scenario = free(layers(&[250_000]), 4, "p3", ideal(1e9));
    scenario.slice_elems = Some(250_000);
    scenario.frame_bytes = 100_000;
    let wire_s = (1_000_000 + 10 * HEADER_BYTES) as f64 * 8.0 / 1e9;
    // The results go out frame by frame in turns, so the others get the end of theirs within three
    // frames of each other, push together, and are all held up by all six transfers.
    for step in &run(&scenario).steps_s[1..] {
        near(*step, 2.0 * UNIT_S + 6.0 * wire_s, 0.5 * wire_s);
    }
}

#[test]
fn a_reduction_waits_for_the_work_thread_and_costs_its_bytes() {
    let mut scenario = free(layers(&[250_000]), 2, "p3", ideal(1e9));
    scenario.slice_elems = Some(250_000);
    let without = run(&scenario).steps_s[1];
    scenario.costs.work_s = 0.004;
    scenario.costs.reduce_byte_s = 5e-9;
    near(run(&scenario).steps_s[1] - without, 0.004 + 5e-9 * 2e6, 1e-6);
}

#[test]
fn the_io_thread_delays_what_it_sends_and_hears() {
    let mut scenario = free(layers(&[1_000]), 2, "p3", ideal(1e9));
    let without = run(&scenario).steps_s[1];
    scenario.costs.send_frame_s = 0.001;
    scenario.costs.receive_frame_s = 0.002;
    scenario.costs.command_s = 0.003;
    scenario.costs.wake_s = 0.005;
    // The gradient's command, then push and result, each sent and heard, then the wake-up.
    near(run(&scenario).steps_s[1] - without, 0.003 + 2.0 * 0.003 + 0.005, 1e-6);
}

#[test]
fn an_urgent_tensor_passes_a_large_one() {
    // 100 ms of bulk is under way when a small urgent gradient appears in the last moment.
    let profile = Profile {
        tensors: vec![tensor("first", 1_000, 0.0, 0.21), tensor("last", 6_250_000, 0.1, 0.2)],
        forward_s: 0.11,
        compute_s: 0.21,
    };
    let wait = |strategy: &str| {
        let mut scenario = free(profile.clone(), 2, strategy, ideal(1e9));
        scenario.frame_bytes = 50_000;
        run(&scenario).waits[0].wait_s
    };
    // There and back, behind at most a frame that is leaving and one that is arriving.
    let frame_s = 50_064.0 * 8.0 / 1e9;
    assert!(wait("p3") <= 4.0 * frame_s + 2.0 * 4_064.0 * 8.0 / 1e9, "{}", wait("p3"));
    assert!(wait("slicing") > 0.1, "{}", wait("slicing"));
}

#[test]
fn a_slow_rank_holds_everyone() {
    let mut scenario = free(layers(&[1_000; 4]), 4, "p3", ideal(1e12));
    scenario.steps = 5;
    scenario.compute_spread = 0.5;
    scenario.seed = 3;
    let report = run(&scenario);
    assert!(report.step_s > 1.1 * report.compute_s, "{}", report.step_s);
    assert!(report.step_s < 1.5 * report.compute_s, "{}", report.step_s);
}

#[test]
fn other_traffic_takes_its_share() {
    let mut scenario = free(layers(&[4_000_000]), 4, "p3", Network::new(1e9));
    let alone = run(&scenario).step_s;
    scenario.network.background_share = 0.3;
    let beside = run(&scenario).step_s;
    assert!(beside > 1.15 * alone && beside < 2.0 * alone, "{alone} and {beside}");
}

/// Four ranks whose ports decide, with buffers of so many bytes on every connection.
fn crowded(send_buffer_bytes: u64, share_spread: f64) -> Scenario {
    let network = Network { send_buffer_bytes, share_spread, ..Network::new(500e6) };
    free(layers(&[1_000_000; 6]), 4, "p3", network)
}

#[test]
fn acknowledgements_wait_in_the_queues_of_the_way_back() {
    // With one packet a connection, a port has nothing to send while acknowledgements wait behind
    // what others send; with ten, there is always a packet.
    let (short, long) = (run(&crowded(1, 0.0)), run(&crowded(650_000, 0.0)));
    assert!(short.step_s > 1.015 * long.step_s, "{} and {}", short.step_s, long.step_s);
    assert!(short.tx_utilization < long.tx_utilization);
}

#[test]
fn unequal_connections_hold_urgent_slices_up() {
    let mut scenario = crowded(0, 0.0);
    let equal = run(&scenario);
    scenario.network.share_spread = 0.8;
    let unequal = run(&scenario);
    assert!(unequal.step_s > 1.01 * equal.step_s, "{} and {}", unequal.step_s, equal.step_s);
    assert_eq!(run(&scenario), unequal, "the same draw");
    scenario.network.share_seed = 1;
    assert_ne!(run(&scenario).steps_s, unequal.steps_s, "another draw");
}

#[test]
fn paced_connections_fill_wires_that_several_share() {
    let step_s = |workers: u32, paces: bool| {
        let network = Network { paces, ..Network::new(500e6) };
        run(&free(layers(&[6_000_000; 8]), workers, "p3", network)).step_s
    };
    let (paced, unpaced) = (step_s(4, true), step_s(4, false));
    assert!(unpaced > 1.02 * paced, "{paced} and {unpaced}");
    // A connection that has the port for itself takes all of it.
    near(step_s(2, true), step_s(2, false), 1e-9);
}

#[test]
fn a_shaped_port_that_was_idle_lets_a_burst_through() {
    let mut scenario = free(layers(&[10_000]), 2, "p3", ideal(1e8));
    let wire = run(&scenario).steps_s[1];
    scenario.network.burst_bytes = 100_000;
    let shaped = run(&scenario).steps_s[1];
    // Push and result are 40 kB each and pass both ports at once, after an idle forward.
    near(wire - shaped, 2.0 * (40_000 + HEADER_BYTES) as f64 * 8.0 / 1e8, 2e-4);
}

#[test]
fn a_trace_has_every_frame_once_and_no_port_sends_two_at_once() {
    for strategy in ["kvstore", "wfbp", "slicing", "p3"] {
        let profile = layers(&[70_000, 1_120_000, 3_000]);
        trace_is_whole(free(profile.clone(), 3, strategy, Network::new(1e9)));
        trace_is_whole(Scenario::new(profile, 3, strategy, Network::new(1e9)));
    }
}

fn trace_is_whole(mut scenario: Scenario) {
    scenario.outputs = Outputs { trace: true, utilization_interval_s: 0.01, ..Outputs::default() };
    let outcome = simulate(&scenario).expect("the scenario runs");
    let trace = outcome.trace.expect("it was asked for");
    let sent = |lane: Lane| trace.spans.iter().filter(move |span| span.lane == lane);
    let bytes = |lane: Lane| -> u64 {
        let bytes = sent(lane).map(|span| match span.subject {
            Subject::Slice { bytes, .. } => u64::from(bytes),
            _ => panic!("a frame is about a slice"),
        });
        bytes.sum()
    };
    let all = bytes(Lane::Push) + bytes(Lane::Broadcast) + bytes(Lane::Control);
    assert_eq!(all, outcome.report.bytes);
    assert_eq!(bytes(Lane::Receive), outcome.report.bytes);
    for rank in 0..3 {
        for lanes in [vec![Lane::Push, Lane::Broadcast, Lane::Control], vec![Lane::Receive]] {
            let mut spans: Vec<(u64, u64)> = trace
                .spans
                .iter()
                .filter(|span| span.rank == rank && lanes.contains(&span.lane))
                .map(|span| (span.begin_ns, span.end_ns))
                .collect();
            spans.sort_unstable();
            assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "rank {rank} {lanes:?}");
        }
    }
    let json = trace.to_json(&scenario.profile).to_string();
    assert!(json.contains(r#""layer2""#) && json.contains(r#""broadcast""#), "{json}");
    let utilization = outcome.report.utilization.expect("it was asked for");
    assert!(utilization.tx.iter().chain(&utilization.rx).all(|&share| share <= 1.0 + 1e-9));
}

#[test]
fn a_trace_keeps_what_was_asked_for_and_counts_the_rest() {
    let mut scenario = free(layers(&[70_000, 120_000]), 3, "p3", Network::new(1e9));
    scenario.outputs = Outputs { trace: true, ..Outputs::default() };
    let trace_of = |scenario: &Scenario| {
        let outcome = simulate(scenario).expect("the scenario runs");
        outcome.trace.expect("it was asked for")
    };
    let whole = trace_of(&scenario);
    assert_eq!(whole.dropped, 0);
    scenario.outputs.trace_ranks = 1;
    let first = trace_of(&scenario);
    let of_rank_0: Vec<_> = whole.spans.iter().filter(|span| span.rank == 0).copied().collect();
    assert_eq!(first.spans, of_rank_0);
    scenario.outputs.trace_spans_max = 10;
    let short = trace_of(&scenario);
    assert_eq!(short.spans, of_rank_0[..10]);
    assert_eq!(short.dropped as usize, of_rank_0.len() - 10);
}

#[test]
fn a_trace_accounts_for_all_of_every_ranks_time() {
    // Steps follow each other without a pause: what is not forward or backward is waiting.
    let mut scenario = free(layers(&[70_000, 120_000]), 3, "slicing", Network::new(1e9));
    scenario.outputs = Outputs { trace: true, ..Outputs::default() };
    let outcome = simulate(&scenario).expect("the scenario runs");
    let trace = outcome.trace.expect("it was asked for");
    let computes = [Lane::Forward, Lane::Backward, Lane::Wait];
    let mut waits = 0;
    for rank in 0..3 {
        let own = trace.spans.iter().filter(|it| it.rank == rank && computes.contains(&it.lane));
        let mut spans: Vec<_> = own.map(|it| (it.begin_ns, it.end_ns, it.lane)).collect();
        spans.sort_unstable();
        assert_eq!(spans[0].0, 0);
        assert!(spans.windows(2).all(|pair| pair[0].1 == pair[1].0), "rank {rank}: {spans:?}");
        assert_eq!(spans.last().map(|it| it.2), Some(Lane::Forward));
        waits += spans.iter().filter(|it| it.2 == Lane::Wait).count();
    }
    assert!(waits > 0, "a slow network makes forward wait");
}

#[test]
fn representatives_stand_for_ranks_that_own_nothing() {
    // 12 slices; of 60 ranks 48 own nothing.
    let mut scenario = Scenario::new(layers(&[200_000; 3]), 60, "p3", Network::new(4e9));
    let all = run(&scenario);
    for representatives in [1, 4, 16] {
        scenario.representatives = representatives;
        let few = run(&scenario);
        assert_eq!(few.simulated_ranks, 12 + representatives);
        near(few.step_s / all.step_s, 1.0, 0.03);
        near(few.tx_bytes_per_step_max / all.tx_bytes_per_step_max, 1.0, 0.001);
        near(few.tx_bytes_per_step_mean / all.tx_bytes_per_step_mean, 1.0, 0.001);
    }
    // Where each stands for itself, nothing is folded.
    scenario.representatives = 48;
    assert_eq!(run(&scenario), all);
}

#[test]
fn a_hundred_ranks_send_every_message_once() {
    let mut scenario = Scenario::new(layers(&[40_000; 30]), 100, "p3", Network::new(10e9));
    scenario.frame_bytes = 200_000;
    let report = run(&scenario);
    assert_eq!(report.frames, 3 * 30 * 2 * 99);
}

#[test]
fn nonsense_is_refused_by_name_and_place() {
    let good = Scenario::new(layers(&[10, 10]), 2, "p3", Network::new(1e9));
    let mut cases: Vec<(Scenario, &str)> = Vec::new();
    let mut case = |named, change: &dyn Fn(&mut Scenario)| {
        let mut scenario = good.clone();
        change(&mut scenario);
        cases.push((scenario, named));
    };
    case("workers", &|it| it.workers = 0);
    case("steps", &|it| it.steps = 0);
    case("unknown strategy \"p4\"", &|it| it.strategy = StrategyChoice::Named("p4".into()));
    case("network.rate_bps", &|it| it.network.rate_bps = f64::NAN);
    case("network.goodput_share", &|it| it.network.goodput_share = 0.0);
    case("network.share_spread", &|it| it.network.share_spread = 1.0);
    case("network.piece_bytes", &|it| it.network.piece_bytes = 1);
    case("costs.wake_s", &|it| it.costs.wake_s = -1.0);
    case("compute_spread", &|it| it.compute_spread = f64::INFINITY);
    case("profile.forward_s", &|it| it.profile.forward_s = f64::NAN);
    case("tensors[1] (\"layer2\"): need_s is -1", &|it| it.profile.tensors[1].need_s = -1.0);
    case("tensors[0] (\"layer1\"): ready_s is NaN", &|it| it.profile.tensors[0].ready_s = f64::NAN);
    case("tensors is empty", &|it| it.profile.tensors.clear());
    case("representatives", &|it| {
        it.strategy = StrategyChoice::Named("kvstore".into());
        it.representatives = 1;
    });
    case("plan is for 2 ranks", &|it| {
        it.plan = Some(simulate(it).expect("it runs").plan.as_ref().clone());
        it.workers = 3;
    });
    for (scenario, named) in cases {
        let text = simulate(&scenario).map(|_| ()).map_err(|error| error.to_string());
        assert!(text.as_ref().is_err_and(|text| text.contains(named)), "{named}: {text:?}");
    }
    let unknown = Scenario::from_json(r#"{"workres": 2}"#).map_err(|error| error.to_string());
    assert!(unknown.is_err_and(|text| text.contains("workres")));
}

fn any_scenario() -> impl Generator<Value = Scenario> {
    let numbers = (1..60_000_u64, 0.0..1.0_f64, 0.0..1.0_f64);
    let profile = (proptest::collection::vec(numbers, 1..12), 0.001..0.05_f64, 0.001..0.1_f64);
    let cluster = (1..7_u32, 0..Strategy::SYNCHRONOUS.len(), 50e6..5e9_f64, 0.0..0.002_f64);
    let knobs = (1_000..70_000_u32, 0..3_u64, 0.0..0.3_f64, 500..60_000_u64, any::<u64>());
    (profile, cluster, knobs).prop_map(|(profile, cluster, knobs)| {
        let (tensors, forward_s, backward_s) = profile;
        let (workers, strategy, rate_bps, latency_s) = cluster;
        let (frame_bytes, pieces, jitter, slice_elems, seed) = knobs;
        let tensors = tensors.into_iter().enumerate().map(|(index, (numel, need, ready))| {
            let ready_s = forward_s + ready * backward_s;
            tensor(&format!("t{index}"), numel, need * forward_s, ready_s)
        });
        let profile =
            Profile { tensors: tensors.collect(), forward_s, compute_s: forward_s + backward_s };
        let network = Network { latency_s, piece_bytes: pieces * 7_000, ..Network::new(rate_bps) };
        let mut scenario =
            Scenario::new(profile, workers, Strategy::SYNCHRONOUS[strategy], network);
        scenario.frame_bytes = frame_bytes;
        scenario.compute_jitter = jitter;
        scenario.slice_elems = Some(slice_elems);
        scenario.seed = seed;
        scenario
    })
}

/// The limit from gradients that come late and are needed early, for evenly loaded ports.
fn pair_bound_s(scenario: &Scenario) -> f64 {
    let profile = &scenario.profile;
    let workers = f64::from(scenario.workers);
    // Each tensor is sent once as gradients and once as results by all ports together; before the
    // last result of a tensor is there, its port has carried these bytes.
    let wire_s = |tensor: &ProfiledTensor| {
        let bytes = (tensor.numel * 4) as f64;
        2.0 * (workers - 1.0) / workers * bytes * 8.0 / scenario.network.goodput_bps()
    };
    let mut bound: f64 = 0.0;
    for early in &profile.tensors {
        for late in &profile.tensors {
            let between =
                |it: &&ProfiledTensor| it.ready_s >= early.ready_s && it.need_s <= late.need_s;
            let bytes_s: f64 = profile.tensors.iter().filter(between).map(wire_s).sum();
            if bytes_s > 0.0 {
                bound = bound.max(early.ready_s + bytes_s - late.need_s);
            }
        }
    }
    bound
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn what_holds_for_every_scenario(scenario in any_scenario()) {
        let outcome = simulate(&scenario).expect("the scenario runs");
        let report = &outcome.report;
        // Same scenario, same report.
        let again = simulate(&scenario).expect("the scenario runs").report;
        prop_assert_eq!(report, &again);
        // Nobody beats the bound. Ranks differ in their steps, so the mean over the run counts:
        // from the end of the first forward to that of the last.
        let mean = report.steps_s.iter().sum::<f64>() / report.steps_s.len() as f64;
        let bound = report.port_bound_s.max(pair_bound_s(&scenario));
        prop_assert!(mean >= bound * (1.0 - 1e-6), "{} beats {}", mean, bound);
        // All gradients go to their owners and all results come back, with a header a frame.
        let others = u64::from(scenario.workers - 1);
        let payload = 2 * others * scenario.profile.bytes() * u64::from(scenario.steps);
        prop_assert_eq!(report.bytes, payload + report.frames * HEADER_BYTES as u64);
        // Waiting explains the step.
        let waits: f64 = report.waits.iter().map(|it| it.wait_s).sum();
        let slowest = report.compute_s * (1.0 + scenario.compute_jitter);
        prop_assert!(mean <= slowest + waits + 1e-6, "{} > {} + {}", mean, slowest, waits);
    }

    #[test]
    fn any_text_is_a_scenario_or_an_error(text in "\\PC*") {
        prop_assert!(Scenario::from_json(&text).is_err());
    }
}

/// One tensor of so many slices, all ready at the end.
fn one_tensor(slices: u64, slice_elems: u64, workers: u32) -> Scenario {
    let mut scenario = free(layers(&[slices * slice_elems]), workers, "ring", ideal(1e9));
    scenario.slice_elems = Some(slice_elems);
    scenario.frame_bytes = 1 << 20;
    scenario
}

#[test]
fn one_slice_goes_round_the_ring_twice() {
    // 16,384 elements are one slice: 2 (N - 1) hops, one after the other.
    let scenario = one_tensor(1, RING_CHUNK_ELEMS, 4);
    let hop_s = (RING_CHUNK_ELEMS * 4 + HEADER_BYTES as u64) as f64 * 8.0 / 1e9;
    let slowest = run(&scenario).waits[0].wait_s;
    // The last rank to get the mean waits for six hops; the mean over ranks is less.
    assert!(slowest <= 6.0 * hop_s && slowest >= 3.0 * hop_s, "{slowest} and {hop_s}");
    near(run(&scenario).steps_s[0], 2.0 * UNIT_S + 6.0 * hop_s, 3.1 * hop_s);
}

#[test]
fn many_slices_keep_every_port_of_a_ring_busy() {
    for workers in [2, 3, 5] {
        let slices = 40 * u64::from(workers);
        let report = run(&one_tensor(slices, RING_CHUNK_ELEMS, workers));
        let share = 2.0 * f64::from(workers - 1) / f64::from(workers);
        let bytes = share * (slices * RING_CHUNK_ELEMS * 4) as f64;
        near(report.tx_bytes_per_step_max / bytes, 1.0, 0.01);
        let wire_s = bytes * 8.0 / 1e9;
        // What comes beside it: the first slice fills the ring, the last one empties it.
        near((report.step_s - 2.0 * UNIT_S) / wire_s, 1.0, 0.1);
    }
}

#[test]
fn an_urgent_slice_passes_the_others_on_a_ring_too() {
    let profile = Profile {
        tensors: vec![tensor("first", 1_000, 0.0, 0.21), tensor("last", 6_250_000, 0.1, 0.2)],
        forward_s: 0.11,
        compute_s: 0.21,
    };
    let wait = |order: Order| {
        let mut scenario = free(profile.clone(), 3, "ring", ideal(1e9));
        let ring = Strategy::named("ring", None, 0).expect("ring");
        scenario.strategy = StrategyChoice::Rules(Strategy { order, ..ring });
        run(&scenario).waits[0].wait_s
    };
    let (urgent, in_turn) = (wait(Order::Priority), wait(Order::Arrival));
    // Four hops, each behind what its port has taken: a frame or two.
    let frame_s = 65_600.0 * 8.0 / 1e9;
    assert!(urgent <= 4.0 * 3.0 * frame_s, "{urgent} s, frames take {frame_s} s");
    assert!(in_turn > 0.1, "{in_turn}");
}

#[test]
fn a_ring_is_not_folded() {
    let mut scenario = one_tensor(10, 1_000, 40);
    scenario.representatives = 4;
    let error = simulate(&scenario).expect_err("refused").to_string();
    assert!(error.contains("representatives") && error.contains("ring"), "{error}");
}

#[test]
fn blocks_go_from_every_rank_to_every_other() {
    let workers = 4;
    let mut scenario = free(layers(&[100_000]), workers, "p3", ideal(1e9));
    let tensors =
        scenario.profile.specs().into_iter().map(|spec| (spec, Scheme::AllGather)).collect();
    let strategy = Strategy::named("p3", None, 0).expect("p3");
    let plan = Plan::build(tensors, strategy, Default::default(), workers).expect("a plan");
    scenario.plan = Some(plan);
    let report = run(&scenario);
    let bytes = f64::from(workers - 1) * 400_000.0;
    near(report.tx_bytes_per_step_max / bytes, 1.0, 0.01);
    // Ports carry every byte once; acknowledgements and the ends of the flows come on top.
    near((report.step_s - 2.0 * UNIT_S) / (bytes * 8.0 / 1e9), 1.1, 0.1);
}

#[test]
fn ranks_that_train_asynchronously_do_not_wait_for_a_slow_one() {
    let scenario = |strategy: &str, workers: u32| Scenario {
        update: Update::Server,
        compute_jitter: 0.5,
        steps: 12,
        ..free(layers(&[9_000, 20_000, 3_000]), workers, strategy, ideal(1e9))
    };
    let asynchronous = run(&scenario("asgd", 4));
    let staleness = asynchronous.staleness.expect("pushes were applied alone");
    // Four ranks of about the same speed: about three updates lie in between.
    assert!((1.5..4.5).contains(&staleness.mean), "{staleness:?}");
    let synchronous = run(&scenario("p3", 4));
    assert!(synchronous.staleness.is_none());
    assert!(
        asynchronous.step_s < synchronous.step_s,
        "{} {}",
        asynchronous.step_s,
        synchronous.step_s
    );
    let alone = run(&scenario("asgd", 1)).staleness.expect("pushes");
    assert_eq!((alone.max, alone.pushes > 0), (0, true));
    let folded = Scenario { representatives: 2, ..scenario("asgd", 8) };
    let refused = simulate(&folded).expect_err("none can stand for another");
    assert!(refused.to_string().contains("none can stand for another"), "{refused}");
}
