//! What ranks tell each other about the next membership, and its bytes.

use crate::api::{violation, Validated};
use crate::rank_set::RankSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use gradlane_units::Rank;

/// Longest reason for one lost connection, in bytes.
pub(super) const LOSS_BYTES_MAX: usize = 200;
/// Longest reason in an agreed value, in bytes.
pub(super) const REASON_BYTES_MAX: usize = 1024;
/// Rounds of one change, at most: no change of ranks that follow the rules needs as many.
pub(super) const ROUNDS_MAX: u32 = 1 << 20;

const NO_RANK: u32 = u32::MAX;

/// The number of a proposal: no two ranks have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ballot {
    pub(super) round: u32,
    pub(super) rank: Rank,
}

/// What the ranks agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Value {
    pub(super) members: RankSet,
    /// The rank that was lost; none: a link between two ranks was.
    pub(super) lost: Option<Rank>,
    /// Whether a rank that agreed had said goodbye: another one may have left with all results.
    pub(super) is_through: bool,
    /// Why each rank that leaves does.
    pub(super) reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The sender's connection to a member is lost.
    Lost {
        peer: Rank,
        reason: String,
    },
    /// Asks for a promise to refuse lower ballots.
    Prepare(Ballot),
    /// The promise, with the last value that the sender has accepted, whether it has accepted one that
    /// the register decides, and whether it has said goodbye.
    Promise {
        ballot: Ballot,
        by_register: bool,
        is_through: bool,
        accepted: Option<(Ballot, Value)>,
    },
    /// Asks to accept a value; with `by_register`, acceptance by itself decides nothing.
    Propose {
        ballot: Ballot,
        by_register: bool,
        value: Value,
    },
    Accepted(Ballot),
    /// The sender has promised a higher ballot to another rank.
    Refused {
        ballot: Ballot,
        promised: Ballot,
    },
    Decided(Value),
}

/// Cuts a text to a length in bytes, between characters.
pub(super) fn shorten(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

impl Value {
    pub(super) fn to_bytes(&self, world_size: u32) -> Vec<u8> {
        let mut bytes = self.lost.map_or(NO_RANK, |rank| rank.0).to_le_bytes().to_vec();
        bytes.push(u8::from(self.is_through));
        bytes.extend(self.members.to_bytes(world_size));
        bytes.extend_from_slice(shorten(&self.reason, REASON_BYTES_MAX).as_bytes());
        bytes
    }

    pub(super) fn from_bytes(world_size: u32, bytes: &[u8]) -> Validated<Value> {
        Reader { bytes, world_size }.value()
    }
}

impl Ballot {
    fn write(self, bytes: &mut Vec<u8>) {
        bytes.extend(self.round.to_le_bytes());
        bytes.extend(self.rank.0.to_le_bytes());
    }
}

/// Length of the longest message, in bytes.
pub(super) fn bytes_max(world_size: u32) -> usize {
    let (header, ballots, value) = (5, 2 + 2 * 8, 5 + (world_size as usize).div_ceil(8));
    header + ballots + value + REASON_BYTES_MAX
}

impl Message {
    /// Writes a message about the change that ends a generation.
    pub(super) fn to_bytes(&self, generation: u32, world_size: u32) -> Vec<u8> {
        let mut bytes = generation.to_le_bytes().to_vec();
        match self {
            Message::Lost { peer, reason } => {
                bytes.push(0);
                bytes.extend(peer.0.to_le_bytes());
                bytes.extend_from_slice(shorten(reason, LOSS_BYTES_MAX).as_bytes());
            }
            Message::Prepare(ballot) => {
                bytes.push(1);
                ballot.write(&mut bytes);
            }
            Message::Promise { ballot, by_register, is_through, accepted } => {
                bytes.push(2);
                ballot.write(&mut bytes);
                bytes.push(u8::from(*by_register));
                bytes.push(u8::from(*is_through));
                if let Some((ballot, value)) = accepted {
                    ballot.write(&mut bytes);
                    bytes.extend(value.to_bytes(world_size));
                }
            }
            Message::Propose { ballot, by_register, value } => {
                bytes.push(3);
                ballot.write(&mut bytes);
                bytes.push(u8::from(*by_register));
                bytes.extend(value.to_bytes(world_size));
            }
            Message::Accepted(ballot) => {
                bytes.push(4);
                ballot.write(&mut bytes);
            }
            Message::Refused { ballot, promised } => {
                bytes.push(5);
                ballot.write(&mut bytes);
                promised.write(&mut bytes);
            }
            Message::Decided(value) => {
                bytes.push(6);
                bytes.extend(value.to_bytes(world_size));
            }
        }
        bytes
    }

    /// Reads a message, and the generation that it is about.
    pub(super) fn from_bytes(world_size: u32, bytes: &[u8]) -> Validated<(u32, Message)> {
        let mut reader = Reader { bytes, world_size };
        let generation = reader.number()?;
        let message = match reader.byte()? {
            0 => Message::Lost { peer: reader.rank()?, reason: reader.text(LOSS_BYTES_MAX)? },
            1 => Message::Prepare(reader.ballot()?),
            2 => Message::Promise {
                ballot: reader.ballot()?,
                by_register: reader.flag()?,
                is_through: reader.flag()?,
                accepted: match reader.bytes {
                    [] => None,
                    _ => Some((reader.ballot()?, reader.value()?)),
                },
            },
            3 => Message::Propose {
                ballot: reader.ballot()?,
                by_register: reader.flag()?,
                value: reader.value()?,
            },
            4 => Message::Accepted(reader.ballot()?),
            5 => Message::Refused { ballot: reader.ballot()?, promised: reader.ballot()? },
            6 => Message::Decided(reader.value()?),
            kind => return violation(format!("a message on membership of kind {kind}")),
        };
        if !reader.bytes.is_empty() {
            return violation(format!(
                "{} bytes after a message on membership",
                reader.bytes.len()
            ));
        }
        Ok((generation, message))
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    world_size: u32,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Validated<&'a [u8]> {
        let Some((taken, rest)) = self.bytes.split_at_checked(count) else {
            return violation("a message on membership that is cut short");
        };
        self.bytes = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Validated<u8> {
        Ok(self.take(1)?[0])
    }

    fn flag(&mut self) -> Validated<bool> {
        match self.byte()? {
            flag @ (0 | 1) => Ok(flag == 1),
            flag => violation(format!("a flag of {flag} in a message on membership")),
        }
    }

    fn number(&mut self) -> Validated<u32> {
        let bytes = self.take(4)?;
        Ok(bytes.iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte)))
    }

    fn rank(&mut self) -> Validated<Rank> {
        match self.number()? {
            rank if rank < self.world_size => Ok(Rank(rank)),
            rank => violation(format!("rank {rank} in a message on membership")),
        }
    }

    fn ballot(&mut self) -> Validated<Ballot> {
        let (round, rank) = (self.number()?, self.rank()?);
        if round > ROUNDS_MAX {
            return violation(format!("round {round} of a change of membership"));
        }
        Ok(Ballot { round, rank })
    }

    /// The rest.
    fn text(&mut self, bytes_max: usize) -> Validated<String> {
        let bytes = self.take(self.bytes.len())?;
        match core::str::from_utf8(bytes) {
            Ok(text) if bytes.len() <= bytes_max => Ok(text.into()),
            _ => violation(format!("a reason of {} bytes that is no such text", bytes.len())),
        }
    }

    /// The rest.
    fn value(&mut self) -> Validated<Value> {
        let lost = match self.number()? {
            NO_RANK => None,
            rank if rank < self.world_size => Some(Rank(rank)),
            rank => return violation(format!("a membership without rank {rank}")),
        };
        let is_through = self.flag()?;
        let bytes = self.take((self.world_size as usize).div_ceil(8))?;
        let Some(members) = RankSet::from_bytes(self.world_size, bytes) else {
            return violation("a membership of ranks outside the world");
        };
        Ok(Value { members, lost, is_through, reason: self.text(REASON_BYTES_MAX)? })
    }
}
