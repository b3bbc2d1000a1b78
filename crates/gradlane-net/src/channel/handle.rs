//! The handle that application threads hold: one session with all other ranks, for one prepared
//! model.
//!
//! Every call is checked before it becomes a command. Calls return at once, except `wait`,
//! `wait_step`, `finish` and `abort`. After a call has reported the end of the session, no thread
//! of the channel touches the application's memory.

use crate::channel::blocks::Blocks;
use crate::channel::completion::{MembershipEvent, WaitTarget};
use crate::channel::guard::ApiGuard;
use crate::channel::shared::{panic_text, Command, SessionOutcome, Shared};
use crate::connect::{self, digest, Acceptor, Identity, Listener, MeshStream, INTERRUPT_EVERY};
use crate::error::{ChannelError, ChannelFailure};
use crate::io::{Driver, PeerLink};
use crate::memory::UserMemory;
use crate::metrics::participation_stats::StepParticipation;
use crate::metrics::Metrics;
use crate::options::ChannelOptions;
use crate::sys::poller::Poller;
use crate::sys::socket::Socket;
use crate::sys::{descriptors, lock};
use gradlane_engine::{Input, Plan, PullRule, UsageError};
use gradlane_units::{Priority, Rank, SquareSum, Step, TensorId};
use std::io;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Threads that are joined when the channel closes.
struct Threads {
    io: JoinHandle<()>,
    acceptor: Acceptor,
}

/// A running session with all other ranks.
pub struct Channel {
    pub(super) shared: Arc<Shared>,
    pub(super) plan: Arc<Plan>,
    pub(super) rank: Rank,
    goes_on: bool,
    pub(super) guard: Mutex<ApiGuard>,
    threads: Mutex<Option<Threads>>,
    /// The process that has the threads.
    process_id: u32,
    pub(super) forgotten: AtomicBool,
}

impl Channel {
    /// Connects all ranks and starts. `peers[rank]` is the `host:port` (`[v6]:port`) of each rank,
    /// `plan_json` the plan, the same text on every rank, `secret` the job's secret. `interrupt` is
    /// called every 50 ms and returns whether to give up.
    ///
    /// # Errors
    /// [`ChannelError::Argument`] for invalid options or an invalid plan, [`ChannelError::Refused`]
    /// when a rank refuses another, [`ChannelError::TimedOut`] when not all ranks are connected in
    /// time, [`ChannelError::Interrupted`] when `interrupt` asks to give up.
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
        if options.going_on.is_some() {
            plan.check_goes_on()?;
        }
        if peers.len() != options.world_size as usize {
            return Err(ChannelError::Argument(format!(
                "{} addresses of peers for a world of {} ranks",
                peers.len(),
                options.world_size
            )));
        }
        if options.seal && secret.is_empty() {
            let text = "seal is set without a secret: give one to every rank, or leave seal off";
            return Err(ChannelError::Argument(text.to_owned()));
        }
        let rank = Rank(options.rank);
        let identity = Identity {
            rank,
            world_size: options.world_size,
            generation: options.generation,
            lanes: options.lanes,
            job_digest: digest(options.job.as_bytes()),
            table_digest: digest(plan_json.as_bytes()),
            secret: secret.to_vec(),
            published: if options.published.is_empty() { peers } else { &options.published }
                .to_vec(),
            seals: options.seal,
        };
        let lanes = options.lanes;
        let metrics = Arc::new(Metrics::new(rank, &plan, lanes.into()));
        let host = &metrics.host;
        let mesh = connect::assemble(listener, identity, peers, options, host, interrupt)?;
        let system = |error| ChannelError::system("cannot start a channel", &error);
        let pollers: io::Result<Vec<Poller>> = (0..lanes).map(|_| Poller::new()).collect();
        let pollers = pollers.map_err(system)?;
        let shared = Arc::new(Shared::new(pollers, &plan, options, metrics));
        let link = |MeshStream { stream, seals }| {
            let socket: Arc<dyn Socket> = Arc::new(stream);
            PeerLink { socket, seals }
        };
        let lane = |streams: Vec<Option<MeshStream>>| {
            streams.into_iter().map(|stream| stream.map(&link)).collect()
        };
        let links = mesh.streams.into_iter().map(lane).collect();
        let driver = Driver::new(options, &plan, links, mesh.is_local, &shared).map_err(system)?;
        let io = std::thread::Builder::new()
            .name("gradlane-io".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || drive(driver, &shared)
            })
            .map_err(system)?;
        let guard = Mutex::new(ApiGuard::new(plan.tensors.len()));
        let threads = Mutex::new(Some(Threads { io, acceptor: mesh.acceptor }));
        let process_id = std::process::id();
        let forgotten = AtomicBool::new(false);
        let goes_on = options.going_on.is_some();
        Ok(Channel { shared, plan, rank, goes_on, guard, threads, process_id, forgotten })
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether training goes on when ranks are lost.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        self.goes_on
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    pub(super) fn check(&self) -> Result<(), ChannelError> {
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
    /// [`ChannelError::Usage`] when it is not the next step or the previous one is not complete; an
    /// error when the session is over. The same for all calls below that name no errors.
    pub fn step_begin(&self, step: Step) -> Result<(), ChannelError> {
        self.begin(step, &Input::StepBegin(step))
    }

    /// Begins a step without this rank's contributions, after one that went on without them
    /// (stragglers). All its tensors are given as absent; the results land there.
    ///
    /// # Errors
    /// As [`Channel::step_begin`]. A step that may not be passed is an error of the next call.
    pub fn step_pass(&self, step: Step) -> Result<(), ChannelError> {
        self.begin(step, &Input::StepPass(step))
    }

    /// Begins a step that waits for every rank, whatever the plan's policy for stragglers. All
    /// ranks begin it so; where steps always wait for all, it is an ordinary step.
    ///
    /// # Errors
    /// As [`Channel::step_begin`]. A session whose ranks disagree on it fails and names them.
    pub fn step_barrier(&self, step: Step) -> Result<(), ChannelError> {
        self.begin(step, &Input::StepBarrier(step))
    }

    /// Returns whether a step counted this rank's contributions, where stragglers are left out, and
    /// how far the others are.
    #[must_use]
    pub fn participation(&self, step: Step) -> StepParticipation {
        lock(&self.shared.metrics.participation).in_step(step)
    }

    fn begin(&self, step: Step, input: &Input) -> Result<(), ChannelError> {
        self.check()?;
        let mut guard = lock(&self.guard);
        let completion = &self.shared.completion;
        let is_complete = |step| completion.has(WaitTarget::Step(step));
        guard.step_begin(step, is_complete, |current| self.missing(current))?;
        // Commands are queued under the guard's lock: their order is that of the checks.
        self.shared.tell_all(|| Command::Engine(input.clone()));
        Ok(())
    }

    fn missing(&self, step: Step) -> (usize, String) {
        let tensors = (0..self.plan.tensors.len() as u32).map(TensorId);
        let missing: Vec<TensorId> = tensors
            .filter(|&tensor| self.plan.takes_part(tensor, step))
            .filter(|&tensor| !self.shared.completion.has(WaitTarget::Tensor(tensor, step)))
            .collect();
        let name = missing.first().map(|&tensor| self.plan.tensor(tensor).spec.name.clone());
        (missing.len(), name.unwrap_or_default())
    }

    /// Makes the owners add up the squares of the gradients of the tensors before this one in the step
    /// that has just begun: [`Channel::wait_squares`]. Every rank calls it, before its first
    /// contribution.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for another step, a call that comes too late, and plans whose owners
    /// cannot do it ([`Plan::check_measurable_squares`]).
    pub fn measure_squares(&self, tensors: TensorId, step: Step) -> Result<(), ChannelError> {
        self.check()?;
        lock(&self.guard).measure_squares(&self.plan, tensors, step)?;
        self.shared.tell_all(|| Command::Engine(Input::MeasureSquares(tensors, step)));
        Ok(())
    }

    /// Hands over a tensor's gradient (in step 0 the tensor itself). The channel owns the memory
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
        let mut guard = lock(&self.guard);
        guard.contribute("gradient_ready", &self.plan, tensor, step, memory)?;
        let input = Input::GradientReady(tensor, step);
        self.shared.tell_lanes_of(tensor, || Command::Contribute(memory, input.clone()));
        Ok(())
    }

    /// Hands over memory for a tensor without a gradient in this step. If another rank has one, the
    /// mean lands in it.
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
        let mut guard = lock(&self.guard);
        guard.contribute("tensor_absent", &self.plan, tensor, step, memory)?;
        let input = Input::TensorAbsent(tensor, step);
        self.shared.tell_lanes_of(tensor, || Command::Contribute(memory, input.clone()));
        Ok(())
    }

    /// Hands over this rank's block of a tensor, of any size up to the plan's. The channel owns the
    /// memory until the tensor is ready in this step and does not write to it.
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
        let mut guard = lock(&self.guard);
        guard.contribute_block(&self.plan, tensor, step, memory.bytes())?;
        let input = Input::BlockReady(tensor, step, memory.bytes() as u64);
        self.shared.tell_lanes_of(tensor, || Command::Contribute(memory, input.clone()));
        Ok(())
    }

    /// Declares that this rank has no block of a tensor in this step.
    ///
    /// # Errors
    /// As [`Channel::block_ready`].
    pub fn block_absent(&self, tensor: TensorId, step: Step) -> Result<(), ChannelError> {
        self.check()?;
        let mut guard = lock(&self.guard);
        guard.contribute_block(&self.plan, tensor, step, 0)?;
        let absent = || Command::Engine(Input::TensorAbsent(tensor, step));
        self.shared.tell_lanes_of(tensor, absent);
        Ok(())
    }

    /// Hands over the root's result for the blocks of a tensor of scheme `GatherToRoot`, which all
    /// ranks get. The channel owns the memory until the tensor is ready in this step and does not
    /// write to it.
    ///
    /// # Errors
    /// As [`Channel::block_ready`]. A result that no rank waits for is an error of the next call.
    pub fn root_result_ready(
        &self,
        tensor: TensorId,
        step: Step,
        memory: UserMemory,
    ) -> Result<(), ChannelError> {
        // Other misuse is reported to the thread that trains.
        self.shared.outcome_error().map_or(Ok(()), Err)?;
        ApiGuard::check_block(&self.plan, tensor, memory.bytes())?;
        if memory.is_null() {
            let what = format!("a result of {} bytes at no address", memory.bytes());
            return Err(UsageError::Argument(what).into());
        }
        let input = Input::RootResultReady(tensor, step, memory.bytes() as u64);
        self.shared.tell_lanes_of(tensor, || Command::Contribute(memory, input.clone()));
        Ok(())
    }

    /// Returns all ranks' blocks of a tensor that is ready in a step, once; `None` before, and when
    /// they were taken. Dropping the value, also in a later step, releases them.
    ///
    /// # Errors
    /// When the session is over, and for an unknown tensor.
    pub fn take_blocks(
        &self,
        tensor: TensorId,
        step: Step,
    ) -> Result<Option<Blocks>, ChannelError> {
        self.shared.outcome_error().map_or(Ok(()), Err)?;
        ApiGuard::check_tensor(&self.plan, tensor)?;
        Ok(Blocks::take(&self.shared, tensor, step))
    }

    /// Declares that all gradients of the step are given (`optimizer.step()` was called): with
    /// updates on the servers, parameters may be written from now on.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for another step than the current one.
    pub fn step_end(&self, step: Step) -> Result<(), ChannelError> {
        self.check()?;
        let guard = lock(&self.guard);
        guard.check_step("step_end", step)?;
        self.shared.tell_all(|| Command::Engine(Input::StepEnd(step)));
        Ok(())
    }

    /// Declares that all ranks are connected to all: from now on a peer that sends nothing is
    /// silent. Before, it has the connect timeout in addition.
    pub fn all_connected(&self) {
        self.shared.tell_all(|| Command::AllConnected);
    }

    /// Sets another priority for every tensor, in force on all ranks two steps later; on rank 0
    /// only.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] on another rank, for a vector of another length, or before any step.
    /// A switch while the last one is unfinished is an error of the next call.
    pub fn switch_priorities(&self, priorities: &[Priority]) -> Result<(), ChannelError> {
        self.check()?;
        let refuse = |text: String| Err(ChannelError::Usage(UsageError::Argument(text)));
        if self.rank != Rank(0) {
            return refuse(format!("{} cannot switch priorities: rank 0 does", self.rank));
        }
        let (found, expected) = (priorities.len(), self.plan.tensors.len());
        if found != expected {
            return refuse(format!("{found} priorities for {expected} tensors"));
        }
        let switch = || Command::Engine(Input::SwitchPriorities(priorities.to_vec()));
        self.shared.tell_all(switch);
        Ok(())
    }

    /// Returns why the session has failed, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<ChannelFailure> {
        match self.shared.ended.get() {
            Some(SessionOutcome::Failed(failure)) => Some(failure.clone()),
            _ => None,
        }
    }

    /// Closes in good order: sends what is owed, says goodbye and waits until every rank has. Gives
    /// up at the timeout. All threads are joined, except after an interrupt.
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
        self.shared.tell_all(|| Command::Engine(Input::Finish));
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
                self.shared.tell_first(Command::Abort(reason));
            }
            let nap = if timed_out { INTERRUPT_EVERY } else { left.min(INTERRUPT_EVERY) };
            self.shared.completion.wait(WaitTarget::End, nap);
            if interrupt() {
                return Err(ChannelError::Interrupted);
            }
        }
        self.join();
        match self.shared.ended.get() {
            Some(SessionOutcome::Failed(failure)) if timed_out => Err(ChannelError::TimedOut {
                message: failure.message.clone(),
                last_complete: failure.last_complete,
                peer: failure.peer,
            }),
            Some(SessionOutcome::Failed(failure)) => Err(ChannelError::Failed(failure.clone())),
            _ => Ok(()),
        }
    }

    /// Gives up: tells every rank why, for about a second at most, and stops. Afterwards no memory
    /// is touched and all threads are joined. A session that has ended is only joined.
    pub fn abort(&self, reason: &str) {
        if !self.forgotten.load(Ordering::Relaxed) {
            self.shared.tell_first(Command::Abort(reason.to_owned()));
            self.join();
        }
    }

    /// Waits until the threads have ended, also where another thread waits for them already.
    fn join(&self) {
        let mut threads = lock(&self.threads);
        if let Some(Threads { io, acceptor }) = threads.take() {
            // The thread turns its own panics into a failure of the session.
            let _ = io.join();
            drop(acceptor);
        }
    }

    /// Closes, in a forked child, all descriptors that gradlane had open in the parent, of every
    /// channel and listener. The child does not have the threads; the parent notices nothing.
    pub fn forget_in_child(&self) {
        self.forgotten.store(true, Ordering::Relaxed);
        descriptors::close_all_inherited();
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if self.forgotten.load(Ordering::Relaxed) || self.process_id != std::process::id() {
            // The threads exist in the parent only, and so do the resources that they share.
            let threads = self.threads.get_mut();
            let threads = threads.unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Some(Threads { io, acceptor }) = threads.take() {
                std::mem::forget(io);
                acceptor.forget();
            }
            return;
        }
        self.abort("the channel was dropped without being closed");
    }
}

/// Runs the lanes from start to end.
fn drive(driver: Driver, shared: &Shared) {
    let result = catch_unwind(AssertUnwindSafe(|| driver.run()));
    if let Err(panic) = result {
        // The driver was dropped: jobs are done, and all connections are closed.
        shared.end_by_panic(&panic_text(&*panic));
    }
}

/// Reads a plan and checks everything that the transport relies on.
fn read_plan(json: &str, options: &ChannelOptions) -> Result<Arc<Plan>, ChannelError> {
    let refuse = |text: String| ChannelError::Argument(format!("plan: {text}"));
    let plan: Plan = serde_json::from_str(json).map_err(|error| refuse(error.to_string()))?;
    if plan.world_size != options.world_size {
        return Err(refuse(format!(
            "it is for {} ranks, but world_size is {}",
            plan.world_size, options.world_size
        )));
    }
    plan.validate().map_err(|error| refuse(error.to_string()))?;
    crate::compute::planned_codecs::of_plan(&plan).map_err(|error| refuse(error.to_string()))?;
    Ok(Arc::new(plan))
}

// Waits of application threads for tensors, steps and decisions.

/// Interval of the interrupt function while a call waits: within what a person notices, and too
/// rare to cost anything beside a step.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(200);

impl Channel {
    /// Declares that a consumer waits for a tensor.
    ///
    /// # Errors
    /// [`ChannelError::Usage`] for an unknown tensor or a step that has not begun.
    pub fn needed(&self, tensor: TensorId, step: Step) -> Result<(), ChannelError> {
        self.check()?;
        self.request(&[tensor], step)
    }

    /// Checks that these tensors may be waited for, and tells the lanes where that sends pulls; else none is woken.
    fn request(&self, tensors: &[TensorId], step: Step) -> Result<(), ChannelError> {
        for &tensor in tensors {
            ApiGuard::check_tensor(&self.plan, tensor)?;
        }
        let completion = &self.shared.completion;
        let missing = |tensor: &TensorId| !completion.has(WaitTarget::Tensor(*tensor, step));
        let missing: Vec<TensorId> = tensors.iter().copied().filter(missing).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let guard = lock(&self.guard);
        if step > guard.current() {
            let current = guard.current();
            return Err(UsageError::WrongStep { call: "wait", step, current }.into());
        }
        if self.plan.strategy.pull == PullRule::NextStep {
            self.shared.tell_all(|| Command::Needed(missing.clone(), step));
        }
        Ok(())
    }

    /// Waits until all these tensors are ready in a step. `interrupt` is called every 200 ms.
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
            self.wait_for(WaitTarget::Tensor(tensor, step), interrupt)?;
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
        self.wait_for(WaitTarget::Step(step), interrupt)
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
        if self.plan.strategy.synchrony.stragglers().is_none() {
            let what = format!("no contributors are chosen for {step}: it waits for all ranks");
            return Err(UsageError::Argument(what).into());
        }
        lock(&self.guard).check_step("wait_decided", step)?;
        self.wait_for(WaitTarget::Contributors(step), interrupt)
    }

    /// Waits until the squares of a step's gradients are added up, and returns their sum; means may
    /// still be on their way.
    ///
    /// # Errors
    /// As [`Channel::wait`]; [`ChannelError::Usage`] for a step without
    /// [`Channel::measure_squares`].
    pub fn wait_squares(
        &self,
        step: Step,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<SquareSum, ChannelError> {
        self.check()?;
        lock(&self.guard).check_measured(step)?;
        self.wait_for(WaitTarget::Squares(step), interrupt)?;
        let gone = || UsageError::Argument(format!("the squares of {step} are known no more"));
        self.shared.completion.squares(step).ok_or_else(|| gone().into())
    }

    fn wait_for(
        &self,
        target: WaitTarget,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<(), ChannelError> {
        let completion = &self.shared.completion;
        if completion.has(target) {
            return Ok(());
        }
        let start = Instant::now();
        let result = loop {
            completion.wait(target, INTERRUPT_INTERVAL);
            if completion.has(target) {
                break Ok(());
            }
            if let Err(error) = self.check() {
                break Err(error);
            }
            if interrupt() {
                break Err(ChannelError::Interrupted);
            }
        };
        self.shared.metrics.note_wait(target, completion.newest(), start.elapsed());
        result
    }

    /// Returns whether a tensor is ready in a step.
    ///
    /// # Errors
    /// When the session is over, and for an unknown tensor.
    pub fn is_ready(&self, tensor: TensorId, step: Step) -> Result<bool, ChannelError> {
        self.check()?;
        ApiGuard::check_tensor(&self.plan, tensor)?;
        Ok(self.shared.completion.has(WaitTarget::Tensor(tensor, step)))
    }

    /// Returns the tensors that became ready in a step since the last call, in order, with whether
    /// no rank had a gradient.
    ///
    /// # Errors
    /// When the session is over.
    pub fn take_ready(&self, step: Step) -> Result<Vec<(TensorId, bool)>, ChannelError> {
        self.check()?;
        Ok(self.shared.completion.take(step))
    }

    /// Waits for a tensor of `step` that was not taken yet, and takes it. For threads that pass
    /// results on: the program's wait time does not count it.
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
            self.shared.completion.wait(WaitTarget::AnyTensor(step), INTERRUPT_INTERVAL);
        }
    }

    /// Waits for tensors whose blocks have all arrived at this rank, their root, and which wait for
    /// its result: each once, in order of arrival. [`Channel::take_blocks`] returns their blocks.
    ///
    /// # Errors
    /// When the session is over, or the wait was interrupted.
    pub fn next_root_requests(
        &self,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<(TensorId, Step)>, ChannelError> {
        loop {
            let requests = self.take_root_requests()?;
            if !requests.is_empty() {
                return Ok(requests);
            }
            if interrupt() {
                return Err(ChannelError::Interrupted);
            }
            self.shared.completion.wait(WaitTarget::RootRequest, INTERRUPT_INTERVAL);
        }
    }

    /// Waits for news of the membership, where training goes on when ranks are lost: each once, in order.
    ///
    /// # Errors
    /// When the session is over, or the wait was interrupted.
    pub fn next_changes(
        &self,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<MembershipEvent>, ChannelError> {
        loop {
            let changes = self.take_changes()?;
            if !changes.is_empty() {
                return Ok(changes);
            }
            if interrupt() {
                return Err(ChannelError::Interrupted);
            }
            self.shared.completion.wait(WaitTarget::Membership, INTERRUPT_INTERVAL);
        }
    }

    /// Returns it without a wait; there may be none.
    ///
    /// # Errors
    /// When the session is over.
    pub fn take_changes(&self) -> Result<Vec<MembershipEvent>, ChannelError> {
        self.shared.outcome_error().map_or(Ok(()), Err)?;
        Ok(self.shared.completion.take_changes())
    }

    /// Tells what the register of a generation holds in the job's store; `None`: the store does not
    /// answer.
    pub fn answer_claim(&self, generation: u32, value: Option<Vec<u8>>) {
        self.shared.tell_first(Command::Engine(Input::ClaimAnswered(generation, value)));
    }

    /// Returns them without a wait; there may be none.
    ///
    /// # Errors
    /// When the session is over.
    pub fn take_root_requests(&self) -> Result<Vec<(TensorId, Step)>, ChannelError> {
        self.shared.outcome_error().map_or(Ok(()), Err)?;
        Ok(self.shared.completion.take_root_requests())
    }
}
