//! The order of sending: its keys, and the versions of the priorities of all tensors, each in force from a
//! step on. Their values come from the application: `python/gradlane/training/modules/forward_order.py`.

use crate::plan::Order;
use alloc::vec::Vec;
use gradlane_units::{Priority, SliceId, Step, TensorId};

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

    /// Goes on as if there had been this many versions.
    #[cfg(test)]
    pub(crate) fn set_version(&mut self, version: u32) {
        self.versions[0].version = version;
    }

    /// Adds the next version.
    pub(crate) fn add(&mut self, from: Step, priorities: Vec<Priority>) -> u32 {
        let version = self.newest().0 + 1;
        self.versions.push(Version { version, from, priorities });
        version
    }

    /// Forgets versions after this one, none of which is in force.
    pub(crate) fn forget_after(&mut self, version: u32) {
        self.versions.retain(|it| it.version <= version);
    }

    /// The version that begins with this step, if one does. Versions before the last step's go.
    pub(crate) fn enter(&mut self, step: Step) -> Option<u32> {
        while self.versions.len() > 1 && self.versions[1].from < step {
            self.versions.remove(0);
        }
        let beginning =
            self.versions.iter().find(|version| version.from == step && !step.is_initial());
        beginning.map(|version| version.version)
    }
}

// The order of sending and of jobs.

/// Position in the order of sending: a strict order, smaller first. Older steps first; then the first
/// leg, where the second one waits for it; then larger priority (or earlier arrival), then tensor and
/// slice, then arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct OrderKey {
    step: Step,
    is_deferred: bool,
    urgency: i64,
    tensor: TensorId,
    slice: SliceId,
    sequence: u64,
}

/// Makes keys of the strategy's order.
#[derive(Debug)]
pub(crate) struct OrderKeys {
    order: Order,
    sequence: u64,
}

impl OrderKeys {
    pub(crate) fn new(order: Order) -> OrderKeys {
        OrderKeys { order, sequence: 0 }
    }

    /// Counts on from a later number.
    pub(crate) fn fast_forward(&mut self, sequence: u64) {
        self.sequence = self.sequence.max(sequence);
    }

    /// Key of a slice's message or job.
    pub(crate) fn slice(
        &mut self,
        step: Step,
        priority: Priority,
        tensor: TensorId,
        slice: SliceId,
    ) -> OrderKey {
        self.sequence += 1;
        let urgency = match self.order {
            Order::Priority => -i64::from(priority.0),
            Order::Arrival => self.sequence as i64,
        };
        let sequence = self.sequence;
        OrderKey { step, is_deferred: false, urgency, tensor, slice, sequence }
    }

    /// Key of a control message, a request or a notice: before every slice.
    pub(crate) fn control(&mut self) -> OrderKey {
        self.sequence += 1;
        OrderKey {
            step: Step(0),
            is_deferred: false,
            urgency: i64::MIN,
            tensor: TensorId(0),
            slice: SliceId(0),
            sequence: self.sequence,
        }
    }
}

impl OrderKey {
    /// Whether it is that of a control message.
    pub(crate) fn is_control(self) -> bool {
        self.urgency == i64::MIN
    }

    /// The same, after everything of its step that has still to be reduced.
    pub(crate) fn deferred(self) -> OrderKey {
        OrderKey { is_deferred: true, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
