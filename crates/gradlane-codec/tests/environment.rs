//! The environment variable that forces an instruction set, seen from a program of its own.
//!
//! A binary of its own: a process reads the variable once, and this one starts itself again for each value.

use std::process::Command;

use gradlane_codec::InstructionSet;

/// This test binary, to be started as it was: by an emulator, where cargo was told of one.
fn this_again() -> Command {
    let architecture = std::env::consts::ARCH.to_uppercase();
    let runner = format!("CARGO_TARGET_{architecture}_UNKNOWN_LINUX_GNU_RUNNER");
    let runner = std::env::var(runner).unwrap_or_default();
    let this = std::env::current_exe().unwrap();
    let mut words = runner.split_whitespace();
    let Some(emulator) = words.next() else {
        return Command::new(this);
    };
    let mut command = Command::new(emulator);
    command.args(words).arg(this);
    command
}

/// Starts this test binary again with the variable set, and gives what it reports.
fn report_with(forced: &str) -> String {
    let output = this_again()
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
    println!("active {} / {:?}", InstructionSet::active(), InstructionSet::from_environment());
}

#[test]
fn every_available_variant_can_be_forced() {
    for instruction_set in InstructionSet::available() {
        let report = report_with(instruction_set.name());
        assert!(
            report.contains(&format!("active {instruction_set} / Ok({instruction_set})")),
            "{report}"
        );
    }
}

#[test]
fn a_mistyped_name_is_reported_and_the_widest_is_used() {
    let widest = InstructionSet::available().last().unwrap();
    let report = report_with("avx9000");
    assert!(report.contains(&format!("active {widest} / Err(")), "{report}");
    let report = report_with("");
    assert!(report.contains(&format!("active {widest} / Ok({widest})")), "{report}");
}
