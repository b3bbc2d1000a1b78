//! Results: what an owner gives to all ranks, and where they land.

use super::owner::PendingBroadcast;
use super::stragglers::is_early;
use super::{pull, ParameterServer};
use crate::api::{BufferRef, PayloadDest};
use crate::cx::Cx;
use crate::kept_results::KeptResult;
use crate::plan::PullRule;
use crate::rank_set::RankSet;
use crate::transmit::Body;
use crate::violation::{violation, Validated};
use crate::worker::{Arrived, Submission};
use alloc::format;
use gradlane_units::{Priority, Rank, SliceId, Step};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

/// Results.
impl ParameterServer {
    /// The result of an owned slice is there: gives it to this rank's worker and to the others.
    /// Without a buffer it is either in place (`in_place`) or absent everywhere.
    pub(super) fn deliver(
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
            self.stragglers.keep_early(cx, slice, step, buffer, form);
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

    pub(super) fn take_pull(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) {
        if self.owner.pending(header.slice, header.step).is_some() {
            self.serve_pull(cx, header.slice, header.step, from);
        } else {
            self.owner.owned(header.slice).pull_early(from);
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

    pub(super) fn land_broadcast(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<PayloadDest> {
        if is_early(cx, header.step) {
            return self.stragglers.land_early(cx, from, header);
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

    pub(super) fn take_broadcast(&mut self, cx: &mut Cx, header: &FrameHeader) {
        if is_early(cx, header.step) {
            return self.stragglers.take_early(header);
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

    /// Whether every result is with the kernel of all ranks that it is owed to.
    pub(crate) fn has_delivered_all(&self) -> bool {
        self.owner.has_delivered_all()
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
