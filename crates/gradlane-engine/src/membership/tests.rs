//! Membership in virtual time: single messages, all points at which a rank can die, and a swarm of
//! random faults.

mod cluster;
mod exhaustive;
mod single;
mod swarm;

/// A mistake that the swarm must find.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Fault {
    #[default]
    None,
    /// Half of the members decide, without the register.
    HalfDecides,
    /// A majority pays no heed to the mark of a half.
    NoMark,
    /// A rank that learns of a decision does not pass it on.
    NoForward,
}
