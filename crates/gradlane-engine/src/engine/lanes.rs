//! The lanes of a rank, where training goes on when ranks are lost. In the first one the ranks agree on who goes on;
//! it tells the others, and each of them finishes the step in flight with its own peers. It says goodbye
//! when the others need nobody any more, so all of a rank's lanes are there until no rank needs any.
//! News about stragglers go on to `ps`.

use super::Engine;
use crate::api::{Event, LaneNews};
use crate::rank_set::RankSet;
use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use gradlane_units::{Rank, Time};

/// What a lane knows of the others of its rank.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    /// In the first: lanes in which all ranks have said goodbye, and nothing is owed.
    through: u32,
    /// In the others: whether the first has been told that of this one.
    has_told: bool,
    /// In the first: peers that another lane has lost, until when the peer may end this lane's connection too and
    /// say why, and the reason.
    lost: BTreeMap<Rank, (Time, String)>,
}

impl Lanes {
    /// Whether all have said goodbye in this lane, which is not the first.
    pub(super) fn is_through(&self) -> bool {
        self.has_told
    }

    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.lost.values().map(|(due, _)| *due).min()
    }
}

impl Engine {
    /// Whether this lane leads others, by which training goes on.
    fn leads(&self) -> bool {
        self.membership.is_some() && self.cx.plan.other_lanes > 0
    }

    /// Whether this lane does what the first one says.
    pub(super) fn follows(&self) -> bool {
        self.goes_on() && self.membership.is_none()
    }

    /// Tells all other lanes, if there are some.
    pub(super) fn tell_lanes(&mut self, news: impl FnOnce() -> LaneNews) {
        if self.leads() {
            self.cx.events.push_back(Event::TellLanes(news()));
        }
    }

    /// Tells the first lane that this one has lost a peer, which it has ended the connection to or not.
    pub(super) fn tell_lost(&mut self, peer: Rank, reason: &str) {
        let by_own_will = !self.session.has_lost(peer);
        let reason = reason.to_string();
        let news = LaneNews::PeerLost { peer, reason, by_own_will };
        self.cx.events.push_back(Event::TellLead(news));
    }

    /// Another lane of this rank has told something.
    pub(super) fn take_news(&mut self, news: LaneNews) {
        if self.session.is_over() {
            return;
        }
        match news {
            LaneNews::PeerLost { peer, reason, by_own_will } => {
                self.lose_in_a_lane(peer, reason, by_own_will);
            }
            LaneNews::Through => self.lanes.through += 1,
            LaneNews::Suspended => {
                self.cx.clock.progressed();
                self.suspend();
            }
            LaneNews::Members { generation, members, is_through, reason } => {
                self.cx.clock.progressed();
                let members = RankSet::of(self.cx.plan.world_size, members);
                self.agree(generation, members, is_through, reason);
            }
            LaneNews::Closed => return self.close(),
            LaneNews::Submitted(step) => {
                self.schemes.ps.on_submitted_in_a_lane(&mut self.cx, step);
            }
            LaneNews::Contributors(step, ranks) => {
                let set = RankSet::of(self.cx.plan.world_size, ranks);
                self.schemes.ps.take_decision(&mut self.cx, step, &set);
            }
        }
        self.settle();
    }

    /// Another lane has lost a peer. Where the peer ends all connections, this lane's may still bring the reason.
    fn lose_in_a_lane(&mut self, peer: Rank, reason: String, by_own_will: bool) {
        // After this rank's goodbye its other lanes need nobody.
        if self.session.has_lost(peer) || self.session.has_said_goodbye() {
            return;
        }
        if by_own_will {
            return self.drop_peer(peer, &reason);
        }
        let wait = self.options.going_on.as_ref().map(|it| it.collect).unwrap_or_default();
        let due = self.cx.clock.now() + wait;
        self.lanes.lost.entry(peer).or_insert((due, reason));
    }

    /// Time has passed: gives up peers that only another lane has lost.
    pub(super) fn tell_lanes_time(&mut self) {
        let now = self.cx.clock.now();
        let is_due = |(_, (due, _)): &(&Rank, &(Time, String))| *due <= now;
        while let Some((&peer, _)) = self.lanes.lost.iter().find(is_due) {
            let reason = self.lanes.lost.remove(&peer).map(|(_, reason)| reason);
            self.lose_in_a_lane(peer, reason.unwrap_or_default(), true);
        }
    }

    /// Whether the other lanes of this rank let it say goodbye.
    pub(super) fn lanes_let_leave(&self) -> bool {
        !self.leads() || self.lanes.through == self.cx.plan.other_lanes
    }

    /// All have said goodbye in this lane, and nothing is owed.
    pub(super) fn leave(&mut self) {
        if !self.follows() {
            self.tell_lanes(|| LaneNews::Closed);
            return self.close();
        }
        if !core::mem::replace(&mut self.lanes.has_told, true) {
            self.cx.events.push_back(Event::TellLead(LaneNews::Through));
        }
    }
}
