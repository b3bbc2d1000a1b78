//! Counters of a channel: bytes, frames, waits.
//!
//! Counters only grow and are read at any time from any thread; a snapshot is not of one instant. A
//! frame costs a few plain additions; waits and stragglers are counted when a thread has slept, or
//! a slice is complete.

use crate::channel::completion::WaitTarget;
use crate::metrics::host_counters::HostCounters;
use crate::metrics::participation_stats::ParticipationStats;
use crate::metrics::queue_stats::StatsQuery;
use crate::metrics::snapshot::{MetricsSnapshot, PeerSnapshot, StalenessSnapshot, WaitSnapshot};
use crate::metrics::straggler_stats::StragglerStats;
use crate::metrics::{count, load, seconds};
use crate::sys::lock;
use gradlane_engine::{Plan, Scheme, Staleness, TensorKind};
use gradlane_units::{Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Traffic with one peer.
#[derive(Debug, Default)]
pub(crate) struct PeerCounters {
    pub(crate) sent_bytes: AtomicU64,
    pub(crate) received_bytes: AtomicU64,
    pub(crate) sent_frames: AtomicU64,
    pub(crate) received_frames: AtomicU64,
    sent_payload_bytes: AtomicU64,
    received_payload_bytes: AtomicU64,
}

impl PeerCounters {
    /// Notes a frame that the kernel has.
    pub(crate) fn sent(&self, header: &FrameHeader) {
        count(&self.sent_frames, 1);
        count(&self.sent_payload_bytes, u64::from(header.length));
    }

    /// Notes a frame that has arrived.
    pub(crate) fn received(&self, header: &FrameHeader) {
        count(&self.received_frames, 1);
        count(&self.received_payload_bytes, u64::from(header.length));
    }
}

/// Waits of application threads for one tensor.
#[derive(Debug, Default)]
struct WaitStats {
    count: AtomicU64,
    sum_ns: AtomicU64,
    max_ns: AtomicU64,
    max_step: AtomicU64,
    last_step: AtomicU64,
    /// Waits for a whole step that this tensor completed.
    step_count: AtomicU64,
    step_sum_ns: AtomicU64,
}

impl WaitStats {
    fn note(&self, step: Step, waited_ns: u64) {
        count(&self.count, 1);
        count(&self.sum_ns, waited_ns);
        self.last_step.store(step.0, Ordering::Relaxed);
        self.note_longest(step, waited_ns);
    }

    fn note_whole_step(&self, step: Step, waited_ns: u64) {
        count(&self.step_count, 1);
        count(&self.step_sum_ns, waited_ns);
        // Initial values may take longer than any step, and are not of training.
        if !step.is_initial() {
            self.note_longest(step, waited_ns);
        }
    }

    fn note_longest(&self, step: Step, waited_ns: u64) {
        if self.max_ns.fetch_max(waited_ns, Ordering::Relaxed) < waited_ns {
            self.max_step.store(step.0, Ordering::Relaxed);
        }
    }
}

/// What one lane has at a time.
#[derive(Debug, Default)]
pub(crate) struct LaneGauges {
    /// Version of the priority vector in force.
    pub(crate) plan_version: AtomicU64,
    /// Jobs handed out and not yet done.
    pub(crate) jobs_in_flight: AtomicU64,
    /// Bytes of scratch buffers.
    pub(crate) scratch_bytes: AtomicU64,
}

/// The counters.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) peers: Vec<PeerCounters>,
    /// Time that application threads have waited.
    pub(crate) wait_ns: AtomicU64,
    /// By lane.
    pub(crate) lanes: Vec<LaneGauges>,
    /// Frames chosen and not yet in the kernel's hands.
    pub(crate) outgoing_frames: AtomicU64,
    /// Turns of the I/O threads.
    pub(crate) turns: AtomicU64,
    /// Staleness of the pushes that this rank has applied one by one.
    pub(crate) staleness: Mutex<Staleness>,
    /// Ranks that the slices of this rank wait for.
    pub(crate) stragglers: StragglerStats,
    /// Ranks that steps went on without.
    pub(crate) participation: Mutex<ParticipationStats>,
    /// The engine's queues, on request.
    pub(crate) queue_stats: StatsQuery,
    waits: Vec<WaitStats>,
    /// Bytes of whole messages sent, before and after encoding.
    raw_bytes: AtomicU64,
    encoded_bytes: AtomicU64,
    /// Payload bytes of results that this rank sent as an owner, and of the contributions to them.
    served_sent_bytes: AtomicU64,
    served_received_bytes: AtomicU64,
    /// By tensor: whether this rank is its root.
    is_root: Vec<bool>,
    /// By rank: bytes of trained tensors that it owns.
    owned_bytes: Vec<u64>,
    /// Threads and refused callers.
    pub(crate) host: Arc<HostCounters>,
}

impl Metrics {
    /// Makes counters at zero.
    pub(crate) fn new(rank: Rank, plan: &Plan, lanes: usize) -> Metrics {
        let (world_size, tensors) = (plan.world_size, plan.tensors.len());
        let is_root = |tensor| plan.root(TensorId(tensor)) == Some(rank);
        Metrics {
            served_sent_bytes: AtomicU64::new(0),
            served_received_bytes: AtomicU64::new(0),
            is_root: (0..tensors as u32).map(is_root).collect(),
            owned_bytes: owned_bytes(plan),
            peers: (0..world_size).map(|_| PeerCounters::default()).collect(),
            wait_ns: AtomicU64::new(0),
            lanes: (0..lanes).map(|_| LaneGauges::default()).collect(),
            outgoing_frames: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            staleness: Mutex::new(Staleness::new(world_size)),
            stragglers: StragglerStats::new(world_size),
            participation: Mutex::new(ParticipationStats::new(rank, world_size)),
            queue_stats: StatsQuery::new(lanes),
            waits: (0..tensors).map(|_| WaitStats::default()).collect(),
            raw_bytes: AtomicU64::new(0),
            encoded_bytes: AtomicU64::new(0),
            host: Arc::default(),
        }
    }

    /// Notes the wait of a thread; of a whole step, `last` is the tensor that completed it.
    pub(crate) fn note_wait(&self, target: WaitTarget, last: TensorId, waited: Duration) {
        let waited_ns = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        count(&self.wait_ns, waited_ns);
        match target {
            WaitTarget::Tensor(tensor, step) => {
                if let Some(waits) = self.waits.get(tensor.index()) {
                    waits.note(step, waited_ns);
                }
            }
            WaitTarget::Step(step) => {
                if let Some(waits) = self.waits.get(last.index()) {
                    waits.note_whole_step(step, waited_ns);
                }
            }
            WaitTarget::AnyTensor(_)
            | WaitTarget::Squares(_)
            | WaitTarget::Contributors(_)
            | WaitTarget::RootRequest
            | WaitTarget::Membership
            | WaitTarget::End => {}
        }
    }

    /// Notes a frame that the kernel has.
    pub(crate) fn sent(&self, to: Rank, header: &FrameHeader) {
        self.peers[to.index()].sent(header);
        if header.kind == FrameKind::Broadcast || self.is_for_this_root(header) {
            count(&self.served_sent_bytes, u64::from(header.length));
        }
    }

    /// Notes a frame that has arrived.
    pub(crate) fn received(&self, from: Rank, header: &FrameHeader) {
        self.peers[from.index()].received(header);
        if header.kind == FrameKind::Push || self.is_for_this_root(header) {
            count(&self.served_received_bytes, u64::from(header.length));
        }
    }

    fn is_for_this_root(&self, header: &FrameHeader) -> bool {
        // Frames of a membership that is over are counted, and never checked against the plan.
        let is_root = self.is_root.get(header.tensor.index());
        header.kind == FrameKind::Block && is_root.is_some_and(|&it| it)
    }

    /// Notes a frame that the kernel has; the last one of a message counts its bytes.
    pub(crate) fn sent_message(&self, plan: &Plan, header: &FrameHeader) {
        let carries_slice = matches!(
            header.kind,
            FrameKind::Push
                | FrameKind::Broadcast
                | FrameKind::RingScale
                | FrameKind::RingReduce
                | FrameKind::RingBroadcast
        );
        let whole = header.flags.contains(FrameFlags::LAST);
        if carries_slice && whole && !header.flags.contains(FrameFlags::ABSENT) {
            count(&self.raw_bytes, plan.slice_bytes(header.slice));
            count(&self.encoded_bytes, header.offset + u64::from(header.length));
        }
    }

    /// Returns all counters.
    pub(crate) fn snapshot(&self, plan: &Plan) -> MetricsSnapshot {
        let queue_stats = self.queue_stats.latest();
        let peers: Vec<PeerSnapshot> = self
            .peers
            .iter()
            .enumerate()
            .map(|(rank, peer)| PeerSnapshot {
                tx_bytes: load(&peer.sent_bytes),
                rx_bytes: load(&peer.received_bytes),
                tx_frames: load(&peer.sent_frames),
                rx_frames: load(&peer.received_frames),
                tx_payload_bytes: load(&peer.sent_payload_bytes),
                rx_payload_bytes: load(&peer.received_payload_bytes),
                queued_messages: queue_stats.peers.get(rank).map_or(0, |it| it.messages),
                queued_bytes: queue_stats.peers.get(rank).map_or(0, |it| it.bytes),
                in_flight_bytes: queue_stats.peers.get(rank).map_or(0, |it| it.in_flight_bytes),
                owned_bytes: self.owned_bytes[rank],
            })
            .collect();
        let refusals = lock(&self.host.refusals);
        let (gathered_slices, tied_slices) = self.stragglers.slices();
        let (decided_steps, left_out) = lock(&self.participation).snapshot();
        MetricsSnapshot {
            tx_bytes: peers.iter().map(|peer| peer.tx_bytes).sum(),
            rx_bytes: peers.iter().map(|peer| peer.rx_bytes).sum(),
            tx_frames: peers.iter().map(|peer| peer.tx_frames).sum(),
            rx_frames: peers.iter().map(|peer| peer.rx_frames).sum(),
            tx_payload_bytes: peers.iter().map(|peer| peer.tx_payload_bytes).sum(),
            rx_payload_bytes: peers.iter().map(|peer| peer.rx_payload_bytes).sum(),
            queued_messages: peers.iter().map(|peer| peer.queued_messages).sum(),
            queued_bytes: peers.iter().map(|peer| peer.queued_bytes).sum(),
            queued_jobs: queue_stats.jobs,
            raw_bytes: load(&self.raw_bytes),
            encoded_bytes: load(&self.encoded_bytes),
            served_tx_bytes: load(&self.served_sent_bytes),
            served_rx_bytes: load(&self.served_received_bytes),
            peers,
            waits: self.wait_snapshots(plan),
            stragglers: self.stragglers.snapshot(),
            gathered_slices,
            tied_slices,
            decided_steps,
            left_out,
            io_cpu_s: self.host.cpu_s("io"),
            work_cpu_s: self.host.cpu_s("work"),
            acceptor_cpu_s: self.host.cpu_s("acceptor"),
            wait_s: seconds(load(&self.wait_ns)),
            // New priorities are in force once they are in every lane.
            plan_version: self.lanes.iter().map(|it| load(&it.plan_version)).min().unwrap_or(0),
            outgoing_frames: load(&self.outgoing_frames),
            jobs_in_flight: self.lanes.iter().map(|it| load(&it.jobs_in_flight)).sum(),
            scratch_bytes: self.lanes.iter().map(|it| load(&it.scratch_bytes)).sum(),
            turns: load(&self.turns),
            staleness: staleness_snapshots(&lock(&self.staleness)),
            refused_connections: refusals.0,
            refusals: refusals.1.iter().cloned().collect(),
        }
    }

    /// Returns the waits of tensors that a thread has waited for.
    fn wait_snapshots(&self, plan: &Plan) -> Vec<WaitSnapshot> {
        let rows = plan.tensors.iter().zip(&self.waits).map(|(tensor, waits)| WaitSnapshot {
            name: tensor.spec.name.clone(),
            count: load(&waits.count),
            wait_s: seconds(load(&waits.sum_ns)),
            wait_s_max: seconds(load(&waits.max_ns)),
            wait_step_max: load(&waits.max_step),
            wait_step_last: load(&waits.last_step),
            last_of_step_count: load(&waits.step_count),
            last_of_step_wait_s: seconds(load(&waits.step_sum_ns)),
        });
        rows.filter(|row| row.count > 0 || row.last_of_step_count > 0).collect()
    }
}

/// Returns, by rank, the bytes of trained tensors that it owns. Tensors of rings, and blocks that
/// all ranks get, have no owner.
fn owned_bytes(plan: &Plan) -> Vec<u64> {
    let mut owned = vec![0; plan.world_size as usize];
    for tensor in plan.tensors.iter().filter(|tensor| tensor.spec.kind == TensorKind::Parameter) {
        if matches!(tensor.scheme, Scheme::Ps | Scheme::GatherToRoot) {
            for slice in tensor.slices.clone().map(SliceId) {
                owned[plan.slice(slice).owner.index()] += plan.slice_bytes(slice);
            }
        }
    }
    owned
}

/// Returns rows by rank; none where no push was applied alone.
fn staleness_snapshots(staleness: &Staleness) -> Vec<StalenessSnapshot> {
    let tallies = staleness.by_rank();
    if tallies.iter().all(|tally| tally.pushes == 0) {
        return Vec::new();
    }
    let reading = |tally: &gradlane_engine::RankStaleness| StalenessSnapshot {
        pushes: tally.pushes,
        mean: tally.mean(),
        max: tally.max,
        histogram: tally.histogram.clone(),
    };
    tallies.iter().map(reading).collect()
}

#[cfg(test)]
mod tests {
    use super::Metrics;
    use gradlane_engine::{Plan, Strategy, TensorKind, TensorSpec, Update};
    use gradlane_units::{Dtype, Priority, Rank, SliceId, Step, TensorId};
    use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

    #[test]
    fn a_block_of_a_tensor_that_the_plan_has_not_is_counted_as_any_frame() {
        let spec = TensorSpec {
            name: "weight".to_owned(),
            numel: 1,
            dtype: Dtype::F32,
            kind: TensorKind::Parameter,
        };
        let strategy = Strategy::named("p3", None, 0).expect("a strategy");
        let plan = Plan::build(vec![spec], strategy, Update::Worker, 2).expect("a plan");
        let metrics = Metrics::new(Rank(0), &plan, 1);
        let header = FrameHeader {
            kind: FrameKind::Block,
            form: PayloadForm::Raw,
            flags: FrameFlags::LAST,
            step: Step(1),
            generation: 0,
            plan_version: 0,
            tensor: TensorId(0xFFFF),
            slice: SliceId(0xFFFF),
            priority: Priority(0),
            sender: Rank(1),
            offset: 0,
            length: 8,
            block_bytes: 8,
            hop: 0,
            payload_checksum: 0,
        };
        metrics.received(Rank(1), &header);
        metrics.sent(Rank(1), &header);
        let peer = &metrics.snapshot(&plan).peers[1];
        assert_eq!((peer.rx_frames, peer.tx_frames), (1, 1));
    }
}
