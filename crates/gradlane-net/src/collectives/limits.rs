//! Lengths from which messages go another way, and what a peer may send without being asked.

/// Lengths, in bytes. All ranks of a group have the same.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Messages up to this length are sent without asking, in one frame.
    pub(super) eager: usize,
    /// Messages up to this length are copied, and through at once.
    pub(super) copied: usize,
    /// Payload of a frame of longer messages.
    pub(super) frame: usize,
    /// Bytes that were sent to a peer without asking and that no call of the peer has taken yet, at most.
    pub(super) credit: u64,
    /// Longer messages of all ranks to all others are cut into pieces of at most so many bytes, which are sent
    /// without asking: a port then takes from several ranks in turns, without queues of grants behind data.
    pub(super) piece: usize,
    /// Pieces of a message at least, where they have `piece_least` bytes: the first is reduced while others come.
    pub(super) pieces: usize,
    /// Bytes of a piece at least, but for the last one.
    pub(super) piece_least: usize,
    /// Another strand of a collective begins while the longest messages of those under way have fewer bytes
    /// together: what a port may have to queue for each peer.
    pub(super) under_way: usize,
    /// Where all contributions together are at most this long, every rank sends its own to all others.
    pub(super) exchange: usize,
    /// Values up to this length go from the root to all others; longer ones in parts, which they exchange.
    pub(super) whole_broadcast: usize,
}

impl Limits {
    /// Those of groups.
    pub(super) const USUAL: Limits = Limits {
        eager: 64 << 10,
        copied: 8 << 10,
        frame: 128 << 10,
        credit: 4 << 20,
        piece: 64 << 10,
        pieces: 8,
        piece_least: 16 << 10,
        under_way: 256 << 10,
        exchange: 64 << 10,
        whole_broadcast: 64 << 10,
    };
}
