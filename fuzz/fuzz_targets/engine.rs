//! Coverage-guided inputs for `gradlane_fuzz::engine`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    gradlane_fuzz::engine::check(bytes);
});
