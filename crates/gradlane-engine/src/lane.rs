//! The data plane of one lane: the plan's slices, what this rank has submitted of them, and how they are sent, added up
//! and given back. It knows no session and no lost rank.

use crate::aggregator::Aggregator;
use crate::api::{
    violation, EngineOptions, Job, JobResult, Outstanding, PayloadDest, UsageError, Validated,
};
use crate::cx::{Cx, Next};
use crate::gather::{self, Gather};
use crate::jobs::{Done, Queued, Running, Task, Then, Written};
use crate::plan::{Plan, Scheme};
use crate::ps::{pull_deferred, ParameterServer};
use crate::rank_set::RankSet;
use crate::ring::Ring;
use crate::transmit::PendingEncode;
use crate::worker::Submission;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader};

#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) cx: Cx,
    ps: ParameterServer,
    ring: Ring,
    gather: Gather,
}

impl Lane {
    pub(crate) fn new(options: &EngineOptions, plan: Arc<Plan>) -> Lane {
        let rank = options.rank;
        let (ps, ring) = (ParameterServer::new(&plan, rank), Ring::new(&plan));
        Lane { ps, ring, gather: Gather::default(), cx: Cx::new(options, plan) }
    }

    /// Goes on as if step 0 were complete, with these priorities.
    pub(crate) fn skip_initial(&mut self, priorities: Vec<Priority>) {
        self.cx.skip_initial(priorities);
        self.ps.skip_initial(&mut self.cx);
    }

    /// Goes on as if this step were the one that has just been completed.
    pub(crate) fn fast_forward(&mut self, step: Step) {
        self.cx.fast_forward(step);
        self.ps.fast_forward(self.cx.plan(), step);
        self.ring.fast_forward(step);
    }

    fn of(&mut self, scheme: Scheme) -> (&mut dyn Aggregator, &mut Cx) {
        let scheme: &mut dyn Aggregator = match scheme {
            Scheme::Ps => &mut self.ps,
            Scheme::Ring => &mut self.ring,
            Scheme::AllGather | Scheme::GatherToRoot => &mut self.gather,
        };
        (scheme, &mut self.cx)
    }

    fn of_tensor(&mut self, tensor: TensorId) -> (&mut dyn Aggregator, &mut Cx) {
        self.of(self.cx.plan().tensor(tensor).scheme)
    }
}

/// The application's calls.
impl Lane {
    /// Checks that a step may begin: the next one, after all of the one before is complete.
    pub(crate) fn check_begins(&self, step: Step) -> Result<(), UsageError> {
        let worker = self.cx.worker();
        let expected = worker.next_step();
        if step != expected {
            return Err(UsageError::WrongStep { call: "step_begin", step, current: expected });
        }
        if !worker.has_begun() || worker.is_complete() {
            return Ok(());
        }
        let outstanding = self.outstanding(None);
        let name = outstanding.tensors.into_iter().next().unwrap_or_default();
        let (current, missing) = (worker.step(), worker.incomplete());
        Err(UsageError::Incomplete { step, current, missing, name })
    }

    /// Checks that a call is about a tensor of the plan, in the current step.
    pub(crate) fn check_call(
        &self,
        tensor: TensorId,
        step: Step,
        call: &'static str,
    ) -> Result<(), UsageError> {
        let count = self.cx.plan().tensors.len();
        if tensor.index() >= count {
            return Err(UsageError::UnknownTensor { tensor: tensor.0, count });
        }
        self.check_step(call, step)
    }

    pub(crate) fn check_step(&self, call: &'static str, step: Step) -> Result<(), UsageError> {
        if self.cx.worker().is_in(step) {
            return Ok(());
        }
        Err(UsageError::WrongStep { call, step, current: self.cx.step() })
    }

    /// Takes this rank's gradient of a tensor.
    pub(crate) fn submit_gradient(
        &mut self,
        tensor: TensorId,
        step: Step,
    ) -> Result<(), UsageError> {
        let planned = self.cx.plan().tensor(tensor);
        if planned.scheme.has_blocks() {
            let name = &planned.spec.name;
            let message = format!("tensor {name:?} has blocks of any size: use block_ready");
            return Err(UsageError::Argument(message));
        }
        self.submit(tensor, step, Submission::Gradient)
    }

    /// Takes this rank's block of a tensor.
    pub(crate) fn submit_block(
        &mut self,
        tensor: TensorId,
        step: Step,
        bytes: u64,
    ) -> Result<(), UsageError> {
        gather::check_bytes(self.cx.plan(), tensor, bytes)?;
        if self.cx.worker().submission(tensor) == Submission::Missing {
            self.gather.set_own(tensor, step, bytes);
        }
        self.submit(tensor, step, Submission::Gradient)
    }

    /// Takes this rank's submission of a tensor.
    pub(crate) fn submit(
        &mut self,
        tensor: TensorId,
        step: Step,
        submission: Submission,
    ) -> Result<(), UsageError> {
        let plan = self.cx.plan();
        let name = &plan.tensor(tensor).spec.name;
        if !plan.takes_part(tensor, step) {
            let message = format!("tensor {name:?} is not trained: it has no gradient in {step}");
            return Err(UsageError::Argument(message));
        }
        if plan.lacks_initial(step, self.cx.rank(), submission == Submission::Absent) {
            let message = format!("tensor {name:?} has no value to start from, which updates need");
            return Err(UsageError::Argument(message));
        }
        if self.cx.worker().submission(tensor) != Submission::Missing {
            return Err(UsageError::Twice { name: name.clone(), step });
        }
        self.cx.submit(tensor, submission);
        Ok(())
    }

    /// Sends this rank's contributions to a tensor that it has submitted.
    pub(crate) fn contribute(&mut self, tensor: TensorId) {
        let (scheme, cx) = self.of_tensor(tensor);
        scheme.contribute(cx, tensor);
    }

    /// The application has the root's result of a tensor.
    pub(crate) fn send_root_result(
        &mut self,
        tensor: TensorId,
        step: Step,
        bytes: u64,
    ) -> Result<(), UsageError> {
        gather::check_bytes(self.cx.plan(), tensor, bytes)?;
        self.gather.send_result(&mut self.cx, tensor, step, bytes)
    }

    pub(crate) fn release_blocks(
        &mut self,
        tensor: TensorId,
        step: Step,
    ) -> Result<(), UsageError> {
        self.gather.release(&mut self.cx, tensor, step)
    }

    /// Sends the pulls that waited for the next iteration.
    pub(crate) fn pull_deferred(&mut self) {
        pull_deferred(&mut self.cx);
    }

    pub(crate) fn send_raw(&mut self) -> Result<(), UsageError> {
        if self.cx.worker().has_submitted() {
            let text = "send_raw comes before the step's first contribution";
            return Err(UsageError::Argument(text.into()));
        }
        self.cx.send_raw();
        Ok(())
    }

    pub(crate) fn send_command(&mut self, command: Vec<u8>) -> Result<(), UsageError> {
        self.ps.commands.send(&mut self.cx, command)
    }

    /// The driver knows how tensors are updated.
    pub(crate) fn updates_ready(&mut self) {
        self.ps.updates_ready(&mut self.cx);
    }

    /// The driver replies to pushes with something else than parameters.
    pub(crate) fn updates_paused(&mut self) {
        self.ps.updates_paused();
    }
}

/// Frames.
impl Lane {
    /// Chooses where the payload of a frame about a slice goes.
    pub(crate) fn land(&mut self, from: Rank, header: &FrameHeader) -> Validated<PayloadDest> {
        self.cx.check_slice(from, header)?;
        let scheme = self.cx.plan().tensor(header.tensor).scheme;
        let (aggregator, cx) = self.of(scheme);
        if !aggregator.takes(header.kind) {
            let (what, scheme) = (cx.describe(header), scheme.name());
            return violation(format!("{what}, a tensor of scheme {scheme}"));
        }
        aggregator.check(cx, from, header)?;
        aggregator.land(cx, from, header)
    }

    /// Takes a frame whose payload is in place.
    pub(crate) fn take(&mut self, from: Rank, header: &FrameHeader) {
        let (scheme, cx) = self.of_tensor(header.tensor);
        scheme.take(cx, from, header);
    }

    /// Nobody reads the memory of a slice's frame any more.
    pub(crate) fn slice_read(&mut self, to: Rank, header: &FrameHeader) {
        if header.flags.contains(FrameFlags::LAST) {
            let (scheme, cx) = self.of_tensor(header.tensor);
            scheme.read(cx, to, header);
        }
    }

    pub(crate) fn check_command(&self, from: Rank, header: &FrameHeader) -> Validated<()> {
        self.ps.commands.check(&self.cx, from, header)
    }

    pub(crate) fn take_command(&mut self, from: Rank, header: &FrameHeader) {
        self.ps.commands.take(from, header);
    }
}

/// Jobs.
impl Lane {
    /// The next job for the driver's threads, most urgent first.
    pub(crate) fn poll_job(&mut self) -> Option<Job> {
        let Queued { slice, step, task } = match self.cx.poll_job()? {
            Next::Job(job) => return Some(job),
            Next::Task(queued) => queued,
        };
        match task {
            Task::Ps(task) => Some(self.ps.start(&mut self.cx, slice, step, task)),
            Task::Ring(task) => Some(self.ring.start(&mut self.cx, slice, step, task)),
            Task::Install(_) | Task::AddSquares => unreachable!("the context starts these"),
        }
    }

    /// The driver has done a job. Contributions are dropped while a membership changes.
    pub(crate) fn finish_job(&mut self, running: Running, result: &JobResult, drops: bool) {
        let Running { slice, step, spent, then } = running;
        spent.into_iter().for_each(|buffer| self.cx.release(buffer));
        let (output, written) = match then {
            Then::Installed => return self.cx.slice_done(slice, true),
            Then::AddedSquares => {
                let squares = match result {
                    JobResult::Squares(sum) => Some(sum),
                    _ => None,
                };
                self.cx.add_squares(squares);
                return self.cx.finish_slice(slice, true);
            }
            Then::Wrote(output, written) => match result {
                JobResult::Encoded(bytes) => (output.fitted(*bytes), written),
                _ => (output, written),
            },
        };
        let done = Done { slice, step, output };
        match written {
            Written::Contribution(key) => {
                self.cx.keep_contribution(slice, step, output);
                if drops {
                    return self.cx.release(output);
                }
                let (scheme, cx) = self.of(self.cx.plan().scheme_of(slice));
                scheme.encoded(cx, PendingEncode { slice, step }, key, output);
            }
            Written::Ps(written) => self.ps.job_done(&mut self.cx, done, written),
            Written::Ring(written) => self.ring.job_done(&mut self.cx, done, written),
        }
    }
}

/// Contributors of a step.
impl Lane {
    pub(crate) fn begin_contributing(&mut self, passes: bool) {
        self.ps.stragglers.begin(&mut self.cx, passes);
    }

    /// Whether this rank may pass a step: it was left out of the one before, or of this one.
    pub(crate) fn may_pass(&self, step: Step) -> bool {
        self.cx.plan().drops_stragglers(step) && self.ps.stragglers.may_pass(self.cx.rank(), step)
    }

    /// Whether this rank takes no part in the current step.
    pub(crate) fn passes(&self) -> bool {
        self.ps.stragglers.passes()
    }

    /// Whether this rank may still contribute to its current step.
    pub(crate) fn may_contribute(&self, step: Step) -> bool {
        self.ps.stragglers.may_contribute(self.cx.rank(), step)
    }

    /// Whether the contributors of a step are known.
    pub(crate) fn is_decided(&self, step: Step) -> bool {
        self.ps.stragglers.set(step).is_some()
    }

    /// Whether the current step waits for a decision.
    pub(crate) fn is_undecided(&self) -> bool {
        let step = self.cx.step();
        self.cx.plan().drops_stragglers(step) && !self.is_decided(step)
    }

    pub(crate) fn note_submitted(&mut self, tensor: TensorId) {
        self.ps.stragglers.on_submitted(&mut self.cx, tensor);
    }

    /// The contributors of a step are known.
    pub(crate) fn decide(&mut self, step: Step, set: &RankSet) {
        self.ps.decided(&mut self.cx, step, set);
    }
}

/// The end, and what is missing until then.
impl Lane {
    /// Whether no job is under way, and everything that is owed to other ranks was sent, if anything still is.
    pub(crate) fn has_delivered_all(&self, owes_nothing: bool) -> bool {
        let has_sent = self.cx.has_encoded_all() && self.ps.owner.has_delivered_all();
        self.cx.has_done_all() && (owes_nothing || has_sent)
    }

    /// Whether every push was applied and every reply is with the kernel.
    pub(crate) fn has_replied_to_all(&self) -> bool {
        self.ps.async_owners.is_idle()
    }

    /// Drops what is kept for other ranks.
    pub(crate) fn close(&mut self) {
        self.ps.drop_states(&mut self.cx);
        self.cx.drop_kept();
    }

    /// Whether this rank has done its part and waits for others.
    pub(crate) fn waits_for_others(&self) -> bool {
        if self.cx.is_dedicated_server() {
            self.ps.is_collecting()
        } else {
            // The first lane knows which ranks a decision waits for.
            let decides_elsewhere = self.cx.plan().lane > 0 && self.is_undecided();
            self.cx.worker().waits_for_others() && !decides_elsewhere
        }
    }

    /// The last step that is behind this rank.
    pub(crate) fn last_complete(&self) -> Option<Step> {
        if self.cx.is_dedicated_server() {
            self.ps.last_served(self.cx.plan())
        } else {
            self.cx.worker().last_complete()
        }
    }

    /// Tensors, bytes and ranks that this rank waits for in the current step. A decision waits for `awaited`.
    pub(crate) fn outstanding(&self, awaited: Option<&RankSet>) -> Outstanding {
        if self.cx.is_dedicated_server() {
            return self.ps.uncollected(&self.cx);
        }
        let (plan, worker) = (self.cx.plan(), self.cx.worker());
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
        let missing = match awaited {
            Some(awaited) if !awaited.is_empty() => awaited.clone(),
            _ => {
                let all: [&dyn Aggregator; 3] = [&self.ps, &self.ring, &self.gather];
                let ranks = all.iter().map(|scheme| scheme.missing(&self.cx));
                ranks.fold(RankSet::empty(plan.world_size), |missing, of| missing.with(&of))
            }
        };
        outstanding.ranks = missing.iter().collect();
        outstanding
    }
}

/// A new membership.
impl Lane {
    /// Goes on with a plan for other members: its schemes are new ones, in which slices that have a result in the latest
    /// step, `latest`, are collected for the next. What this rank has submitted is contributed again.
    pub(crate) fn restart(
        &mut self,
        plan: Arc<Plan>,
        latest: Step,
        has_result: &[bool],
        sources: BTreeMap<SliceId, Rank>,
    ) {
        let rank = self.cx.rank();
        self.ps = ParameterServer::new(&plan, rank);
        self.ps.begin_at(|slice| if has_result[slice.index()] { latest.next() } else { latest });
        self.ring = Ring::new(&plan);
        self.cx.restart(plan, sources);
        for tensor in self.cx.plan().tensor_ids() {
            if self.cx.worker().submission(tensor) != Submission::Missing {
                self.contribute(tensor);
            }
        }
    }

    /// Sends a result that this rank has to others that lack it, whoever owns the slice.
    pub(crate) fn resend(&mut self, slice: SliceId, step: Step, to: &[Rank]) {
        self.ps.resend(&mut self.cx, slice, step, to);
    }
}
