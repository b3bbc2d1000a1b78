//! Training goes on when ranks are lost: carries out what `membership` decides and `session::interrupted_step`
//! describes.

use super::Engine;
use crate::api::{Event, LaneNews};
use crate::membership::Decision;
use crate::rank_set::RankSet;
use crate::session::{Blame, Findings, Holdings, Phase};
use crate::transmit::Body;
use crate::violation::{violation, Validated};
use crate::worker::Submission;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, TensorId};
use gradlane_wire::{FrameHeader, FrameKind};

impl Engine {
    /// Whether training goes on when ranks are lost.
    pub(super) fn goes_on(&self) -> bool {
        self.options.going_on.is_some()
    }

    /// Whether the session goes on without a rank that is lost now.
    fn goes_on_without(&self, peer: Rank) -> bool {
        let membership = self.membership.as_ref();
        let is_needed = membership.is_none_or(|it| it.members().contains(peer));
        self.goes_on() && !self.session.is_over() && is_needed
    }

    /// The connection to a peer is gone.
    pub(super) fn lose_connection(&mut self, peer: Rank, reason: &str) {
        self.cx.tx.forget(peer);
        self.cx.encodes.forget(peer).into_iter().for_each(|buffer| self.cx.release(buffer));
        self.schemes.ps.forget_receiver(&mut self.cx, peer);
        let needed = self.session.lose_member(peer) && !self.leave_the_lost();
        // A change that is under way counts on the peer, also where this rank needs nobody; and whether it does,
        // only the first lane knows.
        let counts = needed || self.changes.are_under_way() || self.follows();
        if counts && self.goes_on_without(peer) {
            self.lose_member(peer, reason);
        } else {
            // It has left, or the others go on without it already.
            self.settle();
        }
    }

    /// Whether this rank is through and leaves, without agreeing on who goes on.
    pub(super) fn leave_the_lost(&mut self) -> bool {
        if self.membership.is_none() {
            return false;
        }
        let leaves = self.session.leave_the_lost(&self.cx.plan.members());
        // Where all have left nobody is owed anything; else a change that is under way goes on, since it has
        // dropped what was queued.
        let all_left = leaves && self.session.have_departed(self.cx.others().iter());
        if all_left && self.changes.is_in(Phase::Agreeing) {
            self.changes.now = None;
            if let Some(membership) = &mut self.membership {
                membership.leave();
            }
            self.cx.tx.hold_slices(false);
            self.schemes.ps.forget_owed(&mut self.cx);
        }
        leaves
    }

    /// A member is lost.
    fn lose_member(&mut self, peer: Rank, reason: &str) {
        let now = self.cx.clock.now();
        match &mut self.membership {
            Some(membership) => membership.lose(peer, reason, now),
            None => self.tell_lost(peer, reason),
        }
        self.follow_membership();
    }

    /// A member gives up, and says why.
    pub(super) fn part_with(&mut self, peer: Rank, reason: &str) {
        self.drop_peer(peer, &format!("it gave up: {reason}"));
    }

    /// This rank goes on without its connection to a member.
    pub(super) fn drop_peer(&mut self, peer: Rank, reason: &str) {
        if self.goes_on_without(peer) {
            self.cx.events.push_back(Event::Disconnect(peer));
            self.lose_member(peer, reason);
        }
    }

    /// Takes a frame of the ranks that agree on a membership or prepare for one.
    pub(super) fn take_change(
        &mut self,
        from: Rank,
        header: &FrameHeader,
        payload: &[u8],
    ) -> Validated<()> {
        let now = self.cx.clock.now();
        if !self.goes_on() {
            return violation(format!("{:?}, where training does not go on", header.kind));
        }
        if self.session.is_over() {
            return Ok(());
        }
        match header.kind {
            FrameKind::Membership => {
                let Some(membership) = &mut self.membership else {
                    let lane = self.cx.plan.lane;
                    return violation(format!(
                        "a message on membership in lane {lane}, not the first"
                    ));
                };
                membership.take(from, payload, now)?;
                self.follow_membership();
            }
            FrameKind::Holdings => {
                let FrameHeader { step, plan_version, .. } = *header;
                let plan = &self.cx.plan;
                let (generation, holdings) = Holdings::read(plan, step, plan_version, payload)?;
                if generation > self.generation_in_force() {
                    self.changes.note(generation, from, holdings)?;
                }
            }
            _ => {
                let generation = <[u8; 4]>::try_from(payload).map_or(0, u32::from_le_bytes);
                if generation > self.generation_in_force() || self.changes.is_in(Phase::Resuming) {
                    self.changes.note_resumed(generation, from)?;
                }
            }
        }
        Ok(())
    }

    /// The newest membership that this rank takes slices of.
    fn generation_in_force(&self) -> u32 {
        self.changes.in_force
    }

    /// Time has passed.
    pub(super) fn tell_membership_time(&mut self) {
        let now = self.cx.clock.now();
        if let Some(membership) = &mut self.membership {
            membership.handle_time(now);
        }
        self.follow_membership();
    }

    /// The register in the job's store holds this value.
    pub(super) fn claim_answered(&mut self, generation: u32, value: Option<&[u8]>) {
        let now = self.cx.clock.now();
        if let Some(membership) = &mut self.membership {
            membership.claim_answered(generation, value, now);
        }
        self.follow_membership();
    }

    /// Sends what the ranks have to tell each other, and carries out what they have decided.
    fn follow_membership(&mut self) {
        while let Some(membership) = self.membership.as_mut().filter(|_| !self.session.is_over()) {
            if let Some((to, payload)) = membership.poll_message() {
                let header = self.cx.control_header(FrameKind::Membership);
                self.cx.send_control(to, header, Body::Inline(payload));
            } else if let Some(decision) = membership.poll_decision() {
                self.take_decision(decision);
            } else {
                break;
            }
        }
        self.settle();
    }

    fn take_decision(&mut self, decision: Decision) {
        self.cx.clock.progressed();
        match decision {
            Decision::Suspended => {
                self.suspend();
                self.tell_lanes(|| LaneNews::Suspended);
                // Peers that had said goodbye are missed by those that they had not said it to.
                let now = self.cx.clock.now();
                if let Some(membership) = &mut self.membership {
                    let missed: Vec<Rank> = self.session.lost().iter().collect();
                    for peer in missed {
                        membership.lose(peer, "connection closed", now);
                    }
                }
            }
            Decision::Members { generation, members, is_through, reason } => {
                self.tell_lanes(|| LaneNews::Members {
                    generation,
                    members: members.iter().collect(),
                    is_through,
                    reason: reason.clone(),
                });
                self.agree(generation, members, is_through, reason);
            }
            Decision::Claim { generation, value } => {
                self.cx.events.push_back(Event::ClaimNeeded { generation, value });
            }
            Decision::Ended { blame, reason } => self.fail(blame, &reason, false),
        }
    }

    /// Ranks were lost: no data of this membership is sent or landed any more.
    pub(super) fn suspend(&mut self) {
        self.cx.tx.clear_slices();
        self.cx.tx.hold_slices(true);
        self.cx.encodes.clear();
        self.changes.suspend();
    }

    /// The next membership is agreed on.
    pub(super) fn agree(
        &mut self,
        generation: u32,
        members: RankSet,
        is_through: bool,
        reason: String,
    ) {
        let leaving = self.leaving(&members);
        for rank in leaving.into_iter().filter(|&rank| !self.session.has_lost(rank)) {
            self.cx.events.push_back(Event::Disconnect(rank));
        }
        self.changes.agree(&self.cx.plan, generation, members, is_through, reason);
    }

    /// Ranks of the plan that are not in the next membership.
    fn leaving(&self, members: &RankSet) -> Vec<Rank> {
        let plan = self.cx.plan.members();
        plan.iter().filter(|&rank| !members.contains(rank)).collect()
    }

    /// Takes the next steps of a change that can be taken now.
    pub(super) fn advance_change(&mut self) {
        if self.changes.is_in(Phase::Agreeing) && self.session.is_leaving() {
            self.leave_the_lost();
        }
        if self.changes.is_in(Phase::Settling) && self.is_settled() {
            self.tell_holdings();
        }
        if let Some(findings) = self.changes.findings(&self.cx.plan) {
            self.take_up(&findings);
        }
        if let Some(change) = self.changes.finish() {
            self.cx.tx.hold_slices(false);
            self.cx.clock.progressed();
            self.cx.events.push_back(Event::MembersChanged {
                generation: change.generation,
                members: change.members.iter().collect(),
                step: change.step,
                reason: change.reason,
            });
        }
    }

    /// Whether nothing of the old membership is being added up, copied, written or read.
    fn is_settled(&self) -> bool {
        let Some(change) = &self.changes.now else {
            return true;
        };
        let mut others = change.members.iter().filter(|&rank| rank != self.cx.rank);
        self.cx.jobs.is_idle()
            && others.all(|rank| self.cx.tx.has_nothing_in_flight(rank))
            && self.leaving(&change.members).iter().all(|&rank| self.session.has_lost(rank))
    }

    /// Tells the other members which results this rank has.
    fn tell_holdings(&mut self) {
        let step = self.cx.worker.step();
        let (version, _) = self.cx.priorities.newest();
        let of = self.cx.plan.slice_ids().map(|slice| self.cx.kept.of(slice, step).into());
        let holdings = Holdings { step, version, of: of.collect() };
        let Some(change) = &mut self.changes.now else {
            return;
        };
        change.phase = Phase::Collecting;
        let (generation, mut to) = (change.generation, change.members.clone());
        to.remove(self.cx.rank);
        let mut header = self.cx.control_header(FrameKind::Holdings);
        header.plan_version = version;
        self.cx.send_control(to, header, Body::Inline(holdings.payload(generation)));
        if self.lanes.is_through() {
            self.changes.note_all_through(&holdings);
            return;
        }
        // A rank's own are noted once: it enters this phase once for a membership.
        let _ = self.changes.note(generation, self.cx.rank, holdings);
    }

    /// Takes up the new membership: what exists is spread, the rest is contributed again.
    fn take_up(&mut self, findings: &Findings) {
        let plan = self.changes.agreed_plan.clone();
        let Some((change, plan)) = self.changes.now.as_mut().zip(plan) else {
            return;
        };
        if findings.lacks_start {
            let reason = format!(
                "{}; before another rank had all values to start from: start again",
                change.reason
            );
            return self.fail(Blame::All, &reason, false);
        }
        if findings.lacks_result {
            let reason = format!(
                "{}; it had all results of the last step, {}, which are not on the ranks that are left, and \
                 others may have ended with them",
                change.reason, findings.step
            );
            return self.fail(Blame::All, &reason, false);
        }
        change.phase = Phase::Resuming;
        change.step = findings.step;
        let (generation, members) = (change.generation, change.members.clone());
        self.changes.in_force = generation;
        let Engine { cx, schemes, switch, .. } = self;
        schemes.ring.drain(cx);
        cx.plan = plan;
        cx.tx.clear_slices();
        cx.encodes.drain_unsent().into_iter().for_each(|buffer| cx.release(buffer));
        cx.worker.reset_results().into_iter().for_each(|buffer| cx.release(buffer));
        let latest = findings.step;
        let is_settled = |slice: SliceId| findings.settled[slice.index()];
        schemes.ps.own_anew(cx, |slice| if is_settled(slice) { latest.next() } else { latest });
        switch.settle(cx, findings.version);
        let (own_rank, own_step) = (cx.rank, cx.worker.step());
        // This rank may have begun the next step since it told its holdings: nothing of that exists.
        let exists =
            |&slice: &SliceId| own_step < latest || (own_step == latest && is_settled(slice));
        cx.settled = cx.plan.slice_ids().filter(exists).collect();
        cx.spread_by.clear();
        for spread in &findings.spreads {
            if spread.to.contains(&own_rank) {
                cx.spread_by.insert(spread.slice, (spread.step, spread.from));
            }
        }
        let tensors: Vec<TensorId> = cx.plan.tensor_ids().collect();
        for tensor in tensors {
            if self.cx.worker.submission(tensor) != Submission::Missing {
                self.contribute(tensor);
            }
        }
        for spread in findings.spreads.iter().filter(|spread| spread.from == own_rank) {
            self.schemes.ps.spread(&mut self.cx, spread.slice, spread.step, &spread.to);
        }
        let mut to = members;
        to.remove(own_rank);
        let header = self.cx.control_header(FrameKind::Resumed);
        self.cx.send_control(to, header, Body::Inline(generation.to_le_bytes().to_vec()));
        // The membership in force is not ahead.
        let _ = self.changes.note_resumed(generation, own_rank);
    }
}
