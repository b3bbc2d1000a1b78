//! Counters of a channel: bytes, frames, CPU time of its threads, refused callers.
//!
//! Counters only grow and are read at any time from any thread; a reading is not one instant.

use crate::ready::lock;
use crate::syscall::ThreadClock;
use gradlane_engine::Staleness;
use gradlane_units::Rank;
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

/// Refusals that are kept; older ones are only counted.
const REFUSALS_KEPT: usize = 64;

/// What went to and came from one peer.
#[derive(Debug, Default)]
pub(crate) struct PeerCounters {
    pub(crate) sent_bytes: AtomicU64,
    pub(crate) received_bytes: AtomicU64,
    pub(crate) sent_frames: AtomicU64,
    pub(crate) received_frames: AtomicU64,
}

/// Adds to a counter that one thread writes.
pub(crate) fn count(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

/// CPU time of one thread, also after it has ended.
#[derive(Debug, Default)]
struct ThreadCpu {
    clock: Option<ThreadClock>,
    final_ns: u64,
}

/// A connection that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// Who called.
    pub address: String,
    /// Why it was refused.
    pub reason: String,
}

/// The counters.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) peers: Vec<PeerCounters>,
    /// Time that application threads waited.
    pub(crate) wait_ns: AtomicU64,
    /// Version of the priority vector in force.
    pub(crate) plan_version: AtomicU64,
    /// Frames chosen and not yet in the kernel's hands.
    pub(crate) outgoing_frames: AtomicU64,
    /// Works handed out and not yet done.
    pub(crate) works_in_flight: AtomicU64,
    /// Bytes of scratch buffers.
    pub(crate) scratch_bytes: AtomicU64,
    /// Times that the I/O thread looked for something to do.
    pub(crate) turns: AtomicU64,
    /// Pushes that this rank has applied one by one.
    pub(crate) staleness: Mutex<Staleness>,
    threads: Mutex<Vec<(&'static str, ThreadCpu)>>,
    refusals: Mutex<(u64, VecDeque<Refusal>)>,
}

impl Metrics {
    /// Counters at zero.
    pub(crate) fn new(world_size: u32) -> Metrics {
        Metrics {
            peers: (0..world_size).map(|_| PeerCounters::default()).collect(),
            wait_ns: AtomicU64::new(0),
            plan_version: AtomicU64::new(0),
            outgoing_frames: AtomicU64::new(0),
            works_in_flight: AtomicU64::new(0),
            scratch_bytes: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            staleness: Mutex::new(Staleness::new(world_size)),
            threads: Mutex::default(),
            refusals: Mutex::default(),
        }
    }

    /// Counts the calling thread's CPU time under `name` until the returned guard is dropped.
    pub(crate) fn count_this_thread(&self, name: &'static str) -> ThreadCount<'_> {
        let mut threads = lock(&self.threads);
        threads.push((name, ThreadCpu { clock: ThreadClock::of_this_thread(), final_ns: 0 }));
        ThreadCount { metrics: self, index: threads.len() - 1 }
    }

    /// Notes a refused caller and says so on standard error.
    pub(crate) fn refuse(&self, rank: Rank, address: &str, reason: &str) {
        eprintln!("gradlane: {rank} refused a connection from {address}: {reason}");
        let mut refusals = lock(&self.refusals);
        refusals.0 += 1;
        if refusals.1.len() == REFUSALS_KEPT {
            refusals.1.pop_front();
        }
        refusals.1.push_back(Refusal { address: address.to_owned(), reason: reason.to_owned() });
    }

    /// All counters now.
    pub(crate) fn read(&self) -> MetricsReading {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let peers: Vec<PeerReading> = self
            .peers
            .iter()
            .map(|peer| PeerReading {
                tx_bytes: load(&peer.sent_bytes),
                rx_bytes: load(&peer.received_bytes),
                tx_frames: load(&peer.sent_frames),
                rx_frames: load(&peer.received_frames),
            })
            .collect();
        let refusals = lock(&self.refusals);
        MetricsReading {
            tx_bytes: peers.iter().map(|peer| peer.tx_bytes).sum(),
            rx_bytes: peers.iter().map(|peer| peer.rx_bytes).sum(),
            tx_frames: peers.iter().map(|peer| peer.tx_frames).sum(),
            rx_frames: peers.iter().map(|peer| peer.rx_frames).sum(),
            peers,
            io_cpu_s: self.cpu_s("io"),
            work_cpu_s: self.cpu_s("work"),
            doorman_cpu_s: self.cpu_s("doorman"),
            wait_s: load(&self.wait_ns) as f64 / 1e9,
            plan_version: load(&self.plan_version),
            outgoing_frames: load(&self.outgoing_frames),
            works_in_flight: load(&self.works_in_flight),
            scratch_bytes: load(&self.scratch_bytes),
            turns: load(&self.turns),
            staleness: read_staleness(&lock(&self.staleness)),
            refused_connections: refusals.0,
            refusals: refusals.1.iter().cloned().collect(),
        }
    }

    fn cpu_s(&self, name: &str) -> f64 {
        let threads = lock(&self.threads);
        let of_name = threads.iter().filter(|(thread, _)| *thread == name);
        let read = |cpu: &ThreadCpu| cpu.clock.and_then(ThreadClock::read_ns);
        of_name.map(|(_, cpu)| read(cpu).unwrap_or(cpu.final_ns)).sum::<u64>() as f64 / 1e9
    }
}

/// By rank; nothing where no push was applied alone.
fn read_staleness(staleness: &Staleness) -> Vec<StalenessReading> {
    let tallies = staleness.tallies();
    if tallies.iter().all(|tally| tally.pushes == 0) {
        return Vec::new();
    }
    let reading = |tally: &gradlane_engine::Tally| StalenessReading {
        pushes: tally.pushes,
        mean: tally.mean(),
        max: tally.max,
        histogram: tally.histogram.clone(),
    };
    tallies.iter().map(reading).collect()
}

/// Keeps the CPU time of a thread when it ends.
pub(crate) struct ThreadCount<'a> {
    metrics: &'a Metrics,
    index: usize,
}

impl Drop for ThreadCount<'_> {
    fn drop(&mut self) {
        let cpu = &mut lock(&self.metrics.threads)[self.index].1;
        cpu.final_ns = cpu.clock.take().and_then(ThreadClock::read_ns).unwrap_or(0);
    }
}

/// What went to and came from one peer, payloads and headers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeerReading {
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Frames sent.
    pub tx_frames: u64,
    /// Frames received.
    pub rx_frames: u64,
}

/// The staleness of one rank's pushes to the slices that this rank owns, where each push is applied
/// alone: updates of the slice between what the rank had received and its push.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StalenessReading {
    /// Pushes that were applied.
    pub pushes: u64,
    /// Their mean staleness.
    pub mean: f64,
    /// The largest.
    pub max: u64,
    /// Pushes by staleness from 0 on; entry 64 counts that and all above.
    pub histogram: Vec<u64>,
}

/// All counters at one time; in JSON by the same names.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MetricsReading {
    /// Bytes sent to all peers, payloads and headers.
    pub tx_bytes: u64,
    /// Bytes received from all peers, payloads and headers.
    pub rx_bytes: u64,
    /// Frames sent to all peers.
    pub tx_frames: u64,
    /// Frames received from all peers.
    pub rx_frames: u64,
    /// The same for each rank; zeros for this one.
    pub peers: Vec<PeerReading>,
    /// CPU time of the I/O thread, in seconds.
    pub io_cpu_s: f64,
    /// CPU time of all work threads, in seconds.
    pub work_cpu_s: f64,
    /// CPU time of the thread that answers callers, in seconds.
    pub doorman_cpu_s: f64,
    /// Time that application threads spent waiting, in seconds.
    pub wait_s: f64,
    /// Version of the priority vector in force.
    pub plan_version: u64,
    /// Frames chosen and not yet in the kernel's hands.
    pub outgoing_frames: u64,
    /// Works handed out and not yet done.
    pub works_in_flight: u64,
    /// Bytes of scratch buffers.
    pub scratch_bytes: u64,
    /// Times that the I/O thread looked for something to do.
    pub turns: u64,
    /// By rank, what was pushed to this rank's slices and applied alone; empty for other strategies.
    pub staleness: Vec<StalenessReading>,
    /// Connections that were refused.
    pub refused_connections: u64,
    /// The last of them.
    pub refusals: Vec<Refusal>,
}

impl MetricsReading {
    /// The counters as a JSON object.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }
}
