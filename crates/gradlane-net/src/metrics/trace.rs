//! A record of frames as they leave and arrive, and of jobs as they run: the last ones, in order,
//! never more than fit the ring. Without the option `trace` nothing is recorded, and each event
//! costs a branch.

use crate::sys::lock;
use gradlane_units::{Rank, SliceId, Step};
use gradlane_wire::{FrameHeader, FrameKind, HEADER_BYTES};
use rustix::time::{clock_gettime, ClockId};
use std::collections::VecDeque;
use std::sync::Mutex;

/// Entries that are kept of each kind; older ones fall out and are counted.
const CAPACITY: usize = 1 << 18;

/// Direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The kernel has its last byte.
    Sent,
    /// Its last byte arrived and its checksum was verified.
    Received,
}

/// One frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEntry {
    /// Begin on the machine's monotonic clock, in nanoseconds: when the frame was chosen and its
    /// predecessors were with the kernel; of a received one, when its header had arrived.
    pub begin_ns: u64,
    /// When its last byte was with the kernel, or had arrived.
    pub time_ns: u64,
    /// Sent or received.
    pub direction: Direction,
    /// The other rank.
    pub peer: Rank,
    /// The frame's header.
    pub header: FrameHeader,
}

impl TraceEntry {
    /// Bytes of the frame, its header included.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.header.length) + HEADER_BYTES as u64
    }
}

/// The operation of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// Reduced contributions.
    Reduce,
    /// Reduced contributions and updated parameters.
    Update,
    /// Copied a result to its place.
    Copy,
    /// Encoded a contribution.
    Encode,
    /// Decoded, reduced and encoded contributions.
    Recode,
    /// Decoded a result to its place.
    Decode,
}

/// One job as it ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobEntry {
    /// Begin, as in [`TraceEntry`].
    pub begin_ns: u64,
    /// End.
    pub end_ns: u64,
    /// Its operation.
    pub kind: JobKind,
    /// The step that it is for.
    pub step: Step,
    /// The slice that it is for.
    pub slice: SliceId,
    /// Bytes that it read and wrote.
    pub bytes: u64,
}

/// Times of the frames of one peer.
#[derive(Clone, Debug, Default)]
struct PeerTimes {
    /// When frames were chosen that are not yet with the kernel, in order.
    chosen: VecDeque<u64>,
    /// When the last frame was with the kernel.
    sent_at: u64,
    /// When the header of the arriving frame was here.
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

/// The record; disabled, it does nothing.
#[derive(Debug)]
pub(crate) struct Trace {
    ring: Option<Mutex<Ring>>,
}

impl Trace {
    /// Makes a record.
    pub(crate) fn new(enabled: bool) -> Trace {
        Trace { ring: enabled.then(Mutex::default) }
    }

    /// Notes a frame that was chosen for a peer.
    pub(crate) fn chosen(&self, peer: Rank) {
        if let Some(ring) = &self.ring {
            lock(ring).times(peer).chosen.push_back(monotonic_ns());
        }
    }

    /// Notes a frame that the kernel has.
    pub(crate) fn sent(&self, peer: Rank, header: &FrameHeader) {
        if let Some(ring) = &self.ring {
            let time_ns = monotonic_ns();
            let mut ring = lock(ring);
            let times = ring.times(peer);
            // The engine does not choose heartbeats, and timelines do not show them. A frame that
            // left with one begins when it was chosen, which `trace merge` compares clocks by.
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

    /// Notes a header that has arrived.
    pub(crate) fn announced(&self, peer: Rank) {
        if let Some(ring) = &self.ring {
            lock(ring).times(peer).announced_at = monotonic_ns();
        }
    }

    /// Notes a frame that has arrived.
    pub(crate) fn received(&self, peer: Rank, header: &FrameHeader) {
        if let Some(ring) = &self.ring {
            let time_ns = monotonic_ns();
            let mut ring = lock(ring);
            let begin_ns = ring.times(peer).announced_at.min(time_ns);
            let (direction, header) = (Direction::Received, *header);
            ring.keep_frame(TraceEntry { begin_ns, time_ns, direction, peer, header });
        }
    }

    /// Returns the time, if jobs are recorded.
    pub(crate) fn clock(&self) -> Option<u64> {
        self.ring.as_ref().map(|_| monotonic_ns())
    }

    /// Notes a job that has run.
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

    /// Takes all frames since the last call.
    pub(crate) fn take_frames(&self) -> Vec<TraceEntry> {
        self.ring.as_ref().map_or_else(Vec::new, |ring| lock(ring).frames.drain(..).collect())
    }

    /// Takes all jobs since the last call.
    pub(crate) fn take_jobs(&self) -> Vec<JobEntry> {
        self.ring.as_ref().map_or_else(Vec::new, |ring| lock(ring).jobs.drain(..).collect())
    }

    /// Returns how many of both have fallen out since the start.
    pub(crate) fn dropped(&self) -> u64 {
        self.ring.as_ref().map_or(0, |ring| lock(ring).dropped)
    }
}

/// Reads the machine's monotonic clock in nanoseconds, the clock of Python's `time.monotonic_ns`.
fn monotonic_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
