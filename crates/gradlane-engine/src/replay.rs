//! The replay of a journal: the same inputs lead a new engine to the same decisions.

use crate::api::{Entry, Journal};
use crate::engine::Engine;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;

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
    /// Tells a new engine the same.
    ///
    /// # Errors
    /// [`Divergence`] at the first decision that is another one.
    pub fn replay(&self) -> Result<(), Divergence> {
        let mut engine = Engine::new(self.options.clone(), Arc::clone(&self.plan));
        for (entry, recorded) in self.entries().iter().enumerate() {
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
