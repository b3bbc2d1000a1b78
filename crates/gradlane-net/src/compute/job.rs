//! A job: one operation of the engine, ready to run on any thread, once.

use super::error::JobError;
use super::residual::WorkerResidual;
use super::server_optimizer::SliceState;
use crate::metrics::JobKind;
use gradlane_engine::{Job as Request, JobId, JobResult};
use gradlane_units::{SliceId, Step};
use std::fmt;

/// The part of a slice's state that a job takes along and gives back. A late rank may encode its
/// contribution while it reduces the others': each of the two has a part of its own.
#[derive(Debug)]
pub(crate) enum JobState {
    Slice(SliceState),
    WorkerResidual(WorkerResidual),
    OwnerResidual(Vec<f32>),
}

/// The outcome of a job.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) result: Result<JobResult, JobError>,
    pub(crate) state: Option<JobState>,
}

/// A job that has run.
#[derive(Debug)]
pub(crate) struct FinishedJob {
    pub(crate) id: JobId,
    pub(crate) slice: SliceId,
    pub(crate) outcome: Outcome,
}

/// A job, ready to run. It owns its settings and state and borrows its memory until it has run.
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) step: Step,
    pub(crate) slice: SliceId,
    pub(crate) kind: JobKind,
    /// Bytes read and written: a measure of how long the job takes.
    pub(crate) bytes: usize,
    run: Box<dyn FnOnce() -> Outcome + Send>,
}

impl Job {
    /// Makes the job of an operation.
    pub(crate) fn new(
        request: &Request,
        kind: JobKind,
        bytes: usize,
        run: impl FnOnce() -> Outcome + Send + 'static,
    ) -> Job {
        let Request { id, step, slice, .. } = *request;
        Job { id, step, slice, kind, bytes, run: Box::new(run) }
    }

    /// Whether the job encodes: then it never runs on an I/O thread, however small it is.
    pub(crate) fn encodes(&self) -> bool {
        matches!(self.kind, JobKind::Encode | JobKind::Recode)
    }

    /// Runs the job.
    pub(crate) fn run(self) -> FinishedJob {
        FinishedJob { id: self.id, slice: self.slice, outcome: (self.run)() }
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {} in {} ({:?})", self.kind, self.slice, self.step, self.id)
    }
}
