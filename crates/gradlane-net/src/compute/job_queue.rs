//! The threads that run the jobs of a lane, so that the lane can go on.
//!
//! Jobs start in the order in which they are given. After [`JobQueue::stop`] no job runs any more and
//! all threads are joined.

use super::error::JobError;
use super::job::{FinishedJob, Job, Outcome};
use crate::channel::shared::{panic_text, Shared};
use crate::metrics::trace::{JobEntry, Trace};
use crate::sys::lock;
use std::collections::VecDeque;
use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

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
