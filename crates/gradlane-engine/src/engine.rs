//! The engine: routes inputs to the rank's session (`control`) and to its data plane (`lane`).

use crate::api::{
    EngineOptions, Entry, Event, Input, Job, JobId, JobResult, Journal, Outstanding, PayloadDest,
    ProtocolError, QueueStats, Refusal, Transmit, UsageError,
};
use crate::control::{Control, StepEntry};
use crate::lane::Lane;
use crate::plan::Plan;
use crate::worker::Submission;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, Step, TensorId, Time};
use gradlane_wire::FrameHeader;

/// One rank's communication engine.
#[derive(Debug)]
pub struct Engine {
    control: Control,
    lane: Lane,
    journal: Option<Journal>,
}

impl Engine {
    /// An engine before step 0. No peer is writable yet.
    ///
    /// # Panics
    /// When the rank is outside the plan's world.
    #[must_use]
    pub fn new(options: EngineOptions, plan: Arc<Plan>) -> Engine {
        let rank = options.rank;
        assert!(rank.0 < plan.world_size, "{rank} is outside the plan's world");
        let lane = Lane::new(&options, plan);
        Engine { control: Control::new(options, lane.cx.plan()), lane, journal: None }
    }

    /// An engine before step 0 that keeps a journal.
    ///
    /// # Panics
    /// As [`Engine::new`].
    #[must_use]
    pub fn journaled(options: EngineOptions, plan: Arc<Plan>) -> Engine {
        let journal = Some(Journal::new(options.clone(), Arc::clone(&plan)));
        Engine { journal, ..Engine::new(options, plan) }
    }

    /// The journal so far, if one is kept; nothing is kept afterwards.
    pub fn take_journal(&mut self) -> Option<Journal> {
        self.journal.take()
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
        engine.lane.skip_initial(priorities);
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
        self.lane.fast_forward(step);
        self.control.fast_forward(step);
    }

    // Inputs.

    /// Takes an input. The answer to a header says where its payload goes.
    ///
    /// # Errors
    /// [`Refusal::Usage`] when a call does not fit the current step, the plan or the session's state; nothing was
    /// changed then. [`Refusal::Protocol`] when no correct peer would send this frame now; the session must end
    /// then.
    ///
    /// # Panics
    /// When a job was never handed out or is reported twice, or more bytes were sent or encoded than there are.
    pub fn handle(&mut self, input: Input) -> Result<PayloadDest, Refusal> {
        if self.journal.is_none() {
            return self.take(input);
        }
        let answer = self.take(input.clone());
        self.note(|| Entry::Input(input, answer.clone()));
        answer
    }

    fn take(&mut self, input: Input) -> Result<PayloadDest, Refusal> {
        let answer = match input {
            Input::Header(from, header) => return Ok(self.take_header(from, &header)?),
            Input::Frame(from, header) => self.take_frame(from, &header).map_err(Refusal::from),
            Input::Control(from, header, payload) => {
                let taken = self.control.take(&mut self.lane, from, &header, &payload);
                self.control.settle(&mut self.lane);
                taken.map_err(|what| what.by(from).into())
            }
            other => {
                let taken = self.take_input(other);
                self.control.end_if_aborted(&mut self.lane);
                taken.map_err(Refusal::from)
            }
        };
        answer.map(|()| PayloadDest::Nothing)
    }

    /// Takes an input that is never refused: what the driver notices of sockets, jobs, time and failures.
    ///
    /// # Panics
    /// When the input is refused all the same, and as [`Engine::handle`].
    pub fn tell(&mut self, input: Input) {
        if let Err(refusal) = self.handle(input) {
            panic!("an engine was told what it cannot take: {refusal}");
        }
    }

    fn take_input(&mut self, input: Input) -> Result<(), UsageError> {
        let Engine { control, lane, .. } = self;
        match input {
            Input::StepBegin(step) => return self.begin(step, StepEntry::Train),
            Input::StepPass(step) => return self.pass(step),
            Input::StepBarrier(step) => return self.begin(step, StepEntry::Barrier),
            Input::GradientReady(tensor, step) => {
                self.check_call(tensor, step, "gradient_ready")?;
                self.lane.submit_gradient(tensor, step)?;
                self.control.on_submitted(&mut self.lane, tensor, step);
            }
            Input::TensorAbsent(tensor, step) => {
                self.check_call(tensor, step, "tensor_absent")?;
                self.lane.submit(tensor, step, Submission::Absent)?;
                self.control.on_submitted(&mut self.lane, tensor, step);
            }
            Input::BlockReady(tensor, step, bytes) => {
                self.check_call(tensor, step, "block_ready")?;
                self.lane.submit_block(tensor, step, bytes)?;
                self.control.on_submitted(&mut self.lane, tensor, step);
            }
            Input::RootResultReady(tensor, step, bytes) => {
                self.check_call(tensor, step, "root_result_ready")?;
                self.lane.send_root_result(tensor, step, bytes)?;
                self.control.progressed();
            }
            Input::ReleaseBlocks(tensor, step) => return lane.release_blocks(tensor, step),
            Input::TensorNeeded(tensor, step) => {
                self.check_call(tensor, step, "tensor_needed")?;
                if self.lane.cx.worker().has_submitted_all() {
                    self.lane.pull_deferred();
                }
            }
            Input::SendRaw(step) => {
                control.check_open()?;
                lane.check_step("send_raw", step)?;
                lane.send_raw()?;
            }
            Input::MeasureSquares(tensors, step) => {
                control.check_open()?;
                lane.check_step("measure_squares", step)?;
                lane.cx.measure_squares(step, tensors)?;
            }
            Input::StepEnd(step) => {
                control.check_open()?;
                lane.check_step("step_end", step)?;
                lane.cx.end_step();
            }
            Input::SwitchPriorities(priorities) => {
                return control.switch_priorities(lane, priorities);
            }
            Input::ClaimAnswered(generation, value) => {
                control.claim_answered(lane, generation, value.as_deref());
            }
            Input::UpdatesReady => lane.updates_ready(),
            Input::UpdatesPaused => lane.updates_paused(),
            Input::ServerCommand(command) => {
                control.check_open()?;
                lane.send_command(command)?;
            }
            Input::Told(news) => control.take_news(lane, news),
            Input::Finish => control.finish(lane),
            Input::Writable(peer, writable) => lane.cx.set_writable(peer, writable),
            Input::FrameBytes(peer, frame_bytes) => lane.cx.set_frame_bytes(peer, frame_bytes),
            Input::Sent(peer, header) => {
                if control.counts_sent(peer) {
                    lane.cx.frame_sent(peer, &header);
                    control.settle(lane);
                }
            }
            Input::Read(peer, header) => {
                if control.counts_sent(peer) {
                    lane.cx.frame_read(peer);
                    if !header.kind.is_control() && !control.has_ended() {
                        lane.slice_read(peer, &header);
                    }
                    control.settle(lane);
                }
            }
            Input::JobDone(id, result) => self.finish_job(id, &result),
            Input::Time(now) => control.handle_time(lane, now),
            Input::PeerLost(peer, reason) => control.handle_peer_lost(lane, peer, &reason),
            Input::Suspect(peer) => return control.suspect(lane, peer),
            Input::BlameLink(one, other) => control.blame_link(lane, one, other),
            Input::RejectPeer(peer, reason) => control.reject_peer(lane, peer, &reason),
            Input::Abort(reason) => control.abort(lane, &reason),
            Input::EndAs(failure) => control.end_as(lane, &failure),
            Input::Header(..) | Input::Frame(..) | Input::Control(..) => {
                unreachable!("frames are taken apart from calls")
            }
        }
        Ok(())
    }

    fn begin(&mut self, step: Step, entry: StepEntry) -> Result<(), UsageError> {
        if self.lane.cx.is_dedicated_server() {
            let what = format!("{} only serves: it begins no step", self.rank());
            return Err(UsageError::Argument(what));
        }
        self.control.check_open()?;
        self.lane.check_begins(step)?;
        self.lane.cx.begin(step);
        self.control.on_step_begun(&mut self.lane, step, entry);
        Ok(())
    }

    fn pass(&mut self, step: Step) -> Result<(), UsageError> {
        if !self.lane.may_pass(step) {
            let what = format!("{step} cannot be passed: only a rank that was left out may");
            return Err(UsageError::Argument(what));
        }
        let decided = self.lane.is_decided(step);
        self.begin(step, StepEntry::Pass)?;
        if decided {
            self.control.note_passed(&mut self.lane, step);
        }
        Ok(())
    }

    fn check_call(
        &self,
        tensor: TensorId,
        step: Step,
        call: &'static str,
    ) -> Result<(), UsageError> {
        self.control.check_open()?;
        self.lane.check_call(tensor, step, call)
    }

    fn take_header(
        &mut self,
        from: Rank,
        header: &FrameHeader,
    ) -> Result<PayloadDest, ProtocolError> {
        let landed = match self.control.check(&self.lane, from, header) {
            // Frames on the way are not counted any more: the next one of a slice would seem out of order.
            Ok(true) if self.control.has_ended() => Ok(PayloadDest::Nothing),
            Ok(true) => self.lane.land(from, header),
            Ok(false) => Ok(PayloadDest::Control),
            Err(what) => Err(what),
        };
        landed.map_err(|what| what.by(from))
    }

    fn take_frame(&mut self, from: Rank, header: &FrameHeader) -> Result<(), ProtocolError> {
        if self.control.has_ended() {
            return Ok(());
        }
        if header.kind.is_control() {
            let what = format!("{:?} is a control frame", header.kind);
            return Err(ProtocolError { peer: from, what });
        }
        if !self.control.drops(&self.lane, from, header.kind) {
            self.control.progressed();
            self.lane.take(from, header);
            self.control.settle(&mut self.lane);
        }
        Ok(())
    }

    fn finish_job(&mut self, id: JobId, result: &JobResult) {
        let running = self.lane.cx.take_job(id);
        if self.control.has_ended() {
            return;
        }
        self.control.progressed();
        self.lane.finish_job(running, result, self.control.drops_slices());
        self.control.settle(&mut self.lane);
    }

    // What the engine decides.

    /// The next frame to send: the most urgent one whose peer can take it.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        let transmit = self.lane.cx.poll_transmit();
        self.note(|| Entry::Transmit(transmit.clone()));
        transmit
    }

    /// The next job for the driver's threads, most urgent first.
    pub fn poll_job(&mut self) -> Option<Job> {
        let job = if self.control.has_ended() { None } else { self.lane.poll_job() };
        self.note(|| Entry::Job(job.clone()));
        job
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.lane.cx.poll_event();
        self.note(|| Entry::Event(event.clone()));
        event
    }

    fn note(&mut self, entry: impl FnOnce() -> Entry) {
        if let Some(journal) = &mut self.journal {
            journal.note(entry());
        }
    }

    /// When [`Input::Time`] is wanted at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.control.poll_timeout(&self.lane)
    }

    /// When rank 0 wants [`Input::Time`] to look again at the progress of the ranks.
    #[must_use]
    pub fn decision_timeout(&self) -> Option<Time> {
        self.control.decision_timeout()
    }

    // Views.

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        self.lane.cx.plan()
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.lane.cx.rank()
    }

    /// Number of scratch buffers in use.
    #[must_use]
    pub fn buffers_in_use(&self) -> usize {
        self.lane.cx.buffers_in_use()
    }

    /// Sizes of all queues. Takes time in proportion to their lengths.
    #[must_use]
    pub fn queue_stats(&self) -> QueueStats {
        self.lane.cx.queue_stats()
    }

    /// Tensors, bytes and ranks that this rank waits for in the current step.
    #[must_use]
    pub fn outstanding(&self) -> Outstanding {
        self.control.outstanding(&self.lane)
    }
}

#[cfg(test)]
impl Engine {
    pub(crate) fn priorities_mut(&mut self) -> &mut crate::transmit::PriorityTable {
        self.lane.cx.priorities_mut()
    }
}
