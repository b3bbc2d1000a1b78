//! Blocks that a step gathered from all ranks, in the hands of the application.
//!
//! Blocks of other ranks lie in scratch buffers, which leave the channel with them: they stay
//! readable after the session, and return to its pool when they are dropped.

use crate::channel::shared::{Command, GatheredBlock, LaneInbox, Shared};
use crate::memory::ScratchBuffer;
use crate::sys::lock;
use gradlane_units::{Rank, Step, TensorId};
use std::sync::Arc;

/// One rank's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block<'a> {
    /// The rank had no block.
    Absent,
    /// This rank's own block, with its number of bytes: it lies where the application gave it.
    Own(u64),
    /// Another rank's block.
    Other(&'a [u8]),
}

/// All ranks' blocks of a tensor in a step. Dropping it releases them.
#[derive(Debug)]
pub struct Blocks {
    tensor: TensorId,
    step: Step,
    held: Vec<GatheredBlock>,
    shared: Arc<Shared>,
}

impl Blocks {
    /// Takes the blocks of a tensor in a step, once.
    pub(crate) fn take(shared: &Arc<Shared>, tensor: TensorId, step: Step) -> Option<Blocks> {
        let held = lock(&shared.blocks).remove(&(tensor, step))?;
        Some(Blocks { tensor, step, held, shared: Arc::clone(shared) })
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.held.len() as u32
    }

    /// Returns the block of a rank; absent for a rank outside of the world.
    #[must_use]
    pub fn of(&self, rank: Rank) -> Block<'_> {
        match self.held.get(rank.index()) {
            None | Some(GatheredBlock::Absent) => Block::Absent,
            Some(GatheredBlock::Own(bytes)) => Block::Own(*bytes),
            Some(GatheredBlock::Empty) => Block::Other(&[]),
            Some(GatheredBlock::Other(scratch, length)) => Block::Other(scratch.bytes(*length)),
        }
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        let scratch = self.held.drain(..).filter_map(|held| match held {
            GatheredBlock::Other(scratch, _) => Some(scratch),
            _ => None,
        });
        let scratch: Vec<ScratchBuffer> = scratch.collect();
        let command = Command::ReleaseBlocks(self.tensor, self.step, scratch);
        // One lane carries all slices of a tensor with blocks.
        let carries = |lane: &&LaneInbox| lane.plan.has_slices_of(self.tensor);
        if let Some(lane) = self.shared.lanes.iter().find(carries) {
            lane.command(command);
        }
    }
}
