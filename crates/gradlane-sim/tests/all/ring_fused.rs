//! The paper's model: cases worked out by hand, and the curves that the authors' own program gave.

use gradlane_sim::ring_fused::{ring_fused, RingScenario, Rings};
use gradlane_sim::{Profile, ProfiledTensor};
use gradlane_units::Dtype;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn tensor(name: &str, numel: u64, need_s: f64, ready_s: f64) -> ProfiledTensor {
    ProfiledTensor { name: name.into(), numel, dtype: Dtype::F32, need_s, ready_s }
}

/// Backward from 1.000 s to 1.020 s; gradients of 4 MB after 2, 6, 8 and 20 ms of it.
fn four_gradients() -> Profile {
    let ready_s = [1.020, 1.008, 1.006, 1.002];
    let tensors = ready_s.iter().enumerate().map(|(index, &ready_s)| {
        tensor(&format!("layer{index}"), 1_000_000, 0.1 * index as f64, ready_s)
    });
    Profile { tensors: tensors.collect(), forward_s: 1.0, compute_s: 1.02 }
}

fn flat(profile: Profile, workers: u32, rate_bps: f64) -> RingScenario {
    RingScenario {
        profile,
        rings: Rings::Flat { workers },
        rate_bps,
        compression: 1.0,
        fusion_bytes: 64 << 20,
        fusion_timeout_s: 0.005,
        additions: Vec::new(),
    }
}

fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-9, "{found} instead of {expected}");
}

#[test]
fn the_window_is_looked_at_when_a_gradient_comes_and_takes_it_along() {
    // At 2 ms nothing is due. At 6 ms the window of 5 ms is over: two gradients go. At 8 ms it is
    // 2 ms old, at 20 ms it is over again.
    let report = ring_fused(&flat(four_gradients(), 4, 16e9)).expect("a sound scenario");
    let seen: Vec<u64> = report.fusions.iter().map(|fusion| fusion.bytes).collect();
    assert_eq!(seen, [8_000_000, 8_000_000]);
    near(report.fusions[0].ready_s, 0.006);
    near(report.fusions[1].ready_s, 0.020);
    // 2 x 8 MB x 3/4 at 2 GB/s: 6 ms each; the second begins when backward ends.
    near(report.fusions[0].end_s, 0.012);
    near(report.fusions[1].end_s, 0.026);
    near(report.overhead_s, 0.006);
    near(report.scaling_factor, 1.02 / 1.026);
}

#[test]
fn a_full_buffer_goes_before_its_time() {
    let scenario = RingScenario { fusion_bytes: 4_000_000, ..flat(four_gradients(), 2, 1e9) };
    let report = ring_fused(&scenario).expect("a sound scenario");
    assert_eq!(report.fusions.len(), 4);
    // 4 MB through every port at 1 Gbit/s: 32 ms each, one after the other from 2 ms on.
    near(report.fusions[3].begin_s, 0.002 + 3.0 * 0.032);
    near(report.step_s, 1.02 + 0.002 + 4.0 * 0.032 - 0.020);
}

#[test]
fn additions_are_interpolated_and_compression_leaves_them_alone() {
    let mut scenario = flat(four_gradients(), 4, 16e9);
    // 8 MB over 4 workers: 500,000 elements, a quarter of the way from 400,000 to 800,000.
    scenario.additions = vec![(400_000.0, 1e-3), (800_000.0, 5e-3)];
    let report = ring_fused(&scenario).expect("a sound scenario");
    near(report.fusions[0].end_s - report.fusions[0].begin_s, 0.006 + 3.0 * 2e-3);
    scenario.compression = 3.0;
    let report = ring_fused(&scenario).expect("a sound scenario");
    near(report.fusions[0].end_s - report.fusions[0].begin_s, 0.002 + 3.0 * 2e-3);
    // Outside of what was measured the nearest point counts.
    scenario.additions = vec![(800_000.0, 5e-3), (900_000.0, 6e-3)];
    let report = ring_fused(&scenario).expect("a sound scenario");
    near(report.fusions[0].end_s - report.fusions[0].begin_s, 0.002 + 3.0 * 5e-3);
}

#[test]
fn a_hierarchical_ring_needs_the_port_for_nodes_only() {
    let mut scenario = flat(four_gradients(), 16, 1e9);
    let all = ring_fused(&scenario).expect("a sound scenario");
    scenario.rings = Rings::Hierarchical { nodes: 2, workers_per_node: 8, local_rate_bps: 1e12 };
    let nodes = ring_fused(&scenario).expect("a sound scenario");
    let length = |report: &gradlane_sim::ring_fused::RingReport| {
        report.fusions[0].end_s - report.fusions[0].begin_s
    };
    near(length(&all), 2.0 * 8e6 * 8.0 * 15.0 / 16.0 / 1e9);
    near(length(&nodes), 8e6 * 8.0 / 1e9 + 2.0 * 8e6 * 8.0 * 7.0 / 8.0 / 1e12);
    // One worker a node is the flat ring.
    scenario.rings = Rings::Hierarchical { nodes: 16, workers_per_node: 1, local_rate_bps: 1e9 };
    let single = ring_fused(&scenario).expect("a sound scenario");
    near(single.step_s, all.step_s);
}

#[test]
fn a_parameter_set_takes_the_time_that_the_paper_states() {
    // Section 4: 7.8 and 42.2 ms for ResNet-50 (97 MB) and VGG16 (527 MB) at 100 Gbit/s: once
    // through a port. A ring over many workers sends nearly twice as much.
    for (megabytes, stated_s) in [(97_u64, 7.8e-3), (527, 42.2e-3)] {
        let numel = megabytes * 1_000_000 / 4;
        let tensors = vec![tensor("all", numel, 0.0, 0.2)];
        let profile = Profile { tensors, forward_s: 0.1, compute_s: 0.2 };
        let report = ring_fused(&flat(profile, 2, 100e9)).expect("a sound scenario");
        assert!((report.overhead_s - stated_s).abs() < 0.1e-3, "{}", report.overhead_s);
    }
}

#[test]
fn nonsense_is_refused_by_name() {
    let good = flat(four_gradients(), 2, 1e9);
    let cases = [
        (RingScenario { rate_bps: f64::NAN, ..good.clone() }, "rate_bps"),
        (RingScenario { compression: 0.0, ..good.clone() }, "compression"),
        (RingScenario { rings: Rings::Flat { workers: 0 }, ..good.clone() }, "rings"),
        (RingScenario { additions: vec![(2.0, 1.0), (1.0, 1.0)], ..good.clone() }, "additions"),
        (RingScenario { fusion_timeout_s: -1.0, ..good }, "fusion_timeout_s"),
    ];
    for (scenario, named) in cases {
        let text = ring_fused(&scenario).map_err(|error| error.to_string());
        assert!(text.as_ref().is_err_and(|text| text.contains(named)), "{named}: {text:?}");
    }
}

/// Published measurements that lie beside a checkout; not part of the project.
fn reference_folder() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data");
    folder.join("whatif_reference.csv").exists().then_some(folder)
}

fn rows(path: &Path) -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(path).expect("a readable file");
    let cells = |line: &str| line.split(',').map(str::to_string).collect();
    text.lines().skip(1).map(cells).collect()
}

fn reference_profile(path: &Path) -> Profile {
    let text = std::fs::read_to_string(path).expect("a readable file");
    let file: Value = serde_json::from_str(&text).expect("JSON");
    let number = |value: &Value| value.as_f64().expect("a number");
    let compute_s = number(&file["batch_time_s"]);
    let forward_s = compute_s - number(&file["backward_time_s"]);
    let entries = file["params"].as_array().expect("a list");
    let tensors = entries.iter().rev().map(|entry| {
        let numel = entry["numel"].as_u64().expect("a count");
        // The last gradient comes with the end of backward; the sum may round to a bit later.
        let ready_s = (forward_s + number(&entry["grad_ready_s"])).min(compute_s);
        tensor(entry["name"].as_str().expect("a name"), numel, 0.0, ready_s)
    });
    Profile { tensors: tensors.collect(), forward_s, compute_s }
}

#[test]
fn agrees_with_the_reference_curves_within_a_twentieth_of_a_point() {
    let Some(folder) = reference_folder() else {
        eprintln!("skipped: no reference data beside this checkout");
        return;
    };
    let number = |cell: &String| cell.parse::<f64>().expect("a number");
    let additions: Vec<(f64, f64)> = rows(&folder.join("vec_add_v100.csv"))
        .iter()
        .map(|row| (number(&row[0]), number(&row[1])))
        .collect();
    let rows = rows(&folder.join("whatif_reference.csv"));
    assert!(rows.len() >= 180, "only {} rows", rows.len());
    for row in &rows {
        let profile = folder.join(format!("profiles/{}-v100-bs32.json", row[0]));
        let workers = row[2].parse().expect("a count");
        let scenario = RingScenario {
            compression: number(&row[4]),
            additions: additions.clone(),
            ..flat(reference_profile(&profile), workers, number(&row[3]) * 1e9)
        };
        let found = ring_fused(&scenario).expect("a sound scenario").scaling_factor;
        let points = 100.0 * (found - number(&row[5])).abs();
        assert!(points <= 0.05, "{row:?}: {found}");
    }
}
