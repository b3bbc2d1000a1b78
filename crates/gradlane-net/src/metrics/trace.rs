//! A record of frames as they leave and arrive, and of works as they run: the last ones, in order,
//! never more than fit the ring. Without the option `trace` nothing is recorded and nothing is paid
//! but a branch.

use crate::sys::lock;
use crate::sys::syscall::monotonic_ns;
use gradlane_units::{Rank, SliceId, Step};
use gradlane_wire::{FrameHeader, FrameKind, HEADER_BYTES};
use std::collections::VecDeque;
use std::sync::Mutex;

/// Entries that are kept of each kind; older ones fall out and are counted.
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
    /// When it was chosen and the frames before it on its connection were with the kernel, or, of
    /// one that came, when its header was here; on the machine's monotonic clock, in nanoseconds.
    pub begin_ns: u64,
    /// When the last byte of it was with the kernel, or here.
    pub time_ns: u64,
    /// Which way.
    pub direction: Direction,
    /// The other rank.
    pub peer: Rank,
    /// Its header.
    pub header: FrameHeader,
}

impl TraceEntry {
    /// Bytes of the frame, its header included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.header.length) + HEADER_BYTES as u64
    }
}

/// What a work did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// Added contributions up.
    Reduce,
    /// Added them up and updated parameters.
    Update,
    /// Copied a result to its place.
    Copy,
    /// Encoded a contribution.
    Encode,
    /// Added encoded contributions up and encoded their mean.
    Recode,
    /// Decoded a result to its place.
    Decode,
}

/// One work as it ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobEntry {
    /// When it began to run, as in [`TraceEntry`].
    pub begin_ns: u64,
    /// When it had run.
    pub end_ns: u64,
    /// What it did.
    pub kind: JobKind,
    /// For this step.
    pub step: Step,
    /// For this slice.
    pub slice: SliceId,
    /// Bytes that it read and wrote.
    pub bytes: u64,
}

/// What a thread has found out about the frames of one peer.
#[derive(Clone, Debug, Default)]
struct PeerTimes {
    /// When frames were chosen that are not yet with the kernel, in order.
    chosen: VecDeque<u64>,
    /// When the last frame was with the kernel.
    sent_at: u64,
    /// When the header of the frame was here that is arriving.
    announced_at: u64,
}

#[derive(Debug, Default)]
struct Ring {
    frames: VecDeque<TraceEntry>,
    jobs: VecDeque<JobEntry>,
    dropped: u64,
    peers: Vec<PeerTimes>,
}

impl Ring {
    fn times(&mut self, peer: Rank) -> &mut PeerTimes {
        if self.peers.len() <= peer.index() {
            self.peers.resize(peer.index() + 1, PeerTimes::default());
        }
        &mut self.peers[peer.index()]
    }

    fn keep_frame(&mut self, entry: TraceEntry) {
        if self.frames.len() == CAPACITY {
            self.frames.pop_front();
            self.dropped += 1;
        }
        self.frames.push_back(entry);
    }
}

/// The ring.
#[derive(Debug)]
pub(crate) struct Trace {
    ring: Option<Mutex<Ring>>,
}

impl Trace {
    /// A ring that records, or one that does nothing.
    pub(crate) fn new(enabled: bool) -> Trace {
        Trace { ring: enabled.then(Mutex::default) }
    }

    /// A frame to this rank was chosen and stands before its socket.
    pub(crate) fn chosen(&self, peer: Rank) {
        if let Some(ring) = &self.ring {
            lock(ring).times(peer).chosen.push_back(monotonic_ns());
        }
    }

    /// The kernel has a frame.
    pub(crate) fn sent(&self, peer: Rank, header: &FrameHeader) {
        if let Some(ring) = &self.ring {
            let time_ns = monotonic_ns();
            let mut ring = lock(ring);
            let times = ring.times(peer);
            // The engine does not choose heartbeats, and timelines do not show them: a frame that
            // went with one begins when it was chosen, as clocks are compared by (`trace merge`).
            let begin_ns = if header.kind == FrameKind::Heartbeat {
                time_ns
            } else {
                let before = std::mem::replace(&mut times.sent_at, time_ns);
                times.chosen.pop_front().unwrap_or(time_ns).max(before).min(time_ns)
            };
            let (direction, header) = (Direction::Sent, *header);
            ring.keep_frame(TraceEntry { begin_ns, time_ns, direction, peer, header });
        }
    }

    /// The header of a frame is here.
    pub(crate) fn announced(&self, peer: Rank) {
        if let Some(ring) = &self.ring {
            lock(ring).times(peer).announced_at = monotonic_ns();
        }
    }

    /// All of a frame is here.
    pub(crate) fn received(&self, peer: Rank, header: &FrameHeader) {
        if let Some(ring) = &self.ring {
            let time_ns = monotonic_ns();
            let mut ring = lock(ring);
            let begin_ns = ring.times(peer).announced_at.min(time_ns);
            let (direction, header) = (Direction::Received, *header);
            ring.keep_frame(TraceEntry { begin_ns, time_ns, direction, peer, header });
        }
    }

    /// The time, if works are to be recorded.
    pub(crate) fn clock(&self) -> Option<u64> {
        self.ring.as_ref().map(|_| monotonic_ns())
    }

    /// A work has run.
    pub(crate) fn job_done(&self, job: JobEntry) {
        if let Some(ring) = &self.ring {
            let mut ring = lock(ring);
            if ring.jobs.len() == CAPACITY {
                ring.jobs.pop_front();
                ring.dropped += 1;
            }
            ring.jobs.push_back(job);
        }
    }

    /// All frames since the last call.
    pub(crate) fn take_frames(&self) -> Vec<TraceEntry> {
        self.ring.as_ref().map_or_else(Vec::new, |ring| lock(ring).frames.drain(..).collect())
    }

    /// All works since the last call.
    pub(crate) fn take_jobs(&self) -> Vec<JobEntry> {
        self.ring.as_ref().map_or_else(Vec::new, |ring| lock(ring).jobs.drain(..).collect())
    }

    /// How many of both have fallen out since the start.
    pub(crate) fn dropped(&self) -> u64 {
        self.ring.as_ref().map_or(0, |ring| lock(ring).dropped)
    }
}
