//! Coverage-guided inputs for `gradlane_fuzz::group`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    gradlane_fuzz::group::check(bytes);
});
