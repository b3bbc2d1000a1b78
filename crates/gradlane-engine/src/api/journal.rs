//! A journal of all that an engine and its driver said to each other.
//!
//! An engine's decisions follow from its inputs alone: replayed into a new engine, the inputs of a
//! run over real sockets give the same landings, frames, jobs and events, one by one. Without a
//! journal, nothing is kept and nothing is paid but a branch a call.

use crate::api::{EngineOptions, Event, Input, Job, PayloadDest, Refusal, Transmit};
use crate::plan::Plan;
use alloc::sync::Arc;
use alloc::vec::Vec;

/// What was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// An input, and its answer.
    Input(Input, Result<PayloadDest, Refusal>),
    /// The next frame.
    Transmit(Option<Transmit>),
    /// The next job.
    Job(Option<Job>),
    /// The next event.
    Event(Option<Event>),
}

/// All that was said, in order.
#[derive(Clone, Debug)]
pub struct Journal {
    pub(crate) options: EngineOptions,
    pub(crate) plan: Arc<Plan>,
    entries: Vec<Entry>,
}

impl Journal {
    /// All entries.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// An empty journal of an engine with these options and this plan.
    pub(crate) fn new(options: EngineOptions, plan: Arc<Plan>) -> Journal {
        Journal { options, plan, entries: Vec::new() }
    }

    pub(crate) fn note(&mut self, entry: Entry) {
        self.entries.push(entry);
    }

    /// The same run with one entry less, to see whether a replay notices.
    #[must_use]
    pub fn without(&self, entry: usize) -> Journal {
        let mut changed = self.clone();
        changed.entries.remove(entry);
        changed
    }
}
