//! Parameter servers: every slice has an owner that collects the contributions of all ranks, reduces them
//! once in rank order, and sends the result to all by the strategy's pull rule.

mod async_owner;
mod collecting;
mod contribution_set;
mod dedicated;
mod owner;
mod pull;
mod results;
mod server_commands;
mod stragglers;

pub(crate) use async_owner::lacks_initial;
pub(crate) use pull::pull_deferred;

use crate::aggregator::Aggregator;
use crate::api::{BufferRef, PayloadDest, UsageError};
use crate::contribution::Contribution;
use crate::cx::Cx;
use crate::plan::{Plan, Scheme, Slice};
use crate::rank_set::RankSet;
use crate::transmit::{Body, Message, OrderKey, PendingEncode};
use crate::violation::{violation, Validated};
use crate::worker::Submission;
use alloc::format;
use alloc::vec::Vec;
use async_owner::AsyncOwners;
use gradlane_units::{Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};
use owner::{OwnedSlice, Owner};
use server_commands::ServerCommands;
use stragglers::Stragglers;

#[derive(Debug)]
pub(crate) struct ParameterServer {
    owner: Owner,
    async_owners: AsyncOwners,
    stragglers: Stragglers,
    commands: ServerCommands,
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
            self.contributes(cx, rank, owned.step()) && !owned.contributions().has(rank)
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

/// Commands of the ranks that train to dedicated servers.
impl ParameterServer {
    /// Sends this rank's command for the current step.
    pub(crate) fn send_command(&mut self, cx: &mut Cx, it: Vec<u8>) -> Result<(), UsageError> {
        self.commands.send(cx, it)
    }

    pub(crate) fn check_command(&self, cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<()> {
        self.commands.check(cx, from, header)
    }

    pub(crate) fn take_command(&mut self, from: Rank, header: &FrameHeader) {
        self.commands.take(from, header);
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

    /// Whether every push was applied and every reply is with the kernel.
    pub(crate) fn has_replied_to_all(&self) -> bool {
        self.async_owners.is_idle()
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
    pub(crate) fn stragglers(&self) -> &Stragglers {
        &self.stragglers
    }

    /// The current step has begun; whether this rank takes no part in it.
    pub(crate) fn begin(&mut self, cx: &mut Cx, passes: bool) {
        self.stragglers.begin(cx, passes);
    }

    /// A tensor of the current step was submitted.
    pub(crate) fn on_submitted(&mut self, cx: &mut Cx, tensor: TensorId) {
        self.stragglers.on_submitted(cx, tensor);
    }

    /// The contributors of a step are known.
    pub(crate) fn decided(&mut self, cx: &mut Cx, step: Step, set: &RankSet) {
        self.stragglers.decided(cx, step, set);
        for slice in self.owner.slices() {
            self.reduce_if_decided(cx, slice);
        }
    }
}
