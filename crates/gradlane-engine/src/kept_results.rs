//! The last complete result of every slice, kept when training goes on without lost ranks, since other ranks
//! may lack it. Contributions that cannot be made again are kept, too.
//!
//! One result per slice is enough. A result of the next step can only begin to arrive once every rank has
//! contributed to that step, and so has the result before.

use crate::api::BufferRef;
use crate::plan::Plan;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use gradlane_units::{SliceId, Step};
use gradlane_wire::PayloadForm;

/// The result of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeptResult {
    /// Its bytes, as they were sent: what is sent again is what others have decoded.
    Buffer(BufferRef, PayloadForm),
    /// It has a value, of no bytes.
    Empty,
    /// No rank had a gradient.
    Absent,
}

/// A result and its step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeptSlice {
    pub(crate) step: Step,
    pub(crate) result: KeptResult,
}

#[derive(Debug)]
pub(crate) struct KeptResults {
    /// By slice.
    slices: Vec<Option<KeptSlice>>,
    /// This rank's encoded contributions to slices without a result, whose codecs hold back what was not
    /// sent: encoded a second time, they would be without it.
    contributions: BTreeMap<SliceId, (Step, BufferRef)>,
}

impl KeptResults {
    /// Room for the results of a plan.
    pub(crate) fn new(plan: &Plan) -> KeptResults {
        KeptResults { slices: alloc::vec![None; plan.slices.len()], contributions: BTreeMap::new() }
    }

    /// The result of a slice in a step, if it is here.
    pub(crate) fn of(&self, slice: SliceId, step: Step) -> Option<KeptResult> {
        let kept = self.slices.get(slice.index()).copied().flatten();
        kept.filter(|kept| kept.step == step).map(|kept| kept.result)
    }

    /// Keeps a result; the buffers of the one before, and of the contribution to this one: they are read no
    /// longer.
    pub(crate) fn keep(&mut self, slice: SliceId, kept: KeptSlice) -> [Option<BufferRef>; 2] {
        let contribution = self.contributions.remove(&slice).map(|(_, buffer)| buffer);
        let place = self.slices.get_mut(slice.index());
        [place.and_then(|place| buffer_of(place.replace(kept))), contribution]
    }

    /// Keeps this rank's contribution to a slice until its result is here; the buffer of one to an earlier step.
    pub(crate) fn keep_contribution(
        &mut self,
        slice: SliceId,
        step: Step,
        buffer: BufferRef,
    ) -> Option<BufferRef> {
        self.contributions.insert(slice, (step, buffer)).map(|(_, old)| old)
    }

    /// This rank's contribution to a slice in a step, if it is kept.
    pub(crate) fn contribution(&self, slice: SliceId, step: Step) -> Option<BufferRef> {
        let kept = self.contributions.get(&slice).filter(|(of, _)| *of == step);
        kept.map(|&(_, buffer)| buffer)
    }

    /// Forgets a slice's result; its buffer.
    pub(crate) fn forget(&mut self, slice: SliceId) -> Option<BufferRef> {
        buffer_of(self.slices.get_mut(slice.index())?.take())
    }

    /// The buffers of all that is kept.
    pub(crate) fn buffers(&self) -> Vec<BufferRef> {
        let results = self.slices.iter().filter_map(|&kept| buffer_of(kept));
        results.chain(self.contributions.values().map(|&(_, buffer)| buffer)).collect()
    }
}

fn buffer_of(kept: Option<KeptSlice>) -> Option<BufferRef> {
    match kept?.result {
        KeptResult::Buffer(buffer, _) => Some(buffer),
        KeptResult::Empty | KeptResult::Absent => None,
    }
}
