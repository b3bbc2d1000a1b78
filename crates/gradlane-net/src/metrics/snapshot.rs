//! Snapshots of a channel's counters, in Rust and, by the same names, in JSON.

use crate::metrics::participation_stats::LeftOutSnapshot;
use crate::metrics::straggler_stats::StragglerSnapshot;
use serde::Serialize;

/// A connection that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// Address of the caller.
    pub address: String,
    /// Reason of the refusal.
    pub reason: String,
}

/// Traffic with one peer, and its queue.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeerSnapshot {
    /// Bytes sent, payloads and headers of frames.
    pub tx_bytes: u64,
    /// Bytes received, payloads and headers of frames.
    pub rx_bytes: u64,
    /// Bytes sent in payloads of whole frames.
    pub tx_payload_bytes: u64,
    /// Bytes received in payloads of whole frames.
    pub rx_payload_bytes: u64,
    /// Messages that are not handed out, or not whole.
    pub queued_messages: u64,
    /// Bytes of them that are still to be handed out.
    pub queued_bytes: u64,
    /// Bytes handed out and not yet with the kernel.
    pub in_flight_bytes: u64,
    /// Bytes of trained tensors that the rank owns or is the root of.
    pub owned_bytes: u64,
    /// Frames sent.
    pub tx_frames: u64,
    /// Frames received.
    pub rx_frames: u64,
}

/// The staleness of one rank's pushes to the slices that this rank owns, in asynchronous training:
/// updates of the slice between the version that the rank had received and its push.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StalenessSnapshot {
    /// Pushes that were applied.
    pub pushes: u64,
    /// Their mean staleness.
    pub mean: f64,
    /// The largest.
    pub max: u64,
    /// Pushes by staleness from 0 on; entry 64 counts that and all above.
    pub histogram: Vec<u64>,
}

/// Waits of application threads for one tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WaitSnapshot {
    /// Name of the tensor.
    pub name: String,
    /// Waits for it.
    pub count: u64,
    /// Sum of the waits in seconds.
    pub wait_s: f64,
    /// The longest wait for it, or for a whole step that it completed.
    pub wait_s_max: f64,
    /// The step of the longest wait.
    pub wait_step_max: u64,
    /// The step of the last wait.
    pub wait_step_last: u64,
    /// Waits for a whole step that this tensor completed.
    pub last_of_step_count: u64,
    /// Sum of these in seconds.
    pub last_of_step_wait_s: f64,
}

/// All counters at one time; in JSON by the same names.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MetricsSnapshot {
    /// Bytes sent to all peers, payloads and headers.
    pub tx_bytes: u64,
    /// Bytes received from all peers, payloads and headers.
    pub rx_bytes: u64,
    /// Frames sent to all peers.
    pub tx_frames: u64,
    /// Frames received from all peers.
    pub rx_frames: u64,
    /// Bytes sent in payloads of whole frames.
    pub tx_payload_bytes: u64,
    /// Bytes received in payloads of whole frames.
    pub rx_payload_bytes: u64,
    /// Messages that are not handed out, or not whole.
    pub queued_messages: u64,
    /// Bytes of them that are still to be handed out.
    pub queued_bytes: u64,
    /// Jobs that wait for a free thread.
    pub queued_jobs: u64,
    /// Bytes of slices that were sent whole, before encoding.
    pub raw_bytes: u64,
    /// Bytes of the same slices as they were sent.
    pub encoded_bytes: u64,
    /// Payload bytes of results that this rank sent as the owner of slices.
    pub served_tx_bytes: u64,
    /// Payload bytes of contributions of others that this rank got for these.
    pub served_rx_bytes: u64,
    /// The same by rank; zeros for this one, except for the bytes that it owns.
    pub peers: Vec<PeerSnapshot>,
    /// Waits by tensor; tensors without waits are left out.
    pub waits: Vec<WaitSnapshot>,
    /// By rank: how late its contributions to this rank's slices were.
    pub stragglers: Vec<StragglerSnapshot>,
    /// Slices of this rank that have all contributions.
    pub gathered_slices: u64,
    /// Those of them whose last two contributions arrived together: no rank was late.
    pub tied_slices: u64,
    /// Steps whose contributors were chosen.
    pub decided_steps: u64,
    /// By rank: steps without it; empty where contributors are not chosen.
    pub left_out: Vec<LeftOutSnapshot>,
    /// CPU time of the I/O thread, in seconds.
    pub io_cpu_s: f64,
    /// CPU time of all job threads, in seconds.
    pub work_cpu_s: f64,
    /// CPU time of the acceptor, in seconds.
    pub acceptor_cpu_s: f64,
    /// Time that application threads spent waiting, in seconds.
    pub wait_s: f64,
    /// Version of the priority vector in force.
    pub plan_version: u64,
    /// Frames chosen and not yet in the kernel's hands.
    pub outgoing_frames: u64,
    /// Jobs handed out and not yet done.
    pub jobs_in_flight: u64,
    /// Bytes of scratch buffers.
    pub scratch_bytes: u64,
    /// Turns of the I/O threads.
    pub turns: u64,
    /// By rank: its pushes to this rank's slices in asynchronous training; else empty.
    pub staleness: Vec<StalenessSnapshot>,
    /// Connections that were refused.
    pub refused_connections: u64,
    /// The last of them.
    pub refusals: Vec<Refusal>,
}

impl MetricsSnapshot {
    /// The counters as a JSON object.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }
}
