//! Messages to one peer, most urgent first. A thousand ranks have a million such queues, most of them
//! with one entry or none: an empty one owns no memory, and a message that is owed to many peers is
//! shared by their queues.

use crate::transmit::{Message, OrderKey};
use alloc::collections::VecDeque;
use alloc::sync::Arc;

/// A message to one peer and how much of it was handed out.
#[derive(Clone, Debug)]
pub(crate) struct Unicast {
    pub(crate) message: Arc<Message>,
    pub(crate) offset: u64,
    /// Length of its next frame; kept here, so that the message need not be read for it.
    pub(crate) next_bytes: u32,
}

/// Entries in ascending order of their keys. New ones nearly always belong at one of the ends.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    entries: VecDeque<(OrderKey, Unicast)>,
}

impl Queue {
    /// The most urgent entry.
    pub(crate) fn first(&self) -> Option<(OrderKey, &Unicast)> {
        self.entries.front().map(|(key, entry)| (*key, entry))
    }

    /// Takes the most urgent entry.
    pub(crate) fn pop_first(&mut self) -> Option<(OrderKey, Unicast)> {
        self.entries.pop_front()
    }

    /// Adds an entry.
    pub(crate) fn insert(&mut self, key: OrderKey, entry: Unicast) {
        if self.entries.back().is_none_or(|(last, _)| *last < key) {
            self.entries.push_back((key, entry));
            return;
        }
        let at = self.entries.partition_point(|(other, _)| *other < key);
        self.entries.insert(at, (key, entry));
    }

    /// Keeps the entries that are to be kept.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&Unicast) -> bool) {
        self.entries.retain(|(_, entry)| keep(entry));
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// All entries, most urgent first, to be changed.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Unicast> {
        self.entries.iter_mut().map(|(_, entry)| entry)
    }

    /// All entries, most urgent first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Unicast> {
        self.entries.iter().map(|(_, entry)| entry)
    }
}
