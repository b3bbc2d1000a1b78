//! Coverage-guided inputs for `gradlane_fuzz::codec`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    gradlane_fuzz::codec::check(bytes);
});
