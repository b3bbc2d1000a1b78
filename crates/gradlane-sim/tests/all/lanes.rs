//! Lanes: each an engine, a thread and a connection to each peer for its share of the slices.

use gradlane_engine::{Cutoff, StragglerPolicy, Strategy, Update};
use gradlane_sim::{
    simulate, CodedTensor, Costs, Lane, Network, Nodes, Outputs, Profile, ProfiledTensor, Report,
    Scenario, Stops, StrategyChoice, Subject, TensorScheme,
};
use gradlane_units::{Dtype, Priority, SliceId, Step};
use gradlane_wire::{FrameKind, HEADER_BYTES};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Layers of these sizes; each takes a millisecond forward and two backward.
fn layers(sizes: &[u64]) -> Profile {
    layers_of(1e-3, sizes)
}

/// Layers that take as long forward and twice that backward.
fn layers_of(layer_s: f64, sizes: &[u64]) -> Profile {
    let forward_s = layer_s * sizes.len() as f64;
    let tensor = |(index, &numel): (usize, &u64)| ProfiledTensor {
        name: format!("layer{index}"),
        numel,
        dtype: Dtype::F32,
        need_s: layer_s * index as f64,
        ready_s: forward_s + 2.0 * layer_s * (sizes.len() - index) as f64,
    };
    let tensors = sizes.iter().enumerate().map(tensor).collect();
    Profile { tensors, forward_s, compute_s: 3.0 * forward_s }
}

/// A scenario with a work thread for each lane, traced.
fn traced(sizes: &[u64], ranks: u32, strategy: &str, lanes: u32) -> Scenario {
    let mut network = Network::new(2e9);
    // One piece a frame.
    network.piece_bytes = 1 << 20;
    Scenario {
        lanes,
        work_threads: lanes as usize,
        slice_elems: Some(20_000),
        steps: 2,
        outputs: Outputs { trace: true, ..Outputs::default() },
        ..Scenario::new(layers(sizes), ranks, strategy, network)
    }
}

/// A frame of a slice: sender, receiver, slice, step, kind and bytes.
type Sent = (u32, u32, SliceId, Step, &'static str, u32);

/// A frame of a push: when it begins to leave, its priority, and when its tensor is ready.
type Push = (u64, Priority, u64);

/// The frames of slices that a scenario sends, in order.
fn frames(scenario: &Scenario) -> Vec<Sent> {
    let outcome = simulate(scenario).expect("the scenario runs");
    let sent = outcome.trace.expect("a trace").spans.into_iter().filter_map(|span| {
        let Subject::Slice { kind: Some(kind), slice, peer, bytes, .. } = span.subject else {
            return None;
        };
        let is_sent = matches!(span.lane, Lane::Push | Lane::Broadcast);
        is_sent.then(|| (span.rank, peer, slice, span.step, kind.name(), bytes))
    });
    let mut sent: Vec<Sent> = sent.collect();
    sent.sort_unstable();
    sent
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_number_of_lanes_sends_each_slice_once_and_completes_each_step(
        sizes in prop::collection::vec(1_u64..200_000, 1..8),
        ranks in 2_u32..6,
        lanes in 2_u32..7,
        strategy in prop::sample::select(Strategy::SYNCHRONOUS.to_vec()),
    ) {
        let scenario = traced(&sizes, ranks, strategy, lanes);
        let plan = simulate(&scenario).expect("the scenario runs").plan;
        let found = frames(&scenario);
        prop_assert_eq!(&found, &frames(&Scenario { lanes: 1, ..scenario.clone() }));
        if strategy == "ring" {
            return Ok(());
        }
        let mut payload: BTreeMap<(u32, u32, SliceId, Step, &str), u64> = BTreeMap::new();
        for (from, to, slice, step, kind, bytes) in found {
            let bytes = u64::from(bytes) - HEADER_BYTES as u64;
            *payload.entry((from, to, slice, step, kind)).or_default() += bytes;
        }
        for slice in (0..plan.slices.len() as u32).map(SliceId) {
            let owner = plan.slice(slice).owner.0;
            for rank in (0..ranks).filter(|&rank| rank != owner) {
                for step in [Step(1), Step(2)] {
                    let push = (rank, owner, slice, step, FrameKind::Push.name());
                    let back = (owner, rank, slice, step, FrameKind::Broadcast.name());
                    for key in [push, back] {
                        prop_assert_eq!(payload.remove(&key), Some(plan.slice_bytes(slice)));
                    }
                }
            }
        }
        prop_assert!(payload.is_empty(), "sent beside: {:?}", payload);
    }

    #[test]
    fn an_urgent_slice_waits_for_one_frame_of_its_lane_at_most(
        sizes in prop::collection::vec(1_u64..400_000, 2..8),
        ranks in 2_u32..5,
        lanes in 1_u32..6,
        rate_bps in prop::sample::select(vec![0.2e9, 1e9, 4e9]),
    ) {
        let mut scenario = traced(&sizes, ranks, "p3", lanes);
        scenario.network.rate_bps = rate_bps;
        scenario.costs = Costs::FREE;
        // The kernel takes one frame of a connection.
        scenario.network.send_buffer_bytes = 1;
        scenario.network.queue_bytes = 0;
        scenario.network.low_water_bytes = 1;
        let outcome = simulate(&scenario).expect("the scenario runs");
        let lane_of = outcome.plan.lanes_of_slices(lanes);
        let mut sent: BTreeMap<(u32, u32, u32), Vec<Push>> = BTreeMap::new();
        for span in outcome.trace.expect("a trace").spans {
            let Subject::Slice { kind: Some(FrameKind::Push), tensor, slice, peer, priority, .. } =
                span.subject
            else {
                continue;
            };
            if span.lane == Lane::Push && span.step == Step(1) {
                // The first step waits for nothing.
                let ready_ns = scenario.profile.tensors[tensor.index()].ready_s * 1e9;
                let way = (span.rank, peer, lane_of[slice.index()]);
                let frame = (span.begin_ns, priority, ready_ns.ceil() as u64);
                sent.entry(way).or_default().push(frame);
            }
        }
        prop_assert!(!sent.is_empty() || sizes.len() as u32 <= ranks);
        for (way, frames) in sent {
            for &(begin, priority, ready) in &frames {
                let less_urgent = frames.iter().filter(|(other_begin, other, _)| {
                    *other < priority && (ready + 1..begin).contains(other_begin)
                });
                prop_assert!(less_urgent.count() <= 1, "{:?} {:?}", way, frames);
            }
        }
    }
}

/// Something for each of the first three layers.
fn of_three_layers<T: Clone>(value: &T) -> BTreeMap<String, T> {
    (0..3).map(|index| (format!("layer{index}"), value.clone())).collect()
}

/// The report of a scenario over two lanes.
fn over_two_lanes(scenario: Scenario) -> Report {
    let scenario = Scenario { lanes: 2, work_threads: 2, ..scenario };
    simulate(&scenario).expect("the scenario runs").report
}

#[test]
fn everything_that_steps_can_have_completes_over_lanes() {
    let sizes = [150_000, 70_000, 300_000, 20_000];
    let plain = || Scenario {
        slice_elems: Some(20_000),
        ..Scenario::new(layers(&sizes), 4, "p3", Network::new(4e9))
    };
    let schemes = |scheme: TensorScheme| of_three_layers(&scheme);
    let codecs = of_three_layers(&CodedTensor { codec: "qsgd:bits=8".into(), sizes: Vec::new() });
    let asgd = StrategyChoice::Named("asgd".into());
    let carried = |leaders: u64| {
        let part = |(tensor, &numel): (u32, &u64)| (tensor, numel / leaders);
        (0..leaders).map(|_| (0..).zip(&sizes).map(part).collect()).collect()
    };
    let nodes = |leaders| Nodes { ranks: 2, carried: carried(leaders), rate_bps: None };
    let scenarios = [
        Scenario { clips: true, ..plain() },
        Scenario { clips: true, nodes: Some(nodes(2)), ..plain() },
        Scenario { nodes: Some(nodes(1)), ..plain() },
        Scenario {
            nodes: Some(Nodes { ranks: 2, carried: Vec::new(), rate_bps: None }),
            ..plain()
        },
        Scenario { serving: 2, ..plain() },
        Scenario { serving: 1, switch_sums: true, ..plain() },
        Scenario { strategy: asgd, update: Update::Server, ..plain() },
        Scenario { codecs, ..plain() },
        Scenario {
            schemes: schemes(TensorScheme::Sfb { block_bytes: 9_000, rebuild_s: 1e-4 }),
            ..plain()
        },
        Scenario {
            schemes: schemes(TensorScheme::Adam { block_bytes: 9_000, rebuild_s: 1e-4 }),
            ..plain()
        },
        Scenario { schemes: schemes(TensorScheme::Ring), ..plain() },
    ];
    for scenario in scenarios {
        let one = simulate(&scenario).expect("the scenario runs").report;
        let two = over_two_lanes(scenario.clone());
        assert_eq!(two.port_bound_s, one.port_bound_s);
        // A tensor of blocks is in one lane, which has half of the port.
        let ratio = two.step_s / one.step_s;
        assert!((0.5..1.4).contains(&ratio), "{ratio} of {}: {scenario:?}", one.step_s);
    }
}

#[test]
fn steps_go_on_without_a_stopped_rank_over_lanes_too() {
    let scenario = |cutoff| Scenario {
        servers: Some(3),
        steps: 40,
        compute_jitter: 0.01,
        stragglers: Some(StragglerPolicy { cutoff, ahead_steps: 4 }),
        stops: vec![Stops { rank: 3, share: 0.1, burst_s: 0.04 }],
        ..Scenario::new(layers_of(8e-3, &[416_000; 12]), 4, "p3", Network::new(2.7e9))
    };
    for cutoff in [Cutoff::Backup { ranks: 1 }, Cutoff::Adaptive, Cutoff::Deadline { percent: 105 }]
    {
        let figures = over_two_lanes(scenario(cutoff)).stragglers.expect("figures of stragglers");
        assert!(figures.left_out_steps[..3].iter().all(|&it| it < 3), "{cutoff:?}: {figures:?}");
        assert!(figures.left_out_steps[3] > 20, "{cutoff:?}: {figures:?}");
        assert!(figures.passed_steps[3] > 0, "{cutoff:?}: {figures:?}");
    }
}

/// Two ranks whose hosts are slower than their ports.
fn slow_hosts(lanes: u32, processors: u32) -> Report {
    let scenario = Scenario {
        lanes,
        work_threads: lanes as usize,
        processors,
        ..Scenario::new(layers(&[8_000_000; 8]), 2, "p3", Network::new(200e9))
    };
    simulate(&scenario).expect("the scenario runs").report
}

#[test]
fn lanes_share_out_what_a_host_does() {
    let [one, two, four] = [1, 2, 4].map(|lanes| slow_hosts(lanes, 0));
    assert!(two.step_s < 0.65 * one.step_s, "{} and {}", one.step_s, two.step_s);
    assert!(four.step_s < 0.65 * two.step_s, "{} and {}", two.step_s, four.step_s);
    assert!(four.step_s >= four.port_bound_s, "{}", four.step_s);
    assert!(one.io_utilization > 0.9, "{}", one.io_utilization);
}

#[test]
fn as_many_threads_run_at_a_time_as_the_host_has_processors() {
    let threads = 8;
    assert_eq!(slow_hosts(4, threads), slow_hosts(4, 0));
    let steps: Vec<f64> =
        [1, 2, 4, threads].map(|processors| slow_hosts(4, processors).step_s).to_vec();
    assert!(steps.windows(2).all(|pair| pair[1] < pair[0]), "{steps:?}");
    let alone = slow_hosts(4, 1);
    let busy_s = (4.0 * alone.io_utilization + alone.work_utilization) * alone.step_s;
    assert!((0.9..=1.0).contains(&(busy_s / alone.step_s)), "{busy_s} of {}", alone.step_s);
}
