//! How long this process has been running: a clock that stands still while the process does.
//!
//! A process may be stopped from outside for any time: by a batch system that suspends a job, a
//! debugger, a virtual machine that moves. The machine's monotonic clock goes on meanwhile. To a
//! rank that wakes up all others would seem silent for as long, although what they have said waits
//! in its sockets, and a step would seem to hang. So of a turn that took much longer than was asked for
//! only a moment counts.

use gradlane_units::Time;
use std::time::{Duration, Instant};

/// The most that a turn ever counts beyond the time that it was to sleep.
const TURN_MAX: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct SuspendAwareClock {
    read_at: Instant,
    now: Time,
    turn_max: Duration,
}

impl SuspendAwareClock {
    /// Begins at zero. Nobody who was heard a moment ago may pass for silent after one turn.
    pub(crate) fn new(silence_timeout: Duration) -> SuspendAwareClock {
        let turn_max = TURN_MAX.min(silence_timeout / 4);
        SuspendAwareClock { read_at: Instant::now(), now: Time::ZERO, turn_max }
    }

    /// The time now, after a turn that was to sleep for at most so long.
    pub(crate) fn advance(&mut self, asked: Duration) -> Time {
        let instant = Instant::now();
        self.add(instant.saturating_duration_since(self.read_at), asked);
        self.read_at = instant;
        self.now
    }

    fn add(&mut self, elapsed: Duration, asked: Duration) {
        self.now = self.now + elapsed.min(asked.saturating_add(self.turn_max));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hour_in_which_the_process_stood_still_is_a_second() {
        let mut clock = SuspendAwareClock::new(Duration::from_secs(30));
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
        let mut clock = SuspendAwareClock::new(Duration::from_secs(1));
        clock.add(Duration::from_secs(3_600), millisecond);
        assert_eq!(clock.now.since(Time::ZERO), Duration::from_millis(251), "a quarter of silence");
    }
}
