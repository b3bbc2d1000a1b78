//! The change to another membership: the ranks that are left find out which results of the step in flight
//! exist, so that this step is finished and none is done twice.
//!
//! 1. A rank is lost: slices are sent and taken no more; what is queued is dropped, what is being added
//!    up or copied is finished.
//! 2. The ranks agree on the next members (`membership`). Every member tells the others which results
//!    it has of its step (`Holdings`). On a connection, everything before this frame is of the old
//!    membership.
//! 3. With the holdings of all, every member knows the same: where anyone has the result of a slice, one
//!    of these ranks sends it to those that lack it; where nobody has, all members contribute again,
//!    to the slice's new owner. A rank that is ready says so (`Resumed`), and sends slices once all have.
//!
//! A result is over the contributions of one membership: whoever has it has the same bits, and a rank
//! that was the only one to have it and is lost, is in no later membership.

use crate::api::{violation, Validated};
use crate::kept_results::KeptResult;
use crate::plan::Plan;
use crate::rank_set::RankSet;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, Step};

/// Memberships that others may be ahead by, at most.
const MEMBERSHIPS_AHEAD_MAX: u32 = 64;

/// What a rank has of a slice's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holding {
    Nothing,
    /// A value, perhaps of no bytes.
    Value,
    /// Word that no rank had a gradient.
    Absent,
}

impl From<Option<KeptResult>> for Holding {
    fn from(result: Option<KeptResult>) -> Holding {
        match result {
            None => Holding::Nothing,
            Some(KeptResult::Absent) => Holding::Absent,
            Some(KeptResult::Buffer(..) | KeptResult::Empty) => Holding::Value,
        }
    }
}

/// The results that a rank has of its step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holdings {
    pub(crate) step: Step,
    /// The newest priorities that it has.
    pub(crate) version: u32,
    /// By slice.
    pub(crate) of: Vec<Holding>,
}

impl Holdings {
    /// The length of the payload of a `Holdings` frame, in bytes.
    pub(crate) fn payload_bytes(plan: &Plan) -> usize {
        4 + plan.slices.len().div_ceil(4)
    }

    /// The payload of a `Holdings` frame; step and version are in its header.
    pub(crate) fn payload(&self, generation: u32) -> Vec<u8> {
        let mut payload = generation.to_le_bytes().to_vec();
        for four in self.of.chunks(4) {
            let bits = four.iter().enumerate();
            payload.push(bits.fold(0, |byte, (place, &it)| byte | (it as u8) << (2 * place)));
        }
        payload
    }

    /// Reads a payload and its membership's generation.
    pub(crate) fn read(
        plan: &Plan,
        step: Step,
        version: u32,
        payload: &[u8],
    ) -> Validated<(u32, Holdings)> {
        let Some((generation, bits)) = payload.split_first_chunk::<4>() else {
            return violation(format!("holdings of {} bytes", payload.len()));
        };
        let mut of = Vec::with_capacity(plan.slices.len());
        for slice in 0..plan.slices.len() {
            let code = bits.get(slice / 4).map(|byte| byte >> (2 * (slice % 4)) & 3);
            of.push(match code {
                Some(0) => Holding::Nothing,
                Some(1) => Holding::Value,
                Some(2) => Holding::Absent,
                _ => return violation(format!("holdings without slice {slice}")),
            });
        }
        Ok((u32::from_le_bytes(*generation), Holdings { step, version, of }))
    }
}

/// How far a change is on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Ranks were lost, and the next members are not agreed on.
    Agreeing,
    /// What was under way is being finished.
    Settling,
    /// The others' holdings are awaited.
    Collecting,
    /// The new membership is in force here; others still prepare for it.
    Resuming,
}

/// A change that is under way.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) phase: Phase,
    pub(crate) generation: u32,
    pub(crate) members: RankSet,
    /// The latest step that a member is in, once that is known.
    pub(crate) step: Step,
    pub(crate) reason: String,
}

/// The change that is under way, if one is, and what others have said about it, or a later one.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) now: Option<Change>,
    /// The newest membership that this rank takes slices of.
    pub(crate) in_force: u32,
    /// The plan for the members that were agreed on last. It follows from the one before, also on a rank that
    /// has not taken that one up: all have the same owners.
    pub(crate) agreed_plan: Option<Arc<Plan>>,
    /// Whether a rank had said goodbye when a membership was agreed on: the step in flight is the last
    /// one, and another rank may have left with all results.
    is_last_step: bool,
    holdings: BTreeMap<(u32, Rank), Holdings>,
    resumed: BTreeMap<u32, Vec<Rank>>,
}

/// A result that is sent again, by a rank that has it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Resend {
    pub(crate) slice: SliceId,
    pub(crate) step: Step,
    pub(crate) from: Rank,
    pub(crate) to: Vec<Rank>,
}

/// What all members know together.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CommonState {
    /// The latest step that a member is in.
    pub(crate) step: Step,
    /// Whether a value that training starts from is nowhere.
    pub(crate) lacks_start: bool,
    /// Whether a result of the last step is nowhere, and must not be made anew: a rank may have left with it.
    pub(crate) lacks_result: bool,
    /// The newest priorities that all have.
    pub(crate) version: u32,
    pub(crate) resends: Vec<Resend>,
    /// By slice: whether some member has the result of the latest step.
    pub(crate) has_result: Vec<bool>,
}

impl Changes {
    pub(crate) fn is_in(&self, phase: Phase) -> bool {
        self.now.as_ref().is_some_and(|change| change.phase == phase)
    }

    /// Ranks were lost.
    pub(crate) fn suspend(&mut self) {
        self.now = Some(Change {
            phase: Phase::Agreeing,
            generation: self.in_force,
            members: RankSet::default(),
            step: Step(0),
            reason: String::new(),
        });
    }

    /// The next members are agreed on; what was said about earlier memberships is forgotten. `plan` is that of
    /// the first ones.
    pub(crate) fn agree(
        &mut self,
        plan: &Plan,
        generation: u32,
        members: RankSet,
        is_through: bool,
        reason: String,
    ) {
        self.is_last_step |= is_through;
        self.holdings.retain(|&(of, _), _| of >= generation);
        self.resumed.retain(|&of, _| of >= generation);
        let before = self.agreed_plan.as_deref().unwrap_or(plan);
        self.agreed_plan = Some(Arc::new(before.with_members(&members)));
        let (phase, step) = (Phase::Settling, Step(0));
        self.now = Some(Change { phase, generation, members, step, reason });
    }

    /// Notes a member's holdings; twice from a rank is an error.
    pub(crate) fn note(
        &mut self,
        generation: u32,
        rank: Rank,
        holdings: Holdings,
    ) -> Validated<()> {
        self.check_generation(generation)?;
        if self.holdings.insert((generation, rank), holdings).is_some() {
            return violation(format!("holdings for membership {generation} twice"));
        }
        Ok(())
    }

    /// All members have said goodbye, and have what this rank has: it waits for none.
    pub(crate) fn note_all_through(&mut self, holdings: &Holdings) {
        let Some(Change { generation, members, .. }) = &self.now else {
            return;
        };
        let resumed = self.resumed.entry(*generation).or_default();
        for rank in members.iter() {
            self.holdings.entry((*generation, rank)).or_insert_with(|| holdings.clone());
            resumed.push(rank);
        }
    }

    /// Checks that a membership is not further ahead than any can be.
    fn check_generation(&self, generation: u32) -> Validated<()> {
        if generation.saturating_sub(self.in_force) <= MEMBERSHIPS_AHEAD_MAX {
            return Ok(());
        }
        violation(format!("membership {generation}, this rank is in {}", self.in_force))
    }

    /// A member takes slices of a membership.
    pub(crate) fn note_resumed(&mut self, generation: u32, rank: Rank) -> Validated<()> {
        self.check_generation(generation)?;
        let resumed = self.resumed.entry(generation).or_default();
        if !resumed.contains(&rank) {
            resumed.push(rank);
        }
        Ok(())
    }

    /// What the members have, once all have said so.
    pub(crate) fn common_state(&self, plan: &Plan) -> Option<CommonState> {
        let change = self.now.as_ref().filter(|change| change.phase == Phase::Collecting)?;
        let of = |rank| Some((rank, self.holdings.get(&(change.generation, rank))?));
        let all: Option<Vec<(Rank, &Holdings)>> = change.members.iter().map(of).collect();
        all.map(|all| compare(plan, &all, self.is_last_step))
    }

    /// Ends the change, once every member has resumed.
    pub(crate) fn finish(&mut self) -> Option<Change> {
        let change = self.now.as_ref().filter(|change| change.phase == Phase::Resuming)?;
        let resumed = self.resumed.get(&change.generation);
        let all = change.members.iter().all(|it| resumed.is_some_and(|list| list.contains(&it)));
        if !all {
            return None;
        }
        let generation = change.generation;
        self.holdings.retain(|&(of, _), _| of > generation);
        self.resumed.retain(|&of, _| of > generation);
        self.now.take()
    }
}

/// Puts the holdings of all members together. A slice's result is sent by one of those that have it, in
/// turn, so that they share the load.
fn compare(plan: &Plan, all: &[(Rank, &Holdings)], is_last_step: bool) -> CommonState {
    let steps = || all.iter().map(|(_, holdings)| holdings.step);
    let (step, earliest) = (steps().max().unwrap_or_default(), steps().min().unwrap_or_default());
    let (mut resends, mut has_result) = (Vec::new(), Vec::with_capacity(plan.slices.len()));
    for slice in plan.slice_ids() {
        let takes_part = |step| plan.takes_part(plan.slice(slice).tensor, step);
        let has = |holdings: &Holdings, step| {
            let is_here = holdings.of[slice.index()] != Holding::Nothing;
            holdings.step > step || (holdings.step == step && is_here)
        };
        has_result.push(takes_part(step) && all.iter().any(|(_, it)| has(it, step)));
        let later = Some(step).filter(|&step| step != earliest);
        for step in [Some(earliest), later].into_iter().flatten().filter(|&it| takes_part(it)) {
            let holders: Vec<Rank> =
                all.iter().filter(|(_, it)| has(it, step)).map(|&(rank, _)| rank).collect();
            let lacks = |it: &Holdings| it.step == step && !has(it, step);
            let to: Vec<Rank> =
                all.iter().filter(|(_, it)| lacks(it)).map(|&(rank, _)| rank).collect();
            if !to.is_empty() && !holders.is_empty() {
                let from = holders[slice.index() % holders.len()];
                resends.push(Resend { slice, step, from, to });
            }
        }
    }
    // Rank 0 gives its values once more; without it they have to be somewhere.
    let has_source = step > Step(0) || all.iter().any(|&(rank, _)| rank == Rank(0));
    let starts = |slice: &SliceId| plan.takes_part(plan.slice(*slice).tensor, Step(0));
    let is_gone = |slice: SliceId| {
        all.iter().all(|(_, holdings)| holdings.of[slice.index()] == Holding::Nothing)
    };
    let lacks_start = !has_source && plan.slice_ids().filter(starts).any(is_gone);
    let version = all.iter().map(|(_, it)| it.version).min().unwrap_or_default();
    let is_open = |slice: SliceId| {
        plan.takes_part(plan.slice(slice).tensor, step) && !has_result[slice.index()]
    };
    let lacks_result = is_last_step && plan.slice_ids().any(is_open);
    CommonState { step, lacks_start, lacks_result, version, resends, has_result }
}
