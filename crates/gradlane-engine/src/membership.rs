//! Membership: which ranks of the last generation are in the next one, after ranks were lost.
//!
//! 1. A rank that loses its connection to a member tells all others, and so does each of them. For a while
//!    (`collect`), or until all connected ranks have lost the same ones, nobody is blamed.
//! 2. The first rank that is connected to a majority then asks for promises and proposes those that answered and
//!    are connected to each other: single-decree Paxos per generation, among its members. Others follow
//!    in order when nothing comes of it.
//! 3. With acceptances of a majority the value is decided. A rank that learns of a decision sends it to all
//!    others, before anything about the next generation. Connections are FIFO, so nobody hears of a
//!    generation before the decision on it, and nothing of an old one is kept.
//!
//! Where exactly half of the members are left, a register in the job's store decides: it keeps the first value
//! that is written to it. Before the register is written, half of the members have accepted a value with the
//! mark `by_register`; each majority has a rank in common with them, sees the mark in its promise, and goes by
//! way of the register, too. A majority that was earlier is seen by the half, which then proposes
//! its value. So both never decide differently (`docs/decisions/0061-membership.md`).

mod links;
mod message;
mod round;

#[cfg(test)]
mod tests;

use crate::rank_set::RankSet;
use crate::session::Blame;
use crate::violation::{violation, Validated};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::time::Duration;
use gradlane_units::{Rank, Time};
use links::Links;
use message::{Ballot, Message, Value};
use round::{Round, Step, Voter};

/// Ranks that propose one after the other; all later ones propose together.
const TURNS_MAX: u32 = 8;
/// Waits for an answer until a change ends in which no rank is lost any more, and nothing is decided.
const WAITS_MAX: u32 = 16;
/// Waits for an answer until a rank that got too few proposes again: others have their turn before.
const RETRY_WAITS: u32 = 4;

#[derive(Clone, Debug)]
pub(crate) struct MembershipOptions {
    /// Smallest number of members.
    pub(crate) min_ranks: u32,
    /// How long to wait for what other ranks have lost before a proposal.
    pub(crate) collect: Duration,
    /// How long to wait for the answer to a proposal, longer than a round trip: who does not answer leaves.
    pub(crate) answer: Duration,
}

/// What the driver is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Ranks were lost: no data of this generation is sent or landed any more.
    Suspended,
    /// Agreed: the next generation, and why each rank that is not in it left; the same on all ranks.
    Members { generation: u32, members: RankSet, reason: String },
    /// Half of the ranks are left: the value is written into the register of this generation in the job's store,
    /// unless that has one, and [`Membership::claim_answered`] is told what it holds.
    Claim { generation: u32, value: Vec<u8> },
    /// This rank cannot go on.
    Ended { blame: Blame, reason: String },
}

/// The state of a rank.
#[derive(Debug)]
pub(crate) struct Membership {
    rank: Rank,
    world_size: u32,
    options: MembershipOptions,
    generation: u32,
    members: RankSet,
    /// Members that this rank has lost its connection to, and why.
    lost: BTreeMap<Rank, String>,
    change: Option<Change>,
    has_ended: bool,
    messages: VecDeque<(RankSet, Vec<u8>)>,
    decisions: VecDeque<Decision>,
    #[cfg(test)]
    fault: tests::Fault,
}

/// A change to the next generation that is under way.
#[derive(Debug)]
struct Change {
    links: Links,
    voter: Voter,
    /// This rank's own proposal.
    round: Option<Round>,
    /// The highest round that this rank has heard of.
    highest: u32,
    /// Until when to wait for what others have lost; none: the wait is over.
    collect_end: Option<Time>,
    /// When the first rank may propose.
    ready_at: Time,
    /// The rank whose proposal is waited for.
    leader: Option<Rank>,
    /// When this rank proposes, if it may.
    propose_at: Option<Time>,
    /// When this rank gives up.
    deadline: Time,
    /// Whether the driver is asked for the register.
    claims: bool,
}

impl Membership {
    /// Membership of generation 0: all ranks below `world_size`.
    pub(crate) fn new(rank: Rank, world_size: u32, options: MembershipOptions) -> Membership {
        Membership {
            rank,
            world_size,
            options,
            generation: 0,
            members: RankSet::all(world_size),
            lost: BTreeMap::new(),
            change: None,
            has_ended: false,
            messages: VecDeque::new(),
            decisions: VecDeque::new(),
            #[cfg(test)]
            fault: tests::Fault::None,
        }
    }

    /// Number of the last decided generation.
    #[cfg(test)]
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// Members of the last decided generation.
    pub(crate) fn members(&self) -> &RankSet {
        &self.members
    }

    /// Whether a change is under way, so that data must not flow.
    #[cfg(test)]
    pub(crate) fn is_changing(&self) -> bool {
        self.change.is_some()
    }

    /// Length of the longest message, in bytes.
    pub(crate) fn message_bytes_max(world_size: u32) -> usize {
        message::bytes_max(world_size)
    }

    /// The next message, and to whom it goes; before decisions, so that a rank that leaves hears why.
    pub(crate) fn poll_message(&mut self) -> Option<(RankSet, Vec<u8>)> {
        self.messages.pop_front()
    }

    pub(crate) fn poll_decision(&mut self) -> Option<Decision> {
        self.decisions.pop_front()
    }

    /// When to call [`Membership::handle_time`] next.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        let change = self.change.as_ref()?;
        match &change.round {
            Some(round) => Some(round.due()),
            // The driver ends this wait.
            None if change.claims => None,
            None => {
                let next = change.propose_at.unwrap_or(change.deadline).min(change.deadline);
                change.collect_end.or(Some(next))
            }
        }
    }

    /// This rank's connection to a member is closed, reset, or silent for too long.
    pub(crate) fn lose(&mut self, peer: Rank, reason: &str, now: Time) {
        let is_member = peer != self.rank && self.members.contains(peer);
        if self.has_ended || !is_member || self.lost.contains_key(&peer) {
            return;
        }
        let reason = message::shorten(reason, message::LOSS_BYTES_MAX);
        self.lost.insert(peer, reason.into());
        self.tell_lost(peer, reason, now);
        self.advance(now);
    }

    /// Takes a peer's message.
    ///
    /// # Errors
    /// When no rank that follows the rules sends it.
    pub(crate) fn take(&mut self, from: Rank, payload: &[u8], now: Time) -> Validated<()> {
        let (generation, message) = Message::from_bytes(self.world_size, payload)?;
        let is_late = generation < self.generation || !self.members.contains(from);
        if self.has_ended || is_late || self.lost.contains_key(&from) {
            return Ok(());
        }
        if generation > self.generation {
            return violation(format!(
                "a message on membership {generation} before the decision on it; this rank is in {}",
                self.generation
            ));
        }
        self.check(from, &message)?;
        self.begin(now);
        self.take_checked(from, message, now);
        self.advance(now);
        Ok(())
    }

    /// Time has passed.
    pub(crate) fn handle_time(&mut self, now: Time) {
        let Some(change) = &mut self.change else {
            return;
        };
        if let Some(round) = change.round.as_mut().filter(|round| round.due() <= now) {
            round.stop_waiting();
        }
        self.advance(now);
    }

    /// The register of a generation holds this value; none: the store does not answer.
    pub(crate) fn claim_answered(&mut self, generation: u32, winner: Option<&[u8]>, now: Time) {
        let is_asked = self.change.as_ref().is_some_and(|change| change.claims);
        if !is_asked || generation != self.generation + 1 {
            return;
        }
        let value = winner.map(|bytes| Value::from_bytes(self.world_size, bytes));
        match value {
            Some(Ok(value)) if self.is_possible(&value) => {
                self.decide(value, None, now);
                self.advance(now);
            }
            Some(_) => {
                let reason = format!(
                    "half of the ranks of membership {} are left, and its register in the job's store holds \
                     something else than ranks of it: give each job a store of its own",
                    self.generation
                );
                self.end(Blame::Nobody, reason);
            }
            None => {
                let reason = format!(
                    "half of the ranks of membership {} are left, and the job's store, which decides which half \
                     goes on, does not answer ({} lost {}): run the store apart from the ranks",
                    self.generation,
                    self.rank,
                    self.describe_lost(),
                );
                self.end(Blame::Nobody, reason);
            }
        }
    }
}

/// What is told, and what follows.
impl Membership {
    fn others(&self) -> RankSet {
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
    fn begin(&mut self, now: Time) {
        if self.change.is_some() {
            return;
        }
        let collect_end = now + self.options.collect;
        self.change = Some(Change {
            links: Links::new(self.world_size, self.members.clone()),
            voter: Voter::default(),
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
    fn tell_lost(&mut self, peer: Rank, reason: &str, now: Time) {
        self.begin(now);
        self.note_cut(self.rank, peer, reason, now);
        self.send(self.others(), &Message::Lost { peer, reason: reason.into() });
    }

    /// Notes a lost connection. What others have lost is collected anew, unless a value is proposed already.
    fn note_cut(&mut self, by: Rank, peer: Rank, reason: &str, now: Time) {
        let (own, MembershipOptions { collect, answer, .. }) = (self.rank, &self.options);
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
    fn check(&self, from: Rank, message: &Message) -> Validated<()> {
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
    fn is_possible(&self, value: &Value) -> bool {
        let mut members = value.members.iter();
        !value.members.is_empty() && members.all(|rank| self.members.contains(rank))
    }

    fn take_checked(&mut self, from: Rank, message: Message, now: Time) {
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
            Message::Promise { ballot, by_register, accepted } => {
                if let Some(round) = change.round_of(ballot) {
                    round.take_promise(from, by_register, accepted);
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
    fn advance(&mut self, now: Time) {
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
    fn decide(&mut self, value: Value, from: Option<Rank>, now: Time) {
        let mut to = self.others();
        from.into_iter().for_each(|rank| {
            to.remove(rank);
        });
        #[cfg(test)]
        if self.fault == tests::Fault::NoForward && from.is_some() {
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
        let Value { members, reason, .. } = value;
        self.generation += 1;
        self.change = None;
        self.lost.retain(|&rank, _| members.contains(rank));
        self.members = members.clone();
        let generation = self.generation;
        self.decisions.push_back(Decision::Members { generation, members, reason });
        // What was lost meanwhile makes a further change.
        for (peer, reason) in self.lost.clone() {
            self.tell_lost(peer, &reason, now);
        }
    }
}

/// Ends.
impl Membership {
    fn end(&mut self, blame: Blame, reason: String) {
        self.has_ended = true;
        self.change = None;
        self.decisions.push_back(Decision::Ended { blame, reason });
    }

    fn describe_lost(&self) -> String {
        let lost = self.change.as_ref().map(|change| change.links.lost_by(self.rank));
        lost.filter(|lost| !lost.is_empty()).unwrap_or_else(|| "none of its own".to_string())
    }

    fn blame_lost(&self) -> Blame {
        let mut lost = self.lost.keys();
        lost.next()
            .filter(|_| lost.next().is_none())
            .map_or(Blame::Nobody, |&rank| Blame::Rank(rank))
    }

    fn end_with_few(&mut self, value: &Value) {
        let blame = value.lost.map_or(Blame::Link, Blame::Rank);
        let reason = format!(
            "{}; {} of {} ranks are left, fewer than min_ranks = {}",
            value.reason,
            value.members.len(),
            self.members.len(),
            self.options.min_ranks
        );
        self.end(blame, reason);
    }

    fn end_without_majority(&mut self) {
        let reason = format!(
            "no majority of the {} ranks of membership {} is left: {} lost {}",
            self.members.len(),
            self.generation,
            self.rank,
            self.describe_lost()
        );
        self.end(self.blame_lost(), reason);
    }

    fn end_undecided(&mut self) {
        let reason = format!(
            "the {} ranks of membership {} did not agree on the next one in time: {} lost {}",
            self.members.len(),
            self.generation,
            self.rank,
            self.describe_lost()
        );
        self.end(self.blame_lost(), reason);
    }
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
