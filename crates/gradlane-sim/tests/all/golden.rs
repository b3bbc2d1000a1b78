//! A table of simulated steps. A change of the engine that makes a strategy faster or slower is a
//! difference of numbers in `golden.txt`, to be looked at; `GRADLANE_GOLDEN=write` writes the file anew.

use gradlane_engine::Strategy;
use gradlane_sim::{simulate, Network, Profile, ProfiledTensor, Scenario, TensorScheme};
use gradlane_units::Dtype;
use std::fmt::Write;
use std::path::Path;

/// Ten convolutions that grow and take the same time, then two large layers that take little: the
/// shape of the image models.
fn image_model() -> Profile {
    let heavy = (0..10_u64).map(|index| (36_000 << (index / 2), 0.010));
    let layers: Vec<(u64, f64)> = heavy.chain([(4_000_000, 0.002), (500_000, 0.001)]).collect();
    model(&layers)
}

/// A large embedding first, then ten equal layers: the shape of the translation models.
fn translation_model() -> Profile {
    let mut layers = vec![(4_000_000, 0.002)];
    layers.extend([(400_000, 0.010); 10]);
    model(&layers)
}

/// Eight equal layers of 4 MB on a fast accelerator: where ports are fast, hosts are the limit.
fn fast_model() -> Profile {
    model(&[(1_000_000, 0.0002); 8])
}

/// Layers of a size and a forward time; backward takes twice that.
fn model(layers: &[(u64, f64)]) -> Profile {
    let forward_s: f64 = layers.iter().map(|layer| layer.1).sum();
    let mut need_s = 0.0;
    let tensors = layers.iter().enumerate().map(|(index, &(numel, seconds))| {
        let tensor = ProfiledTensor {
            name: format!("layer{index}.weight"),
            numel,
            dtype: Dtype::F32,
            need_s,
            ready_s: forward_s + 2.0 * (forward_s - need_s),
        };
        need_s += seconds;
        tensor
    });
    Profile { tensors: tensors.collect(), forward_s, compute_s: 3.0 * forward_s }
}

/// What a table calls a mixture of schemes, the strategy of the rest, and who has another one.
type Mixture = (&'static str, &'static str, Vec<(&'static str, TensorScheme)>);

/// Factors for the image model's large layers, beside servers and beside a ring; and a ring for
/// one of them alone.
fn mixtures() -> Vec<Mixture> {
    let factors = |bytes, rebuild_s| TensorScheme::Sfb { block_bytes: bytes, rebuild_s };
    let large = || {
        vec![
            ("layer10.weight", factors(640_000, 0.003)),
            ("layer11.weight", factors(160_000, 0.001)),
        ]
    };
    vec![
        ("p3+sfb", "p3", large()),
        ("wfbp+sfb", "wfbp", large()),
        ("ring+sfb", "ring", large()),
        ("p3+ring", "p3", vec![("layer10.weight", TensorScheme::Ring)]),
    ]
}

fn table() -> String {
    let mut table = String::from("model workers Mbit/s strategy step-ms bound-ms utilization\n");
    for (name, profile) in [("image", image_model()), ("translation", translation_model())] {
        for (workers, rate_bps) in [(4, 0.8e9), (4, 2e9), (16, 2e9)] {
            for strategy in Strategy::SYNCHRONOUS {
                let network = Network::new(rate_bps);
                let report = simulate(&Scenario::new(profile.clone(), workers, strategy, network))
                    .expect("the scenario runs")
                    .report;
                let (step_ms, bound_ms) = (report.step_s * 1e3, report.port_bound_s * 1e3);
                let (rate, used) = (rate_bps / 1e6, report.tx_utilization * 100.0);
                writeln!(
                    table,
                    "{name} {workers} {rate} {strategy} {step_ms:.1} {bound_ms:.1} {used:.0}%"
                )
                .expect("text grows");
            }
        }
    }
    for (name, strategy, schemes) in mixtures() {
        for (workers, rate_bps) in [(4, 0.8e9), (16, 2e9)] {
            let network = Network::new(rate_bps);
            let schemes = schemes.iter().map(|(name, it)| ((*name).to_string(), *it));
            let scenario = Scenario {
                schemes: schemes.collect(),
                ..Scenario::new(image_model(), workers, strategy, network)
            };
            let report = simulate(&scenario).expect("the scenario runs").report;
            let (step_ms, bound_ms) = (report.step_s * 1e3, report.port_bound_s * 1e3);
            let (rate, used) = (rate_bps / 1e6, report.tx_utilization * 100.0);
            writeln!(table, "image {workers} {rate} {name} {step_ms:.1} {bound_ms:.1} {used:.0}%")
                .expect("text grows");
        }
    }
    for (workers, rate_bps) in [(2, 50e9), (4, 2e9), (8, 25e9)] {
        for lanes in [1, 2, 4] {
            for strategy in ["p3", "wfbp", "ring"] {
                let network = Network::new(rate_bps);
                let scenario = Scenario {
                    lanes,
                    work_threads: lanes as usize,
                    ..Scenario::new(fast_model(), workers, strategy, network)
                };
                let report = simulate(&scenario).expect("the scenario runs").report;
                let (step_ms, bound_ms) = (report.step_s * 1e3, report.port_bound_s * 1e3);
                let (rate, used) = (rate_bps / 1e6, report.tx_utilization * 100.0);
                writeln!(
                    table,
                    "fast {workers} {rate} {strategy}/{lanes} {step_ms:.1} {bound_ms:.1} {used:.0}%"
                )
                .expect("text grows");
            }
        }
    }
    table
}

#[test]
fn simulated_steps_are_those_of_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden.txt");
    let found = table();
    if std::env::var_os("GRADLANE_GOLDEN").is_some() {
        std::fs::write(&path, &found).expect("a writable file");
    }
    let expected = std::fs::read_to_string(&path).expect("the table");
    for (found, expected) in found.lines().zip(expected.lines()) {
        assert_eq!(found, expected, "GRADLANE_GOLDEN=write writes the table anew");
    }
    assert_eq!(found.lines().count(), expected.lines().count());
}
