//! Priorities beside the plan: one vector a version, each in force from a step on.
//!
//! Rank 0 observes the forward order and announces a new vector. It holds back its own contributions
//! to the step before the switch until every rank has acknowledged, so no rank can reach the switch
//! without the vector: all ranks switch at the same step boundary.

use crate::engine::Engine;
use crate::error::UsageError;
use crate::rank_set::RankSet;
use crate::receive::Validated;
use crate::scheduler::{Body, Message};
use crate::strategy::Synchrony;
use alloc::format;
use alloc::string::ToString;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, Step, TensorId};
use gradlane_wire::{FrameHeader, FrameKind, MAX_FRAME_BYTES};

#[derive(Debug)]
struct Version {
    version: u32,
    from: Step,
    priorities: Vec<Priority>,
}

#[derive(Debug)]
pub(crate) struct PriorityTable {
    /// Ascending; the first is in force until the second's step.
    versions: Vec<Version>,
}

impl PriorityTable {
    /// Version 0: the order of registration, which is the forward order of most models.
    pub(crate) fn new(tensors: usize) -> PriorityTable {
        PriorityTable::with((0..tensors).map(|index| Priority(-(index as i32))).collect())
    }

    /// Version 0 with other priorities.
    pub(crate) fn with(priorities: Vec<Priority>) -> PriorityTable {
        PriorityTable { versions: alloc::vec![Version { version: 0, from: Step(0), priorities }] }
    }

    fn at(&self, step: Step) -> &Version {
        let later = self.versions.iter().rev().find(|version| version.from <= step);
        later.unwrap_or(&self.versions[0])
    }

    /// Version in force in a step.
    pub(crate) fn version(&self, step: Step) -> u32 {
        self.at(step).version
    }

    /// Priority of a tensor in a step.
    pub(crate) fn priority(&self, step: Step, tensor: TensorId) -> Priority {
        self.at(step).priorities[tensor.index()]
    }

    /// The newest version, in force or to come, and the step from which it is in force.
    pub(crate) fn newest(&self) -> (u32, Step) {
        let newest = self.versions.last().map(|version| (version.version, version.from));
        newest.unwrap_or((0, Step(0)))
    }

    /// Adds the next version.
    pub(crate) fn add(&mut self, from: Step, priorities: Vec<Priority>) -> u32 {
        let version = self.newest().0 + 1;
        self.versions.push(Version { version, from, priorities });
        version
    }

    /// The version that begins with this step, if one does. Versions before the last step's go.
    pub(crate) fn enter(&mut self, step: Step) -> Option<u32> {
        while self.versions.len() > 1 && self.versions[1].from.next() <= step {
            self.versions.remove(0);
        }
        let beginning = self.versions.iter().find(|version| version.from == step && step.0 > 0);
        beginning.map(|version| version.version)
    }
}

/// Rank 0's side of a switch: who has not acknowledged yet.
#[derive(Debug)]
pub(crate) struct PendingSwitch {
    /// Version announced.
    pub(crate) version: u32,
    /// First step whose contributions wait for the acknowledgements.
    pub(crate) hold_from: Step,
    /// Ranks that have not acknowledged.
    pub(crate) missing: RankSet,
    /// Contributions held back, in the order in which they came.
    pub(crate) held: Vec<TensorId>,
}

impl Engine {
    /// Rank 0 announces another priority vector, one entry a tensor. It is in force on all ranks
    /// from the same step on, two steps after the current one; where ranks may be in different steps
    /// (synchrony `Async` and `BackupWorkers`), on each rank from its next step on.
    ///
    /// # Errors
    /// On another rank, before a step has begun, when the last switch is not finished, or for a
    /// vector of another length.
    pub(crate) fn switch_priorities(
        &mut self,
        priorities: Vec<Priority>,
    ) -> Result<(), UsageError> {
        self.lifecycle.check_open()?;
        let refuse = |message: &str| Err(UsageError::Argument(message.to_string()));
        if self.rank() != Rank(0) {
            return refuse("only rank 0 may switch priorities");
        }
        if priorities.len() != self.plan.tensors.len() {
            return refuse("a priority vector has one entry a tensor");
        }
        let alone = self.switches_alone();
        let next = self.worker.step.next();
        let from = if alone { next } else { next.next() };
        if !self.worker.begun || self.switch.is_some() || self.priorities.newest().1 >= from {
            return refuse("the last switch of priorities is not finished");
        }
        let mut payload = Vec::with_capacity(8 + 4 * priorities.len());
        payload.extend_from_slice(&from.0.to_le_bytes());
        for priority in &priorities {
            payload.extend_from_slice(&priority.0.to_le_bytes());
        }
        if payload.len() > MAX_FRAME_BYTES as usize {
            return refuse("too many tensors for one priority vector");
        }
        if self.priorities.newest().0 == u32::MAX {
            return refuse("priorities were switched 4294967295 times: open a new session");
        }
        let version = self.priorities.add(from, priorities);
        let missing = RankSet::all_but(self.plan.world_size, self.rank());
        if missing.is_empty() {
            return Ok(());
        }
        let mut header = self.control_header(FrameKind::PlanSwitch);
        header.plan_version = version;
        let key = self.keys.control();
        self.scheduler.push_shared(
            missing.clone(),
            key,
            Message { header, body: Body::Inline(payload) },
        );
        if alone {
            // Steps are each rank's own, and so is the moment from which an order is in force.
            return Ok(());
        }
        let hold_from = self.worker.step.next();
        self.switch = Some(PendingSwitch { version, hold_from, missing, held: Vec::new() });
        Ok(())
    }

    /// The size of a vector that is announced.
    pub(crate) fn check_switch_length(&self, header: &FrameHeader) -> Validated<()> {
        let expected = 8 + 4 * self.plan.tensors.len() as u64;
        if u64::from(header.length) == expected {
            return Ok(());
        }
        Err(format!("a priority vector of {} bytes instead of {expected}", header.length))
    }

    /// Rank 0 has announced other priorities.
    pub(crate) fn take_switch(
        &mut self,
        from: Rank,
        header: &FrameHeader,
        payload: &[u8],
    ) -> Validated<()> {
        let mut words = payload.chunks_exact(4).map(|word| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(word);
            u32::from_le_bytes(bytes)
        });
        let (Some(low), Some(high)) = (words.next(), words.next()) else {
            return Err(format!("a priority vector of {} bytes", payload.len()));
        };
        let step = Step(u64::from(low) | u64::from(high) << 32);
        let (newest, newest_from) = self.priorities.newest();
        let next = header.plan_version == newest + 1;
        let alone = self.switches_alone();
        let late = step <= self.worker.step || step <= newest_from;
        if from != Rank(0) || !next || (late && !alone) {
            return Err(format!(
                "priorities of version {} from {step}; this rank has version {newest} and is in {}",
                header.plan_version, self.worker.step
            ));
        }
        let priorities: Vec<Priority> = words.map(|word| Priority(word as i32)).collect();
        if priorities.len() != self.plan.tensors.len() {
            return Err(format!("{} priorities", priorities.len()));
        }
        if alone {
            self.priorities.add(self.worker.step.next(), priorities);
            return Ok(());
        }
        self.priorities.add(step, priorities);
        let mut ack = self.control_header(FrameKind::PlanSwitchAck);
        ack.plan_version = header.plan_version;
        let key = self.keys.control();
        self.scheduler.push(from, key, Message { header: ack, body: Body::Empty });
        Ok(())
    }

    /// A rank has taken up the priorities that this one announced.
    pub(crate) fn take_switch_ack(&mut self, from: Rank, header: &FrameHeader) -> Validated<()> {
        let version = header.plan_version;
        let expected =
            self.switch.as_mut().filter(|it| it.version == version).map(|it| &mut it.missing);
        let Some(missing) = expected.filter(|missing| missing.contains(from)) else {
            return Err(format!("an unexpected acknowledgement of plan version {version}"));
        };
        missing.remove(from);
        if missing.is_empty() {
            let held = self.switch.take().map(|switch| switch.held);
            for tensor in held.into_iter().flatten() {
                self.send_contribution(tensor);
            }
        }
        Ok(())
    }

    /// Whether ranks take up new priorities each at a step of its own.
    pub(crate) fn switches_alone(&self) -> bool {
        self.plan.strategy.synchrony != Synchrony::Bulk
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_run_out_in_words() {
        let spec = crate::TensorSpec {
            name: "weight".to_string(),
            numel: 1,
            dtype: gradlane_units::Dtype::F32,
            kind: crate::TensorKind::Parameter,
        };
        let strategy = crate::Strategy::named("p3", None, 0).expect("a strategy");
        let plan = crate::Plan::build(alloc::vec![spec], strategy, crate::Update::Worker, 2);
        let plan = alloc::sync::Arc::new(plan.expect("a plan"));
        let options = crate::EngineOptions::new(Rank(0));
        let mut engine = Engine::after_initial(options, plan, alloc::vec![Priority(0)]);
        engine.priorities.versions[0].version = u32::MAX;
        let refused = engine.switch_priorities(alloc::vec![Priority(1)]);
        assert!(refused.is_err_and(|error| error.to_string().contains("4294967295 times")));
    }

    #[test]
    fn a_version_is_in_force_from_its_step_on() {
        let mut table = PriorityTable::new(2);
        assert_eq!(table.priority(Step(3), TensorId(1)), Priority(-1));
        assert_eq!(table.add(Step(3), alloc::vec![Priority(-1), Priority(0)]), 1);
        assert_eq!(table.version(Step(2)), 0);
        assert_eq!(table.version(Step(3)), 1);
        assert_eq!(table.priority(Step(9), TensorId(1)), Priority(0));
        assert_eq!(table.enter(Step(2)), None);
        assert_eq!(table.enter(Step(3)), Some(1));
        assert_eq!(table.version(Step(2)), 0, "frames of the step before may still arrive");
        assert_eq!(table.enter(Step(4)), None);
        assert_eq!(table.version(Step(4)), 1);
    }
}
