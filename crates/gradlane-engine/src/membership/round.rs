//! One rank's part in single-decree Paxos: its votes, and its own proposal.

use super::links::Links;
use super::message::{Ballot, Message, Value};
#[cfg(test)]
use super::tests::Fault;
use crate::rank_set::RankSet;
use gradlane_units::{Rank, Time};

/// What a rank has promised and accepted.
#[derive(Debug, Default)]
pub(super) struct Voter {
    promised: Option<Ballot>,
    accepted: Option<(Ballot, Value)>,
    /// Whether it has ever accepted a value that the register decides.
    by_register: bool,
    /// Whether it has said goodbye.
    is_through: bool,
}

impl Voter {
    /// Has promised nothing; the rank may have said goodbye.
    pub(super) fn new(is_through: bool) -> Voter {
        Voter { is_through, ..Voter::default() }
    }

    /// Promises to refuse lower ballots.
    ///
    /// # Errors
    /// The promise that stands against it.
    pub(super) fn promise(&mut self, ballot: Ballot) -> Result<(), Ballot> {
        match self.promised {
            Some(promised) if promised >= ballot => Err(promised),
            _ => {
                self.promised = Some(ballot);
                Ok(())
            }
        }
    }

    pub(super) fn promise_message(&self, ballot: Ballot) -> Message {
        let Voter { by_register, is_through, .. } = *self;
        Message::Promise { ballot, by_register, is_through, accepted: self.accepted.clone() }
    }

    /// Accepts a value.
    ///
    /// # Errors
    /// The promise that stands against it.
    pub(super) fn accept(
        &mut self,
        ballot: Ballot,
        by_register: bool,
        value: Value,
    ) -> Result<(), Ballot> {
        if let Some(promised) = self.promised.filter(|&promised| promised > ballot) {
            return Err(promised);
        }
        self.promised = Some(ballot);
        self.accepted = Some((ballot, value));
        self.by_register |= by_register;
        Ok(())
    }
}

/// How far a proposal has come.
#[derive(Debug)]
enum Phase {
    /// Promises are awaited of all ranks that are asked; with the accepted value of the highest ballot so far.
    Promises { accepted: Option<(Ballot, Value)> },
    /// Acceptances of a value are awaited, of as many ranks as are needed.
    Votes { value: Value },
}

/// What comes next in a proposal.
#[derive(Debug)]
pub(super) enum Step {
    Wait,
    /// Too few ranks are connected.
    Failed,
    /// Enough have promised: a value is to be proposed.
    Promised,
    /// Enough have accepted.
    Accepted {
        value: Value,
        by_register: bool,
    },
}

/// A proposal of this rank.
#[derive(Debug)]
pub(super) struct Round {
    ballot: Ballot,
    phase: Phase,
    asked: RankSet,
    answered: RankSet,
    /// Number of members of the generation.
    members: u32,
    /// Whether the register decides.
    by_register: bool,
    /// Ranks that have promised and had said goodbye.
    through: RankSet,
    /// Until when answers are awaited.
    due: Time,
    #[cfg(test)]
    fault: Fault,
}

impl Round {
    /// Asks for promises; this rank has given its own.
    pub(super) fn new(
        ballot: Ballot,
        asked: RankSet,
        members: u32,
        voter: &Voter,
        due: Time,
    ) -> Round {
        let mut answered = asked.clone();
        asked.iter().filter(|&rank| rank != ballot.rank).for_each(|rank| {
            answered.remove(rank);
        });
        let mut through = answered.clone();
        if !voter.is_through {
            through.remove(ballot.rank);
        }
        Round {
            ballot,
            phase: Phase::Promises { accepted: voter.accepted.clone() },
            asked,
            answered,
            members,
            by_register: voter.by_register,
            through,
            due,
            #[cfg(test)]
            fault: Fault::None,
        }
    }

    #[cfg(test)]
    pub(super) fn with_fault(self, fault: Fault) -> Round {
        Round { fault, ..self }
    }

    pub(super) fn ballot(&self) -> Ballot {
        self.ballot
    }

    pub(super) fn due(&self) -> Time {
        self.due
    }

    pub(super) fn awaits_promises(&self) -> bool {
        matches!(self.phase, Phase::Promises { .. })
    }

    /// Goes on with the answers that there are.
    pub(super) fn stop_waiting(&mut self) {
        self.asked.clone_from(&self.answered);
    }

    pub(super) fn answered(&self) -> &RankSet {
        &self.answered
    }

    /// Ranks whose answer can still come.
    fn waiting(&self, links: &Links) -> RankSet {
        let mut waiting = self.asked.clone();
        let is_over =
            |&rank: &Rank| self.answered.contains(rank) || links.is_cut(self.ballot.rank, rank);
        self.asked.iter().filter(is_over).for_each(|rank| {
            waiting.remove(rank);
        });
        waiting
    }

    pub(super) fn take_promise(
        &mut self,
        from: Rank,
        by_register: bool,
        is_through: bool,
        theirs: Option<(Ballot, Value)>,
    ) {
        let Phase::Promises { accepted } = &mut self.phase else {
            return;
        };
        self.answered.insert(from);
        self.by_register |= by_register;
        if is_through {
            self.through.insert(from);
        }
        let own = accepted.as_ref().map(|(ballot, _)| *ballot);
        if theirs.as_ref().is_some_and(|(ballot, _)| Some(*ballot) > own) {
            *accepted = theirs;
        }
    }

    pub(super) fn take_vote(&mut self, from: Rank) {
        if matches!(self.phase, Phase::Votes { .. }) {
            self.answered.insert(from);
        }
    }

    /// Chooses the value: the one with the highest ballot that any rank has accepted, since it may have been
    /// decided; otherwise those that can go on together. Returns it, and whether the register decides.
    pub(super) fn propose(&mut self, links: &Links, due: Time) -> (Value, bool) {
        let accepted = match &mut self.phase {
            Phase::Promises { accepted } => accepted.take(),
            Phase::Votes { .. } => None,
        };
        let fresh = || links.propose(self.ballot.rank, &self.answered, &self.through);
        let value = accepted.map_or_else(fresh, |(_, value)| value);
        #[cfg(test)]
        if self.fault == Fault::NoMark {
            self.by_register = false;
        }
        self.by_register |= !self.is_majority(self.answered.len());
        #[cfg(test)]
        if self.fault == Fault::HalfDecides {
            self.by_register = false;
        }
        self.phase = Phase::Votes { value: value.clone() };
        self.asked = self.answered.clone();
        self.asked.iter().for_each(|rank| {
            self.answered.remove(rank);
        });
        self.due = due;
        (value, self.by_register)
    }

    fn is_majority(&self, count: u32) -> bool {
        2 * count > self.members
    }

    fn is_half(&self, count: u32) -> bool {
        2 * count >= self.members
    }

    /// What comes next.
    pub(super) fn step(&self, links: &Links) -> Step {
        let waiting = self.waiting(links).len();
        let answered = self.answered.len();
        match &self.phase {
            Phase::Promises { .. } if waiting > 0 => Step::Wait,
            Phase::Promises { .. } if self.is_half(answered) => Step::Promised,
            Phase::Promises { .. } => Step::Failed,
            Phase::Votes { value } if self.is_enough(answered) => {
                Step::Accepted { value: value.clone(), by_register: self.by_register }
            }
            Phase::Votes { .. } if self.is_enough(answered + waiting) => Step::Wait,
            Phase::Votes { .. } => Step::Failed,
        }
    }

    /// Whether so many acceptances decide, or let the register decide.
    fn is_enough(&self, count: u32) -> bool {
        #[cfg(test)]
        if self.fault == Fault::HalfDecides {
            return self.is_half(count);
        }
        if self.by_register {
            self.is_half(count)
        } else {
            self.is_majority(count)
        }
    }
}
