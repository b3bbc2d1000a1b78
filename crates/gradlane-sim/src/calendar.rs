//! What happens next: a heap of events in the order of time, then of their making. Nothing here
//! depends on addresses or hashes, so the same scenario unfolds the same way every time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What happens to which rank, or to which port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// The port may send the next piece.
    Depart,
    /// The first piece that is on its way to the port is whole.
    Arrive,
    /// Its I/O thread is free and has something to hear.
    Listen,
    /// Its work thread has finished something.
    Worked,
    /// Its accelerator goes on.
    Compute,
    /// It has made the gradient of a tensor that it owns.
    Answer,
    /// Other traffic leaves its port.
    Background,
    /// It does something on its node (see `sums`).
    Local,
    /// It is stopped for a moment.
    Stop,
    /// It may go on to its next step.
    Pace,
    /// It looks at its clock.
    Clock,
}

/// An entry: time, order of making, kind, rank.
type Entry = Reverse<(u64, u64, Kind, u32)>;

#[derive(Debug, Default)]
pub(crate) struct Calendar {
    heap: BinaryHeap<Entry>,
    made: u64,
}

impl Calendar {
    /// Adds an event.
    pub(crate) fn at(&mut self, time: u64, kind: Kind, rank: u32) {
        self.made += 1;
        self.heap.push(Reverse((time, self.made, kind, rank)));
    }

    /// The next event.
    pub(crate) fn next(&mut self) -> Option<(u64, Kind, u32)> {
        self.heap.pop().map(|Reverse((time, _, kind, rank))| (time, kind, rank))
    }

    /// Events made so far.
    pub(crate) fn made(&self) -> u64 {
        self.made
    }
}
