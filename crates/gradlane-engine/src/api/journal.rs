//! A journal of all that an engine and its driver said to each other, and its replay.
//!
//! An engine's decisions follow from its inputs alone: replayed into a new engine, the inputs of a
//! run over real sockets give the same landings, frames, jobs and events, one by one. Without a
//! journal, nothing is kept and nothing is paid but a branch a call.

use crate::api::{never_refused, EngineOptions, Event, Input, Job, PayloadDest, Refusal, Transmit};
use crate::engine::Engine;
use crate::plan::Plan;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Deref;

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
    options: EngineOptions,
    plan: Arc<Plan>,
    entries: Vec<Entry>,
}

/// Where a replay went another way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("entry {entry}: recorded {recorded}, and {replayed} when replayed")]
pub struct Divergence {
    /// Number of the entry.
    pub entry: usize,
    /// As recorded.
    pub recorded: String,
    /// As replayed.
    pub replayed: String,
}

impl Journal {
    /// All entries.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The same run with one entry less, to see whether a replay notices.
    #[must_use]
    pub fn without(&self, entry: usize) -> Journal {
        let mut changed = self.clone();
        changed.entries.remove(entry);
        changed
    }

    /// Tells a new engine the same.
    ///
    /// # Errors
    /// [`Divergence`] at the first decision that is another one.
    pub fn replay(&self) -> Result<(), Divergence> {
        let mut engine = Engine::new(self.options.clone(), Arc::clone(&self.plan));
        for (entry, recorded) in self.entries.iter().enumerate() {
            let replayed = match recorded {
                Entry::Input(input, _) => Entry::Input(input.clone(), engine.handle(input.clone())),
                Entry::Transmit(_) => Entry::Transmit(engine.poll_transmit()),
                Entry::Job(_) => Entry::Job(engine.poll_job()),
                Entry::Event(_) => Entry::Event(engine.poll_event()),
            };
            if replayed != *recorded {
                let (recorded, replayed) = (format!("{recorded:?}"), format!("{replayed:?}"));
                return Err(Divergence { entry, recorded, replayed });
            }
        }
        Ok(())
    }
}

/// An engine that can keep a journal. It is used like the engine itself.
#[derive(Debug)]
pub struct JournaledEngine {
    engine: Engine,
    journal: Option<Journal>,
}

impl Deref for JournaledEngine {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl JournaledEngine {
    /// An engine before step 0, with or without a journal.
    ///
    /// # Panics
    /// As [`Engine::new`].
    #[must_use]
    pub fn new(options: EngineOptions, plan: Arc<Plan>, keep: bool) -> JournaledEngine {
        let journal = keep.then(|| Journal {
            options: options.clone(),
            plan: Arc::clone(&plan),
            entries: Vec::new(),
        });
        JournaledEngine { engine: Engine::new(options, plan), journal }
    }

    /// The journal so far; nothing is kept afterwards.
    pub fn take_journal(&mut self) -> Option<Journal> {
        self.journal.take()
    }

    /// [`Engine::handle`].
    ///
    /// # Errors
    /// As the engine's.
    pub fn handle(&mut self, input: Input) -> Result<PayloadDest, Refusal> {
        let Some(journal) = &mut self.journal else {
            return self.engine.handle(input);
        };
        let answer = self.engine.handle(input.clone());
        journal.entries.push(Entry::Input(input, answer.clone()));
        answer
    }

    /// [`Engine::tell`].
    ///
    /// # Panics
    /// As the engine's.
    pub fn tell(&mut self, input: Input) {
        never_refused(self.handle(input));
    }

    /// [`Engine::poll_transmit`].
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        let transmit = self.engine.poll_transmit();
        self.note(|| Entry::Transmit(transmit.clone()));
        transmit
    }

    /// [`Engine::poll_job`].
    pub fn poll_job(&mut self) -> Option<Job> {
        let job = self.engine.poll_job();
        self.note(|| Entry::Job(job.clone()));
        job
    }

    /// [`Engine::poll_event`].
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.engine.poll_event();
        self.note(|| Entry::Event(event.clone()));
        event
    }

    fn note(&mut self, entry: impl FnOnce() -> Entry) {
        if let Some(journal) = &mut self.journal {
            journal.entries.push(entry());
        }
    }
}
