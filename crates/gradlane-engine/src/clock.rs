//! Time as the driver tells it, and the last progress.

use core::time::Duration;
use gradlane_units::Time;

#[derive(Debug)]
pub(crate) struct Clock {
    now: Time,
    progress_at: Time,
}

impl Clock {
    pub(crate) fn new() -> Clock {
        Clock { now: Time::ZERO, progress_at: Time::ZERO }
    }

    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Moves on; time never goes back.
    pub(crate) fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
    }

    /// Notes that something moved.
    pub(crate) fn progressed(&mut self) {
        self.progress_at = self.now;
    }

    /// When a timeout after the last progress ends.
    pub(crate) fn deadline(&self, timeout: Duration) -> Time {
        self.progress_at + timeout
    }
}
