//! The limits of the transport: how large frames and buffers are, which connections a thread paces, how
//! long a turn lasts; all from the rates of the estimator.
//!
//! Everything follows from one time. The I/O thread serves its connections in turns of at most
//! [`TURN_MAX`]. The bytes that a connection holds in the kernel must last for a turn, since they
//! are not refilled meanwhile; a frame must not last longer, since an urgent slice waits for it;
//! and connections whose frames last about a turn are paced by the thread, whose turns are as
//! frequent, instead of the kernel. `docs/decisions/` 39 and 46 to 48 have the measurements.

use crate::sys::syscall::PathEstimate;
use gradlane_units::{Bytes, Rate};
use gradlane_wire::HEADER_BYTES;
use std::ops::RangeInclusive;
use std::time::Duration;

/// The longest time between the beginnings of two turns of an I/O thread.
pub(super) const TURN_MAX: Duration = Duration::from_millis(3);
/// Bytes that may come and go between two turns, beyond those of a slow port.
const TURN_BYTES: f64 = 262_144.0;
/// 250 Mbit/s both ways. The least that connections hold lasts longer than the longest turn there; the
/// faster a port, the more a late thread costs it.
const SLOW_BYTES_PER_S: f64 = 62_500_000.0;

/// Frames have at most this multiple of the asked bytes: by default, whole usual slices.
const FRAME_MULTIPLE_MAX: u32 = 3;

/// Bytes in flight on any path, however short. The kernel doubles them for its bookkeeping, and then two
/// frames fit whole: the second one is not cut in two (decision 43).
pub(super) const HELD_MIN_BYTES: u64 = 72 << 10;
/// Bytes in flight to all peers together at least: few connections fill a port only if each of them has
/// more, since acknowledgements wait behind the bytes that go the other way.
const PORT_HELD_MIN_BYTES: u64 = 3 * HELD_MIN_BYTES;
/// Bytes in flight on any path, however long.
pub(super) const HELD_MAX_BYTES: u64 = 64 << 20;
/// Unsent bytes of a connection last this long at its rate.
const UNSENT_TIME: Duration = Duration::from_millis(1);
/// Bytes in flight on a connection that the I/O thread paces, in quarters of frames. The thread gives the
/// kernel one frame a turn, which is acknowledged up to three turns later: it has to pass two ports, the
/// peer's thread reads in turns as well, and the acknowledgement comes back through two ports. Doubled
/// by the kernel this is three frames and a half, and the fourth is taken whole.
const THREAD_HELD_QUARTER_FRAMES: u64 = 7;

/// The I/O thread paces connections whose usual frames last this long at an even part of the port: one
/// or two turns. Of shorter ones it would have to be on time for too many, and longer ones would all
/// leave in one turn and then none.
const THREAD_FRAME_TIME: RangeInclusive<Duration> =
    Duration::from_micros(1_500)..=Duration::from_micros(6_000);
/// The whole port takes at least this long for one of them: with many peers on a fast port the kernel
/// is better at it.
const THREAD_PORT_FRAME_TIME: Duration = Duration::from_micros(400);

/// The bytes that the kernel may hold of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BufferSizes {
    /// In flight or not sent yet.
    pub(super) held_bytes: u64,
    /// Not sent yet; 0: no bound.
    pub(super) unsent_bytes: u64,
}

/// Returns how many times the asked bytes the frames of a connection have: as many as last for at most a
/// turn. Each frame costs both ends the same, however large it is.
pub(super) fn frame_multiple(bytes_per_s: f64, asked_bytes: u32) -> u32 {
    let bytes = bytes_per_s * TURN_MAX.as_secs_f64();
    ((bytes / f64::from(asked_bytes.max(1))) as u32).clamp(1, FRAME_MULTIPLE_MAX)
}

/// How many connections share the ports of one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    /// Connections of this rank.
    pub(crate) own: usize,
    /// Connections at the busier end: not fewer.
    pub(crate) busier: usize,
}

impl Ends {
    /// Returns the bytes that a connection holds on the shortest path.
    pub(super) fn held_min(self) -> u64 {
        HELD_MIN_BYTES.max(PORT_HELD_MIN_BYTES / (self.busier.max(1) as u64))
    }

    /// Returns how long the bytes that a connection holds last at least: for a turn. Where more connections
    /// meet at the other end, its queue has bytes of the others while this thread is late; with more of
    /// each, acknowledgements of what comes back would wait in that queue, and less would come back.
    fn held_time(self) -> Duration {
        if self.own < self.busier {
            Duration::ZERO
        } else {
            TURN_MAX
        }
    }
}

/// Returns the bytes that a connection holds at least while the I/O thread paces it.
pub(super) fn thread_held_min(frame_bytes: u32) -> u64 {
    u64::from(frame_bytes) * THREAD_HELD_QUARTER_FRAMES / 4
}

/// Fits the kernel's buffer to a path: twice the bandwidth-delay product without queues, and the least
/// sizes or the bytes of a turn. While the buffer itself limits the rate, both grow with the buffer,
/// until a queue builds up and the smallest round-trip time is passed.
pub(super) fn buffer_sizes(least: BufferSizes, path: PathEstimate, ends: Ends) -> BufferSizes {
    let in_time = |time: Duration| {
        let bytes = u128::from(path.delivery_bytes_per_s) * time.as_micros() / 1_000_000;
        u64::try_from(bytes).unwrap_or(HELD_MAX_BYTES).min(HELD_MAX_BYTES)
    };
    let product = 2 * in_time(Duration::from_micros(path.min_rtt_us.into()));
    let held_bytes = product + least.held_bytes.max(in_time(ends.held_time()));
    let unsent_bytes = match least.unsent_bytes {
        0 => 0,
        least => least.max(in_time(UNSENT_TIME)),
    };
    BufferSizes { held_bytes: held_bytes.min(HELD_MAX_BYTES), unsent_bytes }
}

/// Returns the time of a usual frame at a rate, its header included.
pub(super) fn frame_time(frame_bytes: u32, bytes_per_s: u64) -> Duration {
    let frame = Bytes(u64::from(frame_bytes) + HEADER_BYTES as u64);
    Rate::of_bytes(bytes_per_s).time_for(frame)
}

/// Whether the I/O thread paces `flows` connections that share a port of this rate. The rate of the port
/// decides, not a connection's part of it for a moment: the kernel goes on with timers for a connection
/// that it has paced once.
pub(super) fn paced_by_thread(frame_bytes: u32, port_bytes_per_s: u64, flows: usize) -> bool {
    let time = frame_time(frame_bytes, port_bytes_per_s);
    let even = time.saturating_mul(u32::try_from(flows).unwrap_or(u32::MAX));
    time >= THREAD_PORT_FRAME_TIME && THREAD_FRAME_TIME.contains(&even)
}

/// Returns the time between the beginnings of two turns, for a thread that sends and receives at this
/// rate.
pub(super) fn turn_period(bytes_per_s: f64) -> Duration {
    let period_s = TURN_BYTES / (bytes_per_s - SLOW_BYTES_PER_S).max(0.0);
    Duration::try_from_secs_f64(period_s).map_or(TURN_MAX, |period| period.min(TURN_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVEN: Ends = Ends { own: 3, busier: 3 };

    fn path(delivery_bytes_per_s: u64, min_rtt_us: u32) -> PathEstimate {
        PathEstimate { delivery_bytes_per_s, min_rtt_us, acknowledged_bytes: 0 }
    }

    #[test]
    fn short_slow_paths_get_the_floor_and_long_ones_twice_their_product() {
        let least = BufferSizes { held_bytes: HELD_MIN_BYTES, unsent_bytes: 65_536 };
        let target = |path| buffer_sizes(least, path, EVEN).held_bytes;
        assert_eq!(target(path(16_000_000, 50)), HELD_MIN_BYTES + 1_600);
        assert_eq!(target(path(16_000_000, 40_000)), HELD_MIN_BYTES + 1_280_000);
        assert_eq!(target(path(u64::MAX, u32::MAX)), HELD_MAX_BYTES);
    }

    #[test]
    fn fast_connections_hold_what_lasts_for_a_while() {
        let path = path(500_000_000, 100);
        let least = BufferSizes { held_bytes: HELD_MIN_BYTES, unsent_bytes: 65_536 };
        let held_bytes = 100_000 + 1_500_000;
        let expected = BufferSizes { held_bytes, unsent_bytes: 500_000 };
        assert_eq!(buffer_sizes(least, path, EVEN), expected);
        let unbounded = BufferSizes { unsent_bytes: 0, ..least };
        let expected = BufferSizes { held_bytes, unsent_bytes: 0 };
        assert_eq!(buffer_sizes(unbounded, path, EVEN), expected);
    }

    #[test]
    fn workers_that_meet_at_a_server_hold_no_more_than_the_floor() {
        let path = path(125_000_000, 10);
        let least = BufferSizes { held_bytes: HELD_MIN_BYTES, unsent_bytes: 65_536 };
        let held = |own, busier| buffer_sizes(least, path, Ends { own, busier }).held_bytes;
        assert_eq!(held(4, 4), 2_500 + 375_000, "the server");
        assert_eq!(held(1, 4), 2_500 + HELD_MIN_BYTES, "its workers");
        assert_eq!(held(2, 4), 2_500 + HELD_MIN_BYTES, "workers of two servers");
    }

    #[test]
    fn few_connections_hold_more_each() {
        let floors = [1, 2, 3, 4, 100].map(|busier| Ends { own: 1, busier }.held_min());
        assert_eq!(floors, [216 << 10, 108 << 10, 72 << 10, 72 << 10, 72 << 10]);
    }

    #[test]
    fn the_thread_paces_where_a_frame_lasts_about_as_long_as_a_turn() {
        let by_thread =
            |mbit_per_s: u64, peers: usize| paced_by_thread(65_096, mbit_per_s * 125_000, peers);
        assert!(by_thread(300, 3) && by_thread(400, 3) && by_thread(500, 3) && by_thread(1_000, 3));
        assert!(by_thread(1_000, 7), "8 ranks");
        assert!(!by_thread(100, 3) && !by_thread(500, 7), "frames of many turns");
        assert!(!by_thread(2_000, 3) && !by_thread(10_000, 3), "many frames in a turn");
        assert!(!by_thread(10_000, 63), "a frame every 52 us");
    }
}
