//! Lengths from which messages go another way, and what a peer may send without being asked.

/// Lengths, in bytes. All ranks of a group have the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Messages up to this length are sent without asking, in one frame.
    pub(super) eager: usize,
    /// Payload of a frame of longer messages.
    pub(super) frame: usize,
    /// Bytes that were sent to a peer without asking and that no call of the peer has taken yet, at most.
    pub(super) credit: u64,
    /// Most bytes of one message of a reduction: long enough for a frame, short enough to overlap.
    pub(super) piece: usize,
    /// Where all contributions together are at most this long, every rank sends its own to all others.
    pub(super) exchange: usize,
    /// Values up to this length go from the root to all others; longer ones in parts, which they exchange.
    pub(super) whole_broadcast: usize,
}

impl Limits {
    /// Those of groups.
    pub(super) const USUAL: Limits = Limits {
        eager: 64 << 10,
        frame: 128 << 10,
        credit: 4 << 20,
        piece: 128 << 10,
        exchange: 64 << 10,
        whole_broadcast: 64 << 10,
    };
}
