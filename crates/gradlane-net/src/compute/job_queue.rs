//! The threads that execute works with the kernels, so that I/O threads can go on.
//!
//! Jobs start in the order in which they are given. After [`JobQueue::stop`] no job runs any more
//! and no thread of this file is left.

use crate::channel::shared::Shared;
use crate::compute::kernels::{FinishedJob, Job};
use crate::metrics::trace::{JobEntry, Trace};
use crate::sys::lock;
use std::collections::VecDeque;
use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// JobRunner over no more bytes than this are done at once where they appear: handing them to another
/// thread would take longer.
const INLINE_BYTES: usize = 16 << 10;

#[derive(Debug, Default)]
struct Queue {
    jobs: Mutex<(VecDeque<Job>, bool)>,
    available: Condvar,
    done: Mutex<Vec<FinishedJob>>,
}

/// The threads and their queue.
#[derive(Debug)]
pub(crate) struct JobQueue {
    queue: Arc<Queue>,
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
}

impl JobQueue {
    /// Starts `threads` threads; with none, jobs run where they are given.
    pub(crate) fn start(shared: &Arc<Shared>, threads: usize) -> io::Result<JobQueue> {
        let queue = Arc::new(Queue::default());
        let mut jobs = JobQueue { queue, threads: Vec::new(), shared: Arc::clone(shared) };
        for _ in 0..threads {
            let (queue, shared) = (Arc::clone(&jobs.queue), Arc::clone(shared));
            let builder = std::thread::Builder::new().name("gradlane-work".to_owned());
            jobs.threads.push(builder.spawn(move || run_jobs(&queue, &shared))?);
        }
        Ok(jobs)
    }

    /// Hands a job to the threads, or runs it when that is quicker.
    pub(crate) fn give(&self, job: Job) -> Option<FinishedJob> {
        let quick = job.bytes() <= INLINE_BYTES && !job.encodes();
        if self.threads.is_empty() || quick {
            return Some(run_guarded(job, &self.shared.trace));
        }
        lock(&self.queue.jobs).0.push_back(job);
        self.queue.available.notify_one();
        None
    }

    /// Whether jobs are done that nobody has taken.
    pub(crate) fn has_done(&self) -> bool {
        !lock(&self.queue.done).is_empty()
    }

    /// Moves jobs that are done behind those in `done`.
    pub(crate) fn take_done(&self, done: &mut Vec<FinishedJob>) {
        done.append(&mut lock(&self.queue.done));
    }

    /// Drops jobs that have not begun and waits for the others.
    pub(crate) fn stop(&mut self) {
        {
            let mut jobs = lock(&self.queue.jobs);
            jobs.0.clear();
            jobs.1 = true;
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

fn run_jobs(queue: &Queue, shared: &Shared) {
    let _count = shared.metrics.count_this_thread("work");
    loop {
        let job = {
            let mut jobs = lock(&queue.jobs);
            loop {
                if let Some(job) = jobs.0.pop_front() {
                    break job;
                }
                if jobs.1 {
                    return;
                }
                jobs = queue.available.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            }
        };
        let done = run_guarded(job, &shared.trace);
        lock(&queue.done).push(done);
        shared.wake(0);
    }
}

/// A panic in a kernel is an error of the session, not the silent end of a thread.
fn run_guarded(job: Job, trace: &Trace) -> FinishedJob {
    let (id, step, slice) = (job.id, job.step, job.slice);
    let begun = trace.clock().map(|begin_ns| (begin_ns, job.kind(), job.bytes() as u64));
    let done = catch_unwind(AssertUnwindSafe(|| job.run())).unwrap_or_else(|panic| {
        let text = crate::channel::shared::panic_text(&*panic);
        FinishedJob {
            id,
            slice,
            state_back: None,
            result: Err(format!("a kernel panicked: {text}")),
        }
    });
    if let (Some((begin_ns, kind, bytes)), Some(end_ns)) = (begun, trace.clock()) {
        trace.job_done(JobEntry { begin_ns, end_ns, kind, step, slice, bytes });
    }
    done
}
