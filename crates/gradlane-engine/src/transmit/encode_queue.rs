//! Contributions that wait to be encoded. They are encoded late, most urgent first, and only a few
//! ahead of sending: an encoded contribution that waits for its socket holds a buffer, and can no
//! longer be passed over.

use crate::api::BufferRef;
use crate::transmit::OrderKey;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, Step};

/// A contribution that waits to be encoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingEncode {
    pub(crate) slice: SliceId,
    pub(crate) step: Step,
}

/// Contributions to one owner.
#[derive(Debug, Default)]
struct Lane {
    waiting: BTreeMap<OrderKey, PendingEncode>,
    /// Being encoded, or encoded and not yet with the kernel.
    ahead: BTreeSet<OrderKey>,
    /// The entry of this lane in `EncodeQueue::heads`.
    indexed: Option<OrderKey>,
}

/// Contributions to be encoded, and those that are encoded and wait for their sockets.
#[derive(Debug)]
pub(crate) struct EncodeQueue {
    own: Rank,
    /// Slices towards one owner that are encoded ahead. One more goes if it is more urgent than all
    /// of these.
    ahead_max: usize,
    lanes: BTreeMap<Rank, Lane>,
    /// The most urgent contribution of each lane that may be encoded now.
    heads: BTreeSet<(OrderKey, Rank)>,
    unsent: BTreeMap<(SliceId, Step), (OrderKey, Rank, BufferRef)>,
}

impl EncodeQueue {
    pub(crate) fn new(own: Rank, ahead_max: usize) -> EncodeQueue {
        EncodeQueue {
            own,
            ahead_max: ahead_max.max(1),
            lanes: BTreeMap::new(),
            heads: BTreeSet::new(),
            unsent: BTreeMap::new(),
        }
    }

    pub(crate) fn push(&mut self, owner: Rank, key: OrderKey, waiting: PendingEncode) {
        self.lanes.entry(owner).or_default().waiting.insert(key, waiting);
        self.reindex(owner);
    }

    /// The key of the most urgent contribution that may be encoded now.
    pub(crate) fn first(&self) -> Option<OrderKey> {
        self.heads.first().map(|&(key, _)| key)
    }

    /// Takes that contribution.
    pub(crate) fn pop(&mut self) -> Option<(OrderKey, PendingEncode)> {
        let (key, owner) = self.heads.first().copied()?;
        let lane = self.lanes.get_mut(&owner)?;
        let waiting = lane.waiting.remove(&key)?;
        // This rank's own slices wait for the other ranks, not for a socket.
        if owner != self.own {
            lane.ahead.insert(key);
        }
        self.reindex(owner);
        Some((key, waiting))
    }

    /// A contribution is encoded and queued for its owner.
    pub(crate) fn note_encoded(
        &mut self,
        waiting: PendingEncode,
        key: OrderKey,
        owner: Rank,
        buffer: BufferRef,
    ) {
        self.unsent.insert((waiting.slice, waiting.step), (key, owner, buffer));
    }

    /// All of a contribution is with the kernel; returns its buffer.
    pub(crate) fn note_sent(&mut self, slice: SliceId, step: Step) -> Option<BufferRef> {
        let (key, owner, buffer) = self.unsent.remove(&(slice, step))?;
        if let Some(lane) = self.lanes.get_mut(&owner) {
            lane.ahead.remove(&key);
        }
        self.reindex(owner);
        Some(buffer)
    }

    /// An encoded contribution is dropped.
    pub(crate) fn drop_encoded(&mut self, key: OrderKey, owner: Rank) {
        if let Some(lane) = self.lanes.get_mut(&owner) {
            lane.ahead.remove(&key);
        }
        self.reindex(owner);
    }

    /// Takes back contributions to a step whose encoding has not begun; their slices.
    pub(crate) fn withdraw(&mut self, step: Step) -> Vec<SliceId> {
        let mut slices = Vec::new();
        let owners: Vec<Rank> = self.lanes.keys().copied().collect();
        for owner in owners {
            if let Some(lane) = self.lanes.get_mut(&owner) {
                lane.waiting.retain(|_, waiting| {
                    let goes = waiting.step == step;
                    if goes {
                        slices.push(waiting.slice);
                    }
                    !goes
                });
            }
            self.reindex(owner);
        }
        slices
    }

    /// Drops contributions that wait to be encoded; what is encoded still waits for its socket.
    pub(crate) fn clear(&mut self) {
        self.lanes.clear();
        self.heads.clear();
    }

    /// Drops all contributions; their buffers are the caller's.
    pub(crate) fn restart(&mut self) {
        self.clear();
        self.unsent.clear();
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.unsent.is_empty() && self.lanes.values().all(|lane| lane.waiting.is_empty())
    }

    fn reindex(&mut self, owner: Rank) {
        let Some(lane) = self.lanes.get_mut(&owner) else {
            return;
        };
        let head = lane.waiting.first_key_value().map(|(&key, _)| key).filter(|key| {
            let free = lane.ahead.len() < self.ahead_max;
            let urgent = lane.ahead.first().is_none_or(|first| key < first);
            free || (urgent && lane.ahead.len() == self.ahead_max)
        });
        if head == lane.indexed {
            return;
        }
        if let Some(old) = core::mem::replace(&mut lane.indexed, head) {
            self.heads.remove(&(old, owner));
        }
        if let Some(key) = head {
            self.heads.insert((key, owner));
        }
    }
}

#[cfg(test)]
#[path = "encode_queue_tests.rs"]
mod tests;
