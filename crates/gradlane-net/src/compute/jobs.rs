//! A job: one operation of the engine, ready to run on any thread, once.

use super::error::JobError;
use super::server_optimizer::JobState;
use super::state::ComputeState;
use crate::channel::shared::{panic_text, Shared};
use crate::memory::MemoryTable;
use crate::metrics::trace::{JobEntry, Trace};
use crate::metrics::JobKind;
use crate::options::ChannelOptions;
use crate::sys::lock;
use gradlane_engine::{Engine, Input, Job as Request, JobId, JobResult};
use gradlane_units::{SliceId, Step};
use std::collections::VecDeque;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::{fmt, io};

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

// The threads that run the jobs of a lane, so that the lane can go on.
//
// Jobs start in the order in which they are given. After [`JobQueue::stop`] no job runs any more and
// all threads are joined.

/// Jobs over no more bytes than this run where they appear: another thread would take longer to begin.
const INLINE_BYTES: usize = 16 << 10;

/// Jobs that wait.
#[derive(Debug, Default)]
struct QueuedJobs {
    jobs: VecDeque<Job>,
    stopped: bool,
}

/// The part that all threads share.
#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<QueuedJobs>,
    available: Condvar,
    finished: Mutex<Vec<FinishedJob>>,
}

/// The threads and their queue.
#[derive(Debug)]
pub(crate) struct JobQueue {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
    lane: usize,
}

impl JobQueue {
    /// Starts `threads` threads; with none, jobs run where they are given.
    pub(crate) fn start(shared: &Arc<Shared>, lane: usize, threads: usize) -> io::Result<JobQueue> {
        let queue = Arc::new(Queue::default());
        let mut jobs = JobQueue { queue, threads: Vec::new(), shared: Arc::clone(shared), lane };
        for _ in 0..threads {
            let (queue, shared) = (Arc::clone(&jobs.queue), Arc::clone(shared));
            let builder = std::thread::Builder::new().name("gradlane-work".to_owned());
            jobs.threads.push(builder.spawn(move || run_jobs(&queue, &shared, lane))?);
        }
        Ok(jobs)
    }

    /// Hands a job to the threads, or runs it when that is quicker.
    pub(crate) fn give(&self, job: Job) -> Option<FinishedJob> {
        let quick = job.bytes <= INLINE_BYTES && !job.encodes();
        if self.threads.is_empty() || quick {
            return Some(run_guarded(job, &self.shared.lanes[self.lane].trace));
        }
        lock(&self.queue.waiting).jobs.push_back(job);
        self.queue.available.notify_one();
        None
    }

    /// Whether finished jobs are waiting to be taken.
    pub(crate) fn has_finished(&self) -> bool {
        !lock(&self.queue.finished).is_empty()
    }

    /// Appends the finished jobs to `finished`.
    pub(crate) fn take_finished(&self, finished: &mut Vec<FinishedJob>) {
        finished.append(&mut lock(&self.queue.finished));
    }

    /// Drops jobs that have not begun and waits for the others.
    pub(crate) fn stop(&mut self) {
        {
            let mut waiting = lock(&self.queue.waiting);
            waiting.jobs.clear();
            waiting.stopped = true;
        }
        self.queue.available.notify_all();
        for thread in self.threads.drain(..) {
            // Jobs are guarded: the thread itself does not panic.
            let _ = thread.join();
        }
    }
}

impl Drop for JobQueue {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run_jobs(queue: &Queue, shared: &Shared, lane: usize) {
    let _count = shared.metrics.host.count_this_thread("work");
    let lane = &shared.lanes[lane];
    loop {
        let job = {
            let mut waiting = lock(&queue.waiting);
            loop {
                if let Some(job) = waiting.jobs.pop_front() {
                    break job;
                }
                if waiting.stopped {
                    return;
                }
                waiting = queue.available.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            }
        };
        let finished = run_guarded(job, &lane.trace);
        lock(&queue.finished).push(finished);
        lane.poller.wake();
    }
}

/// Runs a job; a panic in a kernel becomes an error of the session instead of the silent end of a thread.
fn run_guarded(job: Job, trace: &Trace) -> FinishedJob {
    let (id, step, slice, kind, bytes) = (job.id, job.step, job.slice, job.kind, job.bytes as u64);
    let begun = trace.clock();
    let finished = catch_unwind(AssertUnwindSafe(|| job.run())).unwrap_or_else(|panic| {
        let result = Err(JobError::Panic(panic_text(&*panic)));
        FinishedJob { id, slice, outcome: Outcome { result, state: None } }
    });
    if let (Some(begin_ns), Some(end_ns)) = (begun, trace.clock()) {
        trace.job_done(JobEntry { begin_ns, end_ns, kind, step, slice, bytes });
    }
    finished
}

// The jobs between the engine and the threads: started when the engine asks, reported when finished.

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
        engine: &mut Engine,
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

    fn report(&mut self, job: FinishedJob, engine: &mut Engine) -> Result<(), FailedJob> {
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
