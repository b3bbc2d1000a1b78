//! A record of frames as they leave and arrive: the last ones, in order, never more than fit the
//! ring. Without the option `trace` nothing is recorded and nothing is paid.

use crate::ready::lock;
use crate::syscall::monotonic_ns;
use gradlane_units::Rank;
use gradlane_wire::FrameHeader;
use std::collections::VecDeque;
use std::sync::Mutex;

/// Frames that are kept; older ones fall out.
const CAPACITY: usize = 1 << 18;

/// Which way a frame went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The kernel took the last byte of it.
    Sent,
    /// Its last byte arrived and its checksum was right.
    Received,
}

/// One frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEntry {
    /// When, on the machine's monotonic clock, in nanoseconds.
    pub time_ns: u64,
    /// Which way.
    pub direction: Direction,
    /// The other rank.
    pub peer: Rank,
    /// Its header.
    pub header: FrameHeader,
}

/// The ring.
#[derive(Debug)]
pub(crate) struct Trace {
    entries: Option<Mutex<VecDeque<TraceEntry>>>,
}

impl Trace {
    /// A ring that records, or one that does nothing.
    pub(crate) fn new(enabled: bool) -> Trace {
        Trace { entries: enabled.then(Mutex::default) }
    }

    /// Records a frame.
    pub(crate) fn record(&self, direction: Direction, peer: Rank, header: &FrameHeader) {
        if let Some(entries) = &self.entries {
            let entry = TraceEntry { time_ns: monotonic_ns(), direction, peer, header: *header };
            let mut entries = lock(entries);
            if entries.len() == CAPACITY {
                entries.pop_front();
            }
            entries.push_back(entry);
        }
    }

    /// All entries since the last call.
    pub(crate) fn take(&self) -> Vec<TraceEntry> {
        self.entries.as_ref().map_or_else(Vec::new, |entries| lock(entries).drain(..).collect())
    }
}
