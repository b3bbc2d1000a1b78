//! Clusters in virtual time whose tensors are encoded: fewer bytes, and work for the host.

use gradlane_sim::{simulate, CodedTensor, Costs, Network, Profile, ProfiledTensor, Scenario};

/// The same cluster with every tensor in a codec.
fn encoded(mut scenario: Scenario, codec: &str) -> Scenario {
    let coded = |tensor: &ProfiledTensor| {
        let codec = CodedTensor { codec: codec.to_string(), sizes: vec![tensor.numel] };
        (tensor.name.clone(), codec)
    };
    scenario.codecs = scenario.profile.tensors.iter().map(coded).collect();
    scenario
}

fn wide_profile() -> Profile {
    let tensor = |index: u32| ProfiledTensor {
        name: format!("layer{index}.weight"),
        numel: 1_000_000,
        dtype: gradlane_units::Dtype::F32,
        need_s: 0.01 * f64::from(index),
        ready_s: 0.15 - 0.01 * f64::from(index),
    };
    Profile { tensors: (0..5).map(tensor).collect(), forward_s: 0.05, compute_s: 0.15 }
}

#[test]
fn codecs_shorten_steps_by_their_bytes_and_cost_what_the_host_says() {
    let mut raw = Scenario::new(wide_profile(), 4, "p3", Network::new(1e8));
    raw.costs = Costs::FREE;
    let right = simulate(&raw).expect("a report").report;
    let few = simulate(&encoded(raw.clone(), "qsgd:bits=8")).expect("a report").report;
    let ratio = right.tx_bytes_per_step_mean / few.tx_bytes_per_step_mean;
    // A byte for four, and four bytes for each 512 values.
    assert!((3.93..3.97).contains(&ratio), "{ratio}");
    assert!((right.port_bound_s / few.port_bound_s - ratio).abs() < 0.02);
    assert!(few.step_s < right.step_s / 2.0, "{} and {}", few.step_s, right.step_s);
    assert_eq!(few.step_s.max(few.port_bound_s * 0.999), few.step_s);
    let mut slow = encoded(raw, "qsgd:bits=8");
    slow.costs.encode_byte_s = 20e-9;
    slow.costs.decode_byte_s = 20e-9;
    let slow = simulate(&slow).expect("a report").report;
    // 20 MB are encoded and decoded on every rank, and each of 5 MB is decoded four times and encoded.
    let work_s = (20e6 + 15e6 + 20e6 + 5e6) * 20e-9;
    assert!(slow.step_s > 0.9 * work_s, "{} and {work_s}", slow.step_s);
    assert!(slow.work_utilization > 0.7 && few.work_utilization < 0.01);
}

#[test]
fn each_way_has_the_bytes_that_a_sparse_codec_is_expected_to_take() {
    let mut raw = Scenario::new(wide_profile(), 4, "p3", Network::new(1e7));
    raw.costs = Costs::FREE;
    let sent = |codec: &str| {
        let report = simulate(&encoded(raw.clone(), codec)).expect("a report").report;
        assert!(report.port_bound_s < report.step_s && report.step_s < 1.5 * report.port_bound_s);
        report.tx_bytes_per_step_mean
    };
    // Four bytes a value, and one or two of its position; three quarters go to others.
    let values = 0.75 * 5e6;
    let few = sent("topk:ratio=0.02") / values;
    assert!((0.98..1.03).contains(&(few / (2.0 * 0.02 * 5.08))), "{few}");
    // The way back has four times as many values, with single bytes of positions.
    let back = sent("topk:ratio=0.02,broadcast_ratio=0.08") / values;
    assert!((0.98..1.03).contains(&(back / (0.02 * 5.08 + 0.08 * 5.0))), "{back}");
    // A warm-up is over once.
    assert_eq!(sent("dgc:ratio=0.01,warmup=40"), sent("dgc:ratio=0.01,warmup=0"));
}

#[test]
fn where_compute_is_the_limit_codecs_change_nothing() {
    let raw = Scenario::new(wide_profile(), 4, "p3", Network::new(100e9));
    let right = simulate(&raw).expect("a report").report.step_s;
    let few = simulate(&encoded(raw, "qsgd:bits=4")).expect("a report").report.step_s;
    assert!((few / right - 1.0).abs() < 0.05, "{few} and {right}");
}

#[test]
fn scenarios_with_codecs_that_make_no_sense_are_refused() {
    let base = Scenario::new(wide_profile(), 2, "p3", Network::new(1e9));
    let refused = |scenario: &Scenario, named: &str| {
        let text = simulate(scenario).map(|_| ()).map_err(|error| error.to_string());
        assert!(text.as_ref().is_err_and(|text| text.contains(named)), "{named}: {text:?}");
    };
    refused(&encoded(base.clone(), "zip"), "no codec is named");
    let mut other = encoded(base, "f16");
    other.profile.tensors[0].name = "another".to_string();
    refused(&other, "layer0.weight");
}

#[test]
fn what_goes_round_a_ring_is_encoded_too() {
    let raw = Scenario::new(wide_profile(), 4, "ring", Network::new(1e8));
    let right = simulate(&raw).expect("a report").report;
    let few = simulate(&encoded(raw, "qsgd:bits=8")).expect("a report").report;
    let ratio = right.tx_bytes_per_step_mean / few.tx_bytes_per_step_mean;
    assert!((3.5..4.0).contains(&ratio), "{ratio}");
    assert!(few.step_s < right.step_s / 2.0, "{} and {}", few.step_s, right.step_s);
}
