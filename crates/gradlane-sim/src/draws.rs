//! Random numbers.

use gradlane_units::Rng;

/// A number from 0 to below 1.
pub(crate) fn fraction(rng: &mut Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
}
