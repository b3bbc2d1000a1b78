//! The size of frames: as large as was asked for, and up to three times as large on a connection so fast
//! that an urgent slice hardly waits longer for them. The engine's `transmit/message.rs` cuts messages into them.

use super::limits;
use super::rate::{RateEstimator, Smoothing};
use gradlane_units::Time;
use std::time::Duration;

/// A window of the rate is at least this long: turns of the thread and bursts of acknowledgements must
/// be short beside it.
const WINDOW_MIN: Duration = Duration::from_millis(2);
/// A connection that had nothing to send for a while is no slower for it.
const SMOOTHING: Smoothing = Smoothing::DecayingMax { share: 0.125 };

/// The size of frames on one connection.
#[derive(Debug)]
pub(super) struct FrameSizer {
    asked_bytes: u32,
    multiple: u32,
    /// The begin of the window and the bytes that were acknowledged by then.
    window: Option<(Time, u64)>,
    rate: RateEstimator,
}

impl FrameSizer {
    /// Makes the sizer of a new connection, whose rate is not known.
    pub(super) fn new(asked_bytes: u32) -> FrameSizer {
        FrameSizer { asked_bytes, multiple: 1, window: None, rate: RateEstimator::new(SMOOTHING) }
    }

    /// Takes the bytes that were acknowledged since the connection began. Returns the size of frames from
    /// now on, if it changes.
    pub(super) fn sample(&mut self, now: Time, acknowledged_bytes: u64) -> Option<u32> {
        let (began, before) = *self.window.get_or_insert((now, acknowledged_bytes));
        let elapsed = now.since(began);
        if elapsed < WINDOW_MIN {
            return None;
        }
        self.window = Some((now, acknowledged_bytes));
        self.rate.add(acknowledged_bytes.saturating_sub(before), elapsed);
        let bytes_per_s = self.rate.bytes_per_s().unwrap_or(0.0);
        let multiple = limits::frame_multiple(bytes_per_s, self.asked_bytes);
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

    /// A connection that is sampled after every half a megabyte.
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

        /// Returns the size of frames after samples at this rate.
        fn carries(&mut self, bytes_per_s: u64, samples: u32) -> u32 {
            for _ in 0..samples {
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
    fn samples_of_one_moment_are_no_rate() {
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
