//! The blocks that a step gathered, for Python.

use gradlane_net::{Block, Blocks as CoreBlocks};
use gradlane_units::Rank;
use pyo3::prelude::*;
use std::sync::Mutex;

/// All ranks' blocks of a tensor in a step, until `release` is called or the object is gone.
#[pyclass(frozen, module = "gradlane._core")]
pub(crate) struct Blocks {
    blocks: Mutex<Option<CoreBlocks>>,
}

impl Blocks {
    pub(crate) fn new(blocks: CoreBlocks) -> Blocks {
        Blocks { blocks: Mutex::new(Some(blocks)) }
    }
}

#[pymethods]
impl Blocks {
    /// (address, nbytes) of each rank's block, in rank order; None where a rank had none. That of
    /// this rank is where it was given, and has address 0 here.
    fn regions(&self) -> Vec<Option<(usize, u64)>> {
        let blocks = self.blocks.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(blocks) = blocks.as_ref() else {
            return Vec::new();
        };
        let region = |rank| match blocks.of(Rank(rank)) {
            Block::Absent => None,
            Block::Own(bytes) => Some((0, bytes)),
            Block::Other(bytes) => Some((bytes.as_ptr().expose_provenance(), bytes.len() as u64)),
        };
        (0..blocks.world_size()).map(region).collect()
    }

    /// Give the blocks back: no address of `regions` may be read afterwards.
    fn release(&self) {
        self.blocks.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }
}
