//! Reads a scenario (JSON) from standard input and prints its report:
//! `cargo run --release -p gradlane-sim --example simulate < scenario.json`.

use std::io::Read;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let scenario = gradlane_sim::Scenario::from_json(&text)?;
    let outcome = gradlane_sim::simulate(&scenario)?;
    println!("{}", serde_json::to_string(&outcome.report)?);
    Ok(())
}
