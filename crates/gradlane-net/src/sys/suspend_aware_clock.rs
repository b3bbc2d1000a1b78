//! A clock that stands still while the process does.
//!
//! A process may be stopped from outside for any time: by a batch system that suspends a job, a
//! debugger, a virtual machine that moves. The machine's monotonic clock goes on meanwhile. After
//! waking up, a rank would take all others for silent, although their bytes wait in its sockets, and a
//! step would seem to hang. So a turn that took much longer than its sleep counts a moment only.

use gradlane_units::Time;
use std::time::{Duration, Instant};

/// A turn counts at most this much beyond its sleep.
const EXCESS_MAX: Duration = Duration::from_secs(1);

/// Time after a stop in which others that have given this rank up are heard of.
const RECENT: Duration = Duration::from_secs(2);

/// The time that this process has been running.
#[derive(Debug)]
pub(crate) struct SuspendAwareClock {
    read_at: Instant,
    now: Time,
    excess_max: Duration,
    /// The last time for which the process stood still for seconds, and when it went on.
    stood: Option<(Duration, Time)>,
}

impl SuspendAwareClock {
    /// Begins at zero. One turn never makes a peer silent that was heard a moment ago.
    pub(crate) fn new(now: Instant, silence_timeout: Duration) -> SuspendAwareClock {
        let excess_max = EXCESS_MAX.min(silence_timeout / 4);
        SuspendAwareClock { read_at: now, now: Time::ZERO, excess_max, stood: None }
    }

    /// Returns the time after a turn that slept for at most `sleep`.
    pub(crate) fn advance(&mut self, now: Instant, sleep: Duration) -> Time {
        self.add(now.saturating_duration_since(self.read_at), sleep);
        self.read_at = now;
        self.now
    }

    fn add(&mut self, elapsed: Duration, sleep: Duration) {
        let counted = elapsed.min(sleep.saturating_add(self.excess_max));
        self.now = self.now + counted;
        let excess = elapsed - counted;
        if excess > self.excess_max {
            self.stood = Some((excess + self.excess_max, self.now));
        }
    }

    /// Returns for how long the process stood still, if it has just gone on.
    pub(crate) fn stood_still(&self) -> Option<Duration> {
        let (stood, until) = self.stood?;
        (self.now.since(until) <= RECENT).then_some(stood)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_in_which_the_process_stood_still_is_a_second() {
        let mut clock = SuspendAwareClock::new(Instant::now(), Duration::from_secs(30));
        let millisecond = Duration::from_millis(1);
        for _ in 0..100 {
            clock.add(3 * millisecond, 2 * millisecond);
        }
        assert_eq!(clock.now.since(Time::ZERO), Duration::from_millis(300), "turns as they are");
        clock.add(Duration::from_secs(7), Duration::from_secs(8));
        assert_eq!(clock.now.since(Time::ZERO), Duration::from_millis(7_300), "it slept so long");
        clock.add(Duration::from_secs(3_600), Duration::from_secs(8));
        let late = Duration::from_millis(16_300);
        assert_eq!(clock.now.since(Time::ZERO), late, "what was asked for, and a second");
        assert_eq!(clock.stood_still(), Some(Duration::from_secs(3_592)));
        clock.add(Duration::from_secs(3), Duration::from_secs(8));
        assert_eq!(clock.stood_still(), None, "it went on long ago");
        let mut clock = SuspendAwareClock::new(Instant::now(), Duration::from_secs(1));
        clock.add(Duration::from_secs(3_600), millisecond);
        assert_eq!(clock.now.since(Time::ZERO), Duration::from_millis(251), "a quarter of silence");
    }
}
