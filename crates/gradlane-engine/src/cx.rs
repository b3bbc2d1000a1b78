//! The context that components work in: the plan, and everything outside their own state that they may
//! touch.

use crate::api::{BufferRef, Event, Job, Memory, Operation, Region};
use crate::buffers::BufferTable;
use crate::clock::Clock;
use crate::gradient_norm::Squares;
use crate::jobs::{JobQueue, Running, Task, Then};
use crate::kept_results::{KeptResult, KeptResults, KeptSlice};
use crate::plan::Plan;
use crate::rank_set::RankSet;
use crate::transmit::{Body, EncodeQueue, Message, OrderKey, OrderKeys, PriorityTable, Scheduler};
use crate::worker::{Install, Worker};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

#[derive(Debug)]
pub(crate) struct Cx {
    pub(crate) plan: Arc<Plan>,
    pub(crate) rank: Rank,
    pub(crate) generation: u32,
    pub(crate) clock: Clock,
    pub(crate) priorities: PriorityTable,
    pub(crate) keys: OrderKeys,
    pub(crate) tx: Scheduler,
    pub(crate) encodes: EncodeQueue,
    pub(crate) jobs: JobQueue,
    pub(crate) buffers: BufferTable,
    pub(crate) events: VecDeque<Event>,
    pub(crate) worker: Worker,
    pub(crate) squares: Squares,
    /// The last results, where training goes on without lost ranks.
    pub(crate) kept: KeptResults,
    /// Slices whose result of the current step existed when ranks were lost: it is not contributed to again.
    pub(crate) settled: BTreeSet<SliceId>,
    /// By slice: the rank that its result comes from, in place of its owner, after ranks were lost.
    pub(crate) spread_by: BTreeMap<SliceId, (Step, Rank)>,
    /// Why a component cannot go on: the engine ends the session.
    pub(crate) abort: Option<String>,
}

impl Cx {
    /// Whether this rank trains nothing.
    pub(crate) fn is_dedicated_server(&self) -> bool {
        !self.plan.trains(self.rank)
    }

    /// Asks the engine to end the session; the first reason counts.
    pub(crate) fn abort(&mut self, reason: String) {
        self.abort.get_or_insert(reason);
    }

    /// All other ranks.
    pub(crate) fn others(&self) -> RankSet {
        RankSet::all_but(self.plan.world_size, self.rank).without(&self.plan.lost)
    }

    /// Which rank a frame about a slice's result comes from: its owner, or one that has the result since
    /// ranks were lost.
    pub(crate) fn sender_of(&self, header: &FrameHeader) -> Rank {
        let spread = self.spread_by.get(&header.slice).filter(|(step, _)| *step == header.step);
        match spread {
            Some(&(_, rank)) if header.kind == FrameKind::Broadcast => rank,
            _ => self.plan.slice(header.slice).owner,
        }
    }

    /// Priority of a slice's tensor in a step.
    pub(crate) fn priority(&self, step: Step, slice: SliceId) -> Priority {
        self.priorities.priority(step, self.plan.slice(slice).tensor)
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
            key.on_second_leg()
        } else {
            key
        }
    }

    /// "Push of slice 7 of "fc.weight" in step 3".
    pub(crate) fn describe(&self, header: &FrameHeader) -> String {
        let name = self.plan.tensors.get(header.tensor.index()).map(|it| it.spec.name.as_str());
        let SliceId(slice) = header.slice;
        let name = name.unwrap_or("an unknown tensor");
        format!("{:?} of slice {slice} of {name:?} in {}", header.kind, header.step)
    }
}

/// Messages.
impl Cx {
    /// A step begins: the priorities that are in force from it on take effect.
    pub(crate) fn enter_priorities(&mut self, step: Step) {
        if let Some(version) = self.priorities.enter(step) {
            self.events.push_back(Event::PlanSwitched { version, step });
        }
    }

    pub(crate) fn control_header(&self, kind: FrameKind) -> FrameHeader {
        FrameHeader {
            kind,
            form: PayloadForm::Raw,
            flags: FrameFlags::NONE,
            step: self.worker.step(),
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

/// Memory.
impl Cx {
    pub(crate) fn release(&mut self, buffer: BufferRef) {
        self.buffers.release(buffer, &mut self.events);
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
        let keeps = self.kept.are_kept();
        if header.offset == 0 {
            self.forget_kept(header.slice);
        }
        let Cx { plan, worker, buffers, .. } = self;
        worker.place(plan, header, buffered || keeps, |bytes| buffers.acquire(bytes))
    }

    /// Keeps a result for ranks that may lack it, if results are kept.
    pub(crate) fn keep_result(&mut self, slice: SliceId, buffer: BufferRef, form: PayloadForm) {
        if self.kept.are_kept() {
            self.buffers.retain(buffer);
            self.keep(slice, KeptResult::Buffer(buffer, form));
        }
    }

    fn keep(&mut self, slice: SliceId, result: KeptResult) {
        let step = self.worker.step();
        let read_no_longer = self.kept.keep(slice, KeptSlice { step, result });
        read_no_longer.into_iter().flatten().for_each(|buffer| self.release(buffer));
    }

    /// Keeps this rank's contribution, if it cannot be made again and may have to be sent again.
    pub(crate) fn keep_contribution(&mut self, slice: SliceId, step: Step, buffer: BufferRef) {
        if self.kept.are_kept() && self.plan.keeps_residual(slice) {
            self.buffers.retain(buffer);
            if let Some(old) = self.kept.keep_contribution(slice, step, buffer) {
                self.release(old);
            }
        }
    }

    /// Forgets the kept result of a slice: the next one begins to arrive, so all have this one.
    pub(crate) fn forget_kept(&mut self, slice: SliceId) {
        if let Some(old) = self.kept.forget(slice) {
            self.release(old);
        }
    }
}

/// Jobs.
impl Cx {
    /// Hands a job out to the driver.
    pub(crate) fn start(&mut self, operation: Operation, running: Running) -> Job {
        let (slice, step) = (running.slice, running.step);
        let tensor = self.plan.slice(slice).tensor;
        let priority = self.priorities.priority(step, tensor);
        Job { id: self.jobs.start(running), slice, tensor, step, priority, operation }
    }

    /// Starts to copy or decode a result into the tensor's memory.
    pub(crate) fn start_install(&mut self, slice: SliceId, step: Step, buffer: BufferRef) -> Job {
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

    /// Queues a job at the priority of its slice's tensor.
    pub(crate) fn queue_job(&mut self, slice: SliceId, step: Step, task: impl Into<Task>) {
        let priority = self.priority(step, slice);
        let key = self.slice_key(step, priority, slice);
        self.jobs.push(key, slice, step, task.into());
    }
}

/// This rank's own copy of results.
impl Cx {
    /// In which form this rank's contribution to a slice travels in the current step. That of the last rank
    /// goes nowhere, and is encoded only where the codec keeps what it has not sent.
    pub(crate) fn own_form(&self, slice: SliceId) -> PayloadForm {
        let may = self.plan.may_be_encoded(FrameKind::Push, slice, self.worker.step());
        let stays = self.others().is_empty() && !self.plan.keeps_residual(slice);
        if may && !stays && !self.worker.sends_raw() {
            PayloadForm::Encoded
        } else {
            PayloadForm::Raw
        }
    }

    /// This rank's push of a slice is read no longer, or it owes none: a result may be written.
    pub(crate) fn push_sent(&mut self, slice: SliceId) {
        self.worker.mark_push_sent(slice);
        self.install_if_open(slice);
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
        if self.plan.drops_stragglers(self.worker.step()) {
            self.worker.hold_empty_result(slice, has_value);
            return self.install_if_open(slice);
        }
        self.slice_done(slice, has_value);
    }

    /// Copies a result that waits in scratch into the tensor's memory, if that is open by now.
    pub(crate) fn install_if_open(&mut self, slice: SliceId) {
        match self.worker.install(&self.plan, slice) {
            Install::Nothing => {}
            Install::Copy(buffer) => {
                self.queue_job(slice, self.worker.step(), Task::Install(buffer));
            }
            Install::Finish { has_value } => self.slice_done(slice, has_value),
        }
    }

    /// A slice's result is in place, or there is none. Its squares are added up first, where this
    /// rank owes them.
    pub(crate) fn slice_done(&mut self, slice: SliceId, has_value: bool) {
        if self.owes_squares(slice) {
            if has_value {
                return self.queue_job(slice, self.worker.step(), Task::AddSquares);
            }
            self.add_squares(None);
        }
        self.finish_slice(slice, has_value);
    }

    /// Starts to add up the squares of an owned slice.
    pub(crate) fn start_squares(&mut self, slice: SliceId, step: Step) -> Job {
        let operation = Operation::AddSquares { input: self.gradient_region(slice) };
        let (spent, then) = (Vec::new(), Then::AddedSquares);
        self.start(operation, Running { slice, step, spent, then })
    }

    /// A slice's result may be released.
    pub(crate) fn finish_slice(&mut self, slice: SliceId, has_value: bool) {
        if self.kept.are_kept() && self.kept.of(slice, self.worker.step()).is_none() {
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
