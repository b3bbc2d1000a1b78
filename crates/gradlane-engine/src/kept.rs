//! The last whole result of every slice, kept where training goes on without lost ranks: others may lack it.
//!
//! One a slice is enough. A result of the next step can only begin to arrive once every rank has
//! contributed to that step, and so has the result before.

use crate::api::BufferRef;
use crate::plan::Plan;
use alloc::vec::Vec;
use gradlane_units::{SliceId, Step};

/// The result of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeptResult {
    /// Its bytes.
    Buffer(BufferRef),
    /// It has a value, of no bytes.
    Empty,
    /// No rank had a gradient.
    Absent,
}

/// A result and its step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    pub(crate) step: Step,
    pub(crate) result: KeptResult,
}

#[derive(Debug, Default)]
pub(crate) struct KeptResults {
    /// By slice; empty where none are kept.
    slices: Vec<Option<Kept>>,
}

impl KeptResults {
    /// Room for the results of a plan.
    pub(crate) fn new(plan: &Plan) -> KeptResults {
        KeptResults { slices: alloc::vec![None; plan.slices.len()] }
    }

    /// Whether results are kept.
    pub(crate) fn are_kept(&self) -> bool {
        !self.slices.is_empty()
    }

    /// The result of a slice in a step, if it is here.
    pub(crate) fn of(&self, slice: SliceId, step: Step) -> Option<KeptResult> {
        let kept = self.slices.get(slice.index()).copied().flatten();
        kept.filter(|kept| kept.step == step).map(|kept| kept.result)
    }

    /// Keeps a result; the buffer of the one before, which is read no longer.
    pub(crate) fn keep(&mut self, slice: SliceId, kept: Kept) -> Option<BufferRef> {
        let place = self.slices.get_mut(slice.index())?;
        buffer_of(place.replace(kept))
    }

    /// Forgets a slice's result; its buffer.
    pub(crate) fn forget(&mut self, slice: SliceId) -> Option<BufferRef> {
        buffer_of(self.slices.get_mut(slice.index())?.take())
    }

    /// Forgets all results; their buffers.
    pub(crate) fn clear(&mut self) -> Vec<BufferRef> {
        core::mem::take(&mut self.slices).into_iter().filter_map(buffer_of).collect()
    }
}

fn buffer_of(kept: Option<Kept>) -> Option<BufferRef> {
    match kept?.result {
        KeptResult::Buffer(buffer) => Some(buffer),
        KeptResult::Empty | KeptResult::Absent => None,
    }
}
