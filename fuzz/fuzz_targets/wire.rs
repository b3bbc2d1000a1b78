//! Coverage-guided inputs for `gradlane_fuzz::wire`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    gradlane_fuzz::wire::check(bytes);
});
