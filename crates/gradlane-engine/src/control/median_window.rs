//! Durations of recent steps. A rank is late against their median: one
//! step that took long, or a clock that stood still for a while, does not move it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

/// Durations that are kept.
const KEPT: usize = 16;
/// Durations that a median needs: the first steps are slow.
const LEAST: usize = 5;

/// The last durations, newest last.
#[derive(Clone, Debug, Default)]
pub(crate) struct MedianWindow {
    kept: VecDeque<Duration>,
}

impl MedianWindow {
    pub(crate) fn record(&mut self, duration: Duration) {
        self.kept.push_back(duration);
        if self.kept.len() > KEPT {
            self.kept.pop_front();
        }
    }

    /// The median, or `None` before there are enough.
    pub(crate) fn median(&self) -> Option<Duration> {
        self.middle(|duration| duration)
    }

    /// The median distance from the median.
    pub(crate) fn median_abs_deviation(&self) -> Option<Duration> {
        let median = self.median()?;
        self.middle(|duration| duration.abs_diff(median))
    }

    fn middle(&self, of: impl Fn(Duration) -> Duration) -> Option<Duration> {
        let mut sorted: Vec<Duration> = self.kept.iter().map(|&it| of(it)).collect();
        sorted.sort_unstable();
        (sorted.len() >= LEAST).then(|| sorted[sorted.len() / 2])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_the_last_ones_is_told_once_there_are_enough() {
        let mut window = MedianWindow::default();
        for (number, ms) in [10, 12, 11, 900, 12].into_iter().enumerate() {
            assert_eq!(window.median(), None, "after {number}");
            window.record(Duration::from_millis(ms));
        }
        assert_eq!(window.median(), Some(Duration::from_millis(12)));
        assert_eq!(window.median_abs_deviation(), Some(Duration::from_millis(1)));
        (0..KEPT).for_each(|_| window.record(Duration::from_millis(5)));
        assert_eq!(window.median(), Some(Duration::from_millis(5)), "old ones are forgotten");
    }
}
