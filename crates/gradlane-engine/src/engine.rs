//! The engine: routes the driver's calls to the rank's session (`control`) and to its data plane (`lane`).

use crate::api::{
    EngineOptions, Event, Failure, Input, Job, JobId, Outstanding, PayloadDest, ProtocolError,
    QueueStats, Transmit, UsageError,
};
use crate::control::{Control, StepEntry};
use crate::lane::Lane;
use crate::plan::Plan;
use crate::worker::Submission;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SquareSum, Step, TensorId, Time};
use gradlane_wire::FrameHeader;

/// One rank's communication engine.
#[derive(Debug)]
pub struct Engine {
    control: Control,
    lane: Lane,
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
        Engine { control: Control::new(options, lane.cx.plan()), lane }
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

    // The application's calls.

    /// Takes a call of the application.
    ///
    /// # Errors
    /// When the call does not fit the current step, the plan or the session's state. Nothing was
    /// changed then.
    pub fn handle(&mut self, input: Input) -> Result<(), UsageError> {
        let taken = self.take_input(input);
        self.control.end_if_aborted(&mut self.lane);
        taken
    }

    fn take_input(&mut self, input: Input) -> Result<(), UsageError> {
        let Engine { control, lane } = self;
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
        let landed = match self.control.check(&self.lane, from, header) {
            Ok(true) => self.lane.land(from, header),
            Ok(false) => Ok(PayloadDest::Control),
            Err(what) => Err(what),
        };
        landed.map_err(|what| ProtocolError { peer: from, what: what.0 })
    }

    /// The payload of the frame announced last by this peer is in place and its checksum is right.
    ///
    /// # Errors
    /// When no correct peer would send this frame now.
    pub fn handle_frame(&mut self, from: Rank, header: &FrameHeader) -> Result<(), ProtocolError> {
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
        let taken = self.control.take(&mut self.lane, from, header, payload);
        self.control.settle(&mut self.lane);
        taken.map_err(|what| ProtocolError { peer: from, what: what.0 })
    }

    /// The socket to a peer can, or cannot, take more without queueing in the kernel.
    pub fn handle_writable(&mut self, peer: Rank, writable: bool) {
        self.lane.cx.set_writable(peer, writable);
    }

    /// Frames to a peer have at most this many bytes of payload from now on, whatever the options say:
    /// more on a connection that is so fast that an urgent slice hardly waits longer for it.
    pub fn handle_frame_bytes(&mut self, peer: Rank, frame_bytes: u32) {
        self.lane.cx.set_frame_bytes(peer, frame_bytes);
    }

    /// The kernel has a whole frame that `poll_transmit` gave out.
    pub fn handle_sent(&mut self, transmit: &Transmit) {
        if !self.control.counts_sent(transmit.peer) {
            return;
        }
        self.lane.cx.frame_sent(transmit);
        if !transmit.header.kind.is_control() && !self.control.has_ended() {
            self.lane.slice_sent(transmit);
        }
        self.control.settle(&mut self.lane);
    }

    /// The next frame to send: the most urgent one whose peer can take it.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.lane.cx.poll_transmit()
    }

    // Jobs.

    /// The next job for the driver's threads, most urgent first.
    pub fn poll_job(&mut self) -> Option<Job> {
        if self.control.has_ended() {
            return None;
        }
        self.lane.poll_job()
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

    /// The driver has added up squares ([`Operation::AddSquares`](crate::Operation::AddSquares)); reported with
    /// [`Engine::handle_job_done`], they count nothing.
    ///
    /// # Panics
    /// As [`Engine::handle_job_done`].
    pub fn handle_squares(&mut self, id: JobId, sum: &SquareSum) {
        self.finish_job(id, None, Some(sum));
    }

    fn finish_job(&mut self, id: JobId, bytes: Option<u64>, squares: Option<&SquareSum>) {
        let running = self.lane.cx.take_job(id);
        if self.control.has_ended() {
            return;
        }
        self.control.progressed();
        self.lane.finish_job(running, bytes, squares, self.control.drops_slices());
        self.control.settle(&mut self.lane);
    }

    // Events and time.

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.lane.cx.poll_event()
    }

    /// When [`Engine::handle_time`] wants to be called at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.control.poll_timeout(&self.lane)
    }

    /// When rank 0 wants [`Engine::handle_time`] to look again at the progress of the ranks.
    #[must_use]
    pub fn decision_timeout(&self) -> Option<Time> {
        self.control.decision_timeout()
    }

    /// It is `now`. Without progress for the progress timeout the session fails, naming the ranks
    /// that are missing.
    pub fn handle_time(&mut self, now: Time) {
        self.control.handle_time(&mut self.lane, now);
    }

    // The end of the session.

    /// The connection to a peer is gone: closed, reset, or silent for too long. After the peer's
    /// goodbye that is in order.
    pub fn handle_peer_lost(&mut self, peer: Rank, reason: &str) {
        self.control.handle_peer_lost(&mut self.lane, peer, reason);
    }

    /// Nothing was heard of a peer for too long: asks the other ranks whether they hear it. Returns
    /// whether there is a rank to ask.
    pub fn suspect(&mut self, peer: Rank) -> bool {
        self.control.suspect(&mut self.lane, peer)
    }

    /// A peer hears nothing of another one, and this rank hears both: the session fails on all ranks
    /// with the same words.
    pub fn blame_link(&mut self, one: Rank, other: Rank) {
        self.control.blame_link(&mut self.lane, one, other);
    }

    /// Gives up and tells the other ranks why.
    pub fn abort(&mut self, reason: &str) {
        self.control.abort(&mut self.lane, reason);
    }

    /// A peer broke the protocol or sent a payload with a wrong checksum: the session fails, naming
    /// it. Where training goes on without lost ranks, the ranks agree on who leaves.
    pub fn reject_peer(&mut self, peer: Rank, reason: &str) {
        self.control.reject_peer(&mut self.lane, peer, reason);
    }

    /// Another lane of this rank has failed: this one tells its peers the same, and ends without an event.
    pub fn end_as(&mut self, failure: &Failure) {
        self.control.end_as(&mut self.lane, failure);
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
