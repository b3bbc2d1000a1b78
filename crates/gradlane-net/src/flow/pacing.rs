//! Paces connections: all of them together fill this rank's port, and none sends faster than its part.
//!
//! Several senders that each give the kernel what it takes overrun the queue of a receiver's port, and
//! their flows take uneven parts of it; meanwhile another port has nothing to send, since what it should
//! get waits in the first one's queue. With every flow at its even part of its sender's port no queue
//! builds up anywhere, as long as all ranks have as much for each other.
//!
//! The rate of the port is found as BBR finds that of a path (Cardwell et al., 2016): the most that was
//! acknowledged, over all connections, in recent windows that were never without work. Windows are
//! counted in bytes. In one of so many twice as much may go, so that a faster port is noticed soon. A rank
//! that always has less to send than its port takes never finishes a window, and is never paced.
//!
//! What keeps a connection to its part is in `paced_flow`.

use crate::flow::pacer::{PacedRate, Pacer};
use gradlane_units::{Bytes, Rate, Time};
use gradlane_wire::HEADER_BYTES;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Bytes of a window at least; what is in flight when it begins and ends is small beside them.
const WINDOW_BYTES: u64 = 8 << 20;
/// Bytes of a window for each peer.
const WINDOW_BYTES_A_PEER: u64 = 2 << 20;
/// Time of a window at least.
const WINDOW_AT_LEAST: Duration = Duration::from_millis(4);
/// Windows that the rate of the port is the most of.
const WINDOWS: usize = 64;
/// In one window of so many twice as much may go.
const PROBE_EVERY: u32 = 32;
/// The I/O thread paces connections whose usual frames last so long at an even part of the port: one or
/// two turns, of which the longest has 3 ms. Of shorter ones it would have to be on time for too
/// many, and longer ones would all leave in one turn and then none.
const THREAD_FRAME: RangeInclusive<Duration> =
    Duration::from_micros(1_500)..=Duration::from_micros(6_000);
/// And the whole port takes so long or longer for one: with many peers on a fast port the kernel is
/// better at it.
const THREAD_PORT_FRAME: Duration = Duration::from_micros(400);
/// Time between two looks at who has how much to send.
const TICK: Duration = Duration::from_millis(5);
/// Over the rate that was found in all others, so that it can be found to be more: 1/64.
const OVER_SHIFT: u32 = 6;

/// A window that has begun.
#[derive(Debug)]
struct Window {
    began: Time,
    acknowledged_bytes: u64,
    sent_bytes: u64,
}

/// Finds the rate of this rank's port.
#[derive(Debug)]
struct PortRateEstimator {
    window_bytes: u64,
    window: Option<Window>,
    /// Of the windows before this one, in bytes a second.
    found: VecDeque<u64>,
    /// Windows until one in which more may go; 0: it is this one.
    until_probe: u32,
}

impl PortRateEstimator {
    fn new(peers: usize) -> PortRateEstimator {
        PortRateEstimator {
            window_bytes: WINDOW_BYTES.max(WINDOW_BYTES_A_PEER * peers as u64),
            window: None,
            found: VecDeque::new(),
            until_probe: 0,
        }
    }

    /// Notes bytes that the kernel took since the last time, while there was always more.
    fn busy(
        &mut self,
        now: Time,
        sent_bytes: u64,
        acknowledged_bytes: impl FnOnce() -> Option<u64>,
    ) {
        let Some(window) = &mut self.window else {
            self.window = acknowledged_bytes().map(|acknowledged_bytes| Window {
                began: now,
                acknowledged_bytes,
                sent_bytes: 0,
            });
            return;
        };
        window.sent_bytes += sent_bytes;
        let lasted = now.since(window.began);
        if window.sent_bytes < self.window_bytes || lasted < WINDOW_AT_LEAST {
            return;
        }
        let Some(total) = acknowledged_bytes() else { return };
        let bytes = u128::from(total.saturating_sub(window.acknowledged_bytes));
        let rate = bytes * 1_000_000_000 / lasted.as_nanos().max(1);
        self.found.push_back(u64::try_from(rate).unwrap_or(u64::MAX));
        if self.found.len() > WINDOWS {
            self.found.pop_front();
        }
        self.until_probe = self.until_probe.checked_sub(1).unwrap_or(PROBE_EVERY - 1);
        self.window = Some(Window { began: now, acknowledged_bytes: total, sent_bytes: 0 });
    }

    /// Notes a moment without work: what was counted says nothing of the port.
    fn idle(&mut self) {
        self.window = None;
    }

    /// The rate of the port; none: not found yet.
    fn bytes_per_s(&self) -> Option<u64> {
        self.found.iter().max().copied()
    }

    /// What all connections together may send of a port of this rate.
    fn allowed(&self, bytes_per_s: u64) -> u64 {
        let over = if self.until_probe == 0 { bytes_per_s } else { bytes_per_s >> OVER_SHIFT };
        bytes_per_s.saturating_add(over)
    }
}

/// Paces all connections of a rank.
#[derive(Debug)]
pub(crate) struct PortPacing {
    port: PortRateEstimator,
    /// A usual frame on the wire.
    frame: Bytes,
    sampled: Time,
    /// Whether there was always a full one since then.
    busy: bool,
}

impl PortPacing {
    /// PortPacing for a rank that sends to so many peers, as a rule in frames with so many bytes.
    pub(crate) fn new(peers: usize, frame_bytes: u32) -> PortPacing {
        let frame = Bytes(u64::from(frame_bytes) + HEADER_BYTES as u64);
        PortPacing { port: PortRateEstimator::new(peers), frame, sampled: Time::ZERO, busy: false }
    }

    /// The I/O thread has done what there is to do: a connection that is not full has nothing to send.
    /// Returns whether it is time to look at all flows.
    pub(crate) fn rest(&mut self, now: Time, any_full: impl FnOnce() -> bool) -> bool {
        self.busy = self.busy && any_full();
        now.since(self.sampled) >= TICK
    }

    /// Shares the port out anew.
    ///
    /// # Arguments
    /// * `flows` - each open connection, whether it is full now, and its index.
    /// * `acknowledged_bytes` - reads what peers have acknowledged, all together.
    /// * `set` - sets the kernel's rate of the connection with this index; `None` takes it away.
    pub(crate) fn sample<'a>(
        &mut self,
        now: Time,
        flows: impl Iterator<Item = (usize, bool, &'a mut Pacer)>,
        acknowledged_bytes: impl FnOnce() -> Option<u64>,
        mut set: impl FnMut(usize, Option<u64>),
    ) {
        let elapsed = now.since(self.sampled);
        self.sampled = now;
        let mut flows: Vec<_> = flows.collect();
        let sampled: Vec<_> =
            flows.iter_mut().map(|(_, full, flow)| flow.take_sample(*full)).collect();
        if self.busy {
            let sent_bytes = sampled.iter().map(|(_, bytes)| bytes).sum();
            self.port.busy(now, sent_bytes, acknowledged_bytes);
        } else {
            self.port.idle();
        }
        self.busy = flows.iter().any(|(_, full, _)| *full);
        let share = self.port.bytes_per_s().map(|port| {
            let bytes_per_s = share(self.port.allowed(port), elapsed, &sampled);
            let by_thread = self.suits_thread(port, sampled.len());
            PacedRate { bytes_per_s, frame_time: by_thread.then(|| self.frame_time(bytes_per_s)) }
        });
        for (index, _, flow) in flows {
            if let Some(rate) = flow.set_rate(now, share) {
                set(index, rate);
            }
        }
    }

    /// Whether the I/O thread paces so many connections that share a port of this rate. It is the
    /// port that counts, not what one has of it for a moment: the kernel goes on with timers for a
    /// connection that it has paced once.
    fn suits_thread(&self, port_bytes_per_s: u64, flows: usize) -> bool {
        let lasts = self.frame_time(port_bytes_per_s);
        lasts >= THREAD_PORT_FRAME && THREAD_FRAME.contains(&lasts.saturating_mul(flows as u32))
    }

    fn frame_time(&self, bytes_per_s: u64) -> Duration {
        Rate::of_bytes(bytes_per_s).time_for(self.frame)
    }
}

/// What each flow may send of a port: what those leave that had little to send is shared out by the
/// others, and none gets less than an even part.
fn share(port_bytes_per_s: u64, elapsed: Duration, flows: &[(bool, u64)]) -> u64 {
    let taken: u128 =
        flows.iter().filter(|(demands, _)| !demands).map(|&(_, bytes)| u128::from(bytes)).sum();
    let taken_per_s = taken * 1_000_000_000 / elapsed.as_nanos().max(1);
    let left = port_bytes_per_s.saturating_sub(u64::try_from(taken_per_s).unwrap_or(u64::MAX));
    let demanding = flows.iter().filter(|(demands, _)| *demands).count() as u64;
    let even = port_bytes_per_s / (flows.len() as u64).max(1);
    (left / demanding.max(1)).max(even).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: u64 = 1_000_000;

    /// A port that carries what is offered up to its rate, looked at every tick.
    struct Port {
        rate: u64,
        now: Time,
        acknowledged: u64,
        pacing: PortPacing,
        flows: Vec<Pacer>,
    }

    impl Port {
        fn new(rate: u64, peers: usize) -> Port {
            Port {
                rate,
                now: Time::ZERO,
                acknowledged: 0,
                pacing: PortPacing::new(peers, 65_096),
                flows: (0..peers).map(|_| Pacer::default()).collect(),
            }
        }

        fn rates(&self) -> Vec<Option<u64>> {
            self.flows.iter().map(Pacer::rate_bytes_per_s).collect()
        }

        /// One tick in which the flows want so many bytes a second; `rest` is a moment without work.
        fn tick(&mut self, wants: &[u64], rest: bool) {
            let elapsed_ns = 5 * MILLISECOND;
            self.now = Time(self.now.0 + elapsed_ns);
            let limits = self.rates().into_iter().map(|rate| rate.unwrap_or(u64::MAX));
            let offers: Vec<u64> =
                wants.iter().zip(limits).map(|(&want, limit)| want.min(limit)).collect();
            let mut full = vec![false; wants.len()];
            for (index, bytes_per_s) in carried(self.rate, &offers).into_iter().enumerate() {
                let bytes = bytes_per_s * elapsed_ns / 1_000_000_000;
                self.flows[index].sent(self.now, bytes as usize);
                self.acknowledged += bytes;
                if wants[index] > bytes_per_s {
                    self.flows[index].note_backlog();
                    full[index] = !rest;
                }
            }
            if self.pacing.rest(self.now, || full.contains(&true)) {
                let acknowledged = self.acknowledged;
                let flows = self.flows.iter_mut().zip(full).enumerate();
                self.pacing.sample(
                    self.now,
                    flows.map(|(index, (flow, full))| (index, full, flow)),
                    || Some(acknowledged),
                    |_, _| {},
                );
            }
        }
    }

    /// What a port carries of each offer: small ones whole, the others as much as each other.
    fn carried(rate: u64, offers: &[u64]) -> Vec<u64> {
        let mut order: Vec<usize> = (0..offers.len()).collect();
        order.sort_by_key(|&index| offers[index]);
        let (mut left, mut out) = (rate, vec![0; offers.len()]);
        for (done, index) in order.into_iter().enumerate() {
            out[index] = offers[index].min(left / (offers.len() - done) as u64);
            left -= out[index];
        }
        out
    }

    #[test]
    fn full_flows_share_the_port_evenly_and_a_little_more() {
        let mut port = Port::new(48_000_000, 3);
        for _ in 0..200 {
            port.tick(&[u64::MAX / 8; 3], false);
        }
        for rate in port.rates().into_iter().map(|rate| rate.expect("paced")) {
            assert!((16_000_000..16_700_000).contains(&rate), "{rate}");
        }
    }

    #[test]
    fn the_thread_paces_where_a_frame_lasts_about_as_long_as_a_turn() {
        let by_thread = |mbit_per_s: u64, peers: usize| {
            PortPacing::new(peers, 65_096).suits_thread(mbit_per_s * 125_000, peers)
        };
        assert!(by_thread(300, 3) && by_thread(400, 3) && by_thread(500, 3) && by_thread(1_000, 3));
        assert!(by_thread(1_000, 7), "8 ranks");
        assert!(!by_thread(100, 3) && !by_thread(500, 7), "frames of many turns");
        assert!(!by_thread(2_000, 3) && !by_thread(10_000, 3), "many frames in a turn");
        assert!(!by_thread(10_000, 63), "a frame every 52 us");
    }

    #[test]
    fn who_paces_stays_the_same_in_windows_that_look_for_more() {
        let mut port = Port::new(120_000_000, 3);
        let mut more = 0;
        for _ in 0..2_000 {
            port.tick(&[u64::MAX / 8; 3], false);
            let rates = port.rates();
            assert!(port.flows.iter().all(|flow| rates[0].is_none() || flow.by_thread()));
            more += u32::from(rates[0].is_some_and(|rate| rate > 60_000_000));
        }
        assert!(more > 0, "one window of 32");
    }

    #[test]
    fn what_one_leaves_the_others_get() {
        let mut port = Port::new(48_000_000, 3);
        for _ in 0..200 {
            port.tick(&[u64::MAX / 8, u64::MAX / 8, 4_000_000], false);
        }
        let rate = port.rates()[0].expect("paced");
        assert!((21_000_000..24_000_000).contains(&rate), "{rate}");
        // Alone it has the whole port after one look.
        port.tick(&[u64::MAX / 8, 0, 0], false);
        port.tick(&[u64::MAX / 8, 0, 0], false);
        let rates = port.rates();
        assert!(rates[0].is_none_or(|rate| rate >= 48_000_000), "{rates:?}");
    }

    #[test]
    fn who_has_too_little_to_send_is_never_paced() {
        let mut port = Port::new(48_000_000, 3);
        for turn in 0..2_000 {
            // Bursts at full rate, half of the time.
            let want = if turn % 20 < 10 { u64::MAX / 8 } else { 0 };
            port.tick(&[want; 3], turn % 20 >= 10);
            assert_eq!(port.rates(), [None; 3]);
        }
    }

    #[test]
    fn a_faster_port_is_noticed_and_a_slower_one_forgotten() {
        let mut port = Port::new(48_000_000, 3);
        for _ in 0..500 {
            port.tick(&[u64::MAX / 8; 3], false);
        }
        port.rate = 480_000_000;
        for _ in 0..2_000 {
            port.tick(&[u64::MAX / 8; 3], false);
        }
        let allowed = port.pacing.port.found.iter().max().copied().expect("found");
        assert!(allowed >= 480_000_000 * 99 / 100, "{allowed}");
        port.rate = 48_000_000;
        for _ in 0..4_000 {
            port.tick(&[u64::MAX / 8; 3], false);
        }
        let allowed = port.pacing.port.found.iter().max().copied().expect("found");
        assert!(allowed <= 48_500_000, "{allowed}");
    }
}
