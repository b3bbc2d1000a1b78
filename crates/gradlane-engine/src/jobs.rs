//! Jobs from when they are queued until the driver has done them, most urgent first. An operation is
//! chosen as late as possible: when the driver asks.

use crate::api::{BufferRef, JobId};
use crate::transmit::OrderKey;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step};
use gradlane_wire::PayloadForm;

/// The task of a job.
#[derive(Debug)]
pub(crate) enum Task {
    /// Copy or decode a result from scratch into the tensor's memory.
    Install(BufferRef),
    /// Add up the squares of an owned slice's mean.
    AddSquares,
    Ps(PsTask),
    Ring(RingTask),
}

/// A job on a slice that a server owns.
#[derive(Debug)]
pub(crate) enum PsTask {
    /// Reduce the contributions of a step.
    Reduce(Vec<(Rank, Contribution)>),
    /// Apply one rank's push alone.
    Apply(Push),
}

/// A job on a slice that goes round.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RingTask {
    /// Add this rank's contribution to a sum from the rank before.
    AddSum(Contribution),
    /// Enlarge the scales of the ranks before by this rank's.
    MaxScales(Contribution),
    /// Begin a sum of codes with the scales of all ranks.
    BeginCodes(Contribution),
}

impl From<PsTask> for Task {
    fn from(task: PsTask) -> Task {
        Task::Ps(task)
    }
}

impl From<RingTask> for Task {
    fn from(task: RingTask) -> Task {
        Task::Ring(task)
    }
}

/// A job that the driver has not asked for yet.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) slice: SliceId,
    pub(crate) step: Step,
    pub(crate) task: Task,
}

/// The consequence of a job.
#[derive(Debug)]
pub(crate) enum Then {
    /// The result is in the tensor's memory.
    Installed,
    /// The squares of an owned slice are added up.
    AddedSquares,
    /// The buffer is written.
    Wrote(BufferRef, Written),
}

/// The purpose of a written buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Written {
    /// This rank's contribution, encoded; the key is that of its turn.
    Contribution(OrderKey),
    Ps(PsWritten),
    Ring(RingWritten),
}

/// The contents of a buffer that a server's job has written.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PsWritten {
    /// The result, of this form; it may be in the tensor's memory, too.
    Result { form: PayloadForm, in_place: bool },
    /// The state after this push.
    State(Push),
}

/// The contents of a buffer that a job of the ring has written.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RingWritten {
    /// A sum of this form.
    Sum(PayloadForm),
    Scales,
}

/// A job that the driver has.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) slice: SliceId,
    pub(crate) step: Step,
    /// Buffers that are read for the last time.
    pub(crate) spent: Vec<BufferRef>,
    pub(crate) then: Then,
}

/// A job that has written a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    pub(crate) slice: SliceId,
    pub(crate) step: Step,
    /// As long as the bytes written.
    pub(crate) output: BufferRef,
}

#[derive(Debug)]
pub(crate) struct JobQueue {
    depth: usize,
    next_id: u64,
    queued: BTreeMap<OrderKey, Queued>,
    running: BTreeMap<JobId, Running>,
}

impl JobQueue {
    pub(crate) fn new(depth: usize) -> JobQueue {
        JobQueue { depth, next_id: 0, queued: BTreeMap::new(), running: BTreeMap::new() }
    }

    /// Numbers jobs on from a later number.
    pub(crate) fn fast_forward(&mut self, id: u64) {
        self.next_id = self.next_id.max(id);
    }

    pub(crate) fn push(&mut self, key: OrderKey, slice: SliceId, step: Step, task: Task) {
        self.queued.insert(key, Queued { slice, step, task });
    }

    /// Whether the driver has enough.
    pub(crate) fn is_full(&self) -> bool {
        self.running.len() >= self.depth
    }

    /// The key of the most urgent job.
    pub(crate) fn first(&self) -> Option<OrderKey> {
        self.queued.first_key_value().map(|(&key, _)| key)
    }

    /// Takes the most urgent job.
    pub(crate) fn pop(&mut self) -> Option<Queued> {
        self.queued.pop_first().map(|(_, job)| job)
    }

    pub(crate) fn start(&mut self, running: Running) -> JobId {
        let id = JobId(self.next_id);
        self.next_id += 1;
        self.running.insert(id, running);
        id
    }

    pub(crate) fn finish(&mut self, id: JobId) -> Option<Running> {
        self.running.remove(&id)
    }

    pub(crate) fn clear(&mut self) {
        self.queued.clear();
    }

    /// Number of jobs that the driver has not asked for yet.
    pub(crate) fn queued(&self) -> usize {
        self.queued.len()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queued.is_empty() && self.running.is_empty()
    }
}

// Contributions of ranks to a slice.

/// A whole contribution of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contribution {
    /// This rank's own gradient memory.
    Own,
    /// A whole slice in scratch.
    Buffer(BufferRef),
    /// A whole slice in scratch, encoded.
    Encoded(BufferRef),
    /// Nothing: counts as zeros.
    Absent,
}

impl Contribution {
    /// A whole slice that has arrived in this form.
    pub(crate) fn arrived(arriving: Arriving, form: PayloadForm) -> Contribution {
        let buffer = BufferRef { bytes: arriving.received_bytes, ..arriving.buffer };
        match form {
            PayloadForm::Raw => Contribution::Buffer(buffer),
            PayloadForm::Encoded => Contribution::Encoded(buffer),
        }
    }

    /// Where it lies in scratch.
    pub(crate) fn buffer(self) -> Option<BufferRef> {
        match self {
            Contribution::Buffer(buffer) | Contribution::Encoded(buffer) => Some(buffer),
            Contribution::Own | Contribution::Absent => None,
        }
    }

    /// Its form; none without bytes.
    pub(crate) fn form(self) -> Option<PayloadForm> {
        match self {
            Contribution::Own | Contribution::Buffer(_) => Some(PayloadForm::Raw),
            Contribution::Encoded(_) => Some(PayloadForm::Encoded),
            Contribution::Absent => None,
        }
    }
}

/// A slice that is arriving from a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arriving {
    pub(crate) buffer: BufferRef,
    pub(crate) received_bytes: u64,
}

/// A whole push that is applied alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Push {
    pub(crate) rank: Rank,
    pub(crate) step: Step,
    pub(crate) contribution: Contribution,
    pub(crate) priority: Priority,
}
