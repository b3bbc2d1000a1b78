//! The engine: its parts, the beginning and the end of steps, and what the driver asks for. What a
//! rank contributes is in `contribution`; what arrives from peers is checked in `inbound`; how results
//! are made and delivered is in `aggregate`; the end of a session is in `lifecycle`.

use crate::async_owner::AsyncOwners;
use crate::buffers::BufferTable;
use crate::contributors::Contributors;
use crate::coordinator::StepEntry;
use crate::encoding::EncodeQueue;
use crate::error::UsageError;
use crate::gather::Gather;
use crate::input::Input;
use crate::io::{Event, Transmit};
use crate::jobs::JobQueue;
use crate::lifecycle::Lifecycle;
use crate::options::EngineOptions;
use crate::plan::{Plan, Update};
use crate::priority::{PendingSwitch, PriorityTable};
use crate::ring::Ring;
use crate::scheduler::{OrderKeys, Scheduler};
use crate::server::Server;
use crate::worker::Worker;
use alloc::collections::VecDeque;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId, Time};
use gradlane_wire::{FrameFlags, FrameKind, MAX_FRAME_BYTES};

/// One rank's communication engine.
#[derive(Debug)]
pub struct Engine {
    pub(crate) options: EngineOptions,
    pub(crate) plan: Arc<Plan>,
    pub(crate) priorities: PriorityTable,
    pub(crate) switch: Option<PendingSwitch>,
    pub(crate) keys: OrderKeys,
    pub(crate) scheduler: Scheduler,
    pub(crate) worker: Worker,
    pub(crate) server: Server,
    pub(crate) ring: Ring,
    pub(crate) gather: Gather,
    pub(crate) async_owners: AsyncOwners,
    pub(crate) contributors: Contributors,
    pub(crate) jobs: JobQueue,
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
            keys: OrderKeys::new(plan.strategy.order),
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
            async_owners: AsyncOwners::default(),
            contributors: Contributors::new(&plan, rank),
            jobs: JobQueue::new(options.job_depth.max(1)),
            encodes: EncodeQueue::new(rank, options.encoded_ahead),
            buffers: BufferTable::default(),
            events: VecDeque::new(),
            lifecycle: Lifecycle::new(plan.world_size, !plan.trains(rank)),
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

    /// Takes a call of the application.
    ///
    /// # Errors
    /// When the call does not fit the current step, the plan or the session's state. Nothing was
    /// changed then.
    pub fn handle(&mut self, input: Input) -> Result<(), UsageError> {
        match input {
            Input::StepBegin(step) => self.begin(step, StepEntry::Train),
            Input::StepPass(step) => self.step_pass(step),
            Input::StepBarrier(step) => self.begin(step, StepEntry::Barrier),
            Input::GradientReady(tensor, step) => self.gradient_ready(tensor, step),
            Input::TensorAbsent(tensor, step) => self.tensor_absent(tensor, step),
            Input::BlockReady(tensor, step, bytes) => self.block_ready(tensor, step, bytes),
            Input::RootResultReady(tensor, step, bytes) => {
                self.root_result_ready(tensor, step, bytes)
            }
            Input::ReleaseBlocks(tensor, step) => self.release_blocks(tensor, step),
            Input::TensorNeeded(tensor, step) => self.tensor_needed(tensor, step),
            Input::SendRaw(step) => self.send_raw(step),
            Input::StepEnd(step) => self.step_end(step),
            Input::SwitchPriorities(priorities) => self.switch_priorities(priorities),
            Input::UpdatesReady => {
                self.updates_ready();
                Ok(())
            }
            Input::UpdatesPaused => {
                self.updates_paused();
                Ok(())
            }
            Input::Finish => {
                self.finish();
                Ok(())
            }
        }
    }

    pub(crate) fn begin(&mut self, step: Step, entry: StepEntry) -> Result<(), UsageError> {
        if self.is_dedicated_server() {
            let what = format!("{} only serves: it begins no step", self.rank());
            return Err(UsageError::Argument(what));
        }
        self.lifecycle.check_open()?;
        let expected = if self.worker.begun { self.worker.step.next() } else { self.worker.step };
        if step != expected {
            return Err(UsageError::WrongStep { call: "step_begin", step, current: expected });
        }
        if self.worker.begun {
            self.check_complete(step)?;
            self.worker.enter(&self.plan, step);
        }
        if self.drops_stragglers(step) {
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
        self.on_step_begun(step, entry);
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

    /// The application has ended the step (`optimizer.step()`): with updates on the server,
    /// parameters may be written from now on.
    ///
    /// # Errors
    /// For another step than the current one, or an ended session.
    pub(crate) fn step_end(&mut self, step: Step) -> Result<(), UsageError> {
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

    /// The socket to a peer can, or cannot, take more without queueing in the kernel.
    pub fn handle_writable(&mut self, peer: Rank, writable: bool) {
        self.scheduler.set_writable(peer, writable);
    }

    /// Frames to a peer have at most so many bytes of payload from now on, not what the options say:
    /// more on a connection that is so fast that an urgent slice hardly waits longer for it.
    pub fn handle_frame_bytes(&mut self, peer: Rank, frame_bytes: u32) {
        self.scheduler.set_frame_bytes(peer, frame_bytes.clamp(1, MAX_FRAME_BYTES));
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
                FrameKind::RingScale | FrameKind::RingReduce | FrameKind::RingBroadcast => {
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
        // Whether a rank that only serves waits is looked at when the time has come.
        let waits = self.is_dedicated_server() || self.worker.waits_for_others();
        let deadline = waits.then(|| self.lifecycle.deadline(self.progress_timeout()));
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
        if self.drops_stragglers(step) && rank == self.rank() && step == self.worker.step {
            return self.may_contribute(step);
        }
        if step.0 > 0 {
            self.plan.trains(rank)
        } else {
            rank == Rank(0)
        }
    }

    /// How many ranks contribute to a step.
    pub(crate) fn contributors(&self, step: Step) -> u32 {
        if step.0 == 0 {
            1
        } else {
            self.plan.workers()
        }
    }

    pub(crate) fn updates_on_server(&self, step: Step) -> bool {
        self.plan.update == Update::Server && step.0 > 0
    }
}
