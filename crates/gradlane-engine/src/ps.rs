//! Parameter servers: every slice has an owner that collects the contributions of all ranks, reduces them
//! once in rank order, and sends the result to all by the strategy's pull rule.

mod async_owner;
mod owner;
mod pull;
mod server_commands;
mod stragglers;

pub(crate) use pull::pull_deferred;

use crate::aggregator::Aggregator;
use crate::api::{
    violation, BufferRef, Job, Operation, Outstanding, PayloadDest, Region, Validated,
};
use crate::cx::Cx;
use crate::jobs::{Contribution, Done, PsTask, PsWritten, Running, Then, Written};
use crate::kept_results::KeptResult;
use crate::plan::{Plan, PullRule, Scheme, Slice, Synchrony};
use crate::rank_set::RankSet;
use crate::transmit::{Body, Message, OrderKey, PendingEncode};
use crate::worker::{Arrived, Submission};
use alloc::format;
use alloc::vec::Vec;
use async_owner::AsyncOwners;
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};
use owner::{OwnedSlice, Owner, PendingBroadcast, ReductionInput};
use server_commands::ServerCommands;
use stragglers::{is_early, Stragglers};

#[derive(Debug)]
pub(crate) struct ParameterServer {
    pub(crate) owner: Owner,
    pub(crate) async_owners: AsyncOwners,
    pub(crate) stragglers: Stragglers,
    /// Commands of the ranks that train to dedicated servers.
    pub(crate) commands: ServerCommands,
    /// The newest step of which a slice was reduced, on a dedicated server.
    newest_served: Option<Step>,
}

impl ParameterServer {
    pub(crate) fn new(plan: &Plan, rank: Rank) -> ParameterServer {
        ParameterServer {
            owner: Owner::new(plan, rank),
            async_owners: AsyncOwners::default(),
            stragglers: Stragglers::default(),
            commands: ServerCommands::default(),
            newest_served: None,
        }
    }

    /// Goes on as if step 0 were complete, with states of any values.
    pub(crate) fn skip_initial(&mut self, cx: &mut Cx) {
        self.owner.fast_forward(Step(1));
        self.async_owners.skip_initial(cx);
    }

    /// Collects each slice for a step of its own.
    pub(crate) fn begin_at(&mut self, step: impl Fn(SliceId) -> Step) {
        self.owner.fast_forward_each(step);
    }

    /// Goes on as if all ranks had been in all steps up to this one.
    pub(crate) fn fast_forward(&mut self, plan: &Plan, step: Step) {
        self.owner.fast_forward(step.next());
        self.async_owners.fast_forward(plan.world_size, step);
        self.stragglers.fast_forward(plan.world_size, step);
    }

    /// Whether a rank's gradient counts in a step, as far as is known: rank 0's alone in step 0,
    /// every rank's later, but for stragglers that are left out.
    fn contributes(&self, cx: &Cx, rank: Rank, step: Step) -> bool {
        let own = rank == cx.rank() && step == cx.step();
        if own && cx.plan().drops_stragglers(step) {
            return self.stragglers.may_contribute(rank, step);
        }
        if step.is_initial() {
            rank == Rank(0)
        } else {
            cx.plan().trains(rank)
        }
    }

    /// Ranks whose contributions an owned slice lacks.
    fn lacking<'a>(&'a self, cx: &'a Cx, owned: &'a OwnedSlice) -> impl Iterator<Item = Rank> + 'a {
        let ranks = (0..cx.plan().workers()).map(Rank);
        ranks.filter(move |&rank| {
            self.contributes(cx, rank, owned.step) && !owned.contributions.has(rank)
        })
    }
}

impl Aggregator for ParameterServer {
    fn takes(&self, kind: FrameKind) -> bool {
        use FrameKind::{Broadcast, Notify, Pull, Push};
        matches!(kind, Push | Broadcast | Notify | Pull)
    }

    /// Queues the pushes of a tensor; its own slices it contributes at once.
    fn contribute(&mut self, cx: &mut Cx, tensor: TensorId) {
        let step = cx.step();
        let absent = cx.worker().submission(tensor) == Submission::Absent;
        let priority = cx.priorities().priority(step, tensor);
        let contributes = self.contributes(cx, cx.rank(), step);
        for slice in cx.plan().slices_of(tensor) {
            let owner = cx.plan().slice(slice).owner;
            if !contributes || cx.has_source(slice) {
                cx.push_sent(slice);
            } else if !absent && cx.own_form(slice) == PayloadForm::Encoded {
                let key = cx.slice_key(step, priority, slice);
                let pending = PendingEncode { slice, step };
                match cx.kept_contribution(slice, step) {
                    Some(buffer) => self.encoded(cx, pending, key, buffer),
                    None => cx.queue_encode(owner, key, pending),
                }
            } else if owner == cx.rank() {
                cx.mark_push_sent(slice);
                let own = if absent { Contribution::Absent } else { Contribution::Own };
                self.add_contribution(cx, slice, owner, own, priority);
            } else {
                let key = cx.slice_key(step, priority, slice);
                let mut header = cx.slice_header(FrameKind::Push, step, slice, priority);
                let body = if absent {
                    header.flags = FrameFlags::ABSENT;
                    Body::Empty
                } else {
                    Body::Region(cx.gradient_region(slice))
                };
                cx.send(owner, key, Message { header, body });
            }
        }
    }

    fn check(&self, cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<()> {
        let owner = match header.kind {
            FrameKind::Push | FrameKind::Pull => cx.rank(),
            _ => from,
        };
        let right = cx.sender_of(header);
        if right != owner {
            return violation(format!("{}, but {right} owns it", cx.describe(header)));
        }
        let has_body = matches!(header.kind, FrameKind::Push | FrameKind::Broadcast)
            && !header.flags.contains(FrameFlags::ABSENT);
        cx.check_form(header, has_body)?;
        let bytes = if has_body { cx.plan().bytes_as(header.slice, header.form) } else { 0 };
        cx.check_extent(header, bytes)
    }

    fn land(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) -> Validated<PayloadDest> {
        match header.kind {
            FrameKind::Push => self.land_push(cx, from, header),
            FrameKind::Notify => {
                pull::check_notify(cx, from, header).map(|()| PayloadDest::Nothing)
            }
            FrameKind::Pull => {
                pull::check_pull(cx, &self.owner, from, header).map(|()| PayloadDest::Nothing)
            }
            _ => self.land_broadcast(cx, from, header),
        }
    }

    fn take(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) {
        match header.kind {
            FrameKind::Push => self.take_push(cx, from, header),
            FrameKind::Notify => pull::announced(cx, header.tensor),
            FrameKind::Pull => self.take_pull(cx, from, header),
            _ => self.take_broadcast(cx, header),
        }
    }

    fn read(&mut self, cx: &mut Cx, to: Rank, header: &FrameHeader) {
        let FrameHeader { slice, step, .. } = *header;
        match header.kind {
            FrameKind::Push => cx.contribution_sent(slice, step),
            FrameKind::Broadcast if cx.plan().is_async(step) => {
                self.async_owners.reply_sent(cx, slice, to);
            }
            FrameKind::Broadcast => {
                if let Some(buffer) = self.owner.sent(slice, step, to) {
                    cx.release(buffer);
                }
            }
            _ => {}
        }
    }

    fn encoded(&mut self, cx: &mut Cx, pending: PendingEncode, key: OrderKey, output: BufferRef) {
        let PendingEncode { slice, step } = pending;
        let owner = cx.plan().slice(slice).owner;
        let priority = cx.priority(step, slice);
        cx.mark_push_sent(slice);
        if !self.contributes(cx, cx.rank(), step) {
            // The step has gone on without this rank in the meantime.
            cx.drop_encoded(key, owner, output);
        } else if owner == cx.rank() {
            self.add_contribution(cx, slice, owner, Contribution::Encoded(output), priority);
        } else {
            cx.note_encoded(pending, key, owner, output);
            let mut header = cx.slice_header(FrameKind::Push, step, slice, priority);
            header.form = PayloadForm::Encoded;
            let body = Body::Region(output.whole());
            cx.send(owner, key, Message { header, body });
        }
        cx.install_if_open(slice);
    }

    /// Ranks whose contributions the owned slices lack in the current step; where none does, the
    /// owners of slices whose results are missing.
    fn missing(&self, cx: &Cx) -> RankSet {
        let mut missing = self.missing_contributors(cx);
        if !missing.is_empty() {
            return missing;
        }
        let step = cx.step();
        for slice in cx.plan().slice_ids().filter(|&it| !cx.worker().is_done(it)) {
            let Slice { tensor, owner, .. } = *cx.plan().slice(slice);
            if cx.plan().scheme_of(slice) == Scheme::Ps && cx.plan().takes_part(tensor, step) {
                missing.insert(owner);
            }
        }
        missing.remove(cx.rank());
        missing
    }
}

/// Updates by the driver's rules.
impl ParameterServer {
    /// The driver knows how tensors are updated.
    pub(crate) fn updates_ready(&mut self, cx: &mut Cx) {
        self.commands.set_paused(false);
        self.async_owners.updates_ready(cx);
    }

    /// The driver replies to pushes with something else than parameters.
    pub(crate) fn updates_paused(&mut self) {
        self.commands.set_paused(true);
        self.async_owners.updates_paused();
    }

    /// The session closes: the states go, and what is owed to ranks that have left.
    pub(crate) fn drop_states(&mut self, cx: &mut Cx) {
        self.async_owners.drop_states(cx);
        self.commands.drop_parameters(cx);
        self.owner.drop_broadcasts().for_each(|buffer| cx.release(buffer));
    }
}

/// Stragglers.
impl ParameterServer {
    /// The contributors of a step are known.
    pub(crate) fn decided(&mut self, cx: &mut Cx, step: Step, set: &RankSet) {
        self.stragglers.decided(cx, step, set);
        for slice in self.owner.slices() {
            self.reduce_if_decided(cx, slice);
        }
    }
}

// Contributions to owned slices: where pushes land, and the reduction of all that count.

/// Pushes.
impl ParameterServer {
    fn land_push(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<PayloadDest> {
        if self.owner.is_late(cx.plan(), header) {
            return self.stragglers.land_late(cx, from, header);
        }
        if cx.plan().commands_servers() {
            self.commands.check_push(cx, from, header)?;
        }
        let contributes = self.contributes(cx, from, header.step);
        let expected = self.expected_step(cx, from, header)?;
        let has_body = !header.flags.contains(FrameFlags::ABSENT);
        let what = || cx.describe(header);
        // A push that is applied alone is like no other.
        let is_async = cx.plan().is_async(header.step);
        let owned = self.owner.get_mut(header.slice).ok_or("not owned")?;
        if expected != header.step || owned.reducing || !contributes {
            let state = if owned.reducing { "reduces" } else { "collects for" };
            return violation(format!("{}, but this rank {state} {expected}", what()));
        }
        let arrived = owned.contributions.received_bytes(from);
        if owned.contributions.has(from) || arrived != header.offset {
            let offset = header.offset;
            return violation(format!("{} at offset {offset} after {arrived} bytes", what()));
        }
        if has_body && !is_async && !owned.accepts_form(header.form) {
            let form = header.form;
            return violation(format!("{} as {form:?}, unlike other contributions", what()));
        }
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        let bytes = cx.plan().bytes_as(header.slice, header.form);
        let buffer = owned.contributions.landing(from, || cx.acquire(bytes));
        Ok(PayloadDest::Region(buffer.whole().part(header.offset, header.length)))
    }

    /// The step that a push of this rank may be for now.
    fn expected_step(&self, cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<Step> {
        let owned = self.owner.get(header.slice).ok_or("not owned")?;
        let absent = header.flags.contains(FrameFlags::ABSENT);
        if cx.plan().lacks_initial(header.step, from, absent) {
            return violation(format!("{} without a value to start from", cx.describe(header)));
        }
        if !cx.plan().is_async(owned.step) {
            return Ok(owned.step);
        }
        let expected = self.async_owners.expected(header.slice, from);
        expected.or_else(|reason| violation(format!("{}: {}", cx.describe(header), reason.0)))
    }

    fn take_push(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) {
        if self.owner.is_late(cx.plan(), header) {
            return self.stragglers.late.take(cx, from, header);
        }
        let contributions = &mut self.owner.owned(header.slice).contributions;
        contributions.receive(from, header.length);
        if header.flags.contains(FrameFlags::LAST) {
            let whole = match contributions.take_arrived(from) {
                Some(arriving) => Contribution::arrived(arriving, header.form),
                None => Contribution::Absent,
            };
            self.add_contribution(cx, header.slice, from, whole, header.priority);
        }
    }
}

/// Reductions.
impl ParameterServer {
    /// A rank's contribution to an owned slice is whole.
    fn add_contribution(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        rank: Rank,
        contribution: Contribution,
        priority: Priority,
    ) {
        let owned = self.owner.owned(slice);
        let step = owned.step;
        if cx.plan().is_async(step) {
            return self.async_owners.push(cx, slice, rank, contribution, priority);
        }
        if !owned.add(rank, contribution, priority) {
            let name = cx.plan().name_of(slice);
            return cx.abort(format!(
                "some ranks sent {name:?} encoded in {step} and others as it is: all ranks have to \
                 do the same"
            ));
        }
        if cx.plan().drops_stragglers(step) {
            self.reduce_if_decided(cx, slice);
        } else if let Some(all) = owned.take_all(cx.plan().contributors(step) as usize) {
            self.reduce(cx, slice, all);
        }
    }

    /// Reduces a slice once its contributors are known and all of them have contributed.
    fn reduce_if_decided(&mut self, cx: &mut Cx, slice: SliceId) {
        let owned = self.owner.owned(slice);
        let step = owned.step;
        let Some(mut all) = self.stragglers.set(step).and_then(|set| owned.take_decided(set))
        else {
            return;
        };
        self.stragglers.late.expect(slice, step, core::mem::take(&mut all.arriving));
        for (_, dropped) in core::mem::take(&mut all.dropped) {
            if let Some(buffer) = dropped.buffer() {
                cx.release(buffer);
            }
        }
        self.reduce(cx, slice, all);
    }

    /// All contributions to a slice that count are here.
    fn reduce(&mut self, cx: &mut Cx, slice: SliceId, all: ReductionInput) {
        let ReductionInput { step, priority, counted, .. } = all;
        // The mean over one rank is its gradient, which is in place already, unless it is encoded. In a step
        // whose contributions travel raw the driver may put state in the place of the mean.
        let is_result = cx.others().is_empty()
            && counted.iter().all(|&(_, it)| it.form() != Some(PayloadForm::Encoded))
            && !cx.worker().sends_raw()
            && !cx.plan().updates_on_server(step, cx.plan().slice(slice).tensor)
            && cx.plan().strategy.synchrony != Synchrony::Async;
        if counted.iter().all(|&(_, it)| it == Contribution::Absent) {
            self.deliver(cx, slice, step, None, PayloadForm::Raw, false);
        } else if is_result {
            self.deliver(cx, slice, step, None, PayloadForm::Raw, true);
        } else {
            cx.queue_job_at(priority, slice, step, PsTask::Reduce(counted));
        }
    }

    /// Starts a job that the driver has asked for.
    pub(crate) fn start(&mut self, cx: &mut Cx, slice: SliceId, step: Step, task: PsTask) -> Job {
        match task {
            PsTask::Reduce(counted) => self.start_reduce(cx, slice, step, &counted),
            PsTask::Apply(push) => self.async_owners.start(cx, slice, push),
        }
    }

    /// The reduction of contributions: raw ones are added up into one of their buffers, encoded ones are
    /// decoded, added up and encoded into another. With updates on the server the mean is applied.
    fn start_reduce(
        &self,
        cx: &mut Cx,
        slice: SliceId,
        step: Step,
        counted: &[(Rank, Contribution)],
    ) -> Job {
        let region = |&(_, it): &(Rank, Contribution)| match it {
            Contribution::Own => Some(cx.gradient_region(slice)),
            Contribution::Buffer(buffer) | Contribution::Encoded(buffer) => Some(buffer.whole()),
            Contribution::Absent => None,
        };
        let inputs: Vec<Region> = counted.iter().filter_map(region).collect();
        let (absent, divisor) = (inputs.len() < counted.len(), counted.len() as u32);
        let mut spent: Vec<BufferRef> = counted.iter().filter_map(|(_, it)| it.buffer()).collect();
        let encoded = counted.iter().any(|(_, it)| it.form() == Some(PayloadForm::Encoded));
        let apply = cx.plan().updates_on_server(step, cx.plan().slice(slice).tensor);
        let form = if encoded && !apply { PayloadForm::Encoded } else { PayloadForm::Raw };
        cx.forget_kept(slice);
        let reused = !encoded && !spent.is_empty();
        let buffer =
            if reused { spent.remove(0) } else { cx.acquire(cx.plan().bytes_as(slice, form)) };
        let output = buffer.whole();
        let is_current = step == cx.step();
        let copy_to = cx.open_region(slice).filter(|_| is_current && !apply);
        let written = PsWritten::Result { form, in_place: copy_to.is_some() };
        let operation = match (encoded, apply) {
            (false, false) => Operation::Reduce { inputs, absent, divisor, output, copy_to },
            (false, true) => {
                let parameters = self.commands.parameters(cx, slice);
                Operation::ReduceApply { inputs, absent, divisor, parameters, output }
            }
            (true, false) => {
                Operation::DecodeReduceEncode { inputs, absent, divisor, output, copy_to }
            }
            (true, true) => {
                let parameters = self.commands.parameters(cx, slice);
                Operation::DecodeReduceApply { inputs, absent, divisor, parameters, output }
            }
        };
        let then = Then::Wrote(buffer, Written::Ps(written));
        cx.start(operation, Running { slice, step, spent, then })
    }

    /// The driver has done a job.
    pub(crate) fn job_done(&mut self, cx: &mut Cx, done: Done, written: PsWritten) {
        let Done { slice, step, output } = done;
        match written {
            PsWritten::Result { form, in_place } => {
                self.deliver(cx, slice, step, Some(output), form, in_place);
            }
            PsWritten::State(push) => self.async_owners.applied(cx, slice, push, output),
        }
    }
}

// Results: what an owner gives to all ranks, and where they land.

/// Results.
impl ParameterServer {
    /// The result of an owned slice is there: gives it to this rank's worker and to the others.
    /// Without a buffer it is either in place (`in_place`) or absent everywhere.
    fn deliver(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        step: Step,
        buffer: Option<BufferRef>,
        form: PayloadForm,
        in_place: bool,
    ) {
        let (priority, early_pulls) = self.owner.owned(slice).advance();
        if step.is_initial() {
            self.async_owners.keep_initial(cx, slice, buffer);
        }
        self.offer(cx, slice, step, buffer, form, priority);
        for rank in early_pulls {
            self.serve_pull(cx, slice, step, rank);
        }
        if cx.is_dedicated_server() {
            self.note_served(cx, step);
            buffer.into_iter().for_each(|result| self.commands.keep(cx, slice, step, result));
        } else if is_early(cx, step) {
            self.stragglers.early.keep(cx, slice, step, buffer, form);
        } else {
            match buffer {
                Some(buffer) if !in_place => {
                    cx.retain(buffer);
                    cx.result_in_buffer(slice, buffer, form);
                }
                None if !in_place => cx.result_without_bytes(slice, false),
                _ => {
                    if let Some(buffer) = buffer {
                        cx.keep_result(slice, buffer, form);
                    }
                    cx.slice_done(slice, true);
                }
            }
        }
        if let Some(buffer) = buffer {
            cx.release(buffer);
        }
        if cx.plan().strategy.pull == PullRule::AfterNotice && !cx.is_dedicated_server() {
            pull::announced(cx, cx.plan().slice(slice).tensor);
        }
    }

    /// Keeps a result for the ranks that are owed it and sends it, or a notice of it.
    fn offer(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        step: Step,
        buffer: Option<BufferRef>,
        form: PayloadForm,
        priority: Priority,
    ) {
        let others = cx.plan().workers_but(cx.rank());
        if others.is_empty() {
            return;
        }
        if let Some(buffer) = buffer {
            cx.retain(buffer);
        }
        // Step 0 is sent unasked whatever the rule: there is no iteration to start yet.
        let unasked = cx.plan().strategy.pull == PullRule::Broadcast || step.is_initial();
        let to_pull = if unasked { RankSet::empty(cx.plan().world_size) } else { others.clone() };
        let to_send = others.clone();
        let pending = PendingBroadcast { buffer, form, to_pull, to_send, priority };
        self.owner.keep(slice, step, pending);
        if unasked {
            let message = cx.result_message(slice, step, (buffer, form), priority);
            let key = cx.result_key(step, priority, slice);
            cx.send_shared(others, key, message);
        } else if cx.plan().strategy.pull == PullRule::AfterNotice {
            let header = cx.slice_header(FrameKind::Notify, step, slice, priority);
            cx.send_control(others, header, Body::Empty);
        }
    }

    fn take_pull(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) {
        if self.owner.pending(header.slice, header.step).is_some() {
            self.serve_pull(cx, header.slice, header.step, from);
        } else {
            self.owner.owned(header.slice).early_pulls.push(from);
        }
    }

    /// A rank that is owed a result pulls it.
    fn serve_pull(&mut self, cx: &mut Cx, slice: SliceId, step: Step, rank: Rank) {
        if let Some(pending) = self.owner.pull(slice, step, rank) {
            let (result, priority) = ((pending.buffer, pending.form), pending.priority);
            let message = cx.result_message(slice, step, result, priority);
            let key = cx.result_key(step, priority, slice);
            cx.send(rank, key, message);
        }
    }

    fn land_broadcast(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<PayloadDest> {
        if is_early(cx, header.step) {
            return self.stragglers.early.land(cx, from, header);
        }
        let what = || cx.describe(header);
        let step = cx.step();
        if header.step != step {
            return violation(format!("{}, but this rank is in {step}", what()));
        }
        // A straggler may not have heard yet that it is left out.
        let owes = self.contributes(cx, cx.rank(), step) && !cx.plan().drops_stragglers(step);
        if owes && cx.worker().submission(header.tensor) == Submission::Missing {
            return violation(format!("{} without a contribution of this rank", what()));
        }
        let pulls = cx.plan().strategy.pull != PullRule::Broadcast && !step.is_initial();
        if pulls && !cx.worker().has_pulled(header.tensor) {
            return violation(format!("{} unasked", what()));
        }
        if from == cx.rank() {
            return violation(format!("{} from this rank itself", what()));
        }
        cx.worker().check_result(header, what)?;
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        Ok(PayloadDest::Region(cx.place_result(header, false)))
    }

    fn take_broadcast(&mut self, cx: &mut Cx, header: &FrameHeader) {
        if is_early(cx, header.step) {
            return self.stragglers.early.take(header);
        }
        match cx.receive_result(header) {
            Arrived::Part => {}
            Arrived::Buffered(..) => cx.install_if_open(header.slice),
            Arrived::InPlace => cx.slice_done(header.slice, true),
            // An absent slice, or an empty one.
            Arrived::Empty => {
                let absent = header.flags.contains(FrameFlags::ABSENT);
                cx.result_without_bytes(header.slice, !absent);
            }
        }
    }
}

/// Results since ranks were lost.
impl ParameterServer {
    /// Sends a result that this rank has to others that lack it, whoever owns the slice.
    pub(crate) fn resend(&mut self, cx: &mut Cx, slice: SliceId, step: Step, to: &[Rank]) {
        let mut lacking = RankSet::empty(cx.plan().world_size);
        to.iter().for_each(|&rank| {
            lacking.insert(rank);
        });
        let kept = cx.kept_result(slice, step).expect("a rank sends what it said that it has");
        let (buffer, form) = match kept {
            KeptResult::Buffer(buffer, form) => (Some(buffer), form),
            KeptResult::Empty | KeptResult::Absent => (None, PayloadForm::Raw),
        };
        if let Some(buffer) = buffer {
            cx.retain(buffer);
        }
        let priority = cx.priority(step, slice);
        let mut message = cx.result_message(slice, step, (buffer, form), priority);
        if kept == KeptResult::Empty {
            message.header.flags = FrameFlags::NONE;
        }
        let to_send = lacking.clone();
        let to_pull = RankSet::empty(cx.plan().world_size);
        self.owner.keep(slice, step, PendingBroadcast { buffer, form, to_pull, to_send, priority });
        let key = cx.slice_key(step, priority, slice);
        cx.send_shared(lacking, key, message);
    }
}

// What holds up a step: contributors of owned slices, here and on dedicated servers.

/// Missing contributors.
impl ParameterServer {
    /// Ranks whose contributions the owned slices still lack in the current step.
    fn missing_contributors(&self, cx: &Cx) -> RankSet {
        let mut missing = RankSet::empty(cx.plan().world_size);
        let step = cx.step();
        if cx.plan().is_async(step) {
            return missing;
        }
        let set = self.stragglers.set(step);
        let counts = |rank: &Rank| set.is_none_or(|set| set.contains(*rank));
        for (slice, owned) in self.owner.iter() {
            let collects = cx.plan().takes_part(cx.plan().slice(slice).tensor, step);
            if owned.step == step && !owned.reducing && collects {
                self.lacking(cx, owned).filter(counts).for_each(|rank| {
                    missing.insert(rank);
                });
            }
        }
        missing.remove(cx.rank());
        missing
    }
}

/// Dedicated servers. They need no worker's state: their contributions say which step they are in.
impl ParameterServer {
    /// A slice of a step is reduced, perhaps the first one: priorities are those of the next step from
    /// now on, and the ones before this step are done with.
    fn note_served(&mut self, cx: &mut Cx, step: Step) {
        if self.newest_served.is_none_or(|newest| newest < step) {
            self.newest_served = Some(step);
            cx.enter_priorities(step.next());
        }
    }

    /// Whether some ranks have contributed to a slice, and others not.
    pub(crate) fn is_collecting(&self) -> bool {
        self.owner.collecting().next().is_some()
    }

    /// The last step of which all that this rank owns is reduced.
    pub(crate) fn last_served(&self, plan: &Plan) -> Option<Step> {
        let trained = |slice: SliceId| plan.takes_part(plan.slice(slice).tensor, Step(1));
        let served = self.owner.iter().filter(|&(slice, _)| trained(slice));
        let least = served.map(|(_, owned)| owned.step).min();
        least.and_then(|step| step.0.checked_sub(1)).map(Step)
    }

    /// Slices that some ranks have contributed to, and others not.
    pub(crate) fn uncollected(&self, cx: &Cx) -> Outstanding {
        let mut outstanding = Outstanding::default();
        let mut missing = RankSet::empty(cx.plan().world_size);
        let mut last: Option<TensorId> = None;
        for (slice, owned) in self.owner.collecting() {
            outstanding.step = outstanding.step.max(owned.step);
            let tensor = cx.plan().slice(slice).tensor;
            if last.replace(tensor) != Some(tensor) {
                outstanding.add_tensor(cx.plan().name_of(slice));
            }
            let bytes = cx.plan().bytes_as(slice, owned.form.unwrap_or(PayloadForm::Raw));
            for rank in self.lacking(cx, owned) {
                missing.insert(rank);
                let arrived = owned.contributions.received_bytes(rank);
                outstanding.bytes += bytes.saturating_sub(arrived);
            }
        }
        outstanding.ranks = missing.iter().collect();
        outstanding
    }
}
