//! How results are made and delivered: contributions are collected, reduced once in rank order, given
//! to this rank's own worker and sent to everyone else by the strategy's pull rule.

use crate::engine::Engine;
use crate::io::{BufferRef, Event, Job, JobId, Memory, Operation, Region};
use crate::jobs::{Pending, Running};
use crate::rank_set::RankSet;
use crate::scheduler::{Body, Message};
use crate::server::{Contribution, Owed};
use crate::strategy::{PullRule, Release, Synchrony};
use crate::worker::Phase;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameKind, PayloadForm};

impl Engine {
    /// A rank's contribution to an owned slice is whole.
    pub(crate) fn add_part(
        &mut self,
        slice: SliceId,
        rank: Rank,
        part: Contribution,
        priority: Priority,
    ) {
        let owned = self.server.owned.get(&slice).expect("only the owner collects a slice");
        let step = owned.step;
        if self.is_async(step) {
            self.add_push(slice, rank, part, priority);
            return;
        }
        let drops_stragglers = self.drops_stragglers(step);
        let contributors = self.contributors(step) as usize;
        let Some(owned) = self.server.owned.get_mut(&slice) else {
            return;
        };
        let form = match part {
            Contribution::Own | Contribution::Buffer(_) => Some(PayloadForm::Raw),
            Contribution::Encoded(_) => Some(PayloadForm::Encoded),
            Contribution::Absent => None,
        };
        let mixed = form.is_some_and(|form| *owned.form.get_or_insert(form) != form);
        if mixed {
            let name = &self.plan.tensor(self.plan.slice(slice).tensor).spec.name;
            let reason = alloc::format!(
                "some ranks sent {name:?} encoded in {step} and others as it is: all ranks have to \
                 do the same"
            );
            self.abort(&reason);
            return;
        }
        owned.contributions.insert(rank, part);
        owned.priority = priority;
        if drops_stragglers {
            return self.reduce_if_decided(slice);
        }
        if owned.contributions.whole() < contributors {
            return;
        }
        owned.reducing = true;
        let parts = owned.contributions.take_whole();
        self.reduce(slice, step, parts, priority);
    }

    /// All contributions to a slice that count are here.
    pub(crate) fn reduce(
        &mut self,
        slice: SliceId,
        step: Step,
        parts: Vec<(Rank, Contribution)>,
        priority: Priority,
    ) {
        if parts.iter().all(|&(_, part)| part == Contribution::Absent) {
            self.deliver(slice, step, None, PayloadForm::Raw, false);
        } else if self.plan.world_size == 1 && !self.needs_result(step) {
            // The mean over one rank is its gradient, which is in place already.
            self.deliver(slice, step, None, PayloadForm::Raw, true);
        } else {
            let key = self.slice_key(step, priority, slice);
            self.jobs.push(key, Pending::Reduce { slice, step, parts });
        }
    }

    /// The next job for the driver's threads, most urgent first.
    pub fn poll_job(&mut self) -> Option<Job> {
        if self.lifecycle.has_ended() || self.jobs.is_full() {
            return None;
        }
        let encode = self.encodes.first();
        if encode.is_some_and(|key| self.jobs.first().is_none_or(|other| key < other)) {
            let (key, waiting) = self.encodes.pop()?;
            return Some(self.start_encode(key, waiting));
        }
        match self.jobs.pop()? {
            Pending::Reduce { slice, step, parts } => Some(self.start_reduce(slice, step, &parts)),
            Pending::AddRound { slice, step, received } => {
                Some(self.start_round(slice, step, received))
            }
            Pending::ScaleRound { slice, step, received } => {
                Some(self.start_scales(slice, step, received))
            }
            Pending::BeginRound { slice, step, received } => {
                Some(self.start_codes(slice, step, received))
            }
            Pending::Apply { slice, push } => Some(self.start_apply(slice, push)),
            Pending::Install { slice, step, buffer } => {
                Some(self.start_install(slice, step, buffer))
            }
        }
    }

    fn start_reduce(&mut self, slice: SliceId, step: Step, parts: &[(Rank, Contribution)]) -> Job {
        if parts.iter().any(|&(_, part)| matches!(part, Contribution::Encoded(_))) {
            return self.start_recode(slice, step, parts);
        }
        let bytes = self.plan.slice_bytes(slice);
        let mut buffers = parts.iter().filter_map(|&(_, part)| match part {
            Contribution::Buffer(buffer) => Some(buffer),
            _ => None,
        });
        let reused = buffers.next();
        let spent: Vec<BufferRef> = buffers.collect();
        let output = reused.unwrap_or_else(|| self.buffers.acquire(bytes));
        let inputs = parts.iter().filter_map(|&(_, part)| match part {
            Contribution::Own => Some(self.gradient_region(slice)),
            Contribution::Buffer(buffer) | Contribution::Encoded(buffer) => Some(buffer.whole()),
            Contribution::Absent => None,
        });
        let inputs: Vec<Region> = inputs.collect();
        let absent = inputs.len() < parts.len();
        let divisor = parts.len() as u32;
        let tensor = self.plan.slice(slice).tensor;
        let apply = self.updates_on_server(step);
        let is_current = step == self.worker.step;
        let copy_to = self.open_region(slice).filter(|_| is_current && !apply);
        let in_place = copy_to.is_some();
        let output_region = output.whole();
        let operation = if apply {
            let parameters = self.region(Memory::Parameter(tensor), slice);
            Operation::ReduceApply { inputs, absent, divisor, parameters, output: output_region }
        } else {
            Operation::Reduce { inputs, absent, divisor, output: output_region, copy_to }
        };
        let running = Running::Reduce { slice, step, output, spent, in_place, encoded: false };
        self.hand_out(slice, step, operation, running)
    }

    /// Encoded contributions are decoded and added up; the mean is encoded, or applied.
    fn start_recode(&mut self, slice: SliceId, step: Step, parts: &[(Rank, Contribution)]) -> Job {
        let spent: Vec<BufferRef> = parts
            .iter()
            .filter_map(|&(_, part)| match part {
                Contribution::Encoded(buffer) => Some(buffer),
                _ => None,
            })
            .collect();
        let inputs: Vec<Region> = spent.iter().map(|buffer| buffer.whole()).collect();
        let absent = inputs.len() < parts.len();
        let divisor = parts.len() as u32;
        let (operation, output, in_place, encoded);
        if self.updates_on_server(step) {
            let tensor = self.plan.slice(slice).tensor;
            let parameters = self.region(Memory::Parameter(tensor), slice);
            output = self.buffers.acquire(self.plan.slice_bytes(slice));
            (in_place, encoded) = (false, false);
            let output = output.whole();
            operation =
                Operation::DecodeReduceApply { inputs, absent, divisor, parameters, output };
        } else {
            let is_current = step == self.worker.step;
            let copy_to = self.open_region(slice).filter(|_| is_current);
            output = self.buffers.acquire(self.plan.bytes_as(slice, PayloadForm::Encoded));
            (in_place, encoded) = (copy_to.is_some(), true);
            let output = output.whole();
            operation = Operation::DecodeReduceEncode { inputs, absent, divisor, output, copy_to };
        }
        let running = Running::Reduce { slice, step, output, spent, in_place, encoded };
        self.hand_out(slice, step, operation, running)
    }

    fn start_install(&mut self, slice: SliceId, step: Step, buffer: BufferRef) -> Job {
        let to = self.open_region(slice).expect("memory that was opened stays open in its step");
        let from = buffer.whole();
        let operation = match self.worker.slice(slice).form {
            PayloadForm::Raw => Operation::Copy { from, to },
            PayloadForm::Encoded => Operation::Decode { from, to },
        };
        self.hand_out(slice, step, operation, Running::Install { slice, buffer })
    }

    /// Whether one rank's contribution alone is not the result already.
    fn needs_result(&self, step: Step) -> bool {
        self.updates_on_server(step) || self.plan.strategy.synchrony == Synchrony::Async
    }

    pub(crate) fn hand_out(
        &mut self,
        slice: SliceId,
        step: Step,
        operation: Operation,
        running: Running,
    ) -> Job {
        let tensor = self.plan.slice(slice).tensor;
        let priority = self.priorities.priority(step, tensor);
        Job { id: self.jobs.start(running), slice, tensor, step, priority, operation }
    }

    /// The driver has done a job.
    ///
    /// # Panics
    /// When the job was never handed out or is reported twice.
    pub fn handle_job_done(&mut self, id: JobId) {
        self.finish_work(id, None);
    }

    /// The driver has done a job whose output is an encoding of so many bytes. Where all
    /// are equally long, [`Engine::handle_job_done`] says the same.
    ///
    /// # Panics
    /// As [`Engine::handle_job_done`]; when there is no room for so many bytes.
    pub fn handle_encoded(&mut self, id: JobId, bytes: u64) {
        self.finish_work(id, Some(bytes));
    }

    fn finish_work(&mut self, id: JobId, bytes: Option<u64>) {
        let running =
            self.jobs.finish(id).expect("a job is reported once, after it was handed out");
        if self.lifecycle.has_ended() {
            return;
        }
        self.lifecycle.progressed();
        let fitted = |output: BufferRef| {
            let bytes = bytes.unwrap_or(output.bytes);
            assert!(bytes <= output.bytes, "{bytes} encoded bytes in {}", output.bytes);
            BufferRef { bytes, ..output }
        };
        match running {
            Running::Encode { waiting, key, output } => {
                self.encoded(waiting, key, fitted(output));
            }
            Running::Reduce { slice, step, output, spent, in_place, encoded } => {
                for buffer in spent {
                    self.buffers.release(buffer, &mut self.events);
                }
                let form = if encoded { PayloadForm::Encoded } else { PayloadForm::Raw };
                self.deliver(slice, step, Some(fitted(output)), form, in_place);
            }
            Running::AddRound { slice, step, output, spent, encoded } => {
                if let Some(buffer) = spent {
                    self.buffers.release(buffer, &mut self.events);
                }
                let form = if encoded { PayloadForm::Encoded } else { PayloadForm::Raw };
                self.ring_sum_done(slice, step, fitted(output), form);
            }
            Running::ScaleRound { slice, step, output } => {
                self.send_scales(slice, step, Some(output));
            }
            Running::Apply { slice, push, output } => self.applied(slice, push, output),
            Running::Install { slice, buffer } => {
                self.buffers.release(buffer, &mut self.events);
                self.slice_done(slice, true);
            }
        }
        self.say_goodbye_when_done();
    }

    /// The result of an owned slice is there: give it to this rank's worker and to the others.
    /// Without a buffer it is either in place (`in_place`) or absent everywhere.
    fn deliver(
        &mut self,
        slice: SliceId,
        step: Step,
        buffer: Option<BufferRef>,
        form: PayloadForm,
        in_place: bool,
    ) {
        let owned = self.server.owned.get_mut(&slice).expect("only the owner delivers a slice");
        let priority = owned.priority;
        let early_pulls = core::mem::take(&mut owned.early_pulls);
        owned.advance();
        if step.0 == 0 {
            self.keep_initial(slice, buffer);
        }
        self.offer(slice, step, buffer, form, priority);
        for rank in early_pulls {
            self.answer_pull(slice, step, rank);
        }
        match buffer {
            _ if self.is_dedicated_server() => self.served(step),
            _ if self.keep_ahead(slice, step, buffer, form) => {}
            None if !in_place => self.nothing_to_install(slice, false),
            Some(buffer) if !in_place => {
                self.buffers.retain(buffer);
                let state = self.worker.slice_mut(slice);
                state.phase = Phase::Buffered(buffer);
                state.form = form;
                self.install_if_open(slice);
            }
            _ => self.slice_done(slice, in_place),
        }
        if let Some(buffer) = buffer {
            self.buffers.release(buffer, &mut self.events);
        }
        if self.plan.strategy.pull == PullRule::AfterNotice && !self.is_dedicated_server() {
            self.announced(self.plan.slice(slice).tensor);
        }
    }

    /// Keeps a result for the ranks that are owed it and sends it, or a notice of it.
    fn offer(
        &mut self,
        slice: SliceId,
        step: Step,
        buffer: Option<BufferRef>,
        form: PayloadForm,
        priority: Priority,
    ) {
        let others = self.plan.workers_but(self.rank());
        if others.is_empty() {
            return;
        }
        if let Some(buffer) = buffer {
            self.buffers.retain(buffer);
        }
        let pull = self.plan.strategy.pull;
        // Step 0 comes unasked whatever the rule: there is no iteration to start yet.
        let unasked = pull == PullRule::Broadcast || step.0 == 0;
        let to_pull = if unasked { RankSet::empty(self.plan.world_size) } else { others.clone() };
        let to_send = others.clone();
        self.server.owed.insert((slice, step), Owed { buffer, form, to_pull, to_send, priority });
        if unasked {
            let message = self.result_message(slice, step, (buffer, form), priority);
            let key = self.slice_key(step, priority, slice);
            self.scheduler.push_shared(others, key, message);
        } else if pull == PullRule::AfterNotice {
            let header = self.slice_header(FrameKind::Notify, step, slice, priority);
            let key = self.keys.control();
            self.scheduler.push_shared(others, key, Message { header, body: Body::Empty });
        }
    }

    pub(crate) fn result_message(
        &self,
        slice: SliceId,
        step: Step,
        (buffer, form): (Option<BufferRef>, PayloadForm),
        priority: Priority,
    ) -> Message {
        let mut header = self.slice_header(FrameKind::Broadcast, step, slice, priority);
        header.form = form;
        let body = match buffer {
            Some(buffer) => Body::Region(buffer.whole()),
            None => {
                header.flags = FrameFlags::ABSENT;
                Body::Empty
            }
        };
        Message { header, body }
    }

    /// A rank that was owed a result asks for it.
    pub(crate) fn answer_pull(&mut self, slice: SliceId, step: Step, rank: Rank) {
        let Some(owed) = self.server.owed.get_mut(&(slice, step)) else {
            return;
        };
        owed.to_pull.remove(rank);
        let (buffer, form, priority) = (owed.buffer, owed.form, owed.priority);
        let message = self.result_message(slice, step, (buffer, form), priority);
        let key = self.slice_key(step, priority, slice);
        self.scheduler.push(rank, key, message);
    }

    /// The last frame of a result to one rank is with the kernel.
    pub(crate) fn result_sent(&mut self, slice: SliceId, step: Step, rank: Rank) {
        if self.is_async(step) {
            self.answer_sent(slice, rank);
            return;
        }
        let Some(owed) = self.server.owed.get_mut(&(slice, step)) else {
            return;
        };
        owed.to_send.remove(rank);
        if owed.to_send.is_empty() {
            if let Some(Owed { buffer: Some(buffer), .. }) = self.server.owed.remove(&(slice, step))
            {
                self.buffers.release(buffer, &mut self.events);
            }
        }
    }

    /// The owner of one slice of the tensor has announced it.
    pub(crate) fn announced(&mut self, tensor: TensorId) {
        if self.worker.step.0 == 0 {
            return;
        }
        let slices = self.plan.tensor(tensor).slices.len() as u32;
        let state = self.worker.tensor_mut(tensor);
        state.announced += 1;
        if state.announced == slices {
            self.pull(tensor);
        }
    }

    /// A slice's result is here and has no bytes. Where the step may go on without this rank, its own
    /// push may still be under way, and reads memory that is the engine's until then.
    pub(crate) fn nothing_to_install(&mut self, slice: SliceId, has_value: bool) {
        if self.drops_stragglers(self.worker.step) {
            self.worker.slice_mut(slice).phase = Phase::Empty { has_value };
            return self.install_if_open(slice);
        }
        self.slice_done(slice, has_value);
    }

    /// A slice's result is in place, or there is none.
    pub(crate) fn slice_done(&mut self, slice: SliceId, has_value: bool) {
        let tensor = self.plan.slice(slice).tensor;
        self.worker.slice_mut(slice).phase = Phase::Done;
        self.worker.tensor_mut(tensor).has_value |= has_value;
        self.part_done(tensor);
    }

    /// A tensor waits for one thing less.
    pub(crate) fn part_done(&mut self, tensor: TensorId) {
        let state = self.worker.tensor_mut(tensor);
        state.pending -= 1;
        if state.pending > 0 {
            return;
        }
        self.worker.incomplete -= 1;
        match self.plan.strategy.release {
            Release::Step if self.worker.incomplete > 0 => self.worker.unreleased.push(tensor),
            _ => {
                for earlier in core::mem::take(&mut self.worker.unreleased) {
                    self.release_tensor(earlier);
                }
                self.release_tensor(tensor);
            }
        }
        if self.worker.incomplete == 0 && self.worker.begun {
            self.events.push_back(Event::StepComplete { step: self.worker.step });
        }
    }

    fn release_tensor(&mut self, tensor: TensorId) {
        let absent = !self.worker.tensor(tensor).has_value;
        self.events.push_back(Event::TensorReady { tensor, step: self.worker.step, absent });
    }
}
