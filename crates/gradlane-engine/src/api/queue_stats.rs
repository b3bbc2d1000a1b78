//! Sizes of an engine's queues, for monitoring; no decision uses them.

use alloc::vec::Vec;

/// The queue towards one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerQueueStats {
    /// Messages that are not, or not wholly, handed out.
    pub messages: u64,
    /// Bytes of them that are still to be handed out, without headers.
    pub bytes: u64,
    /// Bytes handed out and not yet reported as sent, with headers.
    pub in_flight_bytes: u64,
}

impl PeerQueueStats {
    pub(crate) fn add(&mut self, bytes: u64) {
        self.messages += 1;
        self.bytes += bytes;
    }
}

/// All queues.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// By rank; zeros for the engine's own.
    pub peers: Vec<PeerQueueStats>,
    /// Jobs that the driver has not asked for yet.
    pub jobs: u64,
}
