//! Stragglers: a step goes on without the ranks that are late.
//!
//! Rank 0 decides which ranks are in (see `coordinator`) and tells all ranks. An owner collects
//! contributions as ever, but reduces a slice only when it knows the set and has all of it; contributions
//! of other ranks are dropped, whole or not, early or late. So a rank is in for all slices of a step or for
//! none, and all ranks divide by the same number.
//!
//! A straggler may be some steps behind. Results that owners send it meanwhile wait in buffers until it
//! comes to their step. The owner's side of a straggler goes
//! on like any other's: only its own worker waits.

mod coordinator;
mod dropped_pushes;
mod early_results;
mod median_window;

pub(crate) use coordinator::StepEntry;
pub(super) use early_results::is_early;

use crate::api::{BufferRef, Event, LaneNews, PayloadDest};
use crate::contribution::Arriving;
use crate::cx::Cx;
use crate::plan::Plan;
use crate::rank_set::RankSet;
use crate::transmit::Body;
use crate::violation::{violation, Validated};
use crate::worker::Submission;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;
use coordinator::Coordinator;
use dropped_pushes::DroppedPushes;
use early_results::EarlyResults;
use gradlane_units::{Rank, SliceId, Step, TensorId, Time};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};
use median_window::MedianWindow;

/// Sets of steps behind this rank that are kept, to tell late pushes from wrong ones.
const SETS_KEPT: u64 = 8;
/// A rank that is later than a decision by more than this part of a step is behind: it would begin the
/// next step as much later, and be left out again. A shorter way the others' waits for their
/// results make up for.
const BEHIND_PART: u32 = 10;

/// The contributors of steps, as this rank knows them; empty where no straggler is dropped.
#[derive(Debug, Default)]
pub(super) struct Stragglers {
    /// On rank 0.
    coordinator: Option<Coordinator>,
    sets: BTreeMap<Step, RankSet>,
    newest: Step,
    /// When this rank heard of the newest set.
    newest_at: Time,
    /// Times between decisions, as this rank heard of them.
    between: MedianWindow,
    early: EarlyResults,
    late: DroppedPushes,
    /// Whether this rank takes no part in the current step.
    passes: bool,
    /// In the first lane: those in which this rank has submitted all of this step.
    submitted: (Step, u32),
}

impl Stragglers {
    pub(super) fn new(plan: &Plan, rank: Rank) -> Stragglers {
        let decides = rank == Rank(0) && plan.lane == 0;
        let policy = plan.strategy.synchrony.stragglers().filter(|_| decides);
        let coordinator = policy.map(|policy| Coordinator::new(policy, plan.world_size));
        Stragglers { coordinator, ..Stragglers::default() }
    }

    /// Goes on as if all ranks had been in all steps up to this one.
    pub(super) fn fast_forward(&mut self, world_size: u32, step: Step) {
        self.newest = step;
        self.sets.clear();
        self.sets.insert(step, RankSet::all(world_size));
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.fast_forward(step);
        }
    }

    /// The contributors of a step, if they are known.
    pub(super) fn set(&self, step: Step) -> Option<&RankSet> {
        self.sets.get(&step)
    }

    /// Whether a rank may still contribute to its current step.
    pub(super) fn may_contribute(&self, rank: Rank, step: Step) -> bool {
        !self.passes && self.set(step).is_none_or(|set| set.contains(rank))
    }

    /// Whether a rank may pass a step: it was left out of the one before, or the step is decided.
    pub(super) fn may_pass(&self, rank: Rank, step: Step) -> bool {
        let before = step.0.checked_sub(1).map(Step).unwrap_or_default();
        let was_out = self.set(before).is_some_and(|set| !set.contains(rank));
        was_out || self.set(step).is_some()
    }

    /// Ranks that the next decision waits for, as far as this one knows.
    pub(super) fn awaited(&self, world_size: u32) -> RankSet {
        match &self.coordinator {
            Some(coordinator) => coordinator.awaited(),
            None => {
                let mut set = RankSet::empty(world_size);
                set.insert(Rank(0));
                set
            }
        }
    }

    /// Whether a rank that comes to a decided step's end, or passes it, only now is behind the
    /// others; none where that is not known yet.
    fn is_behind(&self, step: Step, now: Time) -> Option<bool> {
        if step < self.newest {
            return Some(true);
        }
        let usual = self.between.median()?;
        Some(now.since(self.newest_at) > usual / BEHIND_PART)
    }
}

/// Progress of this rank.
impl Stragglers {
    /// The current step has begun: results that came before are its own, and rank 0 hears of it.
    /// Returns whether decisions may follow.
    pub(super) fn on_step_begun(&mut self, cx: &mut Cx, step: Step, entry: StepEntry) -> bool {
        self.passes = entry == StepEntry::Pass;
        if !cx.plan.drops_stragglers(step) {
            return false;
        }
        let now = cx.clock.now();
        self.sets.retain(|&it, _| it.0 + SETS_KEPT >= step.0);
        self.early.begin(cx, step);
        if cx.plan.lane > 0 {
            // Where it carries nothing, all of that is submitted.
            return cx.worker.has_submitted_all() && self.note_lane(cx, step);
        }
        if let Some(coordinator) = &mut self.coordinator {
            let begun = coordinator.begun(cx.rank, step, entry, now);
            return begun.map_err(|refusal| cx.abort(refusal.0)).is_ok();
        }
        let flags = match entry {
            StepEntry::Train => FrameFlags::NONE,
            StepEntry::Pass => FrameFlags::ABSENT,
            StepEntry::Barrier => FrameFlags::BARRIER,
        };
        tell_coordinator(cx, FrameKind::StepBegun, flags);
        false
    }

    /// A tensor of the current step was submitted; with the last one rank 0 hears of it. Returns
    /// whether decisions may follow.
    pub(super) fn on_submitted(&mut self, cx: &mut Cx, tensor: TensorId) -> bool {
        let step = cx.worker.step();
        let is_last = cx.worker.has_submitted_all() && self.note_lane(cx, step);
        if self.set(step).is_some() {
            cx.part_done(tensor);
        }
        is_last && self.tell_submitted(cx, step)
    }

    /// All that another lane carries of the current step was submitted, in the first lane. Returns whether decisions
    /// may follow.
    pub(super) fn on_submitted_in_a_lane(&mut self, cx: &mut Cx, step: Step) -> bool {
        self.note_lane(cx, step) && self.tell_submitted(cx, step)
    }

    /// All that a lane carries of the current step was submitted. Returns whether that is so in all lanes of this
    /// rank, which the first one knows, and it takes part in the step, which may go on without it.
    fn note_lane(&mut self, cx: &mut Cx, step: Step) -> bool {
        if self.passes {
            return false;
        }
        if cx.plan.lane > 0 {
            cx.events.push_back(Event::TellLead(LaneNews::Submitted(step)));
            return false;
        }
        if self.submitted.0 != step {
            self.submitted = (step, 0);
        }
        self.submitted.1 += 1;
        let is_last = self.has_submitted_all(cx, step);
        if is_last && !self.may_contribute(cx.rank, step) {
            let behind = self.is_behind(step, cx.clock.now());
            let behind = behind.unwrap_or_else(|| has_whole_result(cx, step));
            cx.events.push_back(Event::LeftOut { step, behind });
        }
        is_last
    }

    /// Whether this rank has submitted all of a step in all lanes, which the first one knows.
    fn has_submitted_all(&self, cx: &Cx, step: Step) -> bool {
        cx.plan.lane == 0 && self.submitted == (step, cx.plan.other_lanes + 1)
    }

    /// Rank 0 hears that this rank has submitted all. Returns whether decisions may follow.
    fn tell_submitted(&mut self, cx: &mut Cx, step: Step) -> bool {
        if self.coordinator.is_some() {
            let noted = self.note_complete(cx, cx.rank, step);
            debug_assert_eq!(noted, Ok(()), "a step is completed once");
            return true;
        }
        tell_coordinator(cx, FrameKind::GradientsQueued, FrameFlags::NONE);
        false
    }
}

impl Stragglers {
    /// This rank passes a step that is decided.
    pub(super) fn note_passed(&self, cx: &mut Cx, step: Step) {
        if cx.plan.lane == 0 {
            let behind = self.is_behind(step, cx.clock.now()).unwrap_or(false);
            cx.events.push_back(Event::LeftOut { step, behind });
        }
    }
}

/// Whether all results of the current step are here, installed or not.
fn has_whole_result(cx: &Cx, step: Step) -> bool {
    cx.plan.slice_ids().all(|slice| {
        let takes_part = cx.plan.takes_part(cx.plan.slice(slice).tensor, step);
        !takes_part || cx.worker.has_result(slice)
    })
}

fn tell_coordinator(cx: &mut Cx, kind: FrameKind, flags: FrameFlags) {
    let header = FrameHeader { flags, ..cx.control_header(kind) };
    cx.send_control_to(Rank(0), header, Body::Empty);
}

/// Checks a frame between a rank and rank 0.
pub(super) fn check_control(cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<()> {
    let (length, right_side) = match header.kind {
        FrameKind::Contributors => (cx.plan.world_size.div_ceil(8), from == Rank(0)),
        _ => (0, cx.rank == Rank(0)),
    };
    let decided_here = cx.plan.drops_stragglers(header.step) && cx.plan.lane == 0;
    let expected = decided_here && right_side && from != cx.rank;
    if expected && header.length == length {
        return Ok(());
    }
    violation(format!(
        "{:?} of {} bytes in {}, which this rank does not expect",
        header.kind, header.length, header.step
    ))
}

/// Decisions.
impl Stragglers {
    /// A rank has begun a step, or has queued all its gradients; on rank 0.
    pub(super) fn take_progress(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<()> {
        if header.kind == FrameKind::GradientsQueued {
            return self.note_complete(cx, from, header.step);
        }
        let entry = if header.flags.contains(FrameFlags::BARRIER) {
            StepEntry::Barrier
        } else if header.flags.contains(FrameFlags::ABSENT) {
            StepEntry::Pass
        } else {
            StepEntry::Train
        };
        match &mut self.coordinator {
            Some(coordinator) => coordinator.begun(from, header.step, entry, cx.clock.now()),
            None => Ok(()),
        }
    }

    fn note_complete(&mut self, cx: &mut Cx, rank: Rank, step: Step) -> Validated<()> {
        if let Some(coordinator) = &mut self.coordinator {
            if let Some(lateness) = coordinator.completed(rank, step, cx.clock.now())? {
                cx.events.push_back(Event::Late { rank, step, lateness });
            }
        }
        Ok(())
    }

    /// Decides one step, if it can be decided now, and tells all ranks; on rank 0.
    pub(super) fn decide(&mut self, cx: &mut Cx) -> bool {
        let now = cx.clock.now();
        let Some((step, set)) = self.coordinator.as_mut().and_then(|it| it.decide(now)) else {
            return false;
        };
        let header = FrameHeader { step, ..cx.control_header(FrameKind::Contributors) };
        let body = Body::Inline(set.to_bytes(cx.plan.world_size));
        cx.send_control(cx.others(), header, body);
        self.decided(cx, step, &set);
        true
    }

    /// Rank 0 has decided a step.
    pub(super) fn take_contributors(
        &mut self,
        cx: &mut Cx,
        header: &FrameHeader,
        payload: &[u8],
    ) -> Validated<()> {
        let newest = self.newest;
        let set = RankSet::from_bytes(cx.plan.world_size, payload);
        let Some(set) = set.filter(|set| !set.is_empty() && header.step == newest.next()) else {
            return violation(format!(
                "the contributors of {} after those of {newest}",
                header.step
            ));
        };
        self.decided(cx, header.step, &set);
        Ok(())
    }

    /// The contributors of a step are known. The first lane tells the others before this rank's program hears of it.
    pub(super) fn decided(&mut self, cx: &mut Cx, step: Step, set: &RankSet) {
        if cx.plan.lane == 0 && cx.plan.other_lanes > 0 {
            let news = LaneNews::Contributors(step, set.iter().collect());
            cx.events.push_back(Event::TellLanes(news));
        }
        cx.clock.progressed();
        let now = cx.clock.now();
        if !self.newest.is_initial() {
            self.between.record(now.since(self.newest_at));
        }
        (self.newest, self.newest_at) = (step, now);
        self.sets.insert(step, set.clone());
        let contributors = set.iter().collect();
        cx.events.push_back(Event::ContributorsDecided { step, contributors });
        if cx.worker.is_in(step) {
            self.decided_current(cx, step, set);
        }
    }

    /// The step that this rank is in is decided.
    fn decided_current(&mut self, cx: &mut Cx, step: Step, set: &RankSet) {
        if !set.contains(cx.rank) && !self.passes {
            if self.has_submitted_all(cx, step) {
                cx.events.push_back(Event::LeftOut { step, behind: false });
            }
            for slice in cx.tx.withdraw_pushes(step) {
                match cx.encodes.note_sent(slice, step) {
                    Some(buffer) => cx.release(buffer),
                    None => cx.push_sent(slice),
                }
            }
            for slice in cx.encodes.withdraw(step) {
                cx.push_sent(slice);
            }
        }
        for tensor in cx.plan.tensor_ids() {
            let submitted = cx.worker.submission(tensor) != Submission::Missing;
            if submitted && cx.plan.takes_part(tensor, step) {
                cx.part_done(tensor);
            }
        }
    }

    /// When rank 0 wants to look again at the progress of the ranks.
    pub(super) fn decision_timeout(&self) -> Option<Time> {
        self.coordinator.as_ref().and_then(Coordinator::poll_timeout)
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
