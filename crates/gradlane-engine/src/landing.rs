//! Where a slice's result may be written: into the tensor's own memory as soon as nobody reads it
//! there, into scratch before, from which it is copied then.

use crate::engine::Engine;
use crate::io::{Memory, Region};
use crate::jobs::Pending;
use crate::worker::{Phase, Submission};
use gradlane_units::SliceId;

impl Engine {
    /// Where a slice's result may be written in the tensor's own memory, if it may be now.
    pub(crate) fn open_region(&self, slice: SliceId) -> Option<Region> {
        if self.updates_on_server(self.worker.step) {
            let tensor = self.plan.slice(slice).tensor;
            let memory = Memory::Parameter(tensor);
            return self.worker.ended.then(|| self.region(memory, slice));
        }
        let tensor = self.worker.tensor(self.plan.slice(slice).tensor);
        let registered = tensor.submission != Submission::Missing;
        let open = registered && self.worker.slice(slice).push_sent;
        open.then(|| self.gradient_region(slice))
    }

    pub(crate) fn gradient_region(&self, slice: SliceId) -> Region {
        self.region(Memory::Gradient(self.plan.slice(slice).tensor), slice)
    }

    /// A slice's range in a memory that holds the whole tensor.
    pub(crate) fn region(&self, memory: Memory, slice: SliceId) -> Region {
        let offset = self.plan.slice_start_bytes(slice);
        Region { memory, offset, length: self.plan.slice_bytes(slice) }
    }

    /// Copies a result that waits in scratch into the tensor's memory, if that is open by now.
    pub(crate) fn install_if_open(&mut self, slice: SliceId) {
        let buffer = match self.worker.slice(slice).phase {
            Phase::Buffered(buffer) => buffer,
            Phase::Empty { has_value } if self.worker.slice(slice).push_sent => {
                return self.slice_done(slice, has_value);
            }
            _ => return,
        };
        if self.open_region(slice).is_none() {
            return;
        }
        self.worker.slice_mut(slice).phase = Phase::Installing;
        let step = self.worker.step;
        let priority = self.priorities.priority(step, self.plan.slice(slice).tensor);
        let key = self.slice_key(step, priority, slice);
        self.jobs.push(key, Pending::Install { slice, step, buffer });
    }
}
