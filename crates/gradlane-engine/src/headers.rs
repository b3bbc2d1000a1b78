//! Headers of the frames that this rank sends, and the keys that order them.

use crate::engine::Engine;
use crate::scheduler::OrderKey;
use gradlane_units::{Priority, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

impl Engine {
    pub(crate) fn control_header(&self, kind: FrameKind) -> FrameHeader {
        FrameHeader {
            kind,
            form: PayloadForm::Raw,
            flags: FrameFlags::NONE,
            step: self.worker.step,
            generation: self.options.generation,
            plan_version: 0,
            tensor: TensorId(0),
            slice: SliceId(0),
            priority: Priority(0),
            sender: self.rank(),
            offset: 0,
            length: 0,
            block_bytes: 0,
            hop: 0,
            payload_checksum: 0,
        }
    }

    pub(crate) fn slice_header(
        &self,
        kind: FrameKind,
        step: Step,
        slice: SliceId,
        priority: Priority,
    ) -> FrameHeader {
        let tensor = self.plan.slice(slice).tensor;
        let plan_version = self.priorities.version(step);
        FrameHeader { step, plan_version, tensor, slice, priority, ..self.control_header(kind) }
    }

    /// Key of a slice's message or job in the strategy's order.
    pub(crate) fn slice_key(&mut self, step: Step, priority: Priority, slice: SliceId) -> OrderKey {
        self.keys.slice(step, priority, self.plan.slice(slice).tensor, slice)
    }
}
