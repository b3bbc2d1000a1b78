//! The rate of a stream of bytes, from windows of time: the one estimator of the transport.
//!
//! Its users decide where a window begins and ends. The smoothing decides how fast an old rate is
//! forgotten.

use std::collections::VecDeque;
use std::time::Duration;

/// How the rates of successive windows become one.
#[derive(Clone, Copy, Debug)]
pub(super) enum Smoothing {
    /// The largest of the last windows.
    MaxOf {
        /// Number of windows.
        windows: usize,
    },
    /// The largest, reduced by this share in each window that has less.
    DecayingMax {
        /// Between 0 and 1.
        share: f64,
    },
    /// The mean, in which a window counts by its time.
    Mean {
        /// The time that the mean looks back.
        time: Duration,
    },
}

/// Estimates a rate.
#[derive(Debug)]
pub(super) struct RateEstimator {
    smoothing: Smoothing,
    /// Rates of the last windows, of a maximum over several.
    recent: VecDeque<f64>,
    bytes_per_s: Option<f64>,
}

impl RateEstimator {
    /// Makes an estimator that has seen no window.
    pub(super) fn new(smoothing: Smoothing) -> RateEstimator {
        RateEstimator { smoothing, recent: VecDeque::new(), bytes_per_s: None }
    }

    /// Adds a window; one of no time counts nothing.
    pub(super) fn add(&mut self, bytes: u64, elapsed: Duration) {
        if elapsed.is_zero() {
            return;
        }
        let window = bytes as f64 / elapsed.as_secs_f64();
        let before = self.bytes_per_s.unwrap_or(0.0);
        self.bytes_per_s = Some(match self.smoothing {
            Smoothing::MaxOf { windows } => {
                self.recent.push_back(window);
                if self.recent.len() > windows {
                    self.recent.pop_front();
                }
                self.recent.iter().copied().fold(0.0, f64::max)
            }
            Smoothing::DecayingMax { share } => window.max(before * (1.0 - share)),
            Smoothing::Mean { time } => {
                let weight = elapsed.as_secs_f64() / (elapsed + time).as_secs_f64();
                before + weight * (window - before)
            }
        });
    }

    /// Returns the rate in bytes a second; `None` before the first window.
    pub(super) fn bytes_per_s(&self) -> Option<f64> {
        self.bytes_per_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    fn rates(smoothing: Smoothing, windows: &[u64]) -> Vec<f64> {
        let mut rate = RateEstimator::new(smoothing);
        assert_eq!(rate.bytes_per_s(), None);
        let mut add = |&bytes: &u64| {
            rate.add(bytes, MILLISECOND);
            rate.add(u64::MAX, Duration::ZERO);
            rate.bytes_per_s().expect("a window was added").round() / 1_000.0
        };
        windows.iter().map(&mut add).collect()
    }

    #[test]
    fn a_maximum_forgets_after_its_windows() {
        let smoothing = Smoothing::MaxOf { windows: 2 };
        assert_eq!(rates(smoothing, &[5, 9, 1, 2, 3]), [5.0, 9.0, 9.0, 2.0, 3.0]);
    }

    #[test]
    fn a_decaying_maximum_loses_its_share() {
        let smoothing = Smoothing::DecayingMax { share: 0.125 };
        assert_eq!(rates(smoothing, &[64, 0, 0, 100]), [64.0, 56.0, 49.0, 100.0]);
    }

    #[test]
    fn a_mean_weighs_windows_by_their_time() {
        let smoothing = Smoothing::Mean { time: 3 * MILLISECOND };
        assert_eq!(rates(smoothing, &[100, 100, 0]), [25.0, 43.75, 32.813]);
    }
}
