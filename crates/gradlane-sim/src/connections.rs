//! The sending sides of all connections, as the kernels have them. A thousand ranks have a million of
//! them, so they are small and lie side by side.

use crate::rank_lane::LaneId;
use std::ops::{Index, IndexMut};

/// The sending side of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Connection {
    /// Bytes that it takes now before the first of them is acknowledged.
    pub(crate) window_bytes: u32,
    /// Bytes until that changes.
    pub(crate) window_lasts_bytes: u32,
    /// Bytes that the kernel has taken and has not heard to be at the peer, as it counts them.
    pub(crate) held_bytes: u32,
    /// Those of them that have not begun to leave.
    pub(crate) waiting_bytes: u32,
    /// When its next piece may leave, where it is paced.
    pub(crate) due: u64,
    /// Whether the engine was told that it takes no more.
    pub(crate) busy: bool,
    /// Whether there are frames that the kernel has not taken, or not whole.
    pub(crate) behind: bool,
}

/// Those of all ranks: by lane of a rank and by the peer's number in the rank's channel.
#[derive(Debug)]
pub(crate) struct Connections {
    lanes: usize,
    members: usize,
    all: Vec<Connection>,
}

impl Connections {
    /// Connections of all ranks to all members of their channels, in each lane.
    pub(crate) fn new(ranks: usize, lanes: usize, members: usize) -> Connections {
        let all = vec![Connection::default(); ranks * lanes * members];
        Connections { lanes, members, all }
    }

    /// All of them.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Connection> {
        self.all.iter_mut()
    }

    fn place(&self, (LaneId { rank, lane }, peer): (LaneId, u32)) -> usize {
        debug_assert!((peer as usize) < self.members, "a peer of the rank's channel");
        (rank as usize * self.lanes + lane as usize) * self.members + peer as usize
    }
}

impl Index<(LaneId, u32)> for Connections {
    type Output = Connection;

    fn index(&self, at: (LaneId, u32)) -> &Connection {
        &self.all[self.place(at)]
    }
}

impl IndexMut<(LaneId, u32)> for Connections {
    fn index_mut(&mut self, at: (LaneId, u32)) -> &mut Connection {
        let place = self.place(at);
        &mut self.all[place]
    }
}
