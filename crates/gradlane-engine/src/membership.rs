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

mod agreement;
mod endings;
mod links;
mod message;
mod round;

#[cfg(test)]
mod tests;

use crate::api::{violation, GoingOn, Validated};
use crate::control::blame::Blame;
use crate::rank_set::RankSet;
use agreement::Change;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use gradlane_units::{Rank, Time};
use message::{Message, Value};

/// What the driver is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Ranks were lost: no data of this generation is sent or landed any more.
    Suspended,
    /// Agreed: the next generation, whether a rank of the last one had said goodbye, and why each rank
    /// that is not in it left; the same on all ranks.
    Members { generation: u32, members: RankSet, is_through: bool, reason: String },
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
    options: GoingOn,
    generation: u32,
    members: RankSet,
    /// Members that this rank has lost its connection to, and why.
    lost: BTreeMap<Rank, String>,
    /// By member: links of it that were cut in earlier changes, in which the other end left.
    cut_before: BTreeMap<Rank, u32>,
    change: Option<Change>,
    has_ended: bool,
    /// Whether this rank has said goodbye.
    is_through: bool,
    messages: VecDeque<(RankSet, Vec<u8>)>,
    decisions: VecDeque<Decision>,
    #[cfg(test)]
    fault: tests::Fault,
}

impl Membership {
    /// Membership of generation 0: all ranks below `world_size`.
    pub(crate) fn new(rank: Rank, world_size: u32, options: GoingOn) -> Membership {
        Membership {
            rank,
            world_size,
            options,
            generation: 0,
            members: RankSet::all(world_size),
            lost: BTreeMap::new(),
            cut_before: BTreeMap::new(),
            change: None,
            has_ended: false,
            is_through: false,
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

    /// This rank has said goodbye; no change is under way.
    pub(crate) fn note_goodbye(&mut self) {
        self.is_through = true;
    }

    /// This rank needs nobody any more: it takes no part in a change that others may still make.
    pub(crate) fn leave(&mut self) {
        self.has_ended = true;
        self.change = None;
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
