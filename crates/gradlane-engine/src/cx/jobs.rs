//! Jobs, from when they are queued until the driver has done them.

use super::Cx;
use crate::api::{BufferRef, Job, JobId, Operation};
use crate::jobs::{Queued, Running, Task, Then, Written};
use crate::transmit::{OrderKey, PendingEncode};
use alloc::vec::Vec;
use gradlane_units::{Priority, SliceId, Step};
use gradlane_wire::PayloadForm;

/// What the driver's threads do next.
pub(crate) enum Next {
    /// This, which is handed out already.
    Job(Job),
    /// What a scheme makes of this.
    Task(Queued),
}

impl Cx {
    /// Queues a job at the priority of its slice's tensor.
    pub(crate) fn queue_job(&mut self, slice: SliceId, step: Step, task: impl Into<Task>) {
        let priority = self.priority(step, slice);
        self.queue_job_at(priority, slice, step, task);
    }

    /// Queues a job at a priority.
    pub(crate) fn queue_job_at(
        &mut self,
        priority: Priority,
        slice: SliceId,
        step: Step,
        task: impl Into<Task>,
    ) {
        let key = self.slice_key(step, priority, slice);
        self.jobs.push(key, slice, step, task.into());
    }

    /// Hands a job out to the driver.
    pub(crate) fn start(&mut self, operation: Operation, running: Running) -> Job {
        let (slice, step) = (running.slice, running.step);
        let tensor = self.plan.slice(slice).tensor;
        let priority = self.priorities.priority(step, tensor);
        Job { id: self.jobs.start(running), slice, tensor, step, priority, operation }
    }

    /// The most urgent job, unless the driver has enough.
    pub(crate) fn poll_job(&mut self) -> Option<Next> {
        if self.jobs.is_full() {
            return None;
        }
        let encode = self.encodes.first();
        if encode.is_some_and(|key| self.jobs.first().is_none_or(|other| key < other)) {
            let (key, pending) = self.encodes.pop()?;
            return Some(Next::Job(self.start_encode(key, pending)));
        }
        let queued = self.jobs.pop()?;
        let (slice, step) = (queued.slice, queued.step);
        Some(match queued.task {
            Task::Install(buffer) => Next::Job(self.start_install(slice, step, buffer)),
            Task::AddSquares => Next::Job(self.start_squares(slice, step)),
            Task::Ps(_) | Task::Ring(_) => Next::Task(queued),
        })
    }

    /// Takes the job that the driver has done.
    pub(crate) fn take_job(&mut self, id: JobId) -> Running {
        let running = self.jobs.finish(id);
        running.expect("a job is reported once, after it was handed out")
    }

    /// A contribution that is to be encoded takes its turn.
    fn start_encode(&mut self, key: OrderKey, pending: PendingEncode) -> Job {
        let PendingEncode { slice, step } = pending;
        let buffer = self.buffers.acquire(self.plan.bytes_as(slice, PayloadForm::Encoded));
        let input = self.gradient_region(slice);
        let operation = Operation::Encode { input, output: buffer.whole() };
        let then = Then::Wrote(buffer, Written::Contribution(key));
        self.start(operation, Running { slice, step, spent: Vec::new(), then })
    }

    /// Starts to copy or decode a result into the tensor's memory.
    fn start_install(&mut self, slice: SliceId, step: Step, buffer: BufferRef) -> Job {
        let to = self.open_region(slice).expect("memory that was opened stays open in its step");
        let from = buffer.whole();
        let form = self.worker.installed_form(slice);
        let operation = match form {
            PayloadForm::Raw => Operation::Copy { from, to },
            PayloadForm::Encoded => Operation::Decode { from, to },
        };
        self.keep_result(slice, buffer, form);
        let (spent, then) = (Vec::from([buffer]), Then::Installed);
        self.start(operation, Running { slice, step, spent, then })
    }

    /// Starts to add up the squares of an owned slice.
    fn start_squares(&mut self, slice: SliceId, step: Step) -> Job {
        let operation = Operation::AddSquares { input: self.gradient_region(slice) };
        let (spent, then) = (Vec::new(), Then::AddedSquares);
        self.start(operation, Running { slice, step, spent, then })
    }
}
