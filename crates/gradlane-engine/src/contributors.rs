//! The synchrony `BackupWorkers`: a step goes on without the ranks that are late.
//!
//! Rank 0 decides who is in (see `coordinator`) and tells all ranks. An owner collects contributions as
//! ever, but reduces a slice only when it knows the set and has all of it; what came from others is
//! dropped, whole or not, early or late. So a rank is in for all slices of a step or for none, and all
//! ranks divide by the same number.
//!
//! A rank that is late may be some steps behind. What the owners send it meanwhile waits in buffers,
//! and becomes a step's result when the rank comes to that step. The owner's side of a rank that is
//! late goes on like any other's: only its own worker waits.

use crate::contribution_set::Arriving;
use crate::coordinator::{Coordinator, StepEntry};
use crate::engine::Engine;
use crate::error::UsageError;
use crate::io::Event;
use crate::late_pushes::EarlyResult;
use crate::median_window::MedianWindow;
use crate::plan::Plan;
use crate::rank_set::RankSet;
use crate::receive::Validated;
use crate::scheduler::{Body, Message};
use crate::server::Contribution;
use crate::worker::{Phase, Submission};
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, Step, TensorId, Time};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind};

/// Sets of steps behind this rank that are kept, to tell late pushes from wrong ones.
const SETS_KEPT: u64 = 8;
/// A rank that is later than a decision by more than this part of a step is behind: it would begin the
/// next step as much later, and be left out again. A shorter way the others' waits for their
/// results make up for.
const BEHIND_PART: u32 = 10;

/// All that a rank keeps for the rule; nothing under other rules.
#[derive(Debug, Default)]
pub(crate) struct Contributors {
    /// On rank 0.
    coordinator: Option<Coordinator>,
    sets: BTreeMap<Step, RankSet>,
    newest: Step,
    /// When this rank heard of the newest.
    newest_at: Time,
    /// Times between decisions, as this rank heard of them.
    between: MedianWindow,
    pub(crate) ahead: BTreeMap<(Step, SliceId), EarlyResult>,
    /// Pushes that are arriving too late, by slice and sender.
    pub(crate) late: BTreeMap<(SliceId, Rank), (Step, Arriving)>,
    /// Whether this rank takes no part in the current step.
    passes: bool,
}

impl Contributors {
    pub(crate) fn new(plan: &Plan, rank: Rank) -> Contributors {
        let rule = plan.strategy.synchrony.stragglers().filter(|_| rank == Rank(0));
        let coordinator = rule.map(|rule| Coordinator::new(rule, plan.world_size));
        Contributors { coordinator, ..Contributors::default() }
    }

    /// Goes on as if all ranks had been in all steps up to this one.
    pub(crate) fn skip(&mut self, world_size: u32, step: Step) {
        self.newest = step;
        self.sets.clear();
        self.sets.insert(step, RankSet::all(world_size));
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.skip(step);
        }
    }

    /// Ranks that the next decision waits for, as far as this one knows.
    pub(crate) fn awaited(&self, world_size: u32) -> RankSet {
        let of_rank_0 = || {
            let mut set = RankSet::empty(world_size);
            set.insert(Rank(0));
            set
        };
        self.coordinator.as_ref().map_or_else(of_rank_0, Coordinator::awaited)
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

    /// The contributors of a step, if they are known.
    pub(crate) fn set(&self, step: Step) -> Option<&RankSet> {
        self.sets.get(&step)
    }
}

impl Engine {
    /// Whether contributors are chosen for a step.
    pub(crate) fn drops_stragglers(&self, step: Step) -> bool {
        step.0 > 0 && self.plan.strategy.synchrony.stragglers().is_some()
    }

    /// Whether this rank may still contribute to the current step.
    pub(crate) fn may_contribute(&self, step: Step) -> bool {
        let is_in = |set: &RankSet| set.contains(self.rank());
        !self.contributors.passes && self.contributors.set(step).is_none_or(is_in)
    }

    /// Begins a step and takes no part in it, to be with the other ranks again in the next: for a
    /// rank that was late. Memory for the results is given by [`Engine::tensor_absent`].
    ///
    /// # Errors
    /// As [`Engine::step_begin`]; when contributors are not chosen, or this rank was in the step
    /// before, so that others may count on it.
    pub(crate) fn step_pass(&mut self, step: Step) -> Result<(), UsageError> {
        let before = step.0.checked_sub(1).map(Step).unwrap_or_default();
        let was_out = self.contributors.set(before).is_some_and(|it| !it.contains(self.rank()));
        let decided = self.contributors.set(step).is_some();
        if !self.drops_stragglers(step) || !(was_out || decided) {
            let what = format!("{step} cannot be passed: only a rank that was left out may");
            return Err(UsageError::Argument(what));
        }
        self.begin(step, StepEntry::Pass)?;
        if decided {
            let now = self.lifecycle.now();
            let behind = self.contributors.is_behind(step, now).unwrap_or(false);
            self.events.push_back(Event::LeftOut { step, behind });
        }
        Ok(())
    }

    /// The current step has begun: results that came before are its own, and rank 0 hears of it.
    pub(crate) fn on_step_begun(&mut self, step: Step, entry: StepEntry) {
        self.contributors.passes = entry == StepEntry::Pass;
        if !self.drops_stragglers(step) {
            return;
        }
        self.contributors.sets.retain(|&it, _| it.0 + SETS_KEPT >= step.0);
        let slices = (0..self.plan.slices.len() as u32).map(SliceId);
        let here: Vec<(SliceId, EarlyResult)> = slices
            .filter_map(|slice| Some((slice, self.contributors.ahead.remove(&(step, slice))?)))
            .collect();
        for (slice, ahead) in here {
            let state = self.worker.slice_mut(slice);
            (state.received_bytes, state.form) = (ahead.received_bytes, ahead.form);
            match ahead.buffer {
                Some(buffer) if ahead.is_whole => state.phase = Phase::Buffered(buffer),
                Some(buffer) => state.phase = Phase::Buffering(buffer),
                None => self.nothing_to_install(slice, ahead.has_value),
            }
        }
        let (rank, now) = (self.rank(), self.lifecycle.now());
        if let Some(coordinator) = &mut self.contributors.coordinator {
            match coordinator.begun(rank, step, entry, now) {
                Ok(()) => self.decide(),
                Err(what) => self.abort(&what),
            }
        } else {
            let flags = match entry {
                StepEntry::Train => FrameFlags::NONE,
                StepEntry::Pass => FrameFlags::ABSENT,
                StepEntry::Barrier => FrameFlags::BARRIER,
            };
            self.tell_coordinator(FrameKind::StepBegun, flags);
        }
    }

    /// A tensor of the current step was handed over; with the last one rank 0 hears of it.
    pub(crate) fn on_submitted(&mut self, tensor: TensorId, step: Step) {
        if !self.drops_stragglers(step) {
            return;
        }
        let is_last = self.worker.uncontributed == 0 && !self.contributors.passes;
        if is_last && !self.may_contribute(step) {
            let behind = self.contributors.is_behind(step, self.lifecycle.now());
            let behind = behind.unwrap_or_else(|| self.has_whole_result(step));
            self.events.push_back(Event::LeftOut { step, behind });
        }
        if self.contributors.set(step).is_some() {
            self.part_done(tensor);
        }
        if !is_last {
            return;
        }
        let rank = self.rank();
        if self.contributors.coordinator.is_some() {
            let noted = self.note_complete(rank, step);
            debug_assert_eq!(noted, Ok(()), "a step is completed once");
        } else {
            self.tell_coordinator(FrameKind::GradientsQueued, FrameFlags::NONE);
        }
    }

    /// Whether all that comes in the current step is here, installed or not.
    fn has_whole_result(&self, step: Step) -> bool {
        let is_here = |phase| matches!(phase, Phase::Done | Phase::Buffered(_) | Phase::Installing);
        (0..self.plan.slices.len() as u32).map(SliceId).all(|slice| {
            let takes_part = self.plan.takes_part(self.plan.slice(slice).tensor, step);
            !takes_part || is_here(self.worker.slice(slice).phase)
        })
    }

    fn tell_coordinator(&mut self, kind: FrameKind, flags: FrameFlags) {
        let mut header = self.control_header(kind);
        header.flags = flags;
        let key = self.keys.control();
        self.scheduler.push(Rank(0), key, Message { header, body: Body::Empty });
    }

    /// What a frame between a rank and rank 0 must satisfy.
    pub(crate) fn validate_straggler_frame(
        &self,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<()> {
        let (length, right_side) = match header.kind {
            FrameKind::Contributors => (self.plan.world_size.div_ceil(8), from == Rank(0)),
            _ => (0, self.rank() == Rank(0)),
        };
        let drops_stragglers =
            self.drops_stragglers(header.step) && right_side && from != self.rank();
        if drops_stragglers && header.length == length {
            return Ok(());
        }
        Err(format!(
            "{:?} of {} bytes in {}, which this rank does not expect",
            header.kind, header.length, header.step
        ))
    }

    /// A rank has begun a step; on rank 0.
    pub(crate) fn take_step_begun(&mut self, from: Rank, header: &FrameHeader) -> Validated<()> {
        let entry = if header.flags.contains(FrameFlags::BARRIER) {
            StepEntry::Barrier
        } else if header.flags.contains(FrameFlags::ABSENT) {
            StepEntry::Pass
        } else {
            StepEntry::Train
        };
        let now = self.lifecycle.now();
        if let Some(coordinator) = &mut self.contributors.coordinator {
            coordinator.begun(from, header.step, entry, now)?;
        }
        self.decide();
        Ok(())
    }

    /// All gradients of a rank are queued; on rank 0.
    pub(crate) fn take_step_given(&mut self, from: Rank, header: &FrameHeader) -> Validated<()> {
        self.note_complete(from, header.step)
    }

    fn note_complete(&mut self, rank: Rank, step: Step) -> Validated<()> {
        let now = self.lifecycle.now();
        if let Some(coordinator) = &mut self.contributors.coordinator {
            if let Some(lateness) = coordinator.completed(rank, step, now)? {
                self.events.push_back(Event::Late { rank, step, lateness });
            }
        }
        self.decide();
        Ok(())
    }

    /// Decides what can be decided now; on rank 0.
    pub(crate) fn decide(&mut self) {
        let now = self.lifecycle.now();
        while let Some((step, set)) =
            self.contributors.coordinator.as_mut().and_then(|it| it.decide(now))
        {
            let mut header = self.control_header(FrameKind::Contributors);
            header.step = step;
            let body = Body::Inline(set.to_bytes(self.plan.world_size));
            let others = RankSet::all_but(self.plan.world_size, self.rank());
            let key = self.keys.control();
            self.scheduler.push_shared(others, key, Message { header, body });
            self.decided(step, &set);
        }
    }

    /// Rank 0 has decided a step.
    pub(crate) fn take_contributors(
        &mut self,
        header: &FrameHeader,
        payload: &[u8],
    ) -> Validated<()> {
        let newest = self.contributors.newest;
        let set = RankSet::from_bytes(self.plan.world_size, payload);
        let Some(set) = set.filter(|set| !set.is_empty() && header.step == newest.next()) else {
            return Err(format!("the contributors of {} after those of {newest}", header.step));
        };
        self.decided(header.step, &set);
        Ok(())
    }

    fn decided(&mut self, step: Step, set: &RankSet) {
        self.lifecycle.progressed();
        let now = self.lifecycle.now();
        if self.contributors.newest > Step(0) {
            let since = now.since(self.contributors.newest_at);
            self.contributors.between.record(since);
        }
        (self.contributors.newest, self.contributors.newest_at) = (step, now);
        self.contributors.sets.insert(step, set.clone());
        self.events
            .push_back(Event::ContributorsDecided { step, contributors: set.iter().collect() });
        if step == self.worker.step && self.worker.begun {
            self.decided_current(set);
        }
        let slices: Vec<SliceId> = self.server.owned.keys().copied().collect();
        for slice in slices {
            self.reduce_if_decided(slice);
        }
    }

    /// The step that this rank is in was decided.
    fn decided_current(&mut self, set: &RankSet) {
        let step = self.worker.step;
        if !set.contains(self.rank()) && !self.contributors.passes {
            if self.worker.uncontributed == 0 {
                self.events.push_back(Event::LeftOut { step, behind: false });
            }
            for slice in self.scheduler.withdraw_pushes(step) {
                self.contribution_sent(slice, step);
            }
            for slice in self.encodes.withdraw(step) {
                self.worker.slice_mut(slice).push_sent = true;
                self.install_if_open(slice);
            }
        }
        for tensor in (0..self.plan.tensors.len() as u32).map(TensorId) {
            let given = self.worker.tensor(tensor).submission != Submission::Missing;
            if given && self.plan.takes_part(tensor, step) {
                self.part_done(tensor);
            }
        }
    }

    /// Reduces a slice once the set is known and all of it is here.
    pub(crate) fn reduce_if_decided(&mut self, slice: SliceId) {
        let Some(owned) = self.server.owned.get_mut(&slice) else {
            return;
        };
        let Some(set) = self.contributors.sets.get(&owned.step).filter(|_| !owned.reducing) else {
            return;
        };
        if !set.iter().all(|rank| owned.contributions.has(rank)) {
            return;
        }
        let (parts, others): (Vec<_>, Vec<_>) =
            owned.contributions.take_whole().into_iter().partition(|&(rank, _)| set.contains(rank));
        let (step, priority) = (owned.step, owned.priority);
        owned.reducing = true;
        for (rank, arriving) in owned.contributions.take_arriving() {
            self.contributors.late.insert((slice, rank), (step, arriving));
        }
        for (_, part) in others {
            if let Contribution::Buffer(buffer) | Contribution::Encoded(buffer) = part {
                self.buffers.release(buffer, &mut self.events);
            }
        }
        self.reduce(slice, step, parts, priority);
    }

    /// When rank 0 wants [`Engine::handle_time`] to look again at who is complete.
    #[must_use]
    pub fn decision_timeout(&self) -> Option<Time> {
        self.contributors.coordinator.as_ref().and_then(Coordinator::poll_timeout)
    }
}
