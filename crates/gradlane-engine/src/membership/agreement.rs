//! A change to the next generation: takes messages, proposes in turn, and takes up what is decided.

use super::links::Links;
use super::message::{self, Ballot, Message, Value};
use super::round::{Round, Step, Voter};
#[cfg(test)]
use super::tests::Fault;
use super::{Decision, Membership};
use crate::api::{violation, GoingOn, Validated};
use crate::control::blame::Blame;
use crate::rank_set::RankSet;
use alloc::format;
use gradlane_units::{Rank, Time};

/// Ranks that propose one after the other; all later ones propose together.
const TURNS_MAX: u32 = 8;
/// Waits for an answer until a change ends in which no rank is lost any more, and nothing is decided.
const WAITS_MAX: u32 = 16;
/// Waits for an answer until a rank that got too few proposes again: others have their turn before.
const RETRY_WAITS: u32 = 4;

/// A change to the next generation that is under way.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) links: Links,
    pub(super) voter: Voter,
    /// This rank's own proposal.
    pub(super) round: Option<Round>,
    /// The highest round that this rank has heard of.
    pub(super) highest: u32,
    /// Until when to wait for what others have lost; none: the wait is over.
    pub(super) collect_end: Option<Time>,
    /// When the first rank may propose.
    pub(super) ready_at: Time,
    /// The rank whose proposal is waited for.
    pub(super) leader: Option<Rank>,
    /// When this rank proposes, if it may.
    pub(super) propose_at: Option<Time>,
    /// When this rank gives up.
    pub(super) deadline: Time,
    /// Whether the driver is asked for the register.
    pub(super) claims: bool,
}

impl Change {
    /// This rank's own round, if it has this ballot.
    fn round_of(&mut self, ballot: Ballot) -> Option<&mut Round> {
        self.round.as_mut().filter(|round| round.ballot() == ballot)
    }

    /// Gives way to another rank's proposal, until this time.
    fn follow(&mut self, ballot: Ballot, until: Time) {
        self.highest = self.highest.max(ballot.round);
        self.round = None;
        self.leader = Some(ballot.rank);
        self.ready_at = self.ready_at.max(until);
    }
}

impl Membership {
    pub(super) fn others(&self) -> RankSet {
        let mut others = self.members.clone();
        others.remove(self.rank);
        self.lost.keys().for_each(|&rank| {
            others.remove(rank);
        });
        others
    }

    fn send(&mut self, to: RankSet, message: &Message) {
        if !to.is_empty() {
            self.messages.push_back((to, message.to_bytes(self.generation, self.world_size)));
        }
    }

    fn reply(&mut self, to: Rank, message: &Message) {
        let mut set = RankSet::empty(self.world_size);
        set.insert(to);
        self.send(set, message);
    }

    /// Begins a change, unless one is under way.
    pub(super) fn begin(&mut self, now: Time) {
        if self.change.is_some() {
            return;
        }
        let collect_end = now + self.options.collect;
        self.change = Some(Change {
            links: Links::new(self.world_size, self.members.clone(), self.cut_before.clone()),
            voter: Voter::new(self.is_through),
            round: None,
            highest: 0,
            collect_end: Some(collect_end),
            ready_at: now,
            leader: None,
            propose_at: None,
            deadline: collect_end + self.options.answer * WAITS_MAX,
            claims: false,
        });
        self.decisions.push_back(Decision::Suspended);
    }

    /// This rank has lost a member: tells the others.
    pub(super) fn tell_lost(&mut self, peer: Rank, reason: &str, now: Time) {
        self.begin(now);
        self.note_cut(self.rank, peer, reason, now);
        self.send(self.others(), &Message::Lost { peer, reason: reason.into() });
    }

    /// Notes a lost connection. What others have lost is collected anew, unless a value is proposed already.
    fn note_cut(&mut self, by: Rank, peer: Rank, reason: &str, now: Time) {
        let (own, GoingOn { collect, answer, .. }) = (self.rank, &self.options);
        let Some(change) = &mut self.change else {
            return;
        };
        let was_cut = change.links.is_cut(own, peer);
        if !change.links.cut(by, peer, reason) {
            return;
        }
        change.deadline = now + *collect + *answer * WAITS_MAX;
        if !was_cut {
            change.collect_end.get_or_insert(now + *collect);
            change.round.take_if(|round| round.awaits_promises());
        }
        let is_leader = |rank| change.leader == Some(rank);
        if by == own && is_leader(peer) || peer == own && is_leader(by) {
            change.leader = None;
            change.ready_at = now;
        }
    }

    /// Refuses what no rank of this generation sends.
    pub(super) fn check(&self, from: Rank, message: &Message) -> Validated<()> {
        let is_own = |ballot: &Ballot| ballot.rank == self.rank && self.change.is_some();
        let (is_right, value) = match message {
            Message::Lost { peer, .. } => (*peer != from && self.members.contains(*peer), None),
            Message::Prepare(ballot) => (ballot.rank == from, None),
            Message::Promise { ballot, accepted, .. } => {
                let earlier = accepted.as_ref().is_none_or(|(accepted, _)| accepted < ballot);
                (is_own(ballot) && earlier, accepted.as_ref().map(|(_, value)| value))
            }
            Message::Propose { ballot, value, .. } => (ballot.rank == from, Some(value)),
            Message::Accepted(ballot) => (is_own(ballot), None),
            Message::Refused { ballot, promised } => (is_own(ballot) && promised > ballot, None),
            Message::Decided(value) => (true, Some(value)),
        };
        if is_right && value.is_none_or(|value| self.is_possible(value)) {
            return Ok(());
        }
        violation(format!("{message:?} in membership {}", self.generation))
    }

    /// Whether a value is a choice of members.
    pub(super) fn is_possible(&self, value: &Value) -> bool {
        let mut members = value.members.iter();
        !value.members.is_empty() && members.all(|rank| self.members.contains(rank))
    }

    pub(super) fn take_checked(&mut self, from: Rank, message: Message, now: Time) {
        let wait = self.options.answer * 2;
        let Some(change) = &mut self.change else {
            return;
        };
        match message {
            Message::Lost { peer, reason } => {
                self.note_cut(from, peer, &reason, now);
            }
            Message::Prepare(ballot) => {
                let reply = match change.voter.promise(ballot) {
                    Ok(()) => {
                        change.follow(ballot, now + wait);
                        change.voter.promise_message(ballot)
                    }
                    Err(promised) => Message::Refused { ballot, promised },
                };
                self.reply(from, &reply);
            }
            Message::Propose { ballot, by_register, value } => {
                let reply = match change.voter.accept(ballot, by_register, value) {
                    Ok(()) => {
                        change.follow(ballot, now + wait);
                        Message::Accepted(ballot)
                    }
                    Err(promised) => Message::Refused { ballot, promised },
                };
                self.reply(from, &reply);
            }
            Message::Promise { ballot, by_register, is_through, accepted } => {
                if let Some(round) = change.round_of(ballot) {
                    round.take_promise(from, by_register, is_through, accepted);
                }
            }
            Message::Accepted(ballot) => {
                if let Some(round) = change.round_of(ballot) {
                    round.take_vote(from);
                }
            }
            Message::Refused { ballot, promised } => {
                change.highest = change.highest.max(promised.round);
                if change.round_of(ballot).is_some() {
                    change.follow(promised, now + wait);
                }
            }
            Message::Decided(value) => self.decide(value, Some(from), now),
        }
    }

    /// Does what can be done now, until it is another's turn, or time's.
    pub(super) fn advance(&mut self, now: Time) {
        while self.advance_once(now) {}
    }

    /// Takes one step; whether there may be another one.
    fn advance_once(&mut self, now: Time) -> bool {
        let Some(change) = &mut self.change else {
            return false;
        };
        let Some(round) = &mut change.round else {
            return self.take_turn(now);
        };
        match round.step(&change.links) {
            Step::Wait => false,
            Step::Failed => {
                change.round = None;
                change.ready_at = now + self.options.answer * RETRY_WAITS;
                true
            }
            Step::Promised => self.propose(now),
            Step::Accepted { value, by_register: false } => {
                self.decide(value, None, now);
                true
            }
            Step::Accepted { value, by_register: true } => {
                change.round = None;
                change.claims = true;
                let value = value.to_bytes(self.world_size);
                self.decisions
                    .push_back(Decision::Claim { generation: self.generation + 1, value });
                true
            }
        }
    }

    /// Without a proposal of its own: proposes, waits for others or gives up.
    fn take_turn(&mut self, now: Time) -> bool {
        let Some(change) = self.change.as_mut().filter(|change| !change.claims) else {
            return false;
        };
        if let Some(end) = change.collect_end {
            if now < end && !change.links.agree(self.rank) {
                return false;
            }
            change.collect_end = None;
            change.ready_at = change.ready_at.max(now);
        }
        let proposers = change.links.proposers(self.rank);
        let turn = proposers.iter().position(|&rank| rank == self.rank);
        let turn = turn.map(|turn| TURNS_MAX.min(turn as u32));
        change.propose_at = turn.map(|turn| change.ready_at + self.options.answer * turn);
        if proposers.is_empty() {
            self.end_without_majority();
        } else if change.deadline <= now {
            self.end_undecided();
        } else if change.propose_at.is_some_and(|due| due <= now) {
            return self.prepare(now);
        }
        false
    }

    /// Asks for promises.
    fn prepare(&mut self, now: Time) -> bool {
        let (answer, rank) = (self.options.answer, self.rank);
        let Some(change) = self.change.as_mut().filter(|it| it.highest < message::ROUNDS_MAX)
        else {
            self.end_undecided();
            return false;
        };
        change.highest += 1;
        let ballot = Ballot { round: change.highest, rank };
        let promised = change.voter.promise(ballot);
        debug_assert!(promised.is_ok(), "{ballot:?} is the highest ballot");
        let asked = change.links.connected(rank);
        let members = self.members.len();
        let round = Round::new(ballot, asked.clone(), members, &change.voter, now + answer);
        #[cfg(test)]
        let round = round.with_fault(self.fault);
        change.round = Some(round);
        self.ask(asked, &Message::Prepare(ballot));
        true
    }

    /// Enough ranks have promised: proposes a value.
    fn propose(&mut self, now: Time) -> bool {
        let (answer, rank) = (self.options.answer, self.rank);
        let Some(Change { links, voter, round: Some(round), .. }) = &mut self.change else {
            return false;
        };
        let (ballot, asked) = (round.ballot(), round.answered().clone());
        let (value, by_register) = round.propose(links, now + answer);
        if by_register && value.members.len() < self.options.min_ranks {
            self.end_with_few(&value);
            return false;
        }
        let accepted = voter.accept(ballot, by_register, value.clone());
        debug_assert!(accepted.is_ok(), "a rank gives up its proposal with a promise to another");
        round.take_vote(rank);
        self.ask(asked, &Message::Propose { ballot, by_register, value });
        true
    }

    /// Sends a message to all of a set but this rank.
    fn ask(&mut self, mut to: RankSet, message: &Message) {
        to.remove(self.rank);
        self.send(to, message);
    }

    /// A value is decided: tells all others, and takes it up.
    pub(super) fn decide(&mut self, value: Value, from: Option<Rank>, now: Time) {
        let mut to = self.others();
        from.into_iter().for_each(|rank| {
            to.remove(rank);
        });
        #[cfg(test)]
        if self.fault == Fault::NoForward && from.is_some() {
            to = RankSet::empty(self.world_size);
        }
        self.send(to, &Message::Decided(value.clone()));
        if !value.members.contains(self.rank) {
            let blame = value.lost.map_or(Blame::Link, Blame::Rank);
            let reason = format!("the other ranks go on without {}: {}", self.rank, value.reason);
            return self.end(blame, reason);
        }
        if value.members.len() < self.options.min_ranks {
            return self.end_with_few(&value);
        }
        let Value { members, reason, is_through, .. } = value;
        self.generation += 1;
        if let Some(change) = self.change.take() {
            self.cut_before = change.links.cut_before(&members);
        }
        self.lost.retain(|&rank, _| members.contains(rank));
        self.members = members.clone();
        let generation = self.generation;
        self.decisions.push_back(Decision::Members { generation, members, is_through, reason });
        // What was lost meanwhile makes a further change.
        for (peer, reason) in self.lost.clone() {
            self.tell_lost(peer, &reason, now);
        }
    }
}
