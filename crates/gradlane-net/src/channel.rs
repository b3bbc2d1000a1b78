//! The handle that application threads hold: connections to all ranks and the engine on its own
//! threads, for one prepared model.
//!
//! Every call is checked before it becomes a command; calls return at once, except `wait`,
//! `wait_step`, `finish` and `abort`. When a call says that the session has ended, no thread of the
//! channel touches the application's memory any more.

use crate::attendance::Standing;
use crate::blocks::Blocks;
use crate::descriptors;
use crate::doorman::Doorman;
use crate::driver::{Driver, Ending};
use crate::error::{ChannelError, ChannelFailure};
use crate::handshake::{digest, Identity};
use crate::ledger::Ledger;
use crate::listener::Listener;
use crate::memory::UserMemory;
use crate::mesh::{self, INTERRUPT_EVERY};
use crate::metrics::{Metrics, MetricsReading};
use crate::optimizer::{Rule, StateKind, StateRead};
use crate::options::ChannelOptions;
use crate::poller::Poller;
use crate::ready::{lock, Awaited, ReadyBoard};
use crate::shared::{panic_text, Command, Ended, Shared};
use crate::trace::{Trace, TraceEntry, WorkEntry};
use gradlane_engine::{check_ready_rule, Journal, Plan, UsageError};
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a reader of metrics waits for the depths of queues.
const DEPTHS_WITHIN: Duration = Duration::from_millis(100);

/// Threads that are joined when the channel closes.
struct Threads {
    io: JoinHandle<()>,
    doorman: Doorman,
}

/// A running session with all other ranks.
pub struct Channel {
    shared: Arc<Shared>,
    plan: Arc<Plan>,
    rank: Rank,
    ledger: Mutex<Ledger>,
    threads: Mutex<Option<Threads>>,
    /// The process that has the threads.
    process_id: u32,
    forgotten: AtomicBool,
}

impl Channel {
    /// Connects all ranks and starts. `peers[rank]` is `host:port` (`[v6]:port`) of each rank,
    /// `plan_json` the plan, the same text on every rank, `secret` what all ranks know.
    /// `interrupt` is asked every 50 ms whether to give up.
    ///
    /// # Errors
    /// [`ChannelError::Argument`] for options or a plan that make no sense,
    /// [`ChannelError::Refused`] when a rank refuses another, [`ChannelError::TimedOut`] when not
    /// all ranks are connected in time, [`ChannelError::Interrupted`] when asked to give up.
    pub fn connect(
        listener: Listener,
        options: &ChannelOptions,
        plan_json: &str,
        peers: &[String],
        secret: &[u8],
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Channel, ChannelError> {
        options.validate()?;
        let plan = read_plan(plan_json, options)?;
        if peers.len() != options.world_size as usize {
            return Err(ChannelError::Argument(format!(
                "{} addresses of peers for a world of {} ranks",
                peers.len(),
                options.world_size
            )));
        }
        let rank = Rank(options.rank);
        let identity = Identity {
            rank,
            world_size: options.world_size,
            generation: options.generation,
            job_digest: digest(options.job.as_bytes()),
            table_digest: digest(plan_json.as_bytes()),
            secret: secret.to_vec(),
        };
        let metrics = Arc::new(Metrics::new(rank, options.world_size, plan.tensors.len()));
        let mesh = mesh::assemble(listener, identity, peers, options, &metrics, interrupt)?;
        let system = |error| ChannelError::system("cannot start a channel", &error);
        let shared = Arc::new(Shared {
            poller: Poller::new().map_err(system)?,
            commands: Mutex::default(),
            ready: ReadyBoard::new(plan.tensors.len()),
            blocks: Mutex::default(),
            metrics,
            trace: Trace::new(options.trace),
            journal: Mutex::new(None),
            ended: OnceLock::new(),
            usage: Mutex::new(None),
        });
        let driver = Driver::new(options.clone(), &plan, mesh.streams, Arc::clone(&shared))
            .map_err(system)?;
        let io = std::thread::Builder::new()
            .name("gradlane-io".to_owned())
            .spawn(move || drive(driver))
            .map_err(system)?;
        let ledger = Mutex::new(Ledger::new(plan.tensors.len()));
        let threads = Mutex::new(Some(Threads { io, doorman: mesh.doorman }));
        let process_id = std::process::id();
        let forgotten = AtomicBool::new(false);
        Ok(Channel { shared, plan, rank, ledger, threads, process_id, forgotten })
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    fn check(&self) -> Result<(), ChannelError> {
        if self.forgotten.load(Ordering::Relaxed) {
            return Err(ChannelError::Closed(
                "this channel belongs to the parent process; a forked child cannot use it"
                    .to_owned(),
            ));
        }
        self.shared.check()
    }

    /// Begins a step: 0 first (rank 0's values go everywhere), then 1, 2, …
    ///
    /// # Errors
    /// [`ChannelError::Usage`] when it is not the next step or the one before is not complete; an
    /// error when the session is over. The same for all calls below that name no errors.
    pub fn step_begin(&self, step: Step) -> Result<(), ChannelError> {
        self.begin(step, Command::StepBegin(step))
    }

    /// Begins a step that this rank takes no part in, since it was left out of the one before
    /// (stragglers). All its tensors are to be given as absent; the results land there.
    ///
    /// # Errors
    /// As [`Channel::step_begin`]. That it may not be passed is raised at the next call.
    pub fn step_pass(&self, step: Step) -> Result<(), ChannelError> {
        self.begin(step, Command::StepPass(step))
    }

    /// Whether this rank was in a step, where stragglers are left out, and how far the others are.
    #[must_use]
    pub fn standing(&self, step: Step) -> Standing {
        lock(&self.shared.metrics.attendance).standing(step)
    }

    fn begin(&self, step: Step, command: Command) -> Result<(), ChannelError> {
        self.check()?;
        let mut ledger = lock(&self.ledger);
        let ready = &self.shared.ready;
        let is_complete = |step| ready.has(Awaited::Step(step));
        ledger.step_begin(step, is_complete, |current| self.missing(current))?;
        // Commands are queued under the ledger's lock: their order is that of the checks.
        self.shared.command(command);
        Ok(())
    }

    fn missing(&self, step: Step) -> (usize, String) {
        let tensors = (0..self.plan.tensors.len() as u32).map(TensorId);
        let missing: Vec<TensorId> = tensors
            .filter(|&tensor| self.plan.takes_part(tensor, step))
            .filter(|&tensor| !self.shared.ready.has(Awaited::Tensor(tensor, step)))
            .collect();
        let name = missing.first().map(|&tensor| self.plan.tensor(tensor).spec.name.clone());
        (missing.len(), name.unwrap_or_default())
    }

    /// A tensor's gradient (in step 0: the tensor itself) is ready. The channel owns the memory
    /// until the tensor is ready in this step; then it holds the result.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] also for an unknown tensor, memory of another size, or a second
    /// gradient in the step.
    pub fn gradient_ready(
        &self,
        tensor: TensorId,
        step: Step,
        memory: UserMemory,
    ) -> Result<(), ChannelError> {
        self.check()?;
        let mut ledger = lock(&self.ledger);
        ledger.contribute("gradient_ready", &self.plan, tensor, step, memory)?;
        self.shared.command(Command::GradientReady(tensor, step, memory));
        Ok(())
    }

    /// This rank has no gradient for a tensor in this step. If another rank has one, the mean lands
    /// in `memory` all the same.
    ///
    /// # Errors
    /// As [`Channel::gradient_ready`].
    pub fn tensor_absent(
        &self,
        tensor: TensorId,
        step: Step,
        memory: UserMemory,
    ) -> Result<(), ChannelError> {
        self.check()?;
        let mut ledger = lock(&self.ledger);
        ledger.contribute("tensor_absent", &self.plan, tensor, step, memory)?;
        self.shared.command(Command::TensorAbsent(tensor, step, memory));
        Ok(())
    }

    /// This rank's block of a tensor is ready: of any size up to the plan's. The channel owns the
    /// memory until the tensor is ready in this step; it is not written.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] also for an unknown tensor or one of another scheme, a size that the
    /// plan does not allow, or a second block in the step.
    pub fn block_ready(
        &self,
        tensor: TensorId,
        step: Step,
        memory: UserMemory,
    ) -> Result<(), ChannelError> {
        self.check()?;
        if memory.is_null() {
            let what = format!("a block of {} bytes at no address", memory.bytes());
            return Err(UsageError::Argument(what).into());
        }
        let mut ledger = lock(&self.ledger);
        ledger.contribute_block(&self.plan, tensor, step, memory.bytes())?;
        self.shared.command(Command::BlockReady(tensor, step, memory));
        Ok(())
    }

    /// This rank has no block of a tensor in this step.
    ///
    /// # Errors
    /// As [`Channel::block_ready`].
    pub fn block_absent(&self, tensor: TensorId, step: Step) -> Result<(), ChannelError> {
        self.check()?;
        let mut ledger = lock(&self.ledger);
        ledger.contribute_block(&self.plan, tensor, step, 0)?;
        self.shared.command(Command::BlockAbsent(tensor, step));
        Ok(())
    }

    /// All ranks' blocks of a tensor that is ready in a step, once: none before that, or when they
    /// were taken. They are released when the value is dropped, which may be in a later step.
    ///
    /// # Errors
    /// When the session is over, and for an unknown tensor.
    pub fn take_blocks(
        &self,
        tensor: TensorId,
        step: Step,
    ) -> Result<Option<Blocks>, ChannelError> {
        self.check()?;
        Ledger::check_tensor(&self.plan, tensor)?;
        Ok(Blocks::take(&self.shared, tensor, step))
    }

    /// Where a parameter itself lies: needed before its first step with updates on the server.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor or memory of another size.
    pub fn set_parameter(&self, tensor: TensorId, memory: UserMemory) -> Result<(), ChannelError> {
        self.check()?;
        Ledger::check_memory(&self.plan, tensor, memory)?;
        self.shared.command(Command::SetParameter(tensor, memory));
        Ok(())
    }

    /// Settings of the optimizer on the servers, for the tensors named, from the step on whose
    /// gradients come next; others keep theirs.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor or settings that torch refuses too.
    pub fn set_optimizer(&self, rows: Vec<(TensorId, Rule)>) -> Result<(), ChannelError> {
        self.check()?;
        for (tensor, rule) in &rows {
            Ledger::check_tensor(&self.plan, *tensor)?;
            rule.validate().map_err(|error| {
                let name = &self.plan.tensor(*tensor).spec.name;
                UsageError::Argument(format!("optimizer settings of tensor {name:?}: {error}"))
            })?;
        }
        self.shared.command(Command::SetOptimizer(rows));
        Ok(())
    }

    /// In the step that has just begun, and until settings are given again, slices with a gradient
    /// are not updated: their owners broadcast optimizer state in place of parameters. Every rank
    /// has to ask for the same. Where it lands is told by `set_parameter`.
    ///
    /// # Errors
    /// As [`Channel::step_begin`].
    pub fn read_state(&self, read: StateRead) -> Result<(), ChannelError> {
        self.check()?;
        let ledger = lock(&self.ledger);
        self.shared.command(Command::ReadState(read, ledger.current()));
        Ok(())
    }

    /// In the step that has just begun, this rank's contributions travel as they are, whatever codec
    /// the plan has. Every rank has to ask for the same, before its first contribution.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for another step than the current one. That it comes too late is
    /// raised at the next call.
    pub fn send_raw(&self, step: Step) -> Result<(), ChannelError> {
        self.check()?;
        let ledger = lock(&self.ledger);
        ledger.check_step("send_raw", step)?;
        self.shared.command(Command::SendRaw(step));
        Ok(())
    }

    /// What encoding this rank's contributions to a tensor has lost so far (error feedback), in the
    /// order of its storage; between steps. `interrupt` is asked every 50 ms.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor, [`ChannelError::Interrupted`] when asked.
    pub fn worker_residual(
        &self,
        tensor: TensorId,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<f32>, ChannelError> {
        self.check()?;
        Ledger::check_tensor(&self.plan, tensor)?;
        let (reply, answer) = std::sync::mpsc::channel();
        self.shared.command(Command::WorkerResidual(tensor, reply));
        loop {
            if let Ok(values) = answer.recv_timeout(INTERRUPT_EVERY) {
                return Ok(values);
            }
            self.check()?;
            if interrupt() {
                return Err(ChannelError::Interrupted);
            }
        }
    }

    /// Forgets all optimizer state on this rank; between steps.
    ///
    /// # Errors
    /// As [`Channel::step_begin`].
    pub fn clear_state(&self) -> Result<(), ChannelError> {
        self.check()?;
        self.shared.command(Command::ClearState);
        Ok(())
    }

    /// Puts a tensor's optimizer state in place, between steps: `values` are those of the whole
    /// tensor in the order of its storage, of which this rank keeps what it owns; of its own residual
    /// it keeps all.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor or another number of values.
    pub fn load_state(
        &self,
        tensor: TensorId,
        kind: StateKind,
        values: &[f32],
    ) -> Result<(), ChannelError> {
        self.check()?;
        Ledger::check_tensor(&self.plan, tensor)?;
        let spec = &self.plan.tensor(tensor).spec;
        let width = match kind {
            StateKind::WorkerResidual => self.plan.residual_width(tensor),
            _ => 1,
        };
        if values.len() as u64 != spec.numel * width as u64 {
            return Err(ChannelError::Usage(UsageError::Argument(format!(
                "{} of tensor {:?} has {} elements, the tensor {}",
                kind.name(),
                spec.name,
                values.len(),
                spec.numel * width as u64
            ))));
        }
        let owned: Vec<(SliceId, Vec<f32>)> = self
            .plan
            .slices_of(tensor)
            .filter(|&slice| {
                kind == StateKind::WorkerResidual || self.plan.slice(slice).owner == self.rank
            })
            .map(|id| {
                let slice = self.plan.slice(id);
                let start = slice.start as usize * width;
                (id, values[start..start + slice.length as usize * width].to_vec())
            })
            .collect();
        self.shared.command(Command::LoadState(kind, owned));
        Ok(())
    }

    /// The step's gradients are all given (`optimizer.step()` was called): with updates on the
    /// server, parameters may be written from now on.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for another step than the current one.
    pub fn step_end(&self, step: Step) -> Result<(), ChannelError> {
        self.check()?;
        let ledger = lock(&self.ledger);
        ledger.check_step("step_end", step)?;
        self.shared.command(Command::StepEnd(step));
        Ok(())
    }

    /// A consumer waits for a tensor.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor or a step that has not begun.
    pub fn needed(&self, tensor: TensorId, step: Step) -> Result<(), ChannelError> {
        self.check()?;
        self.request(&[tensor], step)
    }

    /// Tells the engine that what is missing is needed.
    fn request(&self, tensors: &[TensorId], step: Step) -> Result<(), ChannelError> {
        for &tensor in tensors {
            Ledger::check_tensor(&self.plan, tensor)?;
        }
        let ready = &self.shared.ready;
        let missing = |tensor: &TensorId| !ready.has(Awaited::Tensor(*tensor, step));
        let missing: Vec<TensorId> = tensors.iter().copied().filter(missing).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let ledger = lock(&self.ledger);
        if step > ledger.current() {
            let current = ledger.current();
            return Err(UsageError::WrongStep { call: "wait", step, current }.into());
        }
        self.shared.command(Command::Needed(missing, step));
        Ok(())
    }

    /// Waits until all these tensors are ready in a step. `interrupt` is asked every 50 ms.
    ///
    /// # Errors
    /// [`ChannelError::Failed`] when the session fails, [`ChannelError::Interrupted`] when asked,
    /// [`ChannelError::Usage`] for an unknown tensor or a step that has not begun.
    pub fn wait(
        &self,
        tensors: &[TensorId],
        step: Step,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChannelError> {
        self.check()?;
        self.request(tensors, step)?;
        for &tensor in tensors {
            self.wait_for(Awaited::Tensor(tensor, step), interrupt)?;
        }
        Ok(())
    }

    /// Waits until a whole step is complete on this rank.
    ///
    /// # Errors
    /// As [`Channel::wait`].
    pub fn wait_step(
        &self,
        step: Step,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChannelError> {
        self.check()?;
        let tensors = (0..self.plan.tensors.len() as u32).map(TensorId);
        let part: Vec<TensorId> = tensors.filter(|&it| self.plan.takes_part(it, step)).collect();
        self.request(&part, step)?;
        self.wait_for(Awaited::Step(step), interrupt)
    }

    /// Waits until the contributors of a step are known, where stragglers are left out.
    ///
    /// # Errors
    /// As [`Channel::wait`]; [`ChannelError::Usage`] where steps wait for all ranks.
    pub fn wait_decided(
        &self,
        step: Step,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChannelError> {
        self.check()?;
        if self.plan.strategy.ready.set().is_none() {
            let what = format!("nobody decides {step}: it waits for all ranks");
            return Err(UsageError::Argument(what).into());
        }
        lock(&self.ledger).check_step("wait_decided", step)?;
        self.wait_for(Awaited::Decided(step), interrupt)
    }

    fn wait_for(
        &self,
        awaited: Awaited,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChannelError> {
        let ready = &self.shared.ready;
        if ready.has(awaited) {
            return Ok(());
        }
        let start = Instant::now();
        let result = loop {
            ready.wait(awaited, INTERRUPT_EVERY);
            if ready.has(awaited) {
                break Ok(());
            }
            if let Err(error) = self.check() {
                break Err(error);
            }
            if interrupt() {
                break Err(ChannelError::Interrupted);
            }
        };
        self.shared.metrics.note_wait(awaited, ready.newest(), start.elapsed());
        result
    }

    /// Whether a tensor is ready in a step.
    ///
    /// # Errors
    /// When the session is over, and for an unknown tensor.
    pub fn is_ready(&self, tensor: TensorId, step: Step) -> Result<bool, ChannelError> {
        self.check()?;
        Ledger::check_tensor(&self.plan, tensor)?;
        Ok(self.shared.ready.has(Awaited::Tensor(tensor, step)))
    }

    /// What became ready in a step since the last call, with whether no rank had a gradient; in the
    /// order in which it did.
    ///
    /// # Errors
    /// When the session is over.
    pub fn take_ready(&self, step: Step) -> Result<Vec<(TensorId, bool)>, ChannelError> {
        self.check()?;
        Ok(self.shared.ready.take(step))
    }

    /// Waits until something became ready in `step` that was not taken, and takes it. For threads
    /// that pass results on: it counts as no wait of the program.
    ///
    /// # Errors
    /// [`ChannelError::Failed`] when the session fails, [`ChannelError::Interrupted`] when asked.
    pub fn next_ready(
        &self,
        step: Step,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<(TensorId, bool)>, ChannelError> {
        loop {
            let taken = self.take_ready(step)?;
            if !taken.is_empty() {
                return Ok(taken);
            }
            if interrupt() {
                return Err(ChannelError::Interrupted);
            }
            self.shared.ready.wait(Awaited::News(step), INTERRUPT_EVERY);
        }
    }

    /// On rank 0: another priority for every tensor, in force on all ranks two steps later.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] on another rank, for a vector of another length, or before any step.
    /// That the last switch is not finished is raised at the next call.
    pub fn switch_priorities(&self, priorities: Vec<Priority>) -> Result<(), ChannelError> {
        self.check()?;
        let refuse = |text: String| Err(ChannelError::Usage(UsageError::Argument(text)));
        if self.rank != Rank(0) {
            return refuse(format!("{} cannot switch priorities: rank 0 does", self.rank));
        }
        let (found, expected) = (priorities.len(), self.plan.tensors.len());
        if found != expected {
            return refuse(format!("{found} priorities for {expected} tensors"));
        }
        self.shared.command(Command::SwitchPriorities(priorities));
        Ok(())
    }

    /// The counters; also after the end. Depths of queues are those of this moment, or, if the I/O
    /// thread is too busy to say, of an earlier one.
    #[must_use]
    pub fn metrics(&self) -> MetricsReading {
        let shared = &self.shared;
        if !self.forgotten.load(Ordering::Relaxed) {
            shared.metrics.depths.ask(DEPTHS_WITHIN, || shared.command(Command::ReportDepths));
        }
        shared.metrics.read(&self.plan)
    }

    /// Time that application threads have waited so far, in nanoseconds.
    #[must_use]
    pub fn waited_ns(&self) -> u64 {
        self.shared.metrics.wait_ns.load(Ordering::Relaxed)
    }

    /// Frames recorded since the last call; none without the option `trace`.
    #[must_use]
    pub fn take_trace(&self) -> Vec<TraceEntry> {
        self.shared.trace.take_frames()
    }

    /// Works recorded since the last call; none without the option `trace`.
    #[must_use]
    pub fn take_works(&self) -> Vec<WorkEntry> {
        self.shared.trace.take_works()
    }

    /// Frames and works that were recorded and fell out before they were taken.
    #[must_use]
    pub fn trace_dropped(&self) -> u64 {
        self.shared.trace.dropped()
    }

    /// After the end of a session with the option `journal`: what the engine heard and decided, once.
    pub fn take_journal(&self) -> Option<Journal> {
        lock(&self.shared.journal).take()
    }

    /// Why the session has failed, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<ChannelFailure> {
        match self.shared.ended.get() {
            Some(Ended::Failed(failure)) => Some(failure.clone()),
            _ => None,
        }
    }

    /// Closes in good order: sends what is owed, says goodbye and waits until every rank has. At
    /// the time's end it gives up. All threads are joined, except after an interrupt.
    ///
    /// # Errors
    /// [`ChannelError::TimedOut`] when not every rank said goodbye in time,
    /// [`ChannelError::Failed`] when the session failed before, [`ChannelError::Interrupted`].
    pub fn finish(
        &self,
        timeout: Duration,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChannelError> {
        if self.forgotten.load(Ordering::Relaxed) {
            return self.check();
        }
        let start = Instant::now();
        self.shared.command(Command::Finish);
        let mut timed_out = false;
        while self.shared.ended.get().is_none() {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() && !timed_out {
                timed_out = true;
                let reason = format!(
                    "{} closed its session, and not every rank did the same within {} s",
                    self.rank,
                    timeout.as_secs_f64()
                );
                self.shared.command(Command::Abort(reason));
            }
            let nap = if timed_out { INTERRUPT_EVERY } else { left.min(INTERRUPT_EVERY) };
            self.shared.ready.wait(Awaited::End, nap);
            if interrupt() {
                return Err(ChannelError::Interrupted);
            }
        }
        self.join();
        match self.shared.ended.get() {
            Some(Ended::Failed(failure)) if timed_out => Err(ChannelError::TimedOut {
                message: failure.message.clone(),
                last_complete: failure.last_complete,
                peer: failure.peer,
            }),
            Some(Ended::Failed(failure)) => Err(ChannelError::Failed(failure.clone())),
            _ => Ok(()),
        }
    }

    /// Gives up: tells every rank why, for at most about a second, and stops. Afterwards no memory
    /// is touched and all threads are joined. After an end of any kind it only joins.
    pub fn abort(&self, reason: &str) {
        if !self.forgotten.load(Ordering::Relaxed) {
            self.shared.command(Command::Abort(reason.to_owned()));
            self.join();
        }
    }

    fn join(&self) {
        let threads = lock(&self.threads).take();
        if let Some(Threads { io, doorman }) = threads {
            // The thread turns its own panics into a failure of the session.
            let _ = io.join();
            drop(doorman);
        }
    }

    /// In a forked child: closes all descriptors that gradlane had open in the parent, of every
    /// channel and listener, and leaves the threads, which the child does not have, alone. The
    /// parent notices nothing.
    pub fn forget_in_child(&self) {
        self.forgotten.store(true, Ordering::Relaxed);
        descriptors::close_all_inherited();
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if self.forgotten.load(Ordering::Relaxed) || self.process_id != std::process::id() {
            // The threads exist in the parent only, which also owns what they share.
            let threads = self.threads.get_mut();
            let threads = threads.unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Some(Threads { io, doorman }) = threads.take() {
                std::mem::forget(io);
                doorman.forget();
            }
            return;
        }
        self.abort("the channel was dropped without being closed");
    }
}

/// The I/O thread from start to end.
fn drive(mut driver: Driver) {
    let shared = Arc::clone(&driver.shared);
    let _count = shared.metrics.count_this_thread("io");
    let result = catch_unwind(AssertUnwindSafe(|| {
        let ending: Ending = driver.run();
        driver.conclude(ending);
    }));
    if let Err(panic) = result {
        // Works may still run; dropping the driver waits for them and closes all connections.
        driver.works.stop();
        drop(driver);
        shared.end(Ended::Failed(ChannelFailure {
            message: format!("the I/O thread panicked: {}", panic_text(&*panic)),
            last_complete: shared.ready.last_complete(),
            peer: None,
            timed_out: false,
        }));
    }
}

/// Reads a plan and checks what everything else relies on.
fn read_plan(json: &str, options: &ChannelOptions) -> Result<Arc<Plan>, ChannelError> {
    let refuse = |text: String| ChannelError::Argument(format!("plan: {text}"));
    let plan: Plan = serde_json::from_str(json).map_err(|error| refuse(error.to_string()))?;
    if plan.world_size != options.world_size {
        return Err(refuse(format!(
            "it is for {} ranks, but world_size is {}",
            plan.world_size, options.world_size
        )));
    }
    plan.check_schemes().map_err(|error| refuse(error.to_string()))?;
    check_ready_rule(&plan.strategy, plan.update).map_err(|error| refuse(error.to_string()))?;
    let mut next_slice = 0;
    for (index, tensor) in plan.tensors.iter().enumerate() {
        let name = &tensor.spec.name;
        let slices = tensor.slices.clone();
        if slices.start != next_slice || slices.end as usize > plan.slices.len() {
            return Err(refuse(format!("tensor {name:?} has slices {slices:?}")));
        }
        next_slice = slices.end;
        let mut elements = 0_u64;
        for slice in &plan.slices[slices.start as usize..slices.end as usize] {
            let fits = slice.tensor.index() == index
                && slice.start == elements
                && slice.owner.0 < plan.world_size;
            if !fits {
                return Err(refuse(format!("tensor {name:?} has a slice that is not its own")));
            }
            elements = elements.saturating_add(slice.length);
        }
        if elements != tensor.spec.numel || slices.is_empty() {
            return Err(refuse(format!("the slices of tensor {name:?} do not cover it")));
        }
    }
    if next_slice as usize != plan.slices.len() {
        return Err(refuse("there are slices of no tensor".to_owned()));
    }
    crate::codecs::of_plan(&plan).map_err(refuse)?;
    Ok(Arc::new(plan))
}
