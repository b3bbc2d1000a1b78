//! Ranks that are stopped for moments, in virtual time: what each rule makes of the others' steps.

use gradlane_engine::{Cutoff, StragglerPolicy};
use gradlane_sim::{
    simulate, CodedTensor, Network, Profile, ProfiledTensor, Scenario, SimError, Stops,
    StragglerFigures,
};

/// Twelve equal layers, 300 ms a step, a third of it forward; 20 MB.
fn profile() -> Profile {
    let layers = 12_u32;
    let tensor = |number: u32| ProfiledTensor {
        name: format!("layer{number}"),
        numel: 416_000,
        dtype: gradlane_units::Dtype::F32,
        need_s: 0.1 * f64::from(number) / f64::from(layers),
        ready_s: 0.3 - 0.2 * f64::from(number) / f64::from(layers),
    };
    Profile { tensors: (0..layers).map(tensor).collect(), forward_s: 0.1, compute_s: 0.3 }
}

/// Four ranks, of which the first three own everything, and the last may be stopped.
fn scenario(close: Option<Cutoff>, stops: bool) -> Scenario {
    let mut scenario = Scenario::new(profile(), 4, "p3", Network::new(2.7e9));
    scenario.servers = Some(3);
    scenario.steps = 40;
    scenario.slice_elems = Some(208_000);
    scenario.compute_jitter = 0.01;
    scenario.stragglers = close.map(|close| StragglerPolicy { cutoff: close, ahead_steps: 4 });
    if stops {
        scenario.stops = vec![Stops { rank: 3, share: 0.1, burst_s: 0.04 }];
    }
    scenario
}

fn figures(close: Option<Cutoff>, stops: bool) -> StragglerFigures {
    let outcome = simulate(&scenario(close, stops)).expect("a run");
    outcome.report.stragglers.expect("figures of stragglers")
}

const BACKUP: Cutoff = Cutoff::Backup { ranks: 1 };

#[test]
fn leaving_a_stopped_rank_out_keeps_the_others_within_a_twentieth_of_nobody_stopped() {
    let undisturbed = simulate(&scenario(None, false)).expect("a run").report.step_s;
    let waiting = figures(None, true);
    assert!(waiting.others_step_s_mean > 1.08 * undisturbed, "{waiting:?} after {undisturbed}");
    assert_eq!(waiting.left_out_steps, [0; 4]);
    for close in [BACKUP, Cutoff::Adaptive, Cutoff::Deadline { percent: 105 }] {
        let found = figures(Some(close), true);
        assert!(found.others_step_s_mean < 1.05 * undisturbed, "{close:?}: {found:?}");
        assert!(found.left_out_steps[3] > 20, "{close:?}: {found:?}");
        assert!(found.passed_steps[3] > 0, "{close:?}: {found:?}");
    }
}

#[test]
fn encoded_steps_go_on_without_a_stopped_rank_too() {
    let run = |close: Option<Cutoff>, stops: bool| {
        let mut scenario = scenario(close, stops);
        // Too slow for the values themselves: 20 MB would take four times as long.
        scenario.network = Network::new(0.4e9);
        let codec = CodedTensor { codec: "qsgd:bits=4,residual=on".into(), sizes: vec![] };
        let names = scenario.profile.tensors.iter().map(|tensor| tensor.name.clone());
        scenario.codecs = names.map(|name| (name, codec.clone())).collect();
        simulate(&scenario).expect("a run").report
    };
    let undisturbed = run(None, false).step_s;
    let waiting = run(None, true).stragglers.expect("figures").others_step_s_mean;
    assert!(waiting > 1.05 * undisturbed, "{waiting} after {undisturbed}");
    let found = run(Some(BACKUP), true).stragglers.expect("figures");
    assert!(found.others_step_s_mean < 0.97 * waiting, "{found:?} after {waiting}");
    assert!(found.left_out_steps[3] > 20, "{found:?}");
    assert!(found.passed_steps[3] > 0, "{found:?}");
}

#[test]
fn nobody_is_left_out_for_good_where_nobody_is_slow() {
    let found = figures(Some(BACKUP), false);
    assert_eq!(found.left_out_steps.iter().sum::<u64>(), 40);
    assert!(found.left_out_steps.iter().all(|&steps| steps < 30), "{found:?}");
    let found = figures(Some(Cutoff::Adaptive), false);
    assert_eq!(found.left_out_steps, [0; 4], "nobody is unusually late");
}

#[test]
fn a_rank_that_stops_for_steps_takes_what_it_missed_and_comes_to_the_end() {
    let mut scenario = scenario(Some(BACKUP), true);
    scenario.stops[0].burst_s = 0.9;
    scenario.stops[0].share = 0.3;
    let report = simulate(&scenario).expect("a run").report;
    let found = report.stragglers.expect("figures");
    assert!(found.passed_steps[3] >= 6, "{found:?}");
    assert!(found.others_step_s_mean < 0.33, "{found:?}");
}

#[test]
fn stops_are_the_same_in_each_run_and_others_for_another_seed() {
    let run = |seed: u64| {
        let mut scenario = scenario(Some(Cutoff::Adaptive), true);
        scenario.seed = seed;
        scenario.steps = 12;
        let report = simulate(&scenario).expect("a run").report;
        serde_json::to_string(&report).expect("text")
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn stops_that_make_no_sense_are_refused() {
    let refused = |change: fn(&mut Scenario)| {
        let mut scenario = scenario(Some(BACKUP), true);
        change(&mut scenario);
        match simulate(&scenario) {
            Err(SimError::Argument(text)) => text,
            other => panic!("{other:?}"),
        }
    };
    assert!(refused(|it| it.stops[0].rank = 4).contains("4 of 4 ranks"));
    assert!(refused(|it| it.stops[0].share = 1.0).contains("below 1"));
    assert!(refused(|it| it.stops[0].burst_s = 0.0).contains("burst_s"));
    assert!(refused(|it| it.stops.push(it.stops[0])).contains("twice"));
    assert!(refused(|it| it.representatives = 2).contains("representatives"));
    assert!(refused(|it| it.stragglers =
        it.stragglers.map(|rule| StragglerPolicy { cutoff: Cutoff::Backup { ranks: 4 }, ..rule }))
    .contains("4 of 4"));
}
