//! Memory: buffers, tensors, and results that are kept for ranks that may lack them.

use super::Cx;
use crate::api::{BufferRef, Memory, Region};
use crate::kept_results::{KeptResult, KeptSlice};
use gradlane_units::{SliceId, Step};
use gradlane_wire::{FrameHeader, PayloadForm};

impl Cx {
    /// A buffer of this many bytes, with one reference.
    pub(crate) fn acquire(&mut self, bytes: u64) -> BufferRef {
        self.buffers.acquire(bytes)
    }

    /// One more reference.
    pub(crate) fn retain(&mut self, buffer: BufferRef) {
        self.buffers.retain(buffer);
    }

    /// One reference less.
    pub(crate) fn release(&mut self, buffer: BufferRef) {
        self.buffers.release(buffer, &mut self.events);
    }

    pub(crate) fn buffers_in_use(&self) -> usize {
        self.buffers.in_use()
    }

    pub(crate) fn gradient_region(&self, slice: SliceId) -> Region {
        self.plan.region(Memory::Gradient(self.plan.slice(slice).tensor), slice)
    }

    pub(crate) fn parameter_region(&self, slice: SliceId) -> Region {
        self.plan.region(Memory::Parameter(self.plan.slice(slice).tensor), slice)
    }

    /// Where a slice's result may be written in the tensor's own memory, if it may be now.
    pub(crate) fn open_region(&self, slice: SliceId) -> Option<Region> {
        self.worker.open_region(&self.plan, slice)
    }

    /// Where the bytes of a result's frame go; its first frame chooses. A `buffered` result lands in
    /// scratch whether or not the tensor's memory is open.
    pub(crate) fn place_result(&mut self, header: &FrameHeader, buffered: bool) -> Region {
        // The result lands beside the contribution, which stays whole until the result is.
        let keeps = self.kept.are_kept();
        if header.offset == 0 {
            self.forget_kept(header.slice);
        }
        let Cx { plan, worker, buffers, .. } = self;
        worker.place(plan, header, buffered || keeps, |bytes| buffers.acquire(bytes))
    }
}

/// Results that are kept.
impl Cx {
    pub(crate) fn keeps_results(&self) -> bool {
        self.kept.are_kept()
    }

    /// The result of a slice in a step, if it is kept.
    pub(crate) fn kept_result(&self, slice: SliceId, step: Step) -> Option<KeptResult> {
        self.kept.of(slice, step)
    }

    /// Keeps a result for ranks that may lack it, if results are kept.
    pub(crate) fn keep_result(&mut self, slice: SliceId, buffer: BufferRef, form: PayloadForm) {
        if self.kept.are_kept() {
            self.buffers.retain(buffer);
            self.keep(slice, KeptResult::Buffer(buffer, form));
        }
    }

    pub(super) fn keep(&mut self, slice: SliceId, result: KeptResult) {
        let step = self.step();
        let read_no_longer = self.kept.keep(slice, KeptSlice { step, result });
        read_no_longer.into_iter().flatten().for_each(|buffer| self.release(buffer));
    }

    /// Keeps this rank's contribution, if it cannot be made again and may have to be sent again.
    pub(crate) fn keep_contribution(&mut self, slice: SliceId, step: Step, buffer: BufferRef) {
        if self.kept.are_kept() && self.plan.keeps_residual(slice) {
            self.buffers.retain(buffer);
            if let Some(old) = self.kept.keep_contribution(slice, step, buffer) {
                self.release(old);
            }
        }
    }

    /// This rank's contribution to a slice in a step, if it is kept; one more reference.
    pub(crate) fn kept_contribution(&mut self, slice: SliceId, step: Step) -> Option<BufferRef> {
        let kept = self.kept.contribution(slice, step);
        kept.into_iter().for_each(|buffer| self.buffers.retain(buffer));
        kept
    }

    /// Forgets the kept result of a slice: the next one begins to arrive, so all have this one.
    pub(crate) fn forget_kept(&mut self, slice: SliceId) {
        if let Some(old) = self.kept.forget(slice) {
            self.release(old);
        }
    }

    /// Forgets all that is kept.
    pub(crate) fn drop_kept(&mut self) {
        self.kept.clear().into_iter().for_each(|buffer| self.release(buffer));
    }
}
