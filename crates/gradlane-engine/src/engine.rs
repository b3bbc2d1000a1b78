//! The engine: routes the driver's calls to components, and puts together what concerns several of them. The schemes move tensors (`schemes`), the session begins and ends
//! (`session`), and everything that they share is in `cx`.

mod lanes;
mod lost_ranks;

use crate::api::{
    EngineOptions, Event, Failure, Input, Job, JobId, Operation, Outstanding, PayloadDest,
    ProtocolError, QueueStats, Transmit, UsageError,
};
use crate::buffers::BufferTable;
use crate::clock::Clock;
use crate::cx::Cx;
use crate::engine::lanes::Lanes;
use crate::gather;
use crate::gradient_norm::Squares;
use crate::jobs::{Done, JobQueue, Running, Task, Then, Written};
use crate::kept_results::KeptResults;
use crate::membership::Membership;
use crate::plan::Plan;
use crate::ps::{lacks_initial, StepEntry};
use crate::schemes::Schemes;
use crate::session::{Blame, Changes, PrioritySwitch, Session, REASON_BYTES_MAX};
use crate::transmit::{EncodeQueue, OrderKey, OrderKeys, PendingEncode, PriorityTable, Scheduler};
use crate::violation::{violation, Validated};
use crate::worker::{Submission, Worker};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SquareSum, Step, TensorId, Time};
use gradlane_wire::{escaped, FrameFlags, FrameHeader, FrameKind, PayloadForm, MAX_FRAME_BYTES};

/// One rank's communication engine.
#[derive(Debug)]
pub struct Engine {
    cx: Cx,
    schemes: Schemes,
    session: Session,
    switch: PrioritySwitch,
    /// Agreement on who goes on, where training does when ranks are lost and this lane leads.
    membership: Option<Membership>,
    changes: Changes,
    lanes: Lanes,
    options: EngineOptions,
}

impl Engine {
    /// An engine before step 0. No peer is writable yet.
    ///
    /// # Panics
    /// When the rank is outside the plan's world.
    #[must_use]
    pub fn new(mut options: EngineOptions, plan: Arc<Plan>) -> Engine {
        let rank = options.rank;
        assert!(rank.0 < plan.world_size, "{rank} is outside the plan's world");
        let frame_bytes = options.frame_bytes.clamp(1, MAX_FRAME_BYTES);
        if plan.dedicated_servers > 0 && plan.trains(rank) {
            // Dedicated servers know best which rank is missing: they are to be the first to say so.
            let timeout = &mut options.progress_timeout;
            *timeout = timeout.saturating_add(*timeout / 4);
        }
        let membership = options.going_on.clone().map(|going_on| {
            let refused = plan.check_goes_on();
            assert!(refused.is_ok(), "{refused:?}");
            Membership::new(rank, plan.world_size, going_on)
        });
        let kept = membership.as_ref().map(|_| KeptResults::new(&plan)).unwrap_or_default();
        let membership = membership.filter(|_| plan.lane == 0);
        Engine {
            schemes: Schemes::new(&plan, rank),
            session: Session::new(&plan, rank),
            switch: PrioritySwitch::default(),
            membership,
            changes: Changes::default(),
            lanes: Lanes::default(),
            cx: Cx {
                rank,
                generation: options.generation,
                clock: Clock::new(),
                priorities: PriorityTable::new(plan.tensors.len()),
                keys: OrderKeys::new(plan.strategy.order),
                tx: Scheduler::new(rank, plan.world_size, frame_bytes, options.credit_bytes),
                encodes: EncodeQueue::new(rank, options.encoded_ahead),
                jobs: JobQueue::new(options.job_depth.max(1)),
                buffers: BufferTable::default(),
                events: VecDeque::new(),
                worker: Worker::new(&plan),
                squares: Squares::default(),
                kept,
                settled: BTreeSet::new(),
                spread_by: BTreeMap::new(),
                abort: None,
                plan,
            },
            options,
        }
    }

    /// An engine after step 0, with a priority vector in force from the beginning: for clusters in
    /// virtual time, whose ranks have no values to broadcast.
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
        engine.cx.priorities = PriorityTable::with(priorities);
        engine.cx.worker.skip_initial();
        engine.schemes.ps.skip_initial(&mut engine.cx);
        engine
    }

    /// Goes on as if `step` were the one that has just been completed, and as if as many messages
    /// had been queued and jobs been done: for tests of numbers after a year of steps. All ranks have
    /// to go on to the same step, when nothing is under way.
    ///
    /// # Panics
    /// When a step is not complete, or this one is not a later one.
    #[doc(hidden)]
    pub fn fast_forward(&mut self, step: Step) {
        self.cx.worker.fast_forward(step);
        self.cx.keys.fast_forward(step.0);
        self.cx.jobs.fast_forward(step.0);
        self.schemes.ps.fast_forward(&self.cx.plan, step);
        self.schemes.ring.fast_forward(step);
    }

    // The application's calls.

    /// Takes a call of the application.
    ///
    /// # Errors
    /// When the call does not fit the current step, the plan or the session's state. Nothing was
    /// changed then.
    pub fn handle(&mut self, input: Input) -> Result<(), UsageError> {
        let taken = self.take_input(input);
        self.end_if_aborted();
        taken
    }

    fn take_input(&mut self, input: Input) -> Result<(), UsageError> {
        match input {
            Input::StepBegin(step) => self.begin(step, StepEntry::Train),
            Input::StepPass(step) => self.pass(step),
            Input::StepBarrier(step) => self.begin(step, StepEntry::Barrier),
            Input::GradientReady(tensor, step) => {
                self.check_call(tensor, step, "gradient_ready")?;
                self.check_gradient(tensor)?;
                self.submit(tensor, step, Submission::Gradient)
            }
            Input::TensorAbsent(tensor, step) => {
                self.check_call(tensor, step, "tensor_absent")?;
                self.submit(tensor, step, Submission::Absent)
            }
            Input::BlockReady(tensor, step, bytes) => {
                self.check_call(tensor, step, "block_ready")?;
                gather::check_bytes(&self.cx.plan, tensor, bytes)?;
                if self.cx.worker.submission(tensor) == Submission::Missing {
                    self.schemes.gather.set_own(tensor, step, bytes);
                }
                self.submit(tensor, step, Submission::Gradient)
            }
            Input::RootResultReady(tensor, step, bytes) => {
                self.check_call(tensor, step, "root_result_ready")?;
                gather::check_bytes(&self.cx.plan, tensor, bytes)?;
                self.schemes.gather.send_result(&mut self.cx, tensor, step, bytes)
            }
            Input::ReleaseBlocks(tensor, step) => {
                self.schemes.gather.release(&mut self.cx, tensor, step)
            }
            Input::TensorNeeded(tensor, step) => {
                self.check_call(tensor, step, "tensor_needed")?;
                if self.cx.worker.has_submitted_all() {
                    self.schemes.ps.pull_deferred(&mut self.cx);
                }
                Ok(())
            }
            Input::SendRaw(step) => self.send_raw(step),
            Input::MeasureSquares(tensors, step) => {
                self.check_step("measure_squares", step)?;
                self.cx.measure_squares(step, tensors)
            }
            Input::StepEnd(step) => self.end_step(step),
            Input::SwitchPriorities(priorities) => {
                self.session.check_open()?;
                if self.changes.are_under_way() {
                    // The order of sending alone would change.
                    return Ok(());
                }
                self.switch.announce(&mut self.cx, priorities)
            }
            Input::ClaimAnswered(generation, value) => {
                self.claim_answered(generation, value.as_deref());
                Ok(())
            }
            Input::UpdatesReady => {
                self.schemes.ps.updates_ready(&mut self.cx);
                Ok(())
            }
            Input::UpdatesPaused => {
                self.schemes.ps.updates_paused();
                Ok(())
            }
            Input::ServerCommand(command) => {
                self.session.check_open()?;
                self.schemes.ps.send_command(&mut self.cx, command)
            }
            Input::Told(news) => {
                self.take_news(news);
                Ok(())
            }
            Input::Finish => {
                self.finish();
                Ok(())
            }
        }
    }

    fn begin(&mut self, step: Step, entry: StepEntry) -> Result<(), UsageError> {
        if self.cx.is_dedicated_server() {
            let what = format!("{} only serves: it begins no step", self.cx.rank);
            return Err(UsageError::Argument(what));
        }
        self.session.check_open()?;
        let expected = self.cx.worker.next_step();
        if step != expected {
            return Err(UsageError::WrongStep { call: "step_begin", step, current: expected });
        }
        self.check_complete(step)?;
        self.cx.worker.begin(&self.cx.plan);
        self.cx.settled.clear();
        self.cx.squares.enter(step);
        self.cx.clock.progressed();
        self.cx.enter_priorities(step);
        self.check_departed();
        if self.cx.worker.is_complete() {
            self.cx.events.push_back(Event::StepComplete { step });
        }
        self.schemes.ps.on_step_begun(&mut self.cx, step, entry);
        Ok(())
    }

    fn pass(&mut self, step: Step) -> Result<(), UsageError> {
        if !self.schemes.ps.may_pass(&self.cx, step) {
            let what = format!("{step} cannot be passed: only a rank that was left out may");
            return Err(UsageError::Argument(what));
        }
        let decided = self.schemes.ps.is_decided(step);
        self.begin(step, StepEntry::Pass)?;
        if decided {
            self.schemes.ps.note_passed(&mut self.cx, step);
        }
        Ok(())
    }

    /// A step begins after the one before is complete.
    fn check_complete(&self, step: Step) -> Result<(), UsageError> {
        let worker = &self.cx.worker;
        if !worker.has_begun() || worker.is_complete() {
            return Ok(());
        }
        let name = self.outstanding().tensors.into_iter().next().unwrap_or_default();
        let (current, missing) = (worker.step(), worker.incomplete());
        Err(UsageError::Incomplete { step, current, missing, name })
    }

    fn check_step(&self, call: &'static str, step: Step) -> Result<(), UsageError> {
        self.session.check_open()?;
        if self.cx.worker.is_in(step) {
            return Ok(());
        }
        Err(UsageError::WrongStep { call, step, current: self.cx.worker.step() })
    }

    fn check_call(
        &self,
        tensor: TensorId,
        step: Step,
        call: &'static str,
    ) -> Result<(), UsageError> {
        self.session.check_open()?;
        let count = self.cx.plan.tensors.len();
        if tensor.index() >= count {
            return Err(UsageError::UnknownTensor { tensor: tensor.0, count });
        }
        self.check_step(call, step)
    }

    fn check_gradient(&self, tensor: TensorId) -> Result<(), UsageError> {
        let planned = self.cx.plan.tensor(tensor);
        if !planned.scheme.has_blocks() {
            return Ok(());
        }
        let name = &planned.spec.name;
        let message = format!("tensor {name:?} has blocks of any size: use block_ready");
        Err(UsageError::Argument(message))
    }

    /// Takes this rank's submission of a tensor, and sends its contributions.
    fn submit(
        &mut self,
        tensor: TensorId,
        step: Step,
        submission: Submission,
    ) -> Result<(), UsageError> {
        let plan = &self.cx.plan;
        let name = &plan.tensor(tensor).spec.name;
        if !plan.takes_part(tensor, step) {
            let message = format!("tensor {name:?} is not trained: it has no gradient in {step}");
            return Err(UsageError::Argument(message));
        }
        if lacks_initial(plan, step, self.cx.rank, submission == Submission::Absent) {
            let message = format!("tensor {name:?} has no value to start from, which updates need");
            return Err(UsageError::Argument(message));
        }
        if self.cx.worker.submission(tensor) != Submission::Missing {
            return Err(UsageError::Twice { name: name.clone(), step });
        }
        self.cx.worker.submit(tensor, submission);
        self.cx.check_squares_are_wanted();
        self.cx.clock.progressed();
        // While a membership changes, contributions wait for it.
        if !self.changes.drop_slices() && !self.switch.holds(step, tensor) {
            self.contribute(tensor);
        }
        self.schemes.ps.on_submitted(&mut self.cx, tensor);
        Ok(())
    }

    fn contribute(&mut self, tensor: TensorId) {
        let scheme = self.cx.plan.tensor(tensor).scheme;
        self.schemes.of(scheme).contribute(&mut self.cx, tensor);
    }

    fn send_raw(&mut self, step: Step) -> Result<(), UsageError> {
        self.check_step("send_raw", step)?;
        if self.cx.worker.has_submitted() {
            let text = "send_raw comes before the step's first contribution";
            return Err(UsageError::Argument(text.into()));
        }
        self.cx.worker.send_raw();
        Ok(())
    }

    fn end_step(&mut self, step: Step) -> Result<(), UsageError> {
        self.check_step("step_end", step)?;
        if self.cx.worker.end() {
            for slice in self.cx.plan.slice_ids() {
                self.cx.install_if_open(slice);
            }
        }
        Ok(())
    }

    // Frames.

    /// A verified header has arrived from a peer: where does its payload go?
    ///
    /// # Errors
    /// When no correct peer would send this frame now. The session must end then.
    pub fn handle_header(
        &mut self,
        from: Rank,
        header: &FrameHeader,
    ) -> Result<PayloadDest, ProtocolError> {
        self.land(from, header).map_err(|what| ProtocolError { peer: from, what: what.0 })
    }

    fn land(&mut self, from: Rank, header: &FrameHeader) -> Validated<PayloadDest> {
        self.cx.check_sender(from, header)?;
        if self.drops(from, header.kind) {
            return Ok(PayloadDest::Control);
        }
        if header.kind.is_about_steps() {
            self.schemes.ps.check_control(&self.cx, from, header)?;
            return Ok(PayloadDest::Control);
        }
        if header.kind == FrameKind::ServerCommand {
            self.schemes.ps.check_command(&self.cx, from, header)?;
            return Ok(PayloadDest::Control);
        }
        if header.kind.is_control() {
            self.cx.check_control(header)?;
            return Ok(PayloadDest::Control);
        }
        self.cx.check_slice(&self.session, from, header)?;
        let scheme = self.cx.plan.tensor(header.tensor).scheme;
        let aggregator = self.schemes.of(scheme);
        if !aggregator.takes(header.kind) {
            let (what, scheme) = (self.cx.describe(header), scheme.name());
            return violation(format!("{what}, a tensor of scheme {scheme}"));
        }
        aggregator.check(&self.cx, from, header)?;
        aggregator.land(&mut self.cx, from, header)
    }

    /// Whether a frame is of a membership that is over, or of a rank that is in none.
    fn drops(&self, from: Rank, kind: FrameKind) -> bool {
        self.cx.plan.lost.contains(from) || (self.changes.drop_slices() && !kind.is_control())
    }

    /// The payload of the frame announced last by this peer is in place and its checksum is right.
    ///
    /// # Errors
    /// When no correct peer would send this frame now.
    pub fn handle_frame(&mut self, from: Rank, header: &FrameHeader) -> Result<(), ProtocolError> {
        if self.session.has_ended() {
            return Ok(());
        }
        if header.kind.is_control() {
            let what = format!("{:?} is a control frame", header.kind);
            return Err(ProtocolError { peer: from, what });
        }
        if self.drops(from, header.kind) {
            return Ok(());
        }
        self.cx.clock.progressed();
        let scheme = self.cx.plan.tensor(header.tensor).scheme;
        self.schemes.of(scheme).take(&mut self.cx, from, header);
        self.settle();
        Ok(())
    }

    /// A control frame and its payload have arrived.
    ///
    /// # Errors
    /// When the payload makes no sense.
    pub fn handle_control(
        &mut self,
        from: Rank,
        header: &FrameHeader,
        payload: &[u8],
    ) -> Result<(), ProtocolError> {
        let taken = self.take_control(from, header, payload);
        self.settle();
        taken.map_err(|what| ProtocolError { peer: from, what: what.0 })
    }

    fn take_control(&mut self, from: Rank, header: &FrameHeader, payload: &[u8]) -> Validated<()> {
        if self.drops(from, header.kind) {
            return Ok(());
        }
        match header.kind {
            FrameKind::Membership | FrameKind::Holdings | FrameKind::Resumed => {
                self.take_change(from, header, payload)
            }
            // They are taken up anew from what all ranks have.
            FrameKind::PlanSwitch | FrameKind::PlanSwitchAck if self.changes.drop_slices() => {
                Ok(())
            }
            kind if kind.is_about_steps() && self.session.has_ended() => Ok(()),
            kind if kind.is_about_steps() => {
                self.schemes.ps.take_control(&mut self.cx, from, header, payload)
            }
            FrameKind::PlanSwitch => PrioritySwitch::take(&mut self.cx, from, header, payload),
            FrameKind::PlanSwitchAck => {
                let held = self.switch.take_ack(from, header)?;
                held.into_iter().for_each(|tensor| self.contribute(tensor));
                Ok(())
            }
            FrameKind::Goodbye => {
                self.session.depart(from, header.step);
                self.leave_the_lost();
                self.check_departed();
                Ok(())
            }
            FrameKind::Abort => {
                self.peer_aborted(from, payload);
                Ok(())
            }
            FrameKind::ServerCommand => {
                self.schemes.ps.take_command(from, header);
                Ok(())
            }
            FrameKind::SquareSum if self.session.has_ended() => Ok(()),
            FrameKind::SquareSum => self.cx.take_squares(from, header, payload),
            FrameKind::Suspect => self.session.take_suspicion(&mut self.cx, from, payload),
            _ => Ok(()),
        }
    }

    /// The socket to a peer can, or cannot, take more without queueing in the kernel.
    pub fn handle_writable(&mut self, peer: Rank, writable: bool) {
        self.cx.tx.set_writable(peer, writable);
    }

    /// Frames to a peer have at most this many bytes of payload from now on, whatever the options say:
    /// more on a connection that is so fast that an urgent slice hardly waits longer for it.
    pub fn handle_frame_bytes(&mut self, peer: Rank, frame_bytes: u32) {
        self.cx.tx.set_frame_bytes(peer, frame_bytes.clamp(1, MAX_FRAME_BYTES));
    }

    /// The kernel has a whole frame that `poll_transmit` gave out.
    pub fn handle_sent(&mut self, transmit: &Transmit) {
        if self.session.has_lost(transmit.peer) && self.goes_on() {
            return;
        }
        self.cx.tx.sent(transmit);
        let header = &transmit.header;
        let last = header.flags.contains(FrameFlags::LAST);
        if last && !header.kind.is_control() && !self.session.has_ended() {
            let scheme = self.cx.plan.tensor(header.tensor).scheme;
            self.schemes.of(scheme).sent(&mut self.cx, transmit.peer, header);
        }
        self.settle();
    }

    /// The next frame to send: the most urgent one whose peer can take it.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.cx.tx.poll()
    }

    // Jobs.

    /// The next job for the driver's threads, most urgent first.
    pub fn poll_job(&mut self) -> Option<Job> {
        if self.session.has_ended() || self.cx.jobs.is_full() {
            return None;
        }
        let encode = self.cx.encodes.first();
        if encode.is_some_and(|key| self.cx.jobs.first().is_none_or(|other| key < other)) {
            let (key, pending) = self.cx.encodes.pop()?;
            return Some(self.start_encode(key, pending));
        }
        let job = self.cx.jobs.pop()?;
        let (slice, step) = (job.slice, job.step);
        Some(match job.task {
            Task::Install(buffer) => self.cx.start_install(slice, step, buffer),
            Task::AddSquares => self.cx.start_squares(slice, step),
            Task::Ps(task) => self.schemes.ps.start(&mut self.cx, slice, step, task),
            Task::Ring(task) => self.schemes.ring.start(&mut self.cx, slice, step, task),
        })
    }

    /// A contribution that is to be encoded takes its turn.
    fn start_encode(&mut self, key: OrderKey, pending: PendingEncode) -> Job {
        let PendingEncode { slice, step } = pending;
        let buffer = self.cx.buffers.acquire(self.cx.plan.bytes_as(slice, PayloadForm::Encoded));
        let input = self.cx.gradient_region(slice);
        let operation = Operation::Encode { input, output: buffer.whole() };
        let then = Then::Wrote(buffer, Written::Contribution(key));
        self.cx.start(operation, Running { slice, step, spent: Vec::new(), then })
    }

    /// The driver has done a job.
    ///
    /// # Panics
    /// When the job was never handed out or is reported twice.
    pub fn handle_job_done(&mut self, id: JobId) {
        self.finish_job(id, None, None);
    }

    /// The driver has done a job whose output is an encoding of this many bytes. Where all are equally
    /// long, [`Engine::handle_job_done`] says the same.
    ///
    /// # Panics
    /// As [`Engine::handle_job_done`]; when there is no room for as many bytes.
    pub fn handle_encoded(&mut self, id: JobId, bytes: u64) {
        self.finish_job(id, Some(bytes), None);
    }

    /// The driver has added up squares ([`Operation::AddSquares`]); reported with
    /// [`Engine::handle_job_done`], they count nothing.
    ///
    /// # Panics
    /// As [`Engine::handle_job_done`].
    pub fn handle_squares(&mut self, id: JobId, sum: &SquareSum) {
        self.finish_job(id, None, Some(sum));
    }

    fn finish_job(&mut self, id: JobId, bytes: Option<u64>, squares: Option<&SquareSum>) {
        let running = self.cx.jobs.finish(id);
        let running = running.expect("a job is reported once, after it was handed out");
        if self.session.has_ended() {
            return;
        }
        self.cx.clock.progressed();
        let Running { slice, step, spent, then } = running;
        spent.into_iter().for_each(|buffer| self.cx.release(buffer));
        match then {
            Then::Installed => self.cx.slice_done(slice, true),
            Then::AddedSquares => {
                self.cx.add_squares(squares);
                self.cx.finish_slice(slice, true);
            }
            Then::Wrote(output, written) => {
                let done = Done { slice, step, output: output.fitted(bytes) };
                self.job_wrote(done, written);
            }
        }
        self.settle();
    }

    fn job_wrote(&mut self, done: Done, written: Written) {
        match written {
            Written::Contribution(key) => {
                let Done { slice, step, output } = done;
                self.cx.keep_contribution(slice, step, output);
                if self.changes.drop_slices() {
                    return self.cx.release(output);
                }
                let pending = PendingEncode { slice, step };
                let scheme = self.cx.plan.scheme_of(slice);
                self.schemes.of(scheme).encoded(&mut self.cx, pending, key, output);
            }
            Written::Ps(written) => self.schemes.ps.job_done(&mut self.cx, done, written),
            Written::Ring(written) => self.schemes.ring.job_done(&mut self.cx, done, written),
        }
    }

    // Events and time.

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.cx.events.pop_front()?;
        if let Event::BufferFree(buffer) = event {
            self.cx.buffers.recycle(buffer);
        }
        Some(event)
    }

    /// When [`Engine::handle_time`] wants to be called at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        if self.session.has_ended() {
            return None;
        }
        // Whether a dedicated server waits is looked at when the time has come.
        let waits = self.cx.is_dedicated_server() || self.waits_for_others();
        let deadline = waits.then(|| self.cx.clock.deadline(self.options.progress_timeout));
        let agreement = self.membership.as_ref().and_then(Membership::poll_timeout);
        let lanes = self.lanes.poll_timeout();
        self.decision_timeout().into_iter().chain(deadline).chain(agreement).chain(lanes).min()
    }

    /// When rank 0 wants [`Engine::handle_time`] to look again at the progress of the ranks.
    #[must_use]
    pub fn decision_timeout(&self) -> Option<Time> {
        self.schemes.ps.decision_timeout()
    }

    /// It is `now`. Without progress for the progress timeout the session fails, naming the ranks
    /// that are missing.
    pub fn handle_time(&mut self, now: Time) {
        self.cx.clock.advance(now);
        if self.session.has_ended() {
            return;
        }
        self.tell_membership_time();
        self.tell_lanes_time();
        let now = self.cx.clock.now();
        if self.decision_timeout().is_some_and(|due| due <= now) {
            self.schemes.ps.decide(&mut self.cx);
            self.end_if_aborted();
        }
        let timeout = self.options.progress_timeout;
        if now < self.cx.clock.deadline(timeout) || self.session.has_ended() {
            return;
        }
        if self.waits_for_others() {
            let outstanding = self.outstanding();
            let ranks: Vec<String> = outstanding.ranks.iter().map(|it| it.to_string()).collect();
            let reason = format!(
                "no progress for {} s: waiting for {}, connected but not taking part (if it evaluates, \
                 saves or loads for longer than that: progress_timeout_s, on all ranks)",
                timeout.as_secs_f64(),
                ranks.join(", ")
            );
            let culprit = outstanding.ranks.first().copied();
            self.fail(culprit.map_or(Blame::Nobody, Blame::Rank), &reason, true);
        } else if self.cx.is_dedicated_server() {
            // The ranks that train are between two steps.
            self.cx.clock.progressed();
        }
    }

    /// Whether this rank has done its part and waits for others.
    fn waits_for_others(&self) -> bool {
        if self.cx.is_dedicated_server() {
            self.schemes.ps.is_collecting()
        } else {
            // The first lane knows which ranks a decision waits for.
            let decides_elsewhere = self.cx.plan.lane > 0 && self.schemes.ps.is_undecided(&self.cx);
            self.cx.worker.waits_for_others() && !decides_elsewhere
        }
    }

    // The end of the session.

    /// After a call: ends the session where a component cannot go on, or says goodbye.
    fn settle(&mut self) {
        self.end_if_aborted();
        self.advance_change();
        self.send_goodbye_when_done();
    }

    fn end_if_aborted(&mut self) {
        if let Some(reason) = self.cx.abort.take() {
            self.abort(&reason);
        }
    }

    /// There will be no more steps: sends what is owed, then goodbye. In the middle of a step that
    /// this rank has not finished contributing to, this is an abort.
    fn finish(&mut self) {
        let begun = self.cx.worker.has_begun();
        if self.session.check_open().is_ok() && begun && !self.cx.worker.has_submitted_all() {
            let (rank, step) = (self.cx.rank, self.cx.worker.step());
            self.abort(&format!("{rank} closed its session in the middle of {step}"));
        } else if self.session.finish() {
            if begun {
                self.schemes.ps.pull_deferred(&mut self.cx);
            }
            self.send_goodbye_when_done();
        }
    }

    /// While leaving: says goodbye once nothing is owed, and reports when all ranks have.
    fn send_goodbye_when_done(&mut self) {
        if !self.session.is_leaving() || self.changes.are_under_way() {
            return;
        }
        let complete = !self.cx.worker.has_begun() || self.cx.worker.is_complete();
        let idle = self.cx.tx.is_idle()
            && self.cx.jobs.is_idle()
            && self.cx.encodes.is_idle()
            && self.schemes.ps.has_delivered_all();
        // In asynchronous training a goodbye says that this rank pushes no more; it serves the others
        // until they have said the same.
        let may = self.may_leave() && self.lanes_let_leave();
        if !complete || !may || !(idle || self.session.serves_to_the_end()) {
            return;
        }
        let last_step = self.last_step();
        self.session.send_goodbye(&mut self.cx, last_step);
        if let Some(membership) = &mut self.membership {
            membership.note_goodbye();
        }
        let all_left = self.session.have_departed(self.cx.others().iter());
        let idle = idle && self.cx.tx.is_idle() && self.schemes.ps.has_replied_to_all();
        if all_left && idle {
            self.leave();
        }
    }

    /// All have left: nothing is kept for them any more.
    fn close(&mut self) {
        self.schemes.ps.drop_states(&mut self.cx);
        self.cx.kept.clear().into_iter().for_each(|buffer| self.cx.release(buffer));
        self.session.close(&mut self.cx);
    }

    /// Whether this rank may leave: a dedicated server, not before all that train have left.
    fn may_leave(&self) -> bool {
        let workers = (0..self.cx.plan.workers()).map(Rank);
        !self.cx.is_dedicated_server() || self.session.have_departed(workers)
    }

    /// The last step that this rank takes part in, as its goodbye says: a dedicated server's is that of
    /// all that train.
    fn last_step(&self) -> Step {
        if self.cx.is_dedicated_server() {
            self.session.last_departed()
        } else {
            self.cx.worker.last_complete().unwrap_or_default()
        }
    }

    /// Fails when a rank that has left is needed for the current step.
    fn check_departed(&mut self) {
        let worker = &self.cx.worker;
        let complete = !worker.has_begun() || worker.is_complete();
        if self.session.has_ended() || complete || self.session.serves_to_the_end() {
            return;
        }
        let step = worker.step();
        if let Some((peer, last)) = self.session.departed_before(step) {
            let reason = format!(
                "{peer} left in good order after {last}, but {step} needs it: do all ranks run \
                 the same number of steps?"
            );
            self.fail(Blame::Rank(peer), &reason, false);
        }
    }

    /// The connection to a peer is gone: closed, reset, or silent for too long. After the peer's
    /// goodbye that is in order.
    pub fn handle_peer_lost(&mut self, peer: Rank, reason: &str) {
        self.cx.tx.set_writable(peer, false);
        if self.goes_on() {
            self.lose_connection(peer, reason);
        } else if self.session.lose(peer) {
            let reason = format!("{peer} was lost: {reason}");
            self.fail(Blame::Rank(peer), &reason, false);
        }
    }

    /// Nothing was heard of a peer for too long: asks the other ranks whether they hear it. Returns
    /// whether there is a rank to ask.
    pub fn suspect(&mut self, peer: Rank) -> bool {
        self.session.suspect(&mut self.cx, peer)
    }

    /// A peer hears nothing of another one, and this rank hears both: the session fails on all ranks
    /// with the same words.
    pub fn blame_link(&mut self, one: Rank, other: Rank) {
        if self.goes_on() {
            // The ranks collect what each has lost, and agree on who leaves.
            return;
        }
        let (first, second) = (one.min(other), one.max(other));
        let reason = format!(
            "the link between {first} and {second} is cut: one hears nothing of the other, and \
             another rank hears both; check the network between their hosts"
        );
        self.fail(Blame::Link, &reason, false);
    }

    /// Gives up and tells the other ranks why.
    pub fn abort(&mut self, reason: &str) {
        self.fail(Blame::Nobody, reason, false);
    }

    /// A peer broke the protocol or sent a payload with a wrong checksum: the session fails, naming
    /// it. Where training goes on without lost ranks, either of the two may be at fault: their link is cut, and the
    /// ranks agree on who leaves.
    pub fn reject_peer(&mut self, peer: Rank, reason: &str) {
        if self.goes_on() {
            return self.drop_peer(peer, reason);
        }
        self.fail(Blame::Rank(peer), reason, false);
    }

    fn peer_aborted(&mut self, peer: Rank, payload: &[u8]) {
        let (blame, text) = Blame::read(&self.cx.plan, payload);
        if self.goes_on() && blame != Blame::All {
            return self.part_with(peer, &text);
        }
        match blame {
            Blame::Link | Blame::All => self.fail(blame, &text, false),
            // A rank that was given up, and goes on, is told so as well.
            Blame::Rank(culprit) if culprit != peer => {
                self.fail(blame, &format!("{text} (reported by {peer})"), false);
            }
            _ => self.fail(Blame::Rank(peer), &format!("{peer} gave up: {text}"), false),
        }
    }

    /// Ends the session once: drops all queues, tells the other ranks, reports.
    fn fail(&mut self, blame: Blame, reason: &str, timed_out: bool) {
        if self.session.is_over() {
            return;
        }
        // Parts of it come from other ranks and their programs, and it is printed on all.
        let reason = escaped(reason.as_bytes(), REASON_BYTES_MAX);
        let failure = Failure {
            peer: blame.rank(),
            notice: blame.payload(&reason),
            reason,
            outstanding: self.outstanding(),
            last_complete: self.last_complete(),
            timed_out,
        };
        self.session.fail(&mut self.cx, &failure);
        self.cx.events.push_back(Event::Failed(failure));
    }

    /// Another lane of this rank has failed: this one tells its peers the same, and ends without an event.
    pub fn end_as(&mut self, failure: &Failure) {
        if !self.session.is_over() {
            self.session.fail(&mut self.cx, failure);
        }
    }

    /// The last step that is behind this rank.
    fn last_complete(&self) -> Option<Step> {
        if self.cx.is_dedicated_server() {
            self.schemes.ps.last_served(&self.cx.plan)
        } else {
            self.cx.worker.last_complete()
        }
    }

    // Views.

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.cx.plan
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.cx.rank
    }

    /// Number of scratch buffers in use.
    #[must_use]
    pub fn buffers_in_use(&self) -> usize {
        self.cx.buffers.in_use()
    }

    /// Sizes of all queues. Takes time in proportion to their lengths.
    #[must_use]
    pub fn queue_stats(&self) -> QueueStats {
        QueueStats { peers: self.cx.tx.queue_stats(), jobs: self.cx.jobs.queued() as u64 }
    }

    /// Tensors, bytes and ranks that this rank waits for in the current step.
    #[must_use]
    pub fn outstanding(&self) -> Outstanding {
        let Cx { plan, worker, .. } = &self.cx;
        if self.cx.is_dedicated_server() {
            return self.schemes.ps.uncollected(&self.cx);
        }
        let step = worker.step();
        let mut outstanding = Outstanding { step, ..Outstanding::default() };
        if !worker.has_begun() {
            return outstanding;
        }
        let pending =
            |tensor: &TensorId| worker.is_pending(*tensor) && plan.takes_part(*tensor, step);
        for tensor in plan.tensor_ids().filter(pending) {
            outstanding.add_tensor(&plan.tensor(tensor).spec.name);
            for slice in plan.slices_of(tensor).filter(|&slice| !worker.is_done(slice)) {
                outstanding.bytes += worker.missing_bytes(plan, slice);
            }
        }
        outstanding.ranks = self.schemes.missing(&self.cx).iter().collect();
        outstanding
    }
}

#[cfg(test)]
impl Engine {
    pub(crate) fn priorities_mut(&mut self) -> &mut PriorityTable {
        &mut self.cx.priorities
    }
}
