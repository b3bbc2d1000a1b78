//! Events in the order of time, then of their making. Nothing here depends on
//! addresses or hashes, so the same scenario unfolds the same way every time.
//!
//! A radix heap: nothing is ever planned before what happened last, so an event waits in the bucket of
//! the highest bit in which its time differs from that moment. When the first bucket that has any is
//! looked into, its events spread over those before it, in the order in which they were made. Each
//! moves to lower buckets alone, and all of them are read one after the other; a binary heap jumps.

use std::collections::VecDeque;

/// The kind of an event of a rank, of a lane of all ranks, of a port or of a line between ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventKind {
    /// The port may send the next piece.
    Depart,
    /// The first piece that is on its way to the port is whole.
    Arrive,
    /// The lane's thread is free and has something to hear.
    Listen,
    /// A work thread of the lane has finished something.
    JobDone,
    /// Its accelerator goes on.
    Compute,
    /// It has made the gradient of a tensor that it owns.
    RootResult,
    /// Other traffic leaves its port.
    Background,
    /// It does something on its node (see `sums`).
    Local,
    /// It is stopped for a moment.
    Stop,
    /// It may go on to its next step.
    Pace,
    /// The lane looks at its clock.
    Clock,
    /// The lane is told something by another one of its rank.
    News,
    /// The line between ports may carry the next piece.
    Line,
}

/// An event: time, kind, rank.
type Entry = (u64, EventKind, u32);

const BUCKETS: usize = u64::BITS as usize;

#[derive(Debug)]
pub(crate) struct EventQueue {
    /// When the last event was.
    last: u64,
    /// Other events at that time.
    present: VecDeque<Entry>,
    /// Later events, by the highest bit in which their time differs from it.
    later: [Vec<Entry>; BUCKETS],
    /// Bit by bit, which of them have any.
    filled: u64,
    made: u64,
}

impl Default for EventQueue {
    fn default() -> EventQueue {
        EventQueue {
            last: 0,
            present: VecDeque::new(),
            later: [const { Vec::new() }; BUCKETS],
            filled: 0,
            made: 0,
        }
    }
}

impl EventQueue {
    /// Adds an event, which is not before the last one that happened.
    pub(crate) fn at(&mut self, time: u64, kind: EventKind, rank: u32) {
        debug_assert!(time >= self.last, "{kind:?} of {rank} at {time}, before {}", self.last);
        self.made += 1;
        self.put((time.max(self.last), kind, rank));
    }

    /// The next event.
    pub(crate) fn next(&mut self) -> Option<(u64, EventKind, u32)> {
        if self.present.is_empty() && self.filled != 0 {
            let first = self.filled.trailing_zeros() as usize;
            let mut entries = std::mem::take(&mut self.later[first]);
            self.filled &= !(1 << first);
            self.last = entries.iter().map(|entry| entry.0).min().unwrap_or(self.last);
            for entry in entries.drain(..) {
                self.put(entry);
            }
            // Its memory serves again.
            self.later[first] = entries;
        }
        self.present.pop_front()
    }

    /// Events made so far.
    pub(crate) fn made(&self) -> u64 {
        self.made
    }

    fn put(&mut self, entry: Entry) {
        match (entry.0 ^ self.last).checked_ilog2() {
            None => self.present.push_back(entry),
            Some(bit) => {
                self.later[bit as usize].push(entry);
                self.filled |= 1 << bit;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradlane_units::Rng;

    #[test]
    fn events_come_in_the_order_of_time_and_then_of_their_making() {
        for seed in 0..200 {
            let mut rng = Rng::new(seed);
            let mut events = EventQueue::default();
            let mut waiting: Vec<(u64, u32)> = Vec::new();
            let (mut now, mut made) = (0, 0);
            for _ in 0..1000 {
                if rng.below(2) == 0 {
                    // Often at once, often together, seldom far away.
                    let time = now + (rng.next_u64() >> (24 + rng.below(40)));
                    events.at(time, EventKind::Listen, made);
                    waiting.push((time, made));
                    made += 1;
                    continue;
                }
                let first = waiting.iter().copied().min();
                waiting.retain(|&it| Some(it) != first);
                let next = events.next();
                assert_eq!(next.map(|(time, _, rank)| (time, rank)), first, "seed {seed}");
                now = first.map_or(now, |(time, _)| time);
            }
            assert_eq!(events.made(), u64::from(made));
        }
    }
}
