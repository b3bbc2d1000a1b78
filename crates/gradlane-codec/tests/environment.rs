//! The environment variable that forces an instruction set, seen from a program of its own.

use std::process::Command;

use gradlane_codec::Variant;

/// Starts this test binary again with the variable set, and gives what it reports.
fn report_with(forced: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "reports_what_is_active", "--ignored", "--nocapture"])
        .env("GRADLANE_SIMD", forced)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[ignore = "started by the other tests in an environment of its own"]
fn reports_what_is_active() {
    println!("active {} / {:?}", Variant::active(), Variant::from_environment());
}

#[test]
fn every_available_variant_can_be_forced() {
    for variant in Variant::available() {
        let report = report_with(variant.name());
        assert!(report.contains(&format!("active {variant} / Ok({variant})")), "{report}");
    }
}

#[test]
fn a_mistyped_name_is_reported_and_the_widest_is_used() {
    let widest = Variant::available().last().unwrap();
    let report = report_with("avx9000");
    assert!(report.contains(&format!("active {widest} / Err(")), "{report}");
    let report = report_with("");
    assert!(report.contains(&format!("active {widest} / Ok({widest})")), "{report}");
}
