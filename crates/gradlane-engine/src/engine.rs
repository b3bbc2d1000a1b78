//! The engine: inputs from the application and the driver, outputs to the driver. What arrives from
//! peers is checked in `inbound`; how results are made and delivered is in `aggregate`; the end of a
//! session is in `lifecycle`.

use crate::buffers::BufferTable;
use crate::contributors::Contributors;
use crate::each::Each;
use crate::encoding::{EncodeQueue, Waiting};
use crate::error::UsageError;
use crate::gather::Gather;
use crate::io::{Event, Memory, Region, Transmit};
use crate::lifecycle::Lifecycle;
use crate::plan::{Plan, Update};
use crate::priority::{PendingSwitch, PriorityTable};
use crate::rank_set::RankSet;
use crate::ring::Ring;
use crate::scheduler::{Body, Key, KeyMaker, Message, Scheduler};
use crate::scheme::Scheme;
use crate::server::{Part, Server};
use crate::strategy::{PullRule, ReadyRule};
use crate::work::WorkQueue;
use crate::worker::{Contribution, Phase, Worker};
use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::ToString;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::time::Duration;
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId, Time};
use gradlane_wire::{Codec, FrameFlags, FrameHeader, FrameKind, MAX_FRAME_BYTES};

/// What an engine is told once.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// This rank.
    pub rank: Rank,
    /// Largest payload of one frame: what an urgent slice waits for at most, a peer.
    pub frame_bytes: u32,
    /// Bytes handed out towards a peer and not yet reported as sent. One frame always goes.
    pub credit_bytes: u64,
    /// Pieces of work handed out at once.
    pub work_depth: usize,
    /// Slices towards one owner that are encoded ahead of sending.
    pub encoded_ahead: usize,
    /// How long to wait for ranks that are alive but do not take part.
    pub progress_timeout: Duration,
    /// Membership generation.
    pub generation: u32,
}

impl EngineOptions {
    /// The defaults for a rank: frames of 64 kB, credit for one, two pieces of work, four slices
    /// encoded ahead for each peer, 30 minutes.
    #[must_use]
    pub fn new(rank: Rank) -> EngineOptions {
        EngineOptions {
            rank,
            frame_bytes: 64 << 10,
            credit_bytes: 64 << 10,
            work_depth: 2,
            encoded_ahead: 4,
            progress_timeout: Duration::from_secs(30 * 60),
            generation: 0,
        }
    }
}

/// One rank's communication engine.
#[derive(Debug)]
pub struct Engine {
    pub(crate) options: EngineOptions,
    pub(crate) plan: Arc<Plan>,
    pub(crate) priorities: PriorityTable,
    pub(crate) switch: Option<PendingSwitch>,
    pub(crate) keys: KeyMaker,
    pub(crate) scheduler: Scheduler,
    pub(crate) worker: Worker,
    pub(crate) server: Server,
    pub(crate) ring: Ring,
    pub(crate) gather: Gather,
    pub(crate) each: Each,
    pub(crate) contributors: Contributors,
    pub(crate) work: WorkQueue,
    pub(crate) encodes: EncodeQueue,
    pub(crate) buffers: BufferTable,
    pub(crate) events: VecDeque<Event>,
    pub(crate) lifecycle: Lifecycle,
}

impl Engine {
    /// An engine before step 0. No peer is writable yet.
    ///
    /// # Panics
    /// When the rank is outside the plan's world.
    #[must_use]
    pub fn new(mut options: EngineOptions, plan: Arc<Plan>) -> Engine {
        assert!(options.rank.0 < plan.world_size, "{} is outside the plan's world", options.rank);
        options.frame_bytes = options.frame_bytes.clamp(1, MAX_FRAME_BYTES);
        let rank = options.rank;
        Engine {
            priorities: PriorityTable::new(plan.tensors.len()),
            switch: None,
            keys: KeyMaker::new(plan.strategy.order),
            scheduler: Scheduler::new(
                rank,
                plan.world_size,
                options.frame_bytes,
                options.credit_bytes,
            ),
            worker: Worker::new(&plan),
            server: Server::new(&plan, rank),
            ring: Ring::new(&plan),
            gather: Gather::default(),
            each: Each::default(),
            contributors: Contributors::new(&plan, rank),
            work: WorkQueue::new(options.work_depth.max(1)),
            encodes: EncodeQueue::new(rank, options.encoded_ahead),
            buffers: BufferTable::default(),
            events: VecDeque::new(),
            lifecycle: Lifecycle::new(plan.world_size),
            options,
            plan,
        }
    }

    /// An engine after step 0, with a priority vector in force from the beginning: for clusters in
    /// virtual time, whose ranks have no values to spread.
    ///
    /// # Panics
    /// When the rank is outside the plan's world, or the vector has not one entry a tensor.
    #[must_use]
    pub fn after_initial(
        options: EngineOptions,
        plan: Arc<Plan>,
        priorities: Vec<Priority>,
    ) -> Engine {
        assert_eq!(
            priorities.len(),
            plan.tensors.len(),
            "a priority vector has one entry a tensor"
        );
        let mut engine = Engine::new(options, plan);
        engine.priorities = PriorityTable::with(priorities);
        engine.worker.begun = true;
        engine.worker.incomplete = 0;
        engine.worker.uncontributed = 0;
        engine.server.skip_initial();
        engine.skip_initial_states();
        engine
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.options.rank
    }

    /// Begins a step: 0 first (rank 0's values go everywhere), then 1, 2, …
    ///
    /// # Errors
    /// When the step is not the next one, the one before is not complete, or the session has ended.
    pub fn step_begin(&mut self, step: Step) -> Result<(), UsageError> {
        self.begin(step, false)
    }

    pub(crate) fn begin(&mut self, step: Step, passes: bool) -> Result<(), UsageError> {
        self.lifecycle.check_open()?;
        let expected = if self.worker.begun { self.worker.step.next() } else { self.worker.step };
        if step != expected {
            return Err(UsageError::WrongStep { call: "step_begin", step, current: expected });
        }
        if self.worker.begun {
            self.check_complete(step)?;
            self.worker.enter(&self.plan, step);
        }
        if self.chooses(step) {
            self.worker.add_parts(&self.plan);
        }
        self.worker.begun = true;
        self.lifecycle.progressed();
        if let Some(version) = self.priorities.enter(step) {
            self.events.push_back(Event::PlanSwitched { version, step });
        }
        self.check_departed();
        if self.worker.incomplete == 0 {
            self.events.push_back(Event::StepComplete { step });
        }
        self.begun_choosing(step, passes);
        Ok(())
    }

    fn check_complete(&self, step: Step) -> Result<(), UsageError> {
        if self.worker.incomplete == 0 {
            return Ok(());
        }
        let name = self.outstanding().tensors.into_iter().next().unwrap_or_default();
        Err(UsageError::Incomplete {
            step,
            current: self.worker.step,
            missing: self.worker.incomplete,
            name,
        })
    }

    /// A tensor's gradient is ready in memory that the driver knows as `Memory::Gradient`. From now
    /// on the engine owns that memory until the tensor is ready. In step 0 the memory is the
    /// tensor itself.
    ///
    /// # Errors
    /// For an unknown tensor, a second call in a step, another step than the current one, or an
    /// ended session. Nothing was changed then.
    pub fn gradient_ready(&mut self, tensor: TensorId, step: Step) -> Result<(), UsageError> {
        self.check_call(tensor, step, "gradient_ready")?;
        let planned = self.plan.tensor(tensor);
        if planned.scheme.has_blocks() {
            let name = &planned.spec.name;
            let message = format!("tensor {name:?} has blocks of any size: use block_ready");
            return Err(UsageError::Argument(message));
        }
        self.contribute(tensor, step, Contribution::Gradient, "gradient_ready")
    }

    /// This rank has no gradient for a tensor in this step; others' count as the sum, zeros for
    /// this one. Memory for the result is registered all the same.
    ///
    /// # Errors
    /// As [`Engine::gradient_ready`].
    pub fn tensor_absent(&mut self, tensor: TensorId, step: Step) -> Result<(), UsageError> {
        self.contribute(tensor, step, Contribution::Absent, "tensor_absent")
    }

    pub(crate) fn contribute(
        &mut self,
        tensor: TensorId,
        step: Step,
        contribution: Contribution,
        call: &'static str,
    ) -> Result<(), UsageError> {
        self.check_call(tensor, step, call)?;
        let name = &self.plan.tensor(tensor).spec.name;
        if !self.plan.takes_part(tensor, step) {
            let message = format!("tensor {name:?} is not trained: it has no gradient in {step}");
            return Err(UsageError::Argument(message));
        }
        if self.lacks_initial(step, self.rank(), contribution == Contribution::Absent) {
            let message = format!("tensor {name:?} has no value to start from, which updates need");
            return Err(UsageError::Argument(message));
        }
        if self.worker.tensor(tensor).contribution != Contribution::Missing {
            return Err(UsageError::Twice { name: name.clone(), step });
        }
        self.worker.tensor_mut(tensor).contribution = contribution;
        self.worker.uncontributed -= 1;
        self.lifecycle.progressed();
        match &mut self.switch {
            Some(switch) if step >= switch.hold_from => switch.held.push(tensor),
            _ => self.send_contribution(tensor),
        }
        self.contributed_choosing(tensor, step);
        Ok(())
    }

    /// Queues the pushes of a tensor, or hands its own slices to the server.
    pub(crate) fn send_contribution(&mut self, tensor: TensorId) {
        match self.plan.tensor(tensor).scheme {
            Scheme::Ps => {}
            Scheme::Ring => return self.contribute_round(tensor),
            Scheme::Gather | Scheme::Answer => return self.contribute_block(tensor),
        }
        let step = self.worker.step;
        let absent = self.worker.tensor(tensor).contribution == Contribution::Absent;
        let contributes = self.contributes(self.rank(), step);
        let priority = self.priorities.priority(step, tensor);
        for slice in self.plan.slices_of(tensor) {
            let owner = self.plan.slice(slice).owner;
            let encoded = contributes && !absent && self.own_form(slice) == Codec::Encoded;
            if !contributes {
                self.worker.slice_mut(slice).push_sent = true;
                self.install_if_open(slice);
            } else if encoded {
                let key = self.keys.slice(step, priority, tensor, slice);
                self.encodes.push(owner, key, Waiting { slice, step });
            } else if owner == self.rank() {
                self.worker.slice_mut(slice).push_sent = true;
                let part = if absent { Part::Absent } else { Part::Own };
                self.add_part(slice, self.rank(), part, priority);
            } else {
                let key = self.keys.slice(step, priority, tensor, slice);
                let mut header = self.slice_header(FrameKind::Push, step, slice, priority);
                let body = if absent {
                    header.flags = FrameFlags::ABSENT;
                    Body::Empty
                } else {
                    Body::Region(self.gradient_region(slice))
                };
                self.scheduler.push(owner, key, Message { header, body });
            }
        }
    }

    /// A consumer waits for a tensor. Drives deferred pulls: the first wait is the start of the
    /// next iteration, which pulls all tensors.
    ///
    /// # Errors
    /// For an unknown tensor, another step than the current one, or an ended session.
    pub fn tensor_needed(&mut self, tensor: TensorId, step: Step) -> Result<(), UsageError> {
        self.check_call(tensor, step, "tensor_needed")?;
        if self.worker.uncontributed == 0 {
            self.pull_deferred();
        }
        Ok(())
    }

    /// Sends the pulls that waited for the next iteration.
    pub(crate) fn pull_deferred(&mut self) {
        let step = self.worker.step;
        if self.plan.strategy.pull != PullRule::NextStep || step.0 == 0 {
            return;
        }
        for tensor in (0..self.plan.tensors.len() as u32).map(TensorId) {
            if self.plan.takes_part(tensor, step) {
                self.pull(tensor);
            }
        }
    }

    /// Sends the pulls of a tensor once.
    pub(crate) fn pull(&mut self, tensor: TensorId) {
        if core::mem::replace(&mut self.worker.tensor_mut(tensor).pulled, true) {
            return;
        }
        let step = self.worker.step;
        let priority = self.priorities.priority(step, tensor);
        for slice in self.plan.slices_of(tensor) {
            let owner = self.plan.slice(slice).owner;
            if owner != self.rank() {
                let key = self.keys.slice(step, priority, tensor, slice);
                let header = self.slice_header(FrameKind::Pull, step, slice, priority);
                self.scheduler.push(owner, key, Message { header, body: Body::Empty });
            }
        }
    }

    /// The application has ended the step (`optimizer.step()`): with updates on the server,
    /// parameters may be written from now on.
    ///
    /// # Errors
    /// For another step than the current one, or an ended session.
    pub fn step_end(&mut self, step: Step) -> Result<(), UsageError> {
        self.check_step("step_end", step)?;
        if !core::mem::replace(&mut self.worker.ended, true) {
            for slice in (0..self.plan.slices.len() as u32).map(SliceId) {
                self.install_if_open(slice);
            }
        }
        Ok(())
    }

    pub(crate) fn check_step(&self, call: &'static str, step: Step) -> Result<(), UsageError> {
        self.lifecycle.check_open()?;
        if !self.worker.begun || step != self.worker.step {
            return Err(UsageError::WrongStep { call, step, current: self.worker.step });
        }
        Ok(())
    }

    pub(crate) fn check_call(
        &self,
        tensor: TensorId,
        step: Step,
        call: &'static str,
    ) -> Result<(), UsageError> {
        self.lifecycle.check_open()?;
        if tensor.index() >= self.plan.tensors.len() {
            let count = self.plan.tensors.len();
            return Err(UsageError::UnknownTensor { tensor: tensor.0, count });
        }
        if !self.worker.begun || step != self.worker.step {
            return Err(UsageError::WrongStep { call, step, current: self.worker.step });
        }
        Ok(())
    }

    /// Rank 0 announces another priority vector, one entry a tensor. It is in force on all ranks
    /// from the same step on, two steps after the current one; where ranks may be in different steps
    /// (ready rules `Each` and `Set`), on each rank from its next step on.
    ///
    /// # Errors
    /// On another rank, before a step has begun, when the last switch is not finished, or for a
    /// vector of another length.
    pub fn switch_priorities(&mut self, priorities: Vec<Priority>) -> Result<(), UsageError> {
        self.lifecycle.check_open()?;
        let refuse = |message: &str| Err(UsageError::Argument(message.to_string()));
        if self.rank() != Rank(0) {
            return refuse("only rank 0 may switch priorities");
        }
        if priorities.len() != self.plan.tensors.len() {
            return refuse("a priority vector has one entry a tensor");
        }
        let alone = self.switches_alone();
        let next = self.worker.step.next();
        let from = if alone { next } else { next.next() };
        if !self.worker.begun || self.switch.is_some() || self.priorities.newest().1 >= from {
            return refuse("the last switch of priorities is not finished");
        }
        let mut payload = Vec::with_capacity(8 + 4 * priorities.len());
        payload.extend_from_slice(&from.0.to_le_bytes());
        for priority in &priorities {
            payload.extend_from_slice(&priority.0.to_le_bytes());
        }
        if payload.len() > MAX_FRAME_BYTES as usize {
            return refuse("too many tensors for one priority vector");
        }
        let version = self.priorities.add(from, priorities);
        let missing = RankSet::all_but(self.plan.world_size, self.rank());
        if missing.is_empty() {
            return Ok(());
        }
        let mut header = self.control_header(FrameKind::PlanSwitch);
        header.plan_version = version;
        let key = self.keys.control();
        self.scheduler.push_shared(
            missing.clone(),
            key,
            Message { header, body: Body::Inline(payload) },
        );
        if alone {
            // Steps are each rank's own, and so is the moment from which an order is in force.
            return Ok(());
        }
        let hold_from = self.worker.step.next();
        self.switch = Some(PendingSwitch { version, hold_from, missing, held: Vec::new() });
        Ok(())
    }

    /// The socket to a peer can, or cannot, take more without queueing in the kernel.
    pub fn handle_writable(&mut self, peer: Rank, writable: bool) {
        self.scheduler.set_writable(peer, writable);
    }

    /// The kernel has a whole frame that `poll_transmit` gave out.
    pub fn handle_sent(&mut self, transmit: &Transmit) {
        self.scheduler.sent(transmit);
        let header = &transmit.header;
        if header.flags.contains(FrameFlags::LAST) && !self.lifecycle.has_ended() {
            match header.kind {
                FrameKind::Push => self.contribution_sent(header.slice, header.step),
                FrameKind::Broadcast => {
                    self.result_sent(header.slice, header.step, transmit.peer);
                }
                FrameKind::RingScale | FrameKind::RingReduce | FrameKind::RingGather => {
                    self.sent_round(header);
                }
                FrameKind::Block => self.sent_block(header.tensor, header.step),
                _ => {}
            }
        }
        self.say_goodbye_when_done();
    }

    /// The next frame to send: the most urgent one whose peer can take it.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.scheduler.poll()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        if let Event::BufferFree(buffer) = event {
            self.buffers.recycle(buffer);
        }
        Some(event)
    }

    /// When [`Engine::handle_time`] wants to be called at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        if self.lifecycle.has_ended() {
            return None;
        }
        let waits = self.worker.waits_for_others();
        let deadline = waits.then(|| self.lifecycle.deadline(self.options.progress_timeout));
        self.decision_timeout().into_iter().chain(deadline).min()
    }

    /// Number of scratch buffers in use.
    #[must_use]
    pub fn buffers_in_use(&self) -> usize {
        self.buffers.in_use()
    }

    /// Whether a rank's gradient counts in a step, as far as is known: rank 0's alone in step 0,
    /// everybody's later, but of those that are left out.
    pub(crate) fn contributes(&self, rank: Rank, step: Step) -> bool {
        if self.chooses(step) && rank == self.rank() && step == self.worker.step {
            return self.is_welcome(step);
        }
        step.0 > 0 || rank == Rank(0)
    }

    /// Whether ranks take up new priorities each at a step of its own.
    pub(crate) fn switches_alone(&self) -> bool {
        self.plan.strategy.ready != ReadyRule::All
    }

    /// How many ranks contribute to a step.
    pub(crate) fn contributors(&self, step: Step) -> u32 {
        if step.0 == 0 {
            1
        } else {
            self.plan.world_size
        }
    }

    /// Where a slice's result may be written in the tensor's own memory, if it may be now.
    pub(crate) fn open_region(&self, slice: SliceId) -> Option<Region> {
        if self.updates_on_server(self.worker.step) {
            let tensor = self.plan.slice(slice).tensor;
            let memory = Memory::Parameter(tensor);
            return self.worker.ended.then(|| self.region(memory, slice));
        }
        let tensor = self.worker.tensor(self.plan.slice(slice).tensor);
        let registered = tensor.contribution != Contribution::Missing;
        let open = registered && self.worker.slice(slice).push_sent;
        open.then(|| self.gradient_region(slice))
    }

    pub(crate) fn updates_on_server(&self, step: Step) -> bool {
        self.plan.update == Update::Server && step.0 > 0
    }

    pub(crate) fn gradient_region(&self, slice: SliceId) -> Region {
        self.region(Memory::Gradient(self.plan.slice(slice).tensor), slice)
    }

    /// A slice's range in a memory that holds the whole tensor.
    pub(crate) fn region(&self, memory: Memory, slice: SliceId) -> Region {
        let offset = self.plan.slice_start_bytes(slice);
        Region { memory, offset, length: self.plan.slice_bytes(slice) }
    }

    pub(crate) fn control_header(&self, kind: FrameKind) -> FrameHeader {
        FrameHeader {
            kind,
            codec: Codec::Raw,
            flags: FrameFlags::NONE,
            step: self.worker.step,
            generation: self.options.generation,
            plan_version: 0,
            tensor: TensorId(0),
            slice: SliceId(0),
            priority: Priority(0),
            sender: self.rank(),
            offset: 0,
            length: 0,
            block_bytes: 0,
            hop: 0,
            payload_crc: 0,
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

    /// Key of a slice's message or work in the strategy's order.
    pub(crate) fn slice_key(&mut self, step: Step, priority: Priority, slice: SliceId) -> Key {
        self.keys.slice(step, priority, self.plan.slice(slice).tensor, slice)
    }

    /// Copies a result that waits in scratch into the tensor's memory, if that is open by now.
    pub(crate) fn install_if_open(&mut self, slice: SliceId) {
        let buffer = match self.worker.slice(slice).phase {
            Phase::Buffered(buffer) => buffer,
            Phase::Empty { has_value } if self.worker.slice(slice).push_sent => {
                return self.slice_done(slice, has_value);
            }
            _ => return,
        };
        if self.open_region(slice).is_none() {
            return;
        }
        self.worker.slice_mut(slice).phase = Phase::Installing;
        let step = self.worker.step;
        let priority = self.priorities.priority(step, self.plan.slice(slice).tensor);
        let key = self.slice_key(step, priority, slice);
        self.work.push(key, crate::work::Pending::Install { slice, step, buffer });
    }
}
