//! Paces connections: all of them together fill this rank's port, and none sends faster than its part.
//!
//! Several senders that each give the kernel as much as it takes overrun the queue of a receiver's port,
//! and their flows take uneven parts of it; meanwhile another port has nothing to send, since its bytes
//! wait in the first one's queue. With every flow at its even part of its sender's port no queue builds
//! up anywhere, as long as all ranks have as much for each other.
//!
//! The rate of the port is found as BBR finds that of a path (Cardwell et al., 2016): the most that was
//! acknowledged, over all connections, in recent windows that were never without work. Windows are
//! counted in bytes. In a probing window twice as much may go, so that a faster port is noticed soon. A
//! rank that always has less to send than its port takes never finishes a window, and is never paced.
//!
//! `pacer` keeps a connection to its part.

use super::limits;
use super::pacer::{PacedRate, Pacer};
use super::rate::{RateEstimator, Smoothing};
use gradlane_units::Time;
use std::time::Duration;

/// Bytes of a window at least; the bytes in flight at its begin and end are few beside them.
const WINDOW_BYTES: u64 = 8 << 20;
/// Bytes of a window for each peer.
const WINDOW_BYTES_PER_PEER: u64 = 2 << 20;
/// Time of a window at least.
const WINDOW_MIN: Duration = Duration::from_millis(4);
const SMOOTHING: Smoothing = Smoothing::MaxOf { windows: 64 };
/// One window of this many probes for a faster port.
const PROBE_EVERY: u32 = 32;
/// Time between two samples of all flows.
const TICK: Duration = Duration::from_millis(5);
/// In other windows flows may exceed the found rate by 1/64, so that a larger one can be found.
const EXCESS_SHIFT: u32 = 6;

/// A window that has begun.
#[derive(Debug)]
struct Window {
    began: Time,
    acknowledged_bytes: u64,
    sent_bytes: u64,
}

/// The rate of this rank's port.
#[derive(Debug)]
struct PortRate {
    window_bytes: u64,
    window: Option<Window>,
    rate: RateEstimator,
    /// Windows until one that probes; 0: this one.
    until_probe: u32,
}

impl PortRate {
    fn new(peers: usize) -> PortRate {
        PortRate {
            window_bytes: WINDOW_BYTES.max(WINDOW_BYTES_PER_PEER * peers as u64),
            window: None,
            rate: RateEstimator::new(SMOOTHING),
            until_probe: 0,
        }
    }

    /// Notes bytes that the kernel took since the last call, while there were always more.
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
        let elapsed = now.since(window.began);
        if window.sent_bytes < self.window_bytes || elapsed < WINDOW_MIN {
            return;
        }
        let Some(total) = acknowledged_bytes() else { return };
        self.rate.add(total.saturating_sub(window.acknowledged_bytes), elapsed);
        self.until_probe = self.until_probe.checked_sub(1).unwrap_or(PROBE_EVERY - 1);
        self.window = Some(Window { began: now, acknowledged_bytes: total, sent_bytes: 0 });
    }

    /// Notes a moment without work, which ends the window without a result.
    fn idle(&mut self) {
        self.window = None;
    }

    /// The rate of the port; `None` until the first window ends.
    fn bytes_per_s(&self) -> Option<u64> {
        self.rate.bytes_per_s().map(|rate| rate as u64)
    }

    /// The rate of all connections together on a port of this rate.
    fn allowed(&self, bytes_per_s: u64) -> u64 {
        let excess = if self.until_probe == 0 { bytes_per_s } else { bytes_per_s >> EXCESS_SHIFT };
        bytes_per_s.saturating_add(excess)
    }
}

/// Paces all connections of a rank.
#[derive(Debug)]
pub(crate) struct PortPacing {
    port: PortRate,
    frame_bytes: u32,
    sampled: Time,
    /// Whether a connection was full at every moment since then.
    busy: bool,
}

impl PortPacing {
    /// Paces a rank that sends to `peers`, usually in frames of `frame_bytes`.
    pub(crate) fn new(peers: usize, frame_bytes: u32) -> PortPacing {
        PortPacing { port: PortRate::new(peers), frame_bytes, sampled: Time::ZERO, busy: false }
    }

    /// Notes that the I/O thread has nothing left to do: a connection that is not full has nothing to
    /// send. Returns whether it is time to sample all flows.
    pub(crate) fn rest(&mut self, now: Time, any_full: impl FnOnce() -> bool) -> bool {
        self.busy = self.busy && any_full();
        now.since(self.sampled) >= TICK
    }

    /// Shares the port out anew.
    ///
    /// # Arguments
    /// * `flows` - index of each open connection, whether it is full now, and its pacer.
    /// * `acknowledged_bytes` - reads the acknowledged bytes of all peers together.
    /// * `set` - sets the kernel's rate of the connection with this index; `None` ends its pacing.
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
        let samples: Vec<_> =
            flows.iter_mut().map(|(_, full, flow)| flow.take_sample(*full)).collect();
        if self.busy {
            let sent_bytes = samples.iter().map(|(_, bytes)| bytes).sum();
            self.port.busy(now, sent_bytes, acknowledged_bytes);
        } else {
            self.port.idle();
        }
        self.busy = flows.iter().any(|(_, full, _)| *full);
        let rate = self.port.bytes_per_s().map(|port| {
            let bytes_per_s = flow_rate(self.port.allowed(port), elapsed, &samples);
            let by_thread = limits::paced_by_thread(self.frame_bytes, port, samples.len());
            let frame_time = limits::frame_time(self.frame_bytes, bytes_per_s);
            PacedRate { bytes_per_s, frame_time: by_thread.then_some(frame_time) }
        });
        for (index, _, flow) in flows {
            if let Some(kernel_rate) = flow.set_rate(now, rate) {
                set(index, kernel_rate);
            }
        }
    }
}

/// Returns the rate of each flow on a port: flows with little to send leave the rest to the others, and
/// none gets less than an even part.
fn flow_rate(port_bytes_per_s: u64, elapsed: Duration, flows: &[(bool, u64)]) -> u64 {
    let taken: u128 =
        flows.iter().filter(|(backlogged, _)| !backlogged).map(|&(_, it)| u128::from(it)).sum();
    let taken_per_s = taken * 1_000_000_000 / elapsed.as_nanos().max(1);
    let left = port_bytes_per_s.saturating_sub(u64::try_from(taken_per_s).unwrap_or(u64::MAX));
    let backlogged = flows.iter().filter(|(backlogged, _)| *backlogged).count() as u64;
    let even = port_bytes_per_s / (flows.len() as u64).max(1);
    (left / backlogged.max(1)).max(even).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: u64 = 1_000_000;

    /// A port that carries offers up to its rate, sampled every tick.
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

        /// One tick in which the flows want these rates in bytes a second; `rest` is a moment
        /// without work.
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

    /// Returns the rate that a port carries of each offer: small ones whole, the others evenly.
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
        let allowed = port.pacing.port.bytes_per_s().expect("found");
        assert!(allowed >= 480_000_000 * 99 / 100, "{allowed}");
        port.rate = 48_000_000;
        for _ in 0..4_000 {
            port.tick(&[u64::MAX / 8; 3], false);
        }
        let allowed = port.pacing.port.bytes_per_s().expect("found");
        assert!(allowed <= 48_500_000, "{allowed}");
    }
}
