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

use crate::api::{violation, BufferRef, PayloadDest, Validated};
use crate::cx::Cx;
use crate::jobs::Arriving;
use crate::rank_set::RankSet;
use crate::worker::{EarlyResult, Submission};
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, PayloadForm};

/// Sets of steps behind this rank that are kept, to tell late pushes from wrong ones.
const SETS_KEPT: u64 = 8;

/// The contributors of steps, as this rank knows them; empty where no straggler is dropped.
#[derive(Debug, Default)]
pub(crate) struct Stragglers {
    sets: BTreeMap<Step, RankSet>,
    pub(super) early: EarlyResults,
    pub(super) late: DroppedPushes,
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
    pub(crate) fn begin(&mut self, cx: &mut Cx, passes: bool) {
        let step = cx.step();
        self.passes = passes;
        if cx.plan().drops_stragglers(step) {
            self.sets.retain(|&it, _| it.0 + SETS_KEPT >= step.0);
            self.early.begin(cx, step);
        }
    }

    /// A tensor of the current step was submitted.
    pub(crate) fn on_submitted(&self, cx: &mut Cx, tensor: TensorId) {
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

    /// Where the payload of a late push goes.
    pub(super) fn land_late(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<PayloadDest> {
        let counts = self.set(header.step).is_some_and(|set| set.contains(from));
        self.late.land(cx, from, header, counts)
    }
}

// Results of steps that this rank's worker has not come to: they wait in buffers until it begins them.

#[derive(Debug, Default)]
pub(super) struct EarlyResults {
    results: BTreeMap<(Step, SliceId), EarlyResult>,
}

/// Whether a result is of a step that this rank has not come to.
pub(in crate::ps) fn is_early(cx: &Cx, step: Step) -> bool {
    cx.plan().drops_stragglers(step) && step > cx.step()
}

impl EarlyResults {
    /// A step has begun: hands its results to the worker.
    fn begin(&mut self, cx: &mut Cx, step: Step) {
        let here: Vec<(SliceId, EarlyResult)> = cx
            .plan()
            .slice_ids()
            .filter_map(|slice| Some((slice, self.results.remove(&(step, slice))?)))
            .collect();
        for (slice, early) in here {
            cx.take_early(slice, &early);
        }
    }

    /// Where the payload of an early result goes.
    pub(super) fn land(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<PayloadDest> {
        let current = cx.step();
        let furthest = cx.plan().strategy.synchrony.stragglers().map_or(0, |it| it.ahead_steps);
        let known = self.results.get(&(header.step, header.slice)).copied();
        let arrived = known.map_or(0, |early| early.received_bytes);
        let is_over = known.is_some_and(|early| early.is_whole);
        let is_other = known.is_some_and(|early| early.form != header.form);
        // Another lane of this rank may have begun the next step already.
        let lag = u32::from(cx.plan().other_lanes > 0);
        let too_far = header.step.0 > current.0 + u64::from(furthest + lag);
        if too_far || is_over || is_other || arrived != header.offset || from == cx.rank() {
            let (what, offset) = (cx.describe(header), header.offset);
            return violation(format!(
                "{what} at offset {offset} after {arrived} bytes; this rank is in {current}"
            ));
        }
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        let buffer = match known.and_then(|early| early.buffer) {
            Some(buffer) => buffer,
            None => cx.acquire(cx.plan().bytes_as(header.slice, header.form)),
        };
        let early = EarlyResult {
            buffer: Some(buffer),
            form: header.form,
            received_bytes: arrived,
            is_whole: false,
            has_value: true,
        };
        self.results.insert((header.step, header.slice), early);
        Ok(PayloadDest::Region(buffer.whole().part(header.offset, header.length)))
    }

    /// Takes a frame of an early result.
    pub(super) fn take(&mut self, header: &FrameHeader) {
        let has_value = !header.flags.contains(FrameFlags::ABSENT);
        let form = header.form;
        let early = self.results.entry((header.step, header.slice)).or_insert(EarlyResult {
            buffer: None,
            form,
            received_bytes: 0,
            is_whole: false,
            has_value,
        });
        early.received_bytes += u64::from(header.length);
        early.is_whole = header.flags.contains(FrameFlags::LAST);
        if let Some(buffer) = early.buffer.as_mut().filter(|_| early.is_whole) {
            buffer.bytes = early.received_bytes;
        }
    }

    /// This rank's own result.
    pub(super) fn keep(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        step: Step,
        buffer: Option<BufferRef>,
        form: PayloadForm,
    ) {
        if let Some(buffer) = buffer {
            cx.retain(buffer);
        }
        let received_bytes = buffer.map_or(0, |buffer| buffer.bytes);
        let has_value = buffer.is_some();
        let early = EarlyResult { buffer, form, received_bytes, is_whole: true, has_value };
        self.results.insert((step, slice), early);
    }
}

// Pushes of ranks that a step went on without: they land in buffers and are dropped.

#[derive(Debug, Default)]
pub(super) struct DroppedPushes {
    /// By slice and sender.
    arriving: BTreeMap<(SliceId, Rank), (Step, Arriving)>,
}

impl DroppedPushes {
    /// Pushes of a step that goes on without them are still arriving.
    pub(super) fn expect(&mut self, slice: SliceId, step: Step, arriving: Vec<(Rank, Arriving)>) {
        for (rank, arriving) in arriving {
            self.arriving.insert((slice, rank), (step, arriving));
        }
    }

    /// Where the payload of a late push goes; a push that counts is no late one.
    fn land(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
        counts: bool,
    ) -> Validated<PayloadDest> {
        let what = || cx.describe(header);
        let key = (header.slice, from);
        let other = self.arriving.get(&key).copied();
        let under_way = other.filter(|(step, _)| *step == header.step).map(|(_, it)| it);
        let arrived = under_way.map_or(0, |arriving| arriving.received_bytes);
        if counts || arrived != header.offset {
            let offset = header.offset;
            return violation(format!("{} at offset {offset} after {arrived} bytes", what()));
        }
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        let bytes = cx.plan().bytes_as(header.slice, header.form);
        let buffer = match under_way {
            Some(arriving) if arriving.buffer.bytes != bytes => {
                return violation(format!("{} in another form than before", what()));
            }
            Some(arriving) => arriving.buffer,
            None if other.is_some() => {
                return violation(format!("{} in the middle of another push", what()));
            }
            None => {
                let arriving = Arriving { buffer: cx.acquire(bytes), received_bytes: 0 };
                self.arriving.insert(key, (header.step, arriving));
                arriving.buffer
            }
        };
        Ok(PayloadDest::Region(buffer.whole().part(header.offset, header.length)))
    }

    /// Takes a frame of a late push; with the last one the push is dropped.
    pub(super) fn take(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) {
        let key = (header.slice, from);
        if let Some((_, arriving)) = self.arriving.get_mut(&key) {
            arriving.received_bytes += u64::from(header.length);
            if header.flags.contains(FrameFlags::LAST) {
                let buffer = arriving.buffer;
                self.arriving.remove(&key);
                cx.release(buffer);
            }
        }
    }
}
