//! The context that components work in: the plan, and what they may do outside their own state. Its fields are private:
//! a component asks (`worker`, `priority`) or does (`send`, `queue_job`, `slice_done`), and reaches no other one.

mod squares;

use crate::api::{
    violation, BufferRef, EngineOptions, Event, Job, JobId, Memory, Operation, QueueStats, Region,
    Transmit, Validated,
};
use crate::buffers::BufferTable;
use crate::gradient_norm::Squares;
use crate::jobs::{JobQueue, Queued, Running, Task, Then, Written};
use crate::kept_results::{KeptResult, KeptResults, KeptSlice};
use crate::plan::Plan;
use crate::rank_set::RankSet;
use crate::transmit::{
    Body, EncodeQueue, Message, OrderKey, OrderKeys, PendingEncode, PriorityTable, Scheduler,
};
use crate::worker::{Arrived, EarlyResult, Install, Submission, Worker};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm, MAX_FRAME_BYTES};

#[derive(Debug)]
pub(crate) struct Cx {
    plan: Arc<Plan>,
    rank: Rank,
    generation: u32,
    priorities: PriorityTable,
    keys: OrderKeys,
    tx: Scheduler,
    encodes: EncodeQueue,
    jobs: JobQueue,
    buffers: BufferTable,
    events: VecDeque<Event>,
    worker: Worker,
    squares: Squares,
    /// The last results, where training goes on without lost ranks.
    kept: Option<KeptResults>,
    /// Slices of the current step that have a result since ranks were lost, and the rank that it comes from. They are
    /// not contributed to again.
    sources: BTreeMap<SliceId, Rank>,
    /// Why a component cannot go on: the session ends.
    abort: Option<String>,
}

impl Cx {
    pub(crate) fn new(options: &EngineOptions, plan: Arc<Plan>) -> Cx {
        let rank = options.rank;
        let frame_bytes = options.frame_bytes.clamp(1, MAX_FRAME_BYTES);
        let keeps = options.going_on.is_some();
        Cx {
            rank,
            generation: options.generation,
            priorities: PriorityTable::new(plan.tensors.len()),
            keys: OrderKeys::new(plan.strategy.order),
            tx: Scheduler::new(rank, plan.world_size, frame_bytes, options.credit_bytes),
            encodes: EncodeQueue::new(rank, options.encoded_ahead),
            jobs: JobQueue::new(options.job_depth.max(1)),
            buffers: BufferTable::default(),
            events: VecDeque::new(),
            worker: Worker::new(&plan),
            squares: Squares::default(),
            kept: keeps.then(|| KeptResults::new(&plan)),
            sources: BTreeMap::new(),
            abort: None,
            plan,
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    /// This rank's step, submissions and results, to be read.
    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }

    /// This rank's current step.
    pub(crate) fn step(&self) -> Step {
        self.worker.step()
    }

    pub(crate) fn priorities(&self) -> &PriorityTable {
        &self.priorities
    }

    /// Whether this rank trains nothing.
    pub(crate) fn is_dedicated_server(&self) -> bool {
        !self.plan.trains(self.rank)
    }

    /// All other ranks.
    pub(crate) fn others(&self) -> RankSet {
        RankSet::all_but(self.plan.world_size, self.rank).without(&self.plan.lost)
    }

    /// Tells the driver something.
    pub(crate) fn tell(&mut self, event: Event) {
        self.events.push_back(event);
    }

    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        if let Event::BufferFree(buffer) = event {
            self.buffers.recycle(buffer);
        }
        Some(event)
    }

    /// Asks for the end of the session; the first reason counts.
    pub(crate) fn abort(&mut self, reason: String) {
        self.abort.get_or_insert(reason);
    }

    pub(crate) fn take_abort(&mut self) -> Option<String> {
        self.abort.take()
    }

    /// "Push of slice 7 of "fc.weight" in step 3".
    pub(crate) fn describe(&self, header: &FrameHeader) -> String {
        let name = self.plan.tensors.get(header.tensor.index()).map(|it| it.spec.name.as_str());
        let SliceId(slice) = header.slice;
        let name = name.unwrap_or("an unknown tensor");
        format!("{:?} of slice {slice} of {name:?} in {}", header.kind, header.step)
    }
}

/// Priorities.
impl Cx {
    /// Priority of a slice's tensor in a step.
    pub(crate) fn priority(&self, step: Step, slice: SliceId) -> Priority {
        self.priorities.priority(step, self.plan.slice(slice).tensor)
    }

    /// A step begins: the priorities that are in force from it on take effect.
    pub(crate) fn enter_priorities(&mut self, step: Step) {
        if let Some(version) = self.priorities.enter(step) {
            self.events.push_back(Event::PlanSwitched { version, step });
        }
    }

    /// Priorities that are in force from a step on; their version.
    pub(crate) fn add_priorities(&mut self, from: Step, priorities: Vec<Priority>) -> u32 {
        self.priorities.add(from, priorities)
    }

    pub(crate) fn forget_priorities_after(&mut self, version: u32) {
        self.priorities.forget_after(version);
    }

    /// Goes on as if step 0 were complete, with these priorities.
    pub(crate) fn skip_initial(&mut self, priorities: Vec<Priority>) {
        self.priorities = PriorityTable::with(priorities);
        self.worker.skip_initial();
    }

    #[cfg(test)]
    pub(crate) fn priorities_mut(&mut self) -> &mut PriorityTable {
        &mut self.priorities
    }
}

/// Ranks are lost.
impl Cx {
    /// Which rank a frame about a slice's result comes from: its owner, or one that has the result since
    /// ranks were lost.
    pub(crate) fn sender_of(&self, header: &FrameHeader) -> Rank {
        let source = self.sources.get(&header.slice).filter(|_| header.step == self.step());
        match source {
            Some(&rank) if header.kind == FrameKind::Broadcast => rank,
            _ => self.plan.slice(header.slice).owner,
        }
    }

    /// Whether a slice has a result since ranks were lost.
    pub(crate) fn has_source(&self, slice: SliceId) -> bool {
        self.sources.contains_key(&slice)
    }

    /// Drops what is queued, and hands out control messages alone until [`Cx::resume`].
    pub(crate) fn suspend(&mut self) {
        self.tx.clear_slices();
        self.tx.hold_slices(true);
        self.encodes.clear();
    }

    pub(crate) fn resume(&mut self) {
        self.tx.hold_slices(false);
    }

    /// Nothing is queued for a peer any more, and nothing that was handed out for it is read.
    pub(crate) fn forget_peer(&mut self, peer: Rank) {
        self.tx.forget(peer);
    }

    /// Whether nothing is added up, copied or written, or read for one of these ranks.
    pub(crate) fn is_quiet(&self, members: &RankSet) -> bool {
        let is_quiet = |rank| rank == self.rank || self.tx.reads_nothing(rank);
        self.jobs.is_idle() && members.iter().all(is_quiet)
    }

    /// Goes on with a plan for other members. Only what this rank has submitted of its step is left, the results that
    /// are kept, and contributions that cannot be made again.
    pub(crate) fn restart(&mut self, plan: Arc<Plan>, sources: BTreeMap<SliceId, Rank>) {
        self.plan = plan;
        self.sources = sources;
        self.tx.clear_slices();
        self.encodes.restart();
        self.worker.restart();
        let kept = self.kept.as_ref().map(KeptResults::buffers).unwrap_or_default();
        self.buffers.free_all_but(&kept, &mut self.events);
    }
}

// Messages to other ranks, and contributions that are encoded before they are sent.

impl Cx {
    pub(crate) fn control_header(&self, kind: FrameKind) -> FrameHeader {
        FrameHeader {
            kind,
            form: PayloadForm::Raw,
            flags: FrameFlags::NONE,
            step: self.step(),
            generation: self.generation,
            plan_version: 0,
            tensor: TensorId(0),
            slice: SliceId(0),
            priority: Priority(0),
            sender: self.rank,
            offset: 0,
            length: 0,
            block_bytes: 0,
            hop: 0,
            payload_checksum: 0,
        }
    }

    pub(crate) fn slice_header(
        &self,
        kind: FrameKind,
        step: Step,
        slice: SliceId,
        priority: Priority,
    ) -> FrameHeader {
        let tensor = self.plan.slice(slice).tensor;
        let plan_version = self.priorities.version(step);
        FrameHeader { step, plan_version, tensor, slice, priority, ..self.control_header(kind) }
    }

    /// A result, or word that there is none.
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

    /// Key of a slice's message or job in the strategy's order.
    pub(crate) fn slice_key(&mut self, step: Step, priority: Priority, slice: SliceId) -> OrderKey {
        self.keys.slice(step, priority, self.plan.slice(slice).tensor, slice)
    }

    /// Key of a reduced slice's message. Where the norm of all gradients is awaited, means go after
    /// what has still to be reduced: until then nobody can use them.
    pub(crate) fn result_key(
        &mut self,
        step: Step,
        priority: Priority,
        slice: SliceId,
    ) -> OrderKey {
        let key = self.slice_key(step, priority, slice);
        if self.squares.are_measured(step) {
            key.deferred()
        } else {
            key
        }
    }

    /// Queues a message to one rank.
    pub(crate) fn send(&mut self, to: Rank, key: OrderKey, message: Message) {
        self.tx.push(to, key, message);
    }

    /// Queues a message to several ranks as one entry.
    pub(crate) fn send_shared(&mut self, to: RankSet, key: OrderKey, message: Message) {
        self.tx.push_shared(to, key, message);
    }

    /// Queues a control message, before every slice.
    pub(crate) fn send_control(&mut self, to: RankSet, header: FrameHeader, body: Body) {
        let key = self.keys.control();
        self.tx.push_shared(to, key, Message { header, body });
    }

    /// Queues a control message to one rank.
    pub(crate) fn send_control_to(&mut self, to: Rank, header: FrameHeader, body: Body) {
        let key = self.keys.control();
        self.tx.push(to, key, Message { header, body });
    }
}

/// Contributions.
impl Cx {
    /// Queues this rank's contribution for its encoding.
    pub(crate) fn queue_encode(&mut self, to: Rank, key: OrderKey, pending: PendingEncode) {
        self.encodes.push(to, key, pending);
    }

    /// An encoded contribution is queued for a rank.
    pub(crate) fn note_encoded(
        &mut self,
        pending: PendingEncode,
        key: OrderKey,
        to: Rank,
        buffer: BufferRef,
    ) {
        self.encodes.note_encoded(pending, key, to, buffer);
    }

    /// An encoded contribution is dropped.
    pub(crate) fn drop_encoded(&mut self, key: OrderKey, to: Rank, buffer: BufferRef) {
        self.encodes.drop_encoded(key, to);
        self.release(buffer);
    }

    /// An encoded contribution, if it was one, is read no longer; whether it was one.
    pub(crate) fn encoded_sent(&mut self, slice: SliceId, step: Step) -> bool {
        let buffer = self.encodes.note_sent(slice, step);
        buffer.into_iter().for_each(|buffer| self.release(buffer));
        buffer.is_some()
    }

    /// This rank's contribution to a slice is read no longer, or goes nowhere.
    pub(crate) fn contribution_sent(&mut self, slice: SliceId, step: Step) {
        if !self.encoded_sent(slice, step) {
            self.push_sent(slice);
        }
    }

    /// Takes back contributions to a step of which nothing was handed out.
    pub(crate) fn withdraw(&mut self, step: Step) {
        for slice in self.tx.withdraw_pushes(step) {
            self.contribution_sent(slice, step);
        }
        for slice in self.encodes.withdraw(step) {
            self.push_sent(slice);
        }
    }
}

/// Sockets.
impl Cx {
    pub(crate) fn set_writable(&mut self, peer: Rank, writable: bool) {
        self.tx.set_writable(peer, writable);
    }

    pub(crate) fn set_frame_bytes(&mut self, peer: Rank, frame_bytes: u32) {
        self.tx.set_frame_bytes(peer, frame_bytes.clamp(1, MAX_FRAME_BYTES));
    }

    pub(crate) fn poll_transmit(&mut self) -> Option<Transmit> {
        self.tx.poll()
    }

    /// The kernel has a frame that was handed out.
    pub(crate) fn frame_sent(&mut self, peer: Rank, header: &FrameHeader) {
        self.tx.sent(peer, header.length);
    }

    /// Nobody reads the memory of a frame any more.
    pub(crate) fn frame_read(&mut self, peer: Rank) {
        self.tx.read(peer);
    }

    pub(crate) fn queue_stats(&self) -> QueueStats {
        QueueStats { peers: self.tx.queue_stats(), jobs: self.jobs.queued() as u64 }
    }

    /// Whether every message is with the kernel, and read no longer.
    pub(crate) fn has_sent_all(&self) -> bool {
        self.tx.is_idle()
    }

    /// Whether no job is queued or under way.
    pub(crate) fn has_done_all(&self) -> bool {
        self.jobs.is_idle()
    }

    /// Whether no contribution waits for its encoding or, encoded, for its socket.
    pub(crate) fn has_encoded_all(&self) -> bool {
        self.encodes.is_idle()
    }

    /// Drops all that is queued: the session ends.
    pub(crate) fn clear(&mut self) {
        self.tx.clear();
        self.jobs.clear();
        self.encodes.clear();
    }
}

// This rank's step: its submissions, and its own copy of results.

/// Steps.
impl Cx {
    /// Begins the next step.
    pub(crate) fn begin(&mut self, step: Step) {
        self.worker.begin(&self.plan);
        self.sources.clear();
        self.squares.enter(step);
        self.enter_priorities(step);
    }

    /// Ends the step: with updates on the server, parameters may be written.
    pub(crate) fn end_step(&mut self) {
        if self.worker.end() {
            for slice in self.plan.slice_ids() {
                self.install_if_open(slice);
            }
        }
    }

    /// Notes this rank's submission of a tensor.
    pub(crate) fn submit(&mut self, tensor: TensorId, submission: Submission) {
        self.worker.submit(tensor, submission);
        self.check_squares_are_wanted();
    }

    /// Contributions to this step travel as they are.
    pub(crate) fn send_raw(&mut self) {
        self.worker.send_raw();
    }

    /// Goes on as if this step were the one that has just been completed.
    pub(crate) fn fast_forward(&mut self, step: Step) {
        self.worker.fast_forward(step);
        self.keys.fast_forward(step.0);
        self.jobs.fast_forward(step.0);
    }

    /// One more owner has announced its slice of a tensor; whether all have.
    pub(crate) fn announce(&mut self, tensor: TensorId) -> bool {
        self.worker.announce(&self.plan, tensor)
    }

    /// Notes that the pulls of a tensor are sent; whether they were before.
    pub(crate) fn pull(&mut self, tensor: TensorId) -> bool {
        self.worker.pull(tensor)
    }
}

/// Results.
impl Cx {
    /// In which form this rank's contribution to a slice travels in the current step. That of the last rank
    /// goes nowhere, and is encoded only where the codec keeps what it has not sent.
    pub(crate) fn own_form(&self, slice: SliceId) -> PayloadForm {
        let may = self.plan.may_be_encoded(FrameKind::Push, slice, self.step());
        let stays = self.others().is_empty() && !self.plan.keeps_residual(slice);
        if may && !stays && !self.worker.sends_raw() {
            PayloadForm::Encoded
        } else {
            PayloadForm::Raw
        }
    }

    /// This rank's push of a slice is read no longer.
    pub(crate) fn mark_push_sent(&mut self, slice: SliceId) {
        self.worker.mark_push_sent(slice);
    }

    /// This rank's push of a slice is read no longer, or it owes none: a result may be written.
    pub(crate) fn push_sent(&mut self, slice: SliceId) {
        self.worker.mark_push_sent(slice);
        self.install_if_open(slice);
    }

    /// Notes a frame of a result that has arrived.
    pub(crate) fn receive_result(&mut self, header: &FrameHeader) -> Arrived {
        self.worker.receive(header)
    }

    /// A whole result lies in a buffer, which this rank holds a reference to.
    pub(crate) fn result_in_buffer(
        &mut self,
        slice: SliceId,
        buffer: BufferRef,
        form: PayloadForm,
    ) {
        self.worker.hold_result(slice, buffer, form);
        self.install_if_open(slice);
    }

    /// A slice's result is here and has no bytes. Where the step may go on without this rank, its own
    /// push may still be under way, and reads memory that is the engine's until then.
    pub(crate) fn result_without_bytes(&mut self, slice: SliceId, has_value: bool) {
        if self.plan.drops_stragglers(self.step()) {
            self.worker.hold_empty_result(slice, has_value);
            return self.install_if_open(slice);
        }
        self.slice_done(slice, has_value);
    }

    /// A result that came before this step began, whole or in part.
    pub(crate) fn take_early(&mut self, slice: SliceId, early: &EarlyResult) {
        if !self.worker.take_early(slice, early) {
            self.result_without_bytes(slice, early.has_value);
        }
    }

    /// Copies a result that waits in scratch into the tensor's memory, if that is open by now.
    pub(crate) fn install_if_open(&mut self, slice: SliceId) {
        match self.worker.install(&self.plan, slice) {
            Install::Nothing => {}
            Install::Copy(buffer) => self.queue_job(slice, self.step(), Task::Install(buffer)),
            Install::Finish { has_value } => self.slice_done(slice, has_value),
        }
    }

    /// A slice's result is in place, or there is none. Its squares are added up first, where this
    /// rank owes them.
    pub(crate) fn slice_done(&mut self, slice: SliceId, has_value: bool) {
        if self.owes_squares(slice) {
            if has_value {
                return self.queue_job(slice, self.step(), Task::AddSquares);
            }
            self.add_squares(None);
        }
        self.finish_slice(slice, has_value);
    }

    /// A slice's result may be released.
    pub(crate) fn finish_slice(&mut self, slice: SliceId, has_value: bool) {
        if self.kept.as_ref().is_some_and(|kept| kept.of(slice, self.step()).is_none()) {
            let empty = if has_value { KeptResult::Empty } else { KeptResult::Absent };
            self.keep(slice, empty);
        }
        self.worker.finish(&self.plan, slice, has_value, &mut self.events);
    }

    /// A tensor waits for one thing less.
    pub(crate) fn part_done(&mut self, tensor: TensorId) {
        self.worker.part_done(&self.plan, tensor, &mut self.events);
    }
}

// Memory: buffers, tensors, and results that are kept for ranks that may lack them.

impl Cx {
    /// A buffer of this many bytes, with one reference.
    pub(crate) fn acquire(&mut self, bytes: u64) -> BufferRef {
        self.buffers.acquire(bytes)
    }

    /// One more reference.
    pub(crate) fn retain(&mut self, buffer: BufferRef) {
        self.buffers.retain(buffer);
    }

    /// One reference less.
    pub(crate) fn release(&mut self, buffer: BufferRef) {
        self.buffers.release(buffer, &mut self.events);
    }

    pub(crate) fn buffers_in_use(&self) -> usize {
        self.buffers.in_use()
    }

    pub(crate) fn gradient_region(&self, slice: SliceId) -> Region {
        self.plan.region(Memory::Gradient(self.plan.slice(slice).tensor), slice)
    }

    pub(crate) fn parameter_region(&self, slice: SliceId) -> Region {
        self.plan.region(Memory::Parameter(self.plan.slice(slice).tensor), slice)
    }

    /// Where a slice's result may be written in the tensor's own memory, if it may be now.
    pub(crate) fn open_region(&self, slice: SliceId) -> Option<Region> {
        self.worker.open_region(&self.plan, slice)
    }

    /// Where the bytes of a result's frame go; its first frame chooses. A `buffered` result lands in
    /// scratch whether or not the tensor's memory is open.
    pub(crate) fn place_result(&mut self, header: &FrameHeader, buffered: bool) -> Region {
        // The result lands beside the contribution, which stays whole until the result is.
        let keeps = self.kept.is_some();
        if header.offset == 0 {
            self.forget_kept(header.slice);
        }
        let Cx { plan, worker, buffers, .. } = self;
        worker.place(plan, header, buffered || keeps, |bytes| buffers.acquire(bytes))
    }
}

/// Results that are kept.
impl Cx {
    pub(crate) fn keeps_results(&self) -> bool {
        self.kept.is_some()
    }

    /// The result of a slice in a step, if it is kept.
    pub(crate) fn kept_result(&self, slice: SliceId, step: Step) -> Option<KeptResult> {
        self.kept.as_ref()?.of(slice, step)
    }

    /// Keeps a result for ranks that may lack it, if results are kept.
    pub(crate) fn keep_result(&mut self, slice: SliceId, buffer: BufferRef, form: PayloadForm) {
        if self.kept.is_some() {
            self.buffers.retain(buffer);
            self.keep(slice, KeptResult::Buffer(buffer, form));
        }
    }

    fn keep(&mut self, slice: SliceId, result: KeptResult) {
        let step = self.step();
        let kept = self.kept.as_mut().map(|kept| kept.keep(slice, KeptSlice { step, result }));
        kept.into_iter().flatten().flatten().for_each(|buffer| self.release(buffer));
    }

    /// Keeps this rank's contribution, if it cannot be made again and may have to be sent again.
    pub(crate) fn keep_contribution(&mut self, slice: SliceId, step: Step, buffer: BufferRef) {
        if let Some(kept) = self.kept.as_mut().filter(|_| self.plan.keeps_residual(slice)) {
            self.buffers.retain(buffer);
            if let Some(old) = kept.keep_contribution(slice, step, buffer) {
                self.release(old);
            }
        }
    }

    /// This rank's contribution to a slice in a step, if it is kept; one more reference.
    pub(crate) fn kept_contribution(&mut self, slice: SliceId, step: Step) -> Option<BufferRef> {
        let kept = self.kept.as_ref()?.contribution(slice, step);
        kept.into_iter().for_each(|buffer| self.buffers.retain(buffer));
        kept
    }

    /// Forgets the kept result of a slice: the next one begins to arrive, so all have this one.
    pub(crate) fn forget_kept(&mut self, slice: SliceId) {
        if let Some(old) = self.kept.as_mut().and_then(|kept| kept.forget(slice)) {
            self.release(old);
        }
    }

    /// Forgets all that is kept.
    pub(crate) fn drop_kept(&mut self) {
        let kept = self.kept.take().as_ref().map(KeptResults::buffers);
        kept.into_iter().flatten().for_each(|buffer| self.release(buffer));
    }
}

// Jobs, from when they are queued until the driver has done them.

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

// Checks of every frame about a slice, whatever the scheme: the slice, its step, its priorities, the form and the
// extent of the payload. Every field is checked against the plan and the state before a byte of the payload is
// accepted; a frame that does not fit is a typed error that names peer, tensor and bytes, and changes nothing.

impl Cx {
    /// Checks the sender and the generation of any frame.
    pub(crate) fn check_sender(&self, from: Rank, header: &FrameHeader) -> Validated<()> {
        if header.sender != from {
            return violation(format!("a frame in the name of {}", header.sender));
        }
        if header.generation != self.generation {
            let (found, own) = (header.generation, self.generation);
            return violation(format!("a frame of generation {found}, this rank is in {own}"));
        }
        Ok(())
    }

    /// Whether a rank may send a result after its goodbye.
    pub(crate) fn serves_to_the_end(&self, header: &FrameHeader, from: Rank) -> bool {
        let sends_again =
            header.step == self.step() && self.sources.get(&header.slice) == Some(&from);
        header.kind == FrameKind::Broadcast && (self.plan.is_async(header.step) || sends_again)
    }

    /// Checks that a frame is about a slice of the plan, in a step and under priorities that it may
    /// come in, and that its sender may send it to this rank.
    pub(crate) fn check_slice(&self, from: Rank, header: &FrameHeader) -> Validated<()> {
        let Some(slice) = self.plan.slices.get(header.slice.index()) else {
            let count = self.plan.slices.len();
            return violation(format!("{}, but there are {count} slices", header.slice));
        };
        if slice.tensor != header.tensor {
            let (found, right) = (header.tensor, slice.tensor);
            return violation(format!("{} as part of {found}; it is of {right}", header.slice));
        }
        if !self.plan.takes_part(slice.tensor, header.step) {
            let what = self.describe(header);
            return violation(format!("{what}, a tensor that is not trained"));
        }
        self.check_version(header)?;
        if !self.may_send(header.kind, from) {
            let (what, own) = (self.describe(header), self.rank);
            return violation(format!("{what} from {from} to {own}, of which one only serves"));
        }
        Ok(())
    }

    /// Checks the version of the priorities that a frame about a slice was sent under.
    fn check_version(&self, header: &FrameHeader) -> Validated<()> {
        let version = self.priorities.version(header.step);
        let independent = self.plan.switches_independently() && !header.step.is_initial();
        if header.plan_version == version || independent {
            return Ok(());
        }
        let found = header.plan_version;
        let what = self.describe(header);
        violation(format!("{what} under plan version {found}, this rank has {version}"))
    }

    /// Whether a frame of this kind may go from one rank to another: dedicated servers push, pull and
    /// pass on nothing, and get no results.
    fn may_send(&self, kind: FrameKind, from: Rank) -> bool {
        let (sender, receiver) = (self.plan.trains(from), !self.is_dedicated_server());
        match kind {
            FrameKind::Push | FrameKind::Pull => sender,
            FrameKind::Broadcast | FrameKind::Notify => receiver,
            _ => sender && receiver,
        }
    }

    /// Checks that only a payload that may be encoded is.
    pub(crate) fn check_form(&self, header: &FrameHeader, has_body: bool) -> Validated<()> {
        let FrameHeader { kind, slice, step, .. } = *header;
        let may_be_encoded = has_body && self.plan.may_be_encoded(kind, slice, step);
        if header.form == PayloadForm::Encoded && !may_be_encoded {
            return violation(format!("{} as encoded bytes", self.describe(header)));
        }
        Ok(())
    }

    /// Checks that a frame's bytes lie within a message of at most this many, and that the last one
    /// says so.
    pub(crate) fn check_extent(&self, header: &FrameHeader, bytes: u64) -> Validated<()> {
        // Where encodings differ in length, the last frame says how long this one is.
        let varies = header.kind != FrameKind::RingScale
            && header.form == PayloadForm::Encoded
            && self.plan.codec(header.slice).is_some_and(|codec| !codec.fixed);
        let end = header.offset.checked_add(u64::from(header.length));
        let last = header.flags.contains(FrameFlags::LAST);
        let fits = end.is_some_and(|end| end <= bytes && (varies || last == (end == bytes)));
        let moves = header.length > 0 || last;
        if fits && moves {
            return Ok(());
        }
        violation(format!(
            "{} with {} bytes at offset {} of {bytes}, last: {last}",
            self.describe(header),
            header.length,
            header.offset
        ))
    }
}
