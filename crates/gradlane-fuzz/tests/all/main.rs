//! Every target with drawn inputs and changed samples, for some seconds each.
//!
//! Nothing guides them by coverage, as libFuzzer does in `fuzz/`. `GRADLANE_FUZZ_S` is the seconds of a target. A failure
//! names a seed and an input: `GRADLANE_FUZZ_SEED` and `GRADLANE_FUZZ_INPUT` give that one again.

use gradlane_fuzz::{codec, engine, group, seal, wire};
use gradlane_units::Rng;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const SECONDS: u64 = 10;
/// However slow the machine is.
const LEAST_INPUTS: u64 = 300;

#[test]
fn any_bytes_as_headers() {
    fuzz("wire", 200, &wire::samples(), wire::check);
}

#[test]
fn any_bytes_as_sealed_connections() {
    fuzz("seal", 400, &[], seal::check);
}

#[test]
fn any_bytes_as_encodings() {
    fuzz("codec", 8000, &[], codec::check);
}

#[test]
fn any_bytes_as_inputs_of_the_engine() {
    fuzz("engine", 1500, &[], engine::check);
}

#[test]
fn any_bytes_as_a_member_of_a_group() {
    fuzz("group", 2000, &[], group::check);
}

fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

fn fuzz(name: &str, longest: u32, samples: &[Vec<u8>], check: fn(&[u8]) -> bool) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970");
    let seed = setting("GRADLANE_FUZZ_SEED").unwrap_or(u64::from(now.subsec_nanos()));
    let only = setting("GRADLANE_FUZZ_INPUT");
    let limit = Duration::from_secs(setting("GRADLANE_FUZZ_S").unwrap_or(SECONDS));
    let began = Instant::now();
    let (mut tried, mut deep) = (0, 0);
    while tried < LEAST_INPUTS || began.elapsed() < limit {
        let number = only.unwrap_or(tried);
        let bytes = draw(&mut Rng::new(seed << 32 ^ number), longest, samples);
        match catch_unwind(AssertUnwindSafe(|| check(&bytes))) {
            Ok(is_deep) => deep += u64::from(is_deep),
            Err(_) => panic!(
                "{name}: GRADLANE_FUZZ_SEED={seed} GRADLANE_FUZZ_INPUT={number}: {bytes:02x?}"
            ),
        }
        tried += 1;
        if only.is_some() {
            return;
        }
    }
    println!("{name}: {tried} inputs, {deep} past the first refusal (seed {seed})");
    assert!(deep > 0, "{name}: none of {tried} inputs came past the first refusal");
}

/// Draws bytes, or changes one to four places of a sample.
fn draw(rng: &mut Rng, longest: u32, samples: &[Vec<u8>]) -> Vec<u8> {
    if samples.is_empty() || rng.below(8) == 0 {
        let length = rng.below(longest + 1);
        return (0..length).map(|_| rng.next_u64() as u8).collect();
    }
    let mut bytes = samples[rng.below(samples.len() as u32) as usize].clone();
    for _ in 0..=rng.below(4) {
        let at = rng.below(bytes.len() as u32 + 1) as usize;
        match rng.below(5) {
            0 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
            1 if at < bytes.len() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][rng.below(5) as usize],
            2 => bytes.insert(at, rng.next_u64() as u8),
            3 => bytes.truncate(at.max(1)),
            _ => {
                let other = &samples[rng.below(samples.len() as u32) as usize];
                let end = bytes.len().min(other.len());
                if at < end {
                    bytes[at..end].copy_from_slice(&other[at..end]);
                }
            }
        }
    }
    bytes
}
