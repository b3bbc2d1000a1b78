//! The order of sending and of jobs, by the priorities of `priorities.rs`.

use crate::plan::Order;
use gradlane_units::{Priority, SliceId, Step, TensorId};

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
