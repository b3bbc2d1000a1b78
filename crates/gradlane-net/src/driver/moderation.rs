//! Moderates wake-ups while there is more to send than sockets take, as network cards moderate
//! interrupts.
//!
//! The kernel takes and delivers bytes in packets of its own, up to 64 kB each, and would wake a
//! thread for every one of them: on a busy port thousands of times a second, each time for a
//! system call or two and a switch of threads. While a connection is full nothing is gained by so
//! many turns, since what the kernel holds lasts for milliseconds (see `send_buffer`). So a thread
//! with a full connection looks at its sockets once in a period: one that the buffers outlast by
//! far, and in which no more bytes come and go than a processor's cache holds. Where nothing is
//! full, and latency is all that counts, it never waits here (decision 46).

use std::time::{Duration, Instant};

/// The longest time between two turns: a third of what the kernel holds.
const PERIOD_MAX: Duration = Duration::from_millis(1);
/// What may come and go between two turns.
const PERIOD_BYTES: f64 = 262_144.0;
/// The rate is the mean of about so long.
const MEMORY: Duration = Duration::from_millis(10);

/// When the next turn may begin.
#[derive(Debug)]
pub(super) struct Moderation {
    turn_began: Instant,
    turn_bytes: usize,
    rate_bytes_per_s: f64,
}

impl Moderation {
    /// Of a thread whose first turn begins now.
    pub(super) fn new(now: Instant) -> Moderation {
        Moderation { turn_began: now, turn_bytes: 0, rate_bytes_per_s: 0.0 }
    }

    /// Notes bytes that were sent or received in this turn.
    pub(super) fn count(&mut self, bytes: usize) {
        self.turn_bytes += bytes;
    }

    /// The next turn begins.
    pub(super) fn begin_turn(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.turn_began);
        if elapsed.is_zero() {
            return;
        }
        let rate_bytes_per_s = self.turn_bytes as f64 / elapsed.as_secs_f64();
        let weight = elapsed.as_secs_f64() / (elapsed + MEMORY).as_secs_f64();
        self.rate_bytes_per_s += weight * (rate_bytes_per_s - self.rate_bytes_per_s);
        (self.turn_began, self.turn_bytes) = (now, 0);
    }

    /// How long to leave sockets alone that are full.
    pub(super) fn pause(&self, now: Instant) -> Duration {
        let period_s = PERIOD_BYTES / self.rate_bytes_per_s;
        let period =
            Duration::try_from_secs_f64(period_s).map_or(PERIOD_MAX, |it| it.min(PERIOD_MAX));
        period.saturating_sub(now.saturating_duration_since(self.turn_began))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pause of a thread that comes and goes with these bytes in turns of this length, after
    /// half a second of them, a tenth of a millisecond into a turn.
    fn pause_at(turn: Duration, turn_bytes: usize) -> Duration {
        let mut now = Instant::now();
        let mut moderation = Moderation::new(now);
        for _ in 0..Duration::from_millis(500).as_micros() / turn.as_micros() {
            moderation.count(turn_bytes);
            now += turn;
            moderation.begin_turn(now);
        }
        moderation.pause(now + Duration::from_micros(100))
    }

    #[test]
    fn a_slow_port_is_looked_at_once_in_the_longest_period() {
        let turn = Duration::from_micros(120);
        assert_eq!(pause_at(turn, 0), Duration::from_micros(900));
        assert_eq!(pause_at(turn, 15_000), Duration::from_micros(900), "500 Mbit/s both ways");
    }

    #[test]
    fn a_fast_port_is_looked_at_when_so_many_bytes_have_come_and_gone() {
        // 4 Gbit/s both ways, whatever the turns are: 262,144 bytes take 262 us.
        for turn_us in [50, 125, 1000] {
            let pause = pause_at(Duration::from_micros(turn_us), 1_000 * turn_us as usize);
            assert_eq!(pause.as_micros(), 162, "turns of {turn_us} us");
        }
    }

    #[test]
    fn a_turn_that_took_long_is_followed_by_another_one_at_once() {
        let began = Instant::now();
        let moderation = Moderation::new(began);
        assert_eq!(moderation.pause(began + Duration::from_millis(3)), Duration::ZERO);
    }

    #[test]
    fn a_rate_of_before_is_forgotten() {
        let mut now = Instant::now();
        let mut moderation = Moderation::new(now);
        for bytes in [vec![1 << 20; 100], vec![0; 100]].concat() {
            moderation.count(bytes);
            now += Duration::from_millis(1);
            moderation.begin_turn(now);
        }
        assert_eq!(moderation.pause(now), PERIOD_MAX);
    }
}
