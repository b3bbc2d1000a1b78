//! Which ranks count in a step, where steps go on without the ranks that are late. Rank 0 decides
//! (see `coordinator`) in its first lane and tells all ranks; each first lane tells the others.

use super::coordinator::{Coordinator, StepEntry};
use super::median_window::MedianWindow;
use super::session::Clock;
use crate::api::{violation, Event, LaneNews, Validated};
use crate::cx::Cx;
use crate::lane::Lane;
use crate::plan::Plan;
use crate::rank_set::RankSet;
use crate::transmit::Body;
use alloc::format;
use gradlane_units::{Rank, Step, TensorId, Time};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind};

/// A rank that is later than a decision by more than this part of a step is behind: it would begin the
/// next step as much later, and be left out again. A shorter way the others' waits for their
/// results make up for.
const BEHIND_PART: u32 = 10;

/// The choice of contributors, and this rank's part in it; unused where no straggler is dropped.
#[derive(Debug, Default)]
pub(crate) struct Contributors {
    /// On rank 0.
    coordinator: Option<Coordinator>,
    newest: Step,
    /// When this rank heard of the newest set.
    newest_at: Time,
    /// Times between decisions, as this rank heard of them.
    between: MedianWindow,
    /// In the first lane: those in which this rank has submitted all of this step.
    submitted: (Step, u32),
    /// Whether all results of these lanes were here by then.
    had_results: bool,
}

impl Contributors {
    pub(crate) fn new(plan: &Plan, rank: Rank) -> Contributors {
        let decides = rank == Rank(0) && plan.lane == 0;
        let policy = plan.strategy.synchrony.stragglers().filter(|_| decides);
        let coordinator = policy.map(|policy| Coordinator::new(policy, plan.world_size));
        Contributors { coordinator, ..Contributors::default() }
    }

    /// Goes on as if all ranks had been in all steps up to this one.
    pub(crate) fn fast_forward(&mut self, step: Step) {
        self.newest = step;
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.fast_forward(step);
        }
    }

    /// Ranks that the next decision waits for, as far as this one knows.
    pub(crate) fn awaited(&self, world_size: u32) -> RankSet {
        match &self.coordinator {
            Some(coordinator) => coordinator.awaited(),
            None => RankSet::of(world_size, [Rank(0)]),
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

    /// When rank 0 wants to look again at the progress of the ranks.
    pub(crate) fn decision_timeout(&self) -> Option<Time> {
        self.coordinator.as_ref().and_then(Coordinator::poll_timeout)
    }
}

/// Progress of this rank.
impl Contributors {
    /// The current step has begun: rank 0 hears of it.
    pub(crate) fn on_step_begun(&mut self, lane: &mut Lane, entry: StepEntry, clock: &mut Clock) {
        let cx = &mut lane.cx;
        let step = cx.step();
        if cx.plan().lane > 0 {
            // Where it carries nothing, all of that is submitted.
            if cx.worker().has_submitted_all() {
                self.note_lane(lane, step, true, clock.now());
            }
        } else if let Some(coordinator) = &mut self.coordinator {
            match coordinator.begun(cx.rank(), step, entry, clock.now()) {
                Ok(()) => self.decide(lane, clock),
                Err(refusal) => cx.abort(refusal.0),
            }
        } else {
            let flags = match entry {
                StepEntry::Train => FrameFlags::NONE,
                StepEntry::Pass => FrameFlags::ABSENT,
                StepEntry::Barrier => FrameFlags::BARRIER,
            };
            tell_coordinator(cx, FrameKind::StepBegun, flags);
        }
    }

    /// A tensor of the current step was submitted; with the last one rank 0 hears of it.
    pub(crate) fn on_submitted(&mut self, lane: &mut Lane, tensor: TensorId, clock: &mut Clock) {
        let step = lane.cx.step();
        let has_all = lane.cx.worker().has_submitted_all();
        let had_results = has_all && has_whole_result(&lane.cx, step);
        let is_last = has_all && self.note_lane(lane, step, had_results, clock.now());
        lane.note_submitted(tensor);
        if is_last {
            self.tell_submitted(lane, step, clock);
        }
    }

    /// All that another lane carries of the current step was submitted, in the first lane.
    pub(crate) fn on_submitted_in_a_lane(
        &mut self,
        lane: &mut Lane,
        step: Step,
        had_results: bool,
        clock: &mut Clock,
    ) {
        if self.note_lane(lane, step, had_results, clock.now()) {
            self.tell_submitted(lane, step, clock);
        }
    }

    /// All that a lane carries of the current step was submitted, when its results were here or not. Returns whether
    /// that is so in all lanes of this rank, which the first one knows, and it takes part in the step, which may go
    /// on without it.
    fn note_lane(&mut self, lane: &mut Lane, step: Step, had_results: bool, now: Time) -> bool {
        if lane.passes() {
            return false;
        }
        if lane.cx.plan().lane > 0 {
            lane.cx.tell(Event::TellLead(LaneNews::Submitted { step, had_results }));
            return false;
        }
        if self.submitted.0 != step {
            (self.submitted, self.had_results) = ((step, 0), true);
        }
        self.submitted.1 += 1;
        self.had_results &= had_results;
        let is_last = self.has_submitted_all(&lane.cx, step);
        if is_last && !lane.may_contribute(step) {
            let behind = self.is_behind(step, now).unwrap_or(self.had_results);
            lane.cx.tell(Event::LeftOut { step, behind });
        }
        is_last
    }

    /// Whether this rank has submitted all of a step in all lanes, which the first one knows.
    fn has_submitted_all(&self, cx: &Cx, step: Step) -> bool {
        cx.plan().lane == 0 && self.submitted == (step, cx.plan().other_lanes + 1)
    }

    /// Rank 0 hears that this rank has submitted all.
    fn tell_submitted(&mut self, lane: &mut Lane, step: Step, clock: &mut Clock) {
        if self.coordinator.is_some() {
            let rank = lane.cx.rank();
            let noted = self.note_complete(&mut lane.cx, rank, step, clock.now());
            debug_assert_eq!(noted, Ok(()), "a step is completed once");
            return self.decide(lane, clock);
        }
        tell_coordinator(&mut lane.cx, FrameKind::GradientsQueued, FrameFlags::NONE);
    }

    /// This rank passes a step that is decided.
    pub(crate) fn note_passed(&self, cx: &mut Cx, step: Step, now: Time) {
        if cx.plan().lane == 0 {
            let behind = self.is_behind(step, now).unwrap_or(false);
            cx.tell(Event::LeftOut { step, behind });
        }
    }
}

/// Whether all results of the current step are here that this lane carries, installed or not.
fn has_whole_result(cx: &Cx, step: Step) -> bool {
    cx.plan().slice_ids().all(|slice| {
        let takes_part = cx.plan().takes_part(cx.plan().slice(slice).tensor, step);
        !takes_part || cx.worker().has_result(slice)
    })
}

fn tell_coordinator(cx: &mut Cx, kind: FrameKind, flags: FrameFlags) {
    let header = FrameHeader { flags, ..cx.control_header(kind) };
    cx.send_control_to(Rank(0), header, Body::Empty);
}

/// Checks a frame between a rank and rank 0.
pub(crate) fn check_frame(cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<()> {
    let (length, right_side) = match header.kind {
        FrameKind::Contributors => (cx.plan().world_size.div_ceil(8), from == Rank(0)),
        _ => (0, cx.rank() == Rank(0)),
    };
    let decided_here = cx.plan().drops_stragglers(header.step) && cx.plan().lane == 0;
    let expected = decided_here && right_side && from != cx.rank();
    if expected && header.length == length {
        return Ok(());
    }
    violation(format!(
        "{:?} of {} bytes in {}, which this rank does not expect",
        header.kind, header.length, header.step
    ))
}

/// Decisions.
impl Contributors {
    /// Takes a frame between a rank and rank 0.
    pub(crate) fn take(
        &mut self,
        lane: &mut Lane,
        from: Rank,
        (header, payload): (&FrameHeader, &[u8]),
        clock: &mut Clock,
    ) -> Validated<()> {
        if header.kind == FrameKind::Contributors {
            let newest = self.newest;
            let set = RankSet::from_bytes(lane.cx.plan().world_size, payload);
            let Some(set) = set.filter(|set| !set.is_empty() && header.step == newest.next())
            else {
                return violation(format!(
                    "the contributors of {} after those of {newest}",
                    header.step
                ));
            };
            self.decided(lane, header.step, &set, clock);
        } else {
            self.take_progress(&mut lane.cx, from, header, clock.now())?;
            self.decide(lane, clock);
        }
        Ok(())
    }

    /// A rank has begun a step, or has queued all its gradients; on rank 0.
    fn take_progress(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
        now: Time,
    ) -> Validated<()> {
        if header.kind == FrameKind::GradientsQueued {
            return self.note_complete(cx, from, header.step, now);
        }
        let entry = if header.flags.contains(FrameFlags::BARRIER) {
            StepEntry::Barrier
        } else if header.flags.contains(FrameFlags::ABSENT) {
            StepEntry::Pass
        } else {
            StepEntry::Train
        };
        match &mut self.coordinator {
            Some(coordinator) => coordinator.begun(from, header.step, entry, now),
            None => Ok(()),
        }
    }

    fn note_complete(&mut self, cx: &mut Cx, rank: Rank, step: Step, now: Time) -> Validated<()> {
        if let Some(coordinator) = &mut self.coordinator {
            if let Some(lateness) = coordinator.completed(rank, step, now)? {
                cx.tell(Event::Late { rank, step, lateness });
            }
        }
        Ok(())
    }

    /// Decides all steps that can be decided now, and tells all ranks; on rank 0.
    pub(crate) fn decide(&mut self, lane: &mut Lane, clock: &mut Clock) {
        let now = clock.now();
        while let Some((step, set)) = self.coordinator.as_mut().and_then(|it| it.decide(now)) {
            let cx = &mut lane.cx;
            let header = FrameHeader { step, ..cx.control_header(FrameKind::Contributors) };
            let body = Body::Inline(set.to_bytes(cx.plan().world_size));
            cx.send_control(cx.others(), header, body);
            self.decided(lane, step, &set, clock);
        }
    }

    /// The contributors of a step are known. The first lane tells the others before this rank's program hears of it.
    pub(crate) fn decided(
        &mut self,
        lane: &mut Lane,
        step: Step,
        set: &RankSet,
        clock: &mut Clock,
    ) {
        let cx = &mut lane.cx;
        if cx.plan().lane == 0 && cx.plan().other_lanes > 0 {
            let news = LaneNews::Contributors(step, set.iter().collect());
            cx.tell(Event::TellLanes(news));
        }
        clock.progressed();
        let now = clock.now();
        if !self.newest.is_initial() {
            self.between.record(now.since(self.newest_at));
        }
        (self.newest, self.newest_at) = (step, now);
        cx.tell(Event::ContributorsDecided { step, contributors: set.iter().collect() });
        let is_out = cx.worker().is_in(step) && !set.contains(cx.rank());
        if is_out && !lane.passes() && self.has_submitted_all(&lane.cx, step) {
            lane.cx.tell(Event::LeftOut { step, behind: false });
        }
        lane.decide(step, set);
    }
}
