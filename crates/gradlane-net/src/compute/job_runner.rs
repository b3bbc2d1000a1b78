//! The jobs between the engine and the threads: started when the engine asks, reported when finished.

use super::error::JobError;
use super::job::FinishedJob;
use super::job_queue::JobQueue;
use super::state::ComputeState;
use crate::channel::shared::Shared;
use crate::memory::MemoryTable;
use crate::options::ChannelOptions;
use gradlane_engine::{Input, JournaledEngine};
use gradlane_units::SliceId;
use std::io;
use std::sync::Arc;

/// A job that failed, with the name of its tensor.
#[derive(Debug, thiserror::Error)]
#[error("job on tensor {tensor:?}, {slice}: {error}")]
pub(crate) struct FailedJob {
    tensor: String,
    slice: SliceId,
    error: JobError,
}

/// Jobs in flight and the state that they share.
#[derive(Debug)]
pub(crate) struct JobRunner {
    pub(crate) state: ComputeState,
    queue: JobQueue,
    finished: Vec<FinishedJob>,
    in_flight: u64,
}

impl JobRunner {
    /// Starts the threads of a lane.
    ///
    /// # Errors
    /// When a thread cannot start, or the plan has a codec that its tensor cannot have.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        lane: usize,
        options: &ChannelOptions,
    ) -> io::Result<JobRunner> {
        let plan = &shared.lanes[lane].plan;
        let work_threads = options.work_threads.div_ceil(shared.lanes.len());
        Ok(JobRunner {
            state: ComputeState::new(plan, options).map_err(io::Error::other)?,
            queue: JobQueue::start(shared, lane, work_threads)?,
            finished: Vec::new(),
            in_flight: 0,
        })
    }

    /// Whether finished jobs wait to be reported.
    pub(crate) fn has_finished(&self) -> bool {
        self.queue.has_finished()
    }

    /// Jobs handed out and not yet reported.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Reports finished jobs to the engine and starts those that it asks for. Returns whether there were
    /// any.
    pub(crate) fn advance(
        &mut self,
        engine: &mut JournaledEngine,
        memory: &mut MemoryTable,
    ) -> Result<bool, FailedJob> {
        let mut progressed = false;
        let mut finished = std::mem::take(&mut self.finished);
        self.queue.take_finished(&mut finished);
        for job in finished.drain(..) {
            progressed = true;
            self.report(job, engine)?;
        }
        self.finished = finished;
        while let Some(request) = engine.poll_job() {
            progressed = true;
            self.in_flight += 1;
            let job = self.state.prepare(&request, memory);
            let job = job.map_err(|error| self.failed(request.slice, error))?;
            if let Some(job) = self.queue.give(job) {
                self.report(job, engine)?;
            }
        }
        Ok(progressed)
    }

    fn report(&mut self, job: FinishedJob, engine: &mut JournaledEngine) -> Result<(), FailedJob> {
        self.in_flight = self.in_flight.saturating_sub(1);
        if let Some(state) = job.outcome.state {
            self.state.store_state(job.slice, state);
        }
        let result = job.outcome.result.map_err(|error| self.failed(job.slice, error))?;
        engine.tell(Input::JobDone(job.id, result));
        Ok(())
    }

    fn failed(&self, slice: SliceId, error: JobError) -> FailedJob {
        let plan = &self.state.plan;
        let tensor = plan.tensor(plan.slice(slice).tensor).spec.name.clone();
        FailedJob { tensor, slice, error }
    }

    /// Waits for running jobs and starts no others: no job touches memory afterwards.
    pub(crate) fn stop(&mut self) {
        self.queue.stop();
    }
}
