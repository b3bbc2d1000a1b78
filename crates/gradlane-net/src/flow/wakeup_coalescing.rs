//! Coalesces wake-ups while there is more to send than sockets take, as network cards coalesce
//! interrupts.
//!
//! The kernel takes and delivers bytes in packets of its own, up to 64 kB each, and would wake a
//! thread for every one of them: on a busy port thousands of times a second, each time for a
//! system call or two and a switch of threads. While a connection is full such turns gain nothing,
//! since the kernel holds bytes for milliseconds (`send_buffer`). So a thread with a full connection
//! leaves its sockets alone for a period: until the first full connection has almost nothing left to
//! send, or the connections that the thread paces itself (`pacer`) are due. The faster its ports are,
//! the shorter is the period. Where nothing is full, latency is all that counts: the thread never waits
//! here, and a call of the application ends a long pause at once (decision 46).

use super::limits;
use super::rate::{RateEstimator, Smoothing};
use std::time::{Duration, Instant};

/// The thread looks again this long before a full connection has nothing left to send: it may have to
/// wait for a processor, and has others to serve first.
const MARGIN: Duration = Duration::from_millis(1);
/// Shorter pauses are none: the kernel may end a sleep 50 us late.
const PAUSE_MIN: Duration = Duration::from_micros(100);
const SMOOTHING: Smoothing = Smoothing::Mean { time: Duration::from_millis(10) };

/// Decides when the next turn may begin.
#[derive(Debug)]
pub(crate) struct WakeupCoalescer {
    turn_began: Instant,
    turn_bytes: u64,
    rate: RateEstimator,
}

impl WakeupCoalescer {
    /// Makes the coalescer of a thread whose first turn begins now.
    pub(crate) fn new(now: Instant) -> WakeupCoalescer {
        WakeupCoalescer { turn_began: now, turn_bytes: 0, rate: RateEstimator::new(SMOOTHING) }
    }

    /// Notes bytes that were sent or received in this turn.
    pub(crate) fn count(&mut self, bytes: usize) {
        self.turn_bytes += bytes as u64;
    }

    /// Begins the next turn.
    pub(crate) fn begin_turn(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.turn_began);
        if !elapsed.is_zero() {
            self.rate.add(self.turn_bytes, elapsed);
            (self.turn_began, self.turn_bytes) = (now, 0);
        }
    }

    /// Returns how long to leave sockets alone.
    ///
    /// # Arguments
    /// * `drain_time` - time until the first full connection that the kernel paces has sent its bytes;
    ///   `None` without one.
    /// * `until_due` - time from the beginning of this turn until all full connections that the thread
    ///   paces are due; `None` without one.
    pub(crate) fn pause(
        &self,
        now: Instant,
        drain_time: Option<Duration>,
        until_due: Option<Duration>,
    ) -> Duration {
        let period = limits::turn_period(self.rate.bytes_per_s().unwrap_or(0.0));
        let elapsed = now.saturating_duration_since(self.turn_began);
        let drain_time = drain_time.map(|time| time.saturating_sub(MARGIN));
        let until_due = until_due.map(|time| time.saturating_sub(elapsed));
        let Some(pause) = drain_time.into_iter().chain(until_due).min() else {
            return Duration::ZERO;
        };
        let pause = pause.min(period.saturating_sub(elapsed));
        if pause < PAUSE_MIN {
            Duration::ZERO
        } else {
            pause
        }
    }
}

#[cfg(test)]
mod tests {
    use super::limits::TURN_MAX;
    use super::*;

    const LONG: Duration = Duration::from_secs(1);

    /// Of a thread that comes and goes with these bytes in turns of this length, after half a second
    /// of them, and when the last turn began.
    fn after(turn: Duration, turn_bytes: usize) -> (WakeupCoalescer, Instant) {
        let mut now = Instant::now();
        let mut coalescer = WakeupCoalescer::new(now);
        for _ in 0..Duration::from_millis(500).as_micros() / turn.as_micros() {
            coalescer.count(turn_bytes);
            now += turn;
            coalescer.begin_turn(now);
        }
        (coalescer, now)
    }

    /// The pause a tenth of a millisecond into a turn.
    fn pause_at((coalescer, began): (WakeupCoalescer, Instant), drain_time: Duration) -> Duration {
        coalescer.pause(began + Duration::from_micros(100), Some(drain_time), None)
    }

    #[test]
    fn a_slow_port_is_looked_at_once_in_the_longest_period() {
        let turn = Duration::from_micros(120);
        assert_eq!(pause_at(after(turn, 0), LONG), Duration::from_micros(2900));
        assert_eq!(
            pause_at(after(turn, 15_000), LONG),
            Duration::from_micros(2900),
            "500 Mbit/s both ways"
        );
    }

    #[test]
    fn a_fast_port_is_looked_at_when_so_many_bytes_have_come_and_gone() {
        // 4 Gbit/s both ways, whatever the turns are: 262,144 bytes take 279 us at 937.5 MB/s.
        for turn_us in [50, 125, 1000] {
            let turns = after(Duration::from_micros(turn_us), 1_000 * turn_us as usize);
            assert_eq!(pause_at(turns, LONG).as_micros(), 179, "turns of {turn_us} us");
        }
    }

    #[test]
    fn a_pause_ends_before_a_full_connection_has_nothing_left() {
        let turn = Duration::from_micros(120);
        for (lasts_us, pause_us) in
            [(0, 0), (1_000, 0), (1_099, 0), (1_100, 100), (2_500, 1_500), (9_000, 2_900)]
        {
            let pause = pause_at(after(turn, 15_000), Duration::from_micros(lasts_us));
            assert_eq!(pause.as_micros(), pause_us, "{lasts_us} us left");
        }
    }

    #[test]
    fn a_pause_ends_when_what_the_thread_paces_is_due() {
        let (coalescer, began) = after(Duration::from_micros(120), 15_000);
        let pause = |drain_time: Option<u64>, until_due: Option<u64>| {
            let now = began + Duration::from_micros(100);
            let [drain_time, until_due] =
                [drain_time, until_due].map(|it| it.map(Duration::from_micros));
            coalescer.pause(now, drain_time, until_due).as_micros()
        };
        assert_eq!(pause(None, Some(1_600)), 1_500, "counted from the beginning of the turn");
        assert_eq!(pause(None, Some(150)), 0, "not worth it");
        assert_eq!(pause(None, Some(9_000)), 2_900, "the longest");
        assert_eq!(pause(Some(1_500), Some(1_600)), 500, "the kernel runs dry first");
        assert_eq!(pause(Some(5_000), Some(1_600)), 1_500);
        assert_eq!(pause(None, None), 0, "nothing is full");
    }

    #[test]
    fn there_are_no_pauses_at_the_rate_of_memory() {
        let turns = after(Duration::from_micros(100), 400_000);
        assert_eq!(pause_at(turns, LONG), Duration::ZERO);
    }

    #[test]
    fn a_turn_that_took_long_is_followed_by_another_one_at_once() {
        let began = Instant::now();
        let coalescer = WakeupCoalescer::new(began);
        assert_eq!(coalescer.pause(began + TURN_MAX, Some(LONG), None), Duration::ZERO);
    }

    #[test]
    fn a_rate_of_before_is_forgotten() {
        let mut now = Instant::now();
        let mut coalescer = WakeupCoalescer::new(now);
        for bytes in [vec![1 << 20; 100], vec![0; 100]].concat() {
            coalescer.count(bytes);
            now += Duration::from_millis(1);
            coalescer.begin_turn(now);
        }
        assert_eq!(coalescer.pause(now, Some(LONG), None), TURN_MAX);
    }
}
