//! The other lanes of this rank, where training goes on when ranks are lost. In the first lane the ranks agree on who
//! goes on; it tells the others, and each of them finishes the step in flight with its own peers. It says goodbye
//! when the others need nobody any more, so all of a rank's lanes are there until no rank needs any.

use alloc::collections::BTreeMap;
use alloc::string::String;
use gradlane_units::{Rank, Time};

/// What a lane knows of the others of its rank.
#[derive(Debug, Default)]
pub(crate) struct Siblings {
    /// In the first: lanes in which all ranks have said goodbye, and nothing is owed.
    through: u32,
    /// In the others: whether the first has been told that of this one.
    has_told: bool,
    /// In the first: peers that another lane has lost, until when the peer may end this lane's connection too and
    /// say why, and the reason.
    lost: BTreeMap<Rank, (Time, String)>,
}

impl Siblings {
    /// Whether all have said goodbye in this lane, which is not the first.
    pub(crate) fn is_through(&self) -> bool {
        self.has_told
    }

    /// All have said goodbye in this lane, which is not the first; whether the first is to be told.
    pub(crate) fn note_through(&mut self) -> bool {
        !core::mem::replace(&mut self.has_told, true)
    }

    /// All have said goodbye in another lane.
    pub(crate) fn note_other_through(&mut self) {
        self.through += 1;
    }

    /// Whether all have said goodbye in so many other lanes.
    pub(crate) fn are_through(&self, other_lanes: u32) -> bool {
        self.through == other_lanes
    }

    /// Another lane has lost a peer, which may end this lane's connection until `due`.
    pub(crate) fn note_lost(&mut self, peer: Rank, due: Time, reason: String) {
        self.lost.entry(peer).or_insert((due, reason));
    }

    /// A peer that only another lane has lost for long enough, and the reason.
    pub(crate) fn take_due(&mut self, now: Time) -> Option<(Rank, String)> {
        let peer = self.lost.iter().find(|(_, (due, _))| *due <= now).map(|(&peer, _)| peer)?;
        self.lost.remove(&peer).map(|(_, reason)| (peer, reason))
    }

    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.lost.values().map(|(due, _)| *due).min()
    }
}
