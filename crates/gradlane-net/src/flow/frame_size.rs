//! How large the frames of a connection are: as large as was asked for, and up to three times as
//! large where the connection is so fast that an urgent slice hardly waits longer for them.
//!
//! Each frame costs both ends the same, however large it is. What an urgent slice waits for is a time:
//! a usual frame lasts for 3 ms where three connections share a port of 500 Mbit/s. So a connection
//! whose frames take less gets larger ones, as long as they do (decision 47).

use gradlane_units::Time;

/// A larger frame lasts at most so long.
const FRAME_TIME_MAX_US: u64 = 3_000;
/// Frames have at most so many times the bytes that were asked for: by default, whole usual slices.
const MULTIPLE_MAX: u32 = 3;
/// A rate is taken over so long at least: turns of the thread and bursts of acknowledgements must be
/// short beside it.
const SAMPLE_US: u64 = 2_000;
/// The rate is the most that was seen, and forgotten by an eighth each time that less is: a
/// connection that had nothing to send for a while is no slower for it.
const DECAY_SHIFT: u32 = 3;

/// The size of frames on one connection.
#[derive(Debug)]
pub(crate) struct FrameSizer {
    asked_bytes: u32,
    multiple: u32,
    /// When it was looked at last, and what the peer had acknowledged by then.
    seen: Option<(Time, u64)>,
    rate_bytes_per_s: u64,
}

impl FrameSizer {
    /// Of a new connection, of whose rate nothing is known.
    pub(crate) fn new(asked_bytes: u32) -> FrameSizer {
        FrameSizer { asked_bytes, multiple: 1, seen: None, rate_bytes_per_s: 0 }
    }

    /// Looks at what the peer has acknowledged since the connection began; the size of frames from
    /// now on, if it is another one.
    pub(crate) fn sample(&mut self, now: Time, acknowledged_bytes: u64) -> Option<u32> {
        let (at, before) = *self.seen.get_or_insert((now, acknowledged_bytes));
        let elapsed_us = u64::try_from(now.since(at).as_micros()).unwrap_or(u64::MAX);
        if elapsed_us < SAMPLE_US {
            return None;
        }
        self.seen = Some((now, acknowledged_bytes));
        let bytes = acknowledged_bytes.saturating_sub(before);
        let rate = bytes.saturating_mul(1_000_000) / elapsed_us;
        self.rate_bytes_per_s =
            rate.max(self.rate_bytes_per_s - (self.rate_bytes_per_s >> DECAY_SHIFT));
        let lasting_bytes = self.rate_bytes_per_s.saturating_mul(FRAME_TIME_MAX_US) / 1_000_000;
        let multiple = lasting_bytes / u64::from(self.asked_bytes.max(1));
        let multiple = u32::try_from(multiple).unwrap_or(MULTIPLE_MAX).clamp(1, MULTIPLE_MAX);
        if multiple == self.multiple {
            return None;
        }
        self.multiple = multiple;
        Some(self.asked_bytes.saturating_mul(multiple))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradlane_units::Rng;

    const ASKED: u32 = 65_096;

    /// A connection that is looked at after every half a megabyte.
    struct Path {
        size: FrameSizer,
        now: Time,
        acknowledged_bytes: u64,
        frame_bytes: u32,
    }

    impl Path {
        fn new() -> Path {
            let size = FrameSizer::new(ASKED);
            Path { size, now: Time::ZERO, acknowledged_bytes: 0, frame_bytes: ASKED }
        }

        /// The size of frames after so many looks at this rate.
        fn carries(&mut self, bytes_per_s: u64, looks: u32) -> u32 {
            for _ in 0..looks {
                self.acknowledged_bytes += 524_288;
                self.now.0 += 524_288 * 1_000_000_000 / bytes_per_s;
                if let Some(bytes) = self.size.sample(self.now, self.acknowledged_bytes) {
                    self.frame_bytes = bytes;
                }
            }
            self.frame_bytes
        }
    }

    #[test]
    fn frames_grow_while_they_last_three_milliseconds_at_most() {
        let third_of = |mbit_per_s: u64| mbit_per_s * 1_000_000 / 8 / 3;
        for (bytes_per_s, expected) in [
            (1_000_000, ASKED),
            (third_of(500), ASKED),
            // Two would last for 3.03 ms.
            (43_000_000, ASKED),
            (45_000_000, 2 * ASKED),
            (third_of(2_000), 3 * ASKED),
            (3_000_000_000, 3 * ASKED),
        ] {
            assert_eq!(Path::new().carries(bytes_per_s, 20), expected, "{bytes_per_s}");
        }
    }

    #[test]
    fn looks_of_one_moment_are_no_rate() {
        let mut path = Path::new();
        for _ in 0..100 {
            path.carries(20_000_000, 1);
            // Acknowledged at once, after a moment without acknowledgements.
            assert_eq!(path.carries(u64::MAX, 1), ASKED);
        }
    }

    #[test]
    fn a_rest_shrinks_no_frame_and_a_slower_path_does() {
        let mut path = Path::new();
        assert_eq!(path.carries(150_000_000, 4), 3 * ASKED);
        path.now.0 += 1_000_000_000;
        assert_eq!(path.carries(150_000_000, 4), 3 * ASKED);
        assert_eq!(path.carries(10_000_000, 20), ASKED);
    }

    #[test]
    fn whatever_is_acknowledged_and_whenever_frames_stay_in_their_limits() {
        let mut rng = Rng::new(9);
        for asked in [1, 64, ASKED, u32::MAX / 2] {
            let (mut size, mut now) = (FrameSizer::new(asked), Time::ZERO);
            for _ in 0..1_000 {
                now.0 += u64::from(rng.below(1 << 30));
                let any = u64::from(rng.below(u32::MAX));
                let acknowledged_bytes = [0, 1, u64::MAX, any][rng.below(4) as usize];
                if let Some(bytes) = size.sample(now, acknowledged_bytes) {
                    assert!((asked..=asked.saturating_mul(3)).contains(&bytes), "{asked} {bytes}");
                }
            }
        }
    }
}
