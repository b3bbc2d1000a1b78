//! Coverage-guided inputs for `gradlane_fuzz::seal`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    gradlane_fuzz::seal::check(bytes);
});
