//! Quantities: time in nanoseconds, sizes in bytes, rates in bits a second.

use core::fmt;
use core::ops::{Add, Sub};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// An instant, in nanoseconds since an origin that the driver chose.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Time(pub u64);

impl Time {
    /// The origin.
    pub const ZERO: Time = Time(0);

    /// Time passed since `earlier`; zero when `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;
    fn add(self, span: Duration) -> Time {
        Time(self.0.saturating_add(nanos(span)))
    }
}

impl Sub<Duration> for Time {
    type Output = Time;
    fn sub(self, span: Duration) -> Time {
        Time(self.0.saturating_sub(nanos(span)))
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// A number of bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0 + other.0)
    }
}

impl Sub for Bytes {
    type Output = Bytes;
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0 - other.0)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0)
    }
}

/// A transmission rate in bits a second.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Rate(pub u64);

impl Rate {
    /// Makes a rate of bytes a second.
    #[must_use]
    pub const fn of_bytes(bytes_per_s: u64) -> Rate {
        Rate(bytes_per_s.saturating_mul(8))
    }

    /// Time that `size` takes at this rate, rounded up; zero for a rate of zero (no limit).
    #[must_use]
    pub fn time_for(self, size: Bytes) -> Duration {
        if self.0 == 0 {
            return Duration::ZERO;
        }
        let nanos = (u128::from(size.0) * 8_000_000_000).div_ceil(u128::from(self.0));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_megabyte_takes_eight_milliseconds_at_a_gigabit() {
        assert_eq!(Rate(1_000_000_000).time_for(Bytes(1_000_000)), Duration::from_millis(8));
        assert_eq!(Rate(3).time_for(Bytes(1)), Duration::from_nanos(2_666_666_667));
        assert_eq!(Rate(0).time_for(Bytes(1)), Duration::ZERO);
    }

    #[test]
    fn time_saturates_instead_of_wrapping() {
        assert_eq!(Time(5).since(Time(9)), Duration::ZERO);
        assert_eq!(Time(u64::MAX) + Duration::from_secs(1), Time(u64::MAX));
        assert_eq!(Time(9) - Duration::from_nanos(4), Time(5));
        assert_eq!(Time(9) - Duration::from_secs(1), Time::ZERO);
    }
}
