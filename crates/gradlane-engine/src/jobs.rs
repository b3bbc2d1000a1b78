//! Jobs waiting for the driver's threads, most urgent first. What exactly is to be done is decided
//! as late as possible: when the driver asks.

use crate::async_owner::Push;
use crate::encoding::PendingEncode;
use crate::io::{BufferRef, JobId};
use crate::scheduler::OrderKey;
use crate::server::Contribution;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, Step};

/// A job that nobody has asked for yet.
#[derive(Debug)]
pub(crate) enum Pending {
    /// Reduce the contributions of an owned slice.
    Reduce { slice: SliceId, step: Step, parts: Vec<(Rank, Contribution)> },
    /// Add this rank's contribution to what came round the ring.
    AddRound { slice: SliceId, step: Step, received: Contribution },
    /// Enlarge the scales that came round the ring by this rank's.
    ScaleRound { slice: SliceId, step: Step, received: Contribution },
    /// Begin a sum of codes with the scales of all ranks.
    BeginRound { slice: SliceId, step: Step, received: Contribution },
    /// Apply one rank's push to an owned slice (synchrony `Async`).
    Apply { slice: SliceId, push: Push },
    /// Copy a result from scratch into the tensor's memory.
    Install { slice: SliceId, step: Step, buffer: BufferRef },
}

/// A job that the driver has.
#[derive(Debug)]
pub(crate) enum Running {
    Reduce {
        slice: SliceId,
        step: Step,
        /// Buffer with the result.
        output: BufferRef,
        /// Contributions that are done with.
        spent: Vec<BufferRef>,
        /// Whether the result went into the tensor's memory in the same pass.
        in_place: bool,
        /// Whether the result is encoded.
        encoded: bool,
    },
    Encode {
        waiting: PendingEncode,
        key: OrderKey,
        output: BufferRef,
    },
    AddRound {
        slice: SliceId,
        step: Step,
        /// Buffer with the sum.
        output: BufferRef,
        /// What it was made from, where that is another buffer.
        spent: Option<BufferRef>,
        /// Whether the sum is encoded.
        encoded: bool,
    },
    ScaleRound {
        slice: SliceId,
        step: Step,
        /// Buffer with the scales.
        output: BufferRef,
    },
    Apply {
        slice: SliceId,
        push: Push,
        /// Buffer with the new state.
        output: BufferRef,
    },
    Install {
        slice: SliceId,
        buffer: BufferRef,
    },
}

#[derive(Debug)]
pub(crate) struct JobQueue {
    depth: usize,
    next_id: u64,
    pending: BTreeMap<OrderKey, Pending>,
    running: BTreeMap<JobId, Running>,
}

impl JobQueue {
    pub(crate) fn new(depth: usize) -> JobQueue {
        JobQueue { depth, next_id: 0, pending: BTreeMap::new(), running: BTreeMap::new() }
    }

    /// Numbers jobs on from a later number.
    pub(crate) fn skip(&mut self, id: u64) {
        self.next_id = self.next_id.max(id);
    }

    pub(crate) fn push(&mut self, key: OrderKey, job: Pending) {
        self.pending.insert(key, job);
    }

    /// Whether the driver has enough.
    pub(crate) fn is_full(&self) -> bool {
        self.running.len() >= self.depth
    }

    /// The key of the most urgent job.
    pub(crate) fn first(&self) -> Option<OrderKey> {
        self.pending.first_key_value().map(|(&key, _)| key)
    }

    /// The most urgent job.
    pub(crate) fn pop(&mut self) -> Option<Pending> {
        self.pending.pop_first().map(|(_, job)| job)
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
        self.pending.clear();
    }

    /// Works that nobody has asked for yet.
    pub(crate) fn waiting(&self) -> usize {
        self.pending.len()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.running.is_empty()
    }
}
