//! Steps that go on without the ranks that are late: the owner's and the worker's side.
//!
//! Rank 0 decides which ranks are in (`control::contributors`) and tells all ranks. An owner collects
//! contributions as ever, but reduces a slice only when it knows the set and has all of it; contributions
//! of other ranks are dropped, whole or not, early or late. So a rank is in for all slices of a step or for
//! none, and all ranks divide by the same number.
//!
//! A straggler may be some steps behind. Results that owners send it meanwhile wait in buffers until it
//! comes to their step. The owner's side of a straggler goes
//! on like any other's: only its own worker waits.

mod dropped_pushes;
mod early_results;

pub(super) use early_results::is_early;

use crate::api::{BufferRef, PayloadDest};
use crate::contribution::Arriving;
use crate::cx::Cx;
use crate::rank_set::RankSet;
use crate::violation::Validated;
use crate::worker::Submission;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use dropped_pushes::DroppedPushes;
use early_results::EarlyResults;
use gradlane_units::{Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameHeader, PayloadForm};

/// Sets of steps behind this rank that are kept, to tell late pushes from wrong ones.
const SETS_KEPT: u64 = 8;

/// The contributors of steps, as this rank knows them; empty where no straggler is dropped.
#[derive(Debug, Default)]
pub(crate) struct Stragglers {
    sets: BTreeMap<Step, RankSet>,
    early: EarlyResults,
    late: DroppedPushes,
    /// Whether this rank takes no part in the current step.
    passes: bool,
}

impl Stragglers {
    /// Goes on as if all ranks had been in all steps up to this one.
    pub(super) fn fast_forward(&mut self, world_size: u32, step: Step) {
        self.sets.clear();
        self.sets.insert(step, RankSet::all(world_size));
    }

    /// The contributors of a step, if they are known.
    pub(crate) fn set(&self, step: Step) -> Option<&RankSet> {
        self.sets.get(&step)
    }

    /// Whether this rank takes no part in the current step.
    pub(crate) fn passes(&self) -> bool {
        self.passes
    }

    /// Whether a rank may still contribute to its current step.
    pub(crate) fn may_contribute(&self, rank: Rank, step: Step) -> bool {
        !self.passes && self.set(step).is_none_or(|set| set.contains(rank))
    }

    /// Whether a rank may pass a step: it was left out of the one before, or the step is decided.
    pub(crate) fn may_pass(&self, rank: Rank, step: Step) -> bool {
        let before = step.0.checked_sub(1).map(Step).unwrap_or_default();
        let was_out = self.set(before).is_some_and(|set| !set.contains(rank));
        was_out || self.set(step).is_some()
    }

    /// The current step has begun: results that came before are its own.
    pub(super) fn begin(&mut self, cx: &mut Cx, passes: bool) {
        let step = cx.step();
        self.passes = passes;
        if cx.plan().drops_stragglers(step) {
            self.sets.retain(|&it, _| it.0 + SETS_KEPT >= step.0);
            self.early.begin(cx, step);
        }
    }

    /// A tensor of the current step was submitted.
    pub(super) fn on_submitted(&self, cx: &mut Cx, tensor: TensorId) {
        let step = cx.step();
        if cx.plan().drops_stragglers(step) && self.set(step).is_some() {
            cx.part_done(tensor);
        }
    }

    /// The contributors of a step are known.
    pub(super) fn decided(&mut self, cx: &mut Cx, step: Step, set: &RankSet) {
        self.sets.insert(step, set.clone());
        if !cx.worker().is_in(step) {
            return;
        }
        if !set.contains(cx.rank()) && !self.passes {
            cx.withdraw(step);
        }
        for tensor in cx.plan().tensor_ids() {
            let submitted = cx.worker().submission(tensor) != Submission::Missing;
            if submitted && cx.plan().takes_part(tensor, step) {
                cx.part_done(tensor);
            }
        }
    }
}

/// Late pushes and early results.
impl Stragglers {
    /// Pushes of a step that goes on without them are still arriving.
    pub(super) fn expect_late_pushes(
        &mut self,
        slice: SliceId,
        step: Step,
        arriving: Vec<(Rank, Arriving)>,
    ) {
        self.late.expect(slice, step, arriving);
    }

    pub(super) fn land_late_push(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<PayloadDest> {
        let counts = self.set(header.step).is_some_and(|set| set.contains(from));
        self.late.land(cx, from, header, counts)
    }

    pub(super) fn take_late_push(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) {
        self.late.take(cx, from, header);
    }

    pub(super) fn land_early(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<PayloadDest> {
        self.early.land(cx, from, header)
    }

    pub(super) fn take_early(&mut self, header: &FrameHeader) {
        self.early.take(header);
    }

    /// This rank's own result of a step that its worker has not come to.
    pub(super) fn keep_early(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        step: Step,
        buffer: Option<BufferRef>,
        form: PayloadForm,
    ) {
        self.early.keep(cx, slice, step, buffer, form);
    }
}
