//! The end of a session: in good order (finish, goodbye, closed) or by a failure. A failure is reported
//! once, with the outstanding tensors, and told to the other ranks, so that all name the same culprit.
//! Beside it the clock, by which time-outs are measured.

use crate::api::{violation, Event, Failure, UsageError, Validated};
use crate::cx::Cx;
use crate::plan::{Plan, Synchrony};
use crate::rank_set::RankSet;
use crate::transmit::Body;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use core::time::Duration;
use gradlane_units::{Rank, Step, Time};
use gradlane_wire::FrameKind;

#[derive(Debug)]
pub(crate) struct Session {
    /// Why the session is over, once it is.
    ended: Option<String>,
    finishing: bool,
    goodbye_said: bool,
    closed: bool,
    /// Peers that have left in good order, and the last step they completed.
    departed: BTreeMap<Rank, Step>,
    lost: RankSet,
    /// Whether owners are needed after their own last step: other ranks may still push to them.
    serves_to_the_end: bool,
}

impl Session {
    /// The session of a rank; a dedicated server leaves of itself, when the others have.
    pub(crate) fn new(plan: &Plan, rank: Rank) -> Session {
        Session {
            ended: None,
            finishing: !plan.trains(rank),
            goodbye_said: false,
            closed: false,
            departed: BTreeMap::new(),
            lost: RankSet::empty(plan.world_size),
            serves_to_the_end: plan.strategy.synchrony == Synchrony::Async,
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Whether the session has failed, or was closed.
    pub(crate) fn is_over(&self) -> bool {
        self.has_ended() || self.closed
    }

    pub(crate) fn serves_to_the_end(&self) -> bool {
        self.serves_to_the_end
    }

    pub(crate) fn check_open(&self) -> Result<(), UsageError> {
        match &self.ended {
            Some(reason) => Err(UsageError::Ended { reason: reason.clone() }),
            None if self.finishing => {
                Err(UsageError::Ended { reason: "it was closed".to_string() })
            }
            None => Ok(()),
        }
    }

    /// Begins to leave; false where the session is ending already.
    pub(crate) fn finish(&mut self) -> bool {
        let begins = !self.has_ended() && !self.finishing;
        self.finishing |= begins;
        begins
    }

    /// Whether this rank is leaving, and has not left.
    pub(crate) fn is_leaving(&self) -> bool {
        self.finishing && !self.is_over()
    }

    /// Whether this rank has said goodbye.
    pub(crate) fn has_said_goodbye(&self) -> bool {
        self.goodbye_said
    }

    /// Says goodbye to all others, once.
    pub(crate) fn send_goodbye(&mut self, cx: &mut Cx, last_step: Step) {
        if !core::mem::replace(&mut self.goodbye_said, true) {
            let mut header = cx.control_header(FrameKind::Goodbye);
            header.step = last_step;
            cx.send_control(cx.others(), header, Body::Empty);
        }
    }

    /// All others have left, too.
    pub(crate) fn close(&mut self, cx: &mut Cx) {
        self.closed = true;
        cx.tell(Event::Closed);
    }

    /// A peer has said goodbye after its last step.
    pub(crate) fn depart(&mut self, peer: Rank, last_step: Step) {
        self.departed.insert(peer, last_step);
    }

    pub(crate) fn has_departed(&self, peer: Rank) -> bool {
        self.departed.contains_key(&peer)
    }

    /// Whether all of these ranks have left.
    pub(crate) fn have_departed(&self, mut ranks: impl Iterator<Item = Rank>) -> bool {
        ranks.all(|rank| self.has_departed(rank))
    }

    /// The last step of those that have left in good order.
    pub(crate) fn last_departed(&self) -> Step {
        self.departed.values().max().copied().unwrap_or_default()
    }

    /// A rank that has left, but is needed for this step, and its last step.
    pub(crate) fn departed_before(&self, step: Step) -> Option<(Rank, Step)> {
        let mut departed = self.departed.iter().map(|(&rank, &last)| (rank, last));
        departed.find(|&(_, last)| last < step)
    }

    /// The connection to a member is gone, and training goes on; whether this rank still needs the peer.
    /// Nobody closes a connection before all have said goodbye, so until this rank has, what a peer has
    /// sent before its own may be lost.
    pub(crate) fn lose_member(&mut self, peer: Rank) -> bool {
        self.lost.insert(peer);
        !(self.goodbye_said && self.has_departed(peer))
    }

    /// Whether this rank needs nobody any more: it has said goodbye, as have so many that they are a
    /// majority of the members. No members can go on without one of these, which has all results.
    /// Peers that are lost have left, then.
    pub(crate) fn leave_the_lost(&mut self, members: &RankSet) -> bool {
        let complete = members.iter().filter(|&rank| self.has_departed(rank)).count() as u32 + 1;
        let may = self.goodbye_said && 2 * complete > members.len();
        if may {
            let last = self.last_departed();
            for peer in self.lost.iter() {
                self.departed.entry(peer).or_insert(last);
            }
        }
        may
    }

    /// The connection to a peer is gone; whether this rank still needs it.
    pub(crate) fn lose(&mut self, peer: Rank) -> bool {
        self.lost.insert(peer);
        // An owner that serves to the end is needed until every rank has left, this one included.
        let serves = self.serves_to_the_end && !self.goodbye_said;
        !self.has_departed(peer) || serves
    }

    /// Peers whose connections are gone.
    pub(crate) fn lost(&self) -> &RankSet {
        &self.lost
    }

    pub(crate) fn has_lost(&self, peer: Rank) -> bool {
        self.lost.contains(peer)
    }

    /// Asks the other ranks whether they hear a peer; whether there is a rank to ask.
    pub(crate) fn suspect(&self, cx: &mut Cx, peer: Rank) -> bool {
        let mut others = cx.others();
        others.remove(peer);
        // Those that have said goodbye are still there until all have.
        for rank in self.lost.iter() {
            others.remove(rank);
        }
        if others.is_empty() || self.is_over() {
            return false;
        }
        let header = cx.control_header(FrameKind::Suspect);
        cx.send_control(others, header, Body::Inline(peer.0.to_le_bytes().to_vec()));
        true
    }

    /// A peer asks whether this rank hears another one.
    pub(crate) fn take_suspicion(&self, cx: &mut Cx, peer: Rank, payload: &[u8]) -> Validated<()> {
        let suspect = <[u8; 4]>::try_from(payload).map_or(u32::MAX, u32::from_le_bytes);
        if suspect >= cx.plan().world_size || suspect == peer.0 {
            return violation(format!("a suspicion of rank {suspect}"));
        }
        if suspect != cx.rank().0 && !self.has_ended() {
            cx.tell(Event::Suspected { by: peer, suspect: Rank(suspect) });
        }
        Ok(())
    }

    /// Ends the session: drops all queues, and tells the other ranks.
    pub(crate) fn fail(&mut self, cx: &mut Cx, failure: &Failure) {
        self.ended = Some(failure.reason.clone());
        cx.clear();
        let mut others = cx.others();
        // Until this rank has said goodbye, those that have wait for it, and would blame it.
        let is_done = self.goodbye_said && !self.serves_to_the_end;
        let departed = self.departed.keys().copied().filter(|_| is_done);
        for rank in self.lost.iter().chain(departed) {
            others.remove(rank);
        }
        let header = cx.control_header(FrameKind::Abort);
        cx.send_control(others, header, Body::Inline(failure.notice.clone()));
    }
}

/// Time as the driver tells it, and the last progress.
#[derive(Debug)]
pub(crate) struct Clock {
    now: Time,
    progress_at: Time,
}

impl Clock {
    pub(crate) fn new() -> Clock {
        Clock { now: Time::ZERO, progress_at: Time::ZERO }
    }

    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Moves on; time never goes back.
    pub(crate) fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
    }

    /// Notes that something moved.
    pub(crate) fn progressed(&mut self) {
        self.progress_at = self.now;
    }

    /// When a timeout after the last progress ends.
    pub(crate) fn deadline(&self, timeout: Duration) -> Time {
        self.progress_at + timeout
    }
}
