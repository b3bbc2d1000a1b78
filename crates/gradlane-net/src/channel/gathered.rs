//! Gathered blocks on their way from a lane to the application.

use crate::memory::{MemoryError, MemoryTable, ScratchBuffer};
use gradlane_engine::{Memory, Region};
use gradlane_units::Rank;

/// A block as the driver hands it over.
#[derive(Debug)]
pub(crate) enum GatheredBlock {
    Absent,
    Own(u64),
    Empty,
    Other(ScratchBuffer, usize),
}

/// Moves gathered blocks out of the memory of the channel of `rank`.
pub(crate) fn take_out(
    memory: &mut MemoryTable,
    rank: Rank,
    blocks: &[Option<Region>],
) -> Result<Vec<GatheredBlock>, MemoryError> {
    let block = |(index, block): (usize, &Option<Region>)| match block {
        None => Ok(GatheredBlock::Absent),
        Some(region) if index == rank.index() => Ok(GatheredBlock::Own(region.length)),
        Some(Region { memory: Memory::Buffer(buffer), length, .. }) => {
            Ok(GatheredBlock::Other(memory.take(*buffer)?, *length as usize))
        }
        Some(_) => Ok(GatheredBlock::Empty),
    };
    blocks.iter().enumerate().map(block).collect()
}
