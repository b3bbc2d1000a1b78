//! Training goes on when ranks are lost: carries out what `membership` decides and `interrupted_step`
//! describes, and tells the other lanes of this rank.

use super::blame::Blame;
use super::interrupted_step::{CommonState, Holdings, Phase};
use super::Control;
use crate::api::{violation, Event, LaneNews, Validated};
use crate::lane::Lane;
use crate::membership::Decision;
use crate::rank_set::RankSet;
use crate::transmit::Body;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId};
use gradlane_wire::{FrameHeader, FrameKind};

impl Control {
    /// Whether the session goes on without a rank that is lost now.
    fn goes_on_without(&self, peer: Rank) -> bool {
        let membership = self.membership.as_ref();
        let is_needed = membership.is_none_or(|it| it.members().contains(peer));
        self.goes_on() && !self.session.is_over() && is_needed
    }

    /// The connection to a peer is gone.
    pub(super) fn lose_connection(&mut self, lane: &mut Lane, peer: Rank, reason: &str) {
        lane.cx.forget_peer(peer);
        let needed = self.session.lose_member(peer) && !self.leave_the_lost(lane);
        // A change that is under way counts on the peer, also where this rank needs nobody; and whether it does,
        // only the first lane knows.
        let counts = needed || self.changes.now.is_some() || self.follows();
        if counts && self.goes_on_without(peer) {
            self.lose_member(lane, peer, reason);
        } else {
            // It has left, or the others go on without it already.
            self.settle(lane);
        }
    }

    /// Whether this rank is through and leaves, without agreeing on who goes on.
    pub(super) fn leave_the_lost(&mut self, lane: &mut Lane) -> bool {
        if self.membership.is_none() {
            return false;
        }
        let leaves = self.session.leave_the_lost(&lane.cx.plan().members());
        // Where all have left nobody is owed anything; else a change that is under way goes on, since it has
        // dropped what was queued.
        let all_left = leaves && self.session.have_departed(lane.cx.others().iter());
        if all_left && self.changes.is_in(Phase::Agreeing) {
            self.changes.now = None;
            if let Some(membership) = &mut self.membership {
                membership.leave();
            }
            lane.cx.resume();
        }
        leaves
    }

    /// A member is lost.
    fn lose_member(&mut self, lane: &mut Lane, peer: Rank, reason: &str) {
        let now = self.clock.now();
        match &mut self.membership {
            Some(membership) => membership.lose(peer, reason, now),
            None => self.tell_lost(lane, peer, reason),
        }
        self.follow_membership(lane);
    }

    /// This rank goes on without its connection to a member.
    pub(super) fn drop_peer(&mut self, lane: &mut Lane, peer: Rank, reason: &str) {
        if self.goes_on_without(peer) {
            lane.cx.tell(Event::Disconnect(peer));
            self.lose_member(lane, peer, reason);
        }
    }

    /// Takes a frame of the ranks that agree on a membership or prepare for one.
    pub(super) fn take_change(
        &mut self,
        lane: &mut Lane,
        from: Rank,
        header: &FrameHeader,
        payload: &[u8],
    ) -> Validated<()> {
        let now = self.clock.now();
        if !self.goes_on() {
            return violation(format!("{:?}, where training does not go on", header.kind));
        }
        if self.session.is_over() {
            return Ok(());
        }
        match header.kind {
            FrameKind::Membership => {
                let Some(membership) = &mut self.membership else {
                    let lane = lane.cx.plan().lane;
                    return violation(format!(
                        "a message on membership in lane {lane}, not the first"
                    ));
                };
                membership.take(from, payload, now)?;
                self.follow_membership(lane);
            }
            FrameKind::Holdings => {
                let FrameHeader { step, plan_version, .. } = *header;
                let plan = lane.cx.plan();
                let (generation, holdings) = Holdings::read(plan, step, plan_version, payload)?;
                if generation > self.changes.in_force {
                    self.changes.note(generation, from, holdings)?;
                }
            }
            _ => {
                let generation = <[u8; 4]>::try_from(payload).map_or(0, u32::from_le_bytes);
                if generation > self.changes.in_force || self.changes.is_in(Phase::Resuming) {
                    self.changes.note_resumed(generation, from)?;
                }
            }
        }
        Ok(())
    }

    /// Time has passed: also gives up peers that only another lane has lost.
    pub(super) fn tell_membership_time(&mut self, lane: &mut Lane) {
        let now = self.clock.now();
        if let Some(membership) = &mut self.membership {
            membership.handle_time(now);
        }
        self.follow_membership(lane);
        while let Some((peer, reason)) = self.siblings.take_due(now) {
            self.lose_in_a_lane(lane, peer, reason, true);
        }
    }

    /// The register in the job's store holds this value.
    pub(crate) fn claim_answered(
        &mut self,
        lane: &mut Lane,
        generation: u32,
        value: Option<&[u8]>,
    ) {
        let now = self.clock.now();
        if let Some(membership) = &mut self.membership {
            membership.claim_answered(generation, value, now);
        }
        self.follow_membership(lane);
    }

    /// Sends what the ranks have to tell each other, and carries out what they have decided.
    fn follow_membership(&mut self, lane: &mut Lane) {
        while let Some(membership) = self.membership.as_mut().filter(|_| !self.session.is_over()) {
            if let Some((to, payload)) = membership.poll_message() {
                let header = lane.cx.control_header(FrameKind::Membership);
                lane.cx.send_control(to, header, Body::Inline(payload));
            } else if let Some(decision) = membership.poll_decision() {
                self.take_decision(lane, decision);
            } else {
                break;
            }
        }
        self.settle(lane);
    }

    fn take_decision(&mut self, lane: &mut Lane, decision: Decision) {
        self.clock.progressed();
        match decision {
            Decision::Suspended => {
                self.suspend(lane);
                self.tell_lanes(lane, || LaneNews::Suspended);
                // Peers that had said goodbye are missed by those that they had not said it to.
                let now = self.clock.now();
                if let Some(membership) = &mut self.membership {
                    let missed: Vec<Rank> = self.session.lost().iter().collect();
                    for peer in missed {
                        membership.lose(peer, "connection closed", now);
                    }
                }
            }
            Decision::Members { generation, members, is_through, reason } => {
                self.tell_lanes(lane, || LaneNews::Members {
                    generation,
                    members: members.iter().collect(),
                    is_through,
                    reason: reason.clone(),
                });
                self.agree(lane, generation, members, is_through, reason);
            }
            Decision::Claim { generation, value } => {
                lane.cx.tell(Event::ClaimNeeded { generation, value });
            }
            Decision::Ended { blame, reason } => self.fail(lane, blame, &reason, false),
        }
    }

    /// Ranks were lost: no data of this membership is sent or landed any more.
    pub(super) fn suspend(&mut self, lane: &mut Lane) {
        lane.cx.suspend();
        self.changes.suspend();
    }

    /// The next membership is agreed on.
    pub(super) fn agree(
        &mut self,
        lane: &mut Lane,
        generation: u32,
        members: RankSet,
        is_through: bool,
        reason: String,
    ) {
        let leaving = self.leaving(lane, &members);
        for rank in leaving.into_iter().filter(|&rank| !self.session.has_lost(rank)) {
            lane.cx.tell(Event::Disconnect(rank));
        }
        self.changes.agree(lane.cx.plan(), generation, members, is_through, reason);
    }

    /// Ranks of the plan that are not in the next membership.
    fn leaving(&self, lane: &Lane, members: &RankSet) -> Vec<Rank> {
        let plan = lane.cx.plan().members();
        plan.iter().filter(|&rank| !members.contains(rank)).collect()
    }

    /// Takes the next steps of a change that can be taken now.
    pub(super) fn advance_change(&mut self, lane: &mut Lane) {
        if self.changes.is_in(Phase::Agreeing) && self.session.is_leaving() {
            self.leave_the_lost(lane);
        }
        if self.changes.is_in(Phase::Settling) && self.is_quiet(lane) {
            self.tell_holdings(lane);
        }
        if let Some(state) = self.changes.common_state(lane.cx.plan()) {
            self.take_up(lane, &state);
        }
        if let Some(change) = self.changes.finish() {
            lane.cx.resume();
            self.clock.progressed();
            lane.cx.tell(Event::MembersChanged {
                generation: change.generation,
                members: change.members.iter().collect(),
                step: change.step,
                reason: change.reason,
            });
        }
    }

    /// Whether nothing of the old membership is being added up, copied, written or read.
    fn is_quiet(&self, lane: &Lane) -> bool {
        let Some(change) = &self.changes.now else {
            return true;
        };
        let mut leaving = self.leaving(lane, &change.members).into_iter();
        lane.cx.is_quiet(&change.members) && leaving.all(|rank| self.session.has_lost(rank))
    }

    /// Tells the other members which results this rank has.
    fn tell_holdings(&mut self, lane: &mut Lane) {
        let step = lane.cx.step();
        let (version, _) = lane.cx.priorities().newest();
        let of = lane.cx.plan().slice_ids().map(|slice| lane.cx.kept_result(slice, step).into());
        let holdings = Holdings { step, version, of: of.collect() };
        let Some(change) = &mut self.changes.now else {
            return;
        };
        change.phase = Phase::Collecting;
        let (generation, mut to) = (change.generation, change.members.clone());
        to.remove(lane.cx.rank());
        let mut header = lane.cx.control_header(FrameKind::Holdings);
        header.plan_version = version;
        lane.cx.send_control(to, header, Body::Inline(holdings.payload(generation)));
        if self.siblings.is_through() {
            self.changes.note_all_through(&holdings);
            return;
        }
        // A rank's own are noted once: it enters this phase once for a membership.
        let _ = self.changes.note(generation, lane.cx.rank(), holdings);
    }

    /// Takes up the new membership: what exists is sent again, the rest is contributed again.
    fn take_up(&mut self, lane: &mut Lane, state: &CommonState) {
        let plan = self.changes.agreed_plan.clone();
        let Some((change, plan)) = self.changes.now.as_mut().zip(plan) else {
            return;
        };
        if state.lacks_start {
            let reason = format!(
                "{}; before another rank had all values to start from: start again",
                change.reason
            );
            return self.fail(lane, Blame::All, &reason, false);
        }
        if state.lacks_result {
            let reason = format!(
                "{}; it had all results of the last step, {}, which are not on the ranks that are left, and \
                 others may have ended with them",
                change.reason, state.step
            );
            return self.fail(lane, Blame::All, &reason, false);
        }
        change.phase = Phase::Resuming;
        change.step = state.step;
        let (generation, members) = (change.generation, change.members.clone());
        self.changes.in_force = generation;
        self.switch.settle(&mut lane.cx, state.version);
        let (own_rank, own_step, latest) = (lane.cx.rank(), lane.cx.step(), state.step);
        // This rank may have begun the next step since it told its holdings: nothing of that exists.
        let exists = |slice: &SliceId| {
            own_step < latest || (own_step == latest && state.has_result[slice.index()])
        };
        let existing = plan.slice_ids().filter(exists).map(|slice| (slice, own_rank));
        let mut sources: BTreeMap<SliceId, Rank> = existing.collect();
        let to_this = state.resends.iter().filter(|resend| resend.to.contains(&own_rank));
        sources.extend(to_this.map(|resend| (resend.slice, resend.from)));
        lane.restart(plan, latest, &state.has_result, sources);
        for resend in state.resends.iter().filter(|resend| resend.from == own_rank) {
            lane.resend(resend.slice, resend.step, &resend.to);
        }
        let mut to = members;
        to.remove(own_rank);
        let header = lane.cx.control_header(FrameKind::Resumed);
        lane.cx.send_control(to, header, Body::Inline(generation.to_le_bytes().to_vec()));
        // The membership in force is not ahead.
        let _ = self.changes.note_resumed(generation, own_rank);
    }
}

/// The lanes of this rank.
impl Control {
    /// Whether this lane leads others, by which training goes on.
    fn leads(&self, lane: &Lane) -> bool {
        self.membership.is_some() && lane.cx.plan().other_lanes > 0
    }

    /// Whether this lane does what the first one says.
    pub(super) fn follows(&self) -> bool {
        self.goes_on() && self.membership.is_none()
    }

    /// Tells all other lanes, if there are some.
    pub(super) fn tell_lanes(&mut self, lane: &mut Lane, news: impl FnOnce() -> LaneNews) {
        if self.leads(lane) {
            lane.cx.tell(Event::TellLanes(news()));
        }
    }

    /// Tells the first lane that this one has lost a peer, which it has ended the connection to or not.
    pub(super) fn tell_lost(&mut self, lane: &mut Lane, peer: Rank, reason: &str) {
        let by_own_will = !self.session.has_lost(peer);
        let reason = reason.to_string();
        let news = LaneNews::PeerLost { peer, reason, by_own_will };
        lane.cx.tell(Event::TellLead(news));
    }

    /// Another lane of this rank has told something.
    pub(crate) fn take_news(&mut self, lane: &mut Lane, news: LaneNews) {
        if self.session.is_over() {
            return;
        }
        match news {
            LaneNews::PeerLost { peer, reason, by_own_will } => {
                self.lose_in_a_lane(lane, peer, reason, by_own_will);
            }
            LaneNews::Through => self.siblings.note_other_through(),
            LaneNews::Suspended => {
                self.clock.progressed();
                self.suspend(lane);
            }
            LaneNews::Members { generation, members, is_through, reason } => {
                self.clock.progressed();
                let members = RankSet::of(lane.cx.plan().world_size, members);
                self.agree(lane, generation, members, is_through, reason);
            }
            LaneNews::Closed => return self.close(lane),
            LaneNews::Submitted { step, had_results } => {
                let clock = &mut self.clock;
                self.contributors.on_submitted_in_a_lane(lane, step, had_results, clock);
            }
            LaneNews::Contributors(step, ranks) => {
                let set = RankSet::of(lane.cx.plan().world_size, ranks);
                self.contributors.decided(lane, step, &set, &mut self.clock);
            }
        }
        self.settle(lane);
    }

    /// Another lane has lost a peer. Where the peer ends all connections, this lane's may still bring the reason.
    fn lose_in_a_lane(&mut self, lane: &mut Lane, peer: Rank, reason: String, by_own_will: bool) {
        // After this rank's goodbye its other lanes need nobody.
        if self.session.has_lost(peer) || self.session.has_said_goodbye() {
            return;
        }
        if by_own_will {
            return self.drop_peer(lane, peer, &reason);
        }
        let wait = self.options.going_on.as_ref().map(|it| it.collect).unwrap_or_default();
        let due = self.clock.now() + wait;
        self.siblings.note_lost(peer, due, reason);
    }

    /// Whether the other lanes of this rank let it say goodbye.
    pub(super) fn siblings_let_leave(&self, lane: &Lane) -> bool {
        !self.leads(lane) || self.siblings.are_through(lane.cx.plan().other_lanes)
    }

    /// All have said goodbye in this lane, and nothing is owed.
    pub(super) fn leave(&mut self, lane: &mut Lane) {
        if !self.follows() {
            self.tell_lanes(lane, || LaneNews::Closed);
            return self.close(lane);
        }
        if self.siblings.note_through() {
            lane.cx.tell(Event::TellLead(LaneNews::Through));
        }
    }
}
