//! Ranks that stop for moments, and steps that go on without those that are late.
//!
//! A stop is one of the whole process, as by SIGSTOP: nothing computes, and what the kernel has for it is
//! heard when it runs again. The kernel itself goes on receiving, without limit, which a socket's
//! buffer has. Between two steps a rank does what `session.keep_pace` does: it waits until it is
//! known who was in, and passes what it would be too late for.

use crate::error::SimError;
use gradlane_engine::Event;
use gradlane_units::Rank;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A rank that is stopped for a part of the time, in bursts. It runs from half to one and a half times
/// as long as on average between two, drawn evenly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stops {
    /// Which rank.
    pub rank: u32,
    /// Part of the time, over 0 and below 1.
    pub share: f64,
    /// Length of one stop, in seconds.
    pub burst_s: f64,
}

impl Stops {
    pub(crate) fn validate(&self, workers: u32) -> Result<(), SimError> {
        let refuse = |text: String| Err(SimError::Argument(text));
        if self.rank >= workers {
            return refuse(format!("stops.rank is {} of {workers} ranks", self.rank));
        }
        if !(self.share > 0.0 && self.share < 1.0) {
            return refuse(format!("stops.share is {}: use more than 0, below 1", self.share));
        }
        if !(1e-6..=1e3).contains(&self.burst_s) {
            return refuse(format!("stops.burst_s is {}: use 1e-6 to 1000", self.burst_s));
        }
        Ok(())
    }
}

/// A rank's knowledge of contributors, and its state between two steps.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Whether this rank was in, by step.
    pub(crate) was_in: BTreeMap<u64, bool>,
    pub(crate) decided: u64,
    /// The last step that it was too late for.
    pub(crate) behind: u64,
    /// The last step whose whole result is here.
    pub(crate) complete: u64,
    /// A step has ended, or was passed, and the next has not begun.
    pub(crate) between_steps: bool,
    pub(crate) passed: u64,
}

impl Pace {
    /// Notes the engine's events about contributors and steps.
    pub(crate) fn note(&mut self, rank: u32, event: &Event) {
        match event {
            Event::ContributorsDecided { step, contributors } => {
                self.decided = step.0;
                self.was_in.insert(step.0, contributors.contains(&Rank(rank)));
            }
            Event::LeftOut { step, behind: true } => self.behind = step.0,
            Event::StepComplete { step } => self.complete = self.complete.max(step.0),
            _ => {}
        }
    }
}
