//! The registered memory, by the names that the engine has for it.

use super::pool::{Pool, ScratchBuffer};
use super::span::Span;
use gradlane_engine::{BufferRef, Memory, Region};
use gradlane_units::TensorId;

/// Memory of the application: an address and a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserMemory {
    address: usize,
    bytes: usize,
}

impl UserMemory {
    /// Names `bytes` bytes from `address` on.
    ///
    /// # Safety
    /// The memory stays allocated and initialized, and nobody else touches it, from the call that
    /// is given this value until the tensor is ready in that step or the channel has ended (for
    /// parameters: until the channel has ended; reading them between steps is allowed).
    #[must_use]
    pub unsafe fn new(address: usize, bytes: usize) -> UserMemory {
        UserMemory { address, bytes }
    }

    /// Number of bytes.
    #[must_use]
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// The first byte's address.
    pub(crate) fn address(self) -> usize {
        self.address
    }

    /// Whether there are bytes but no address.
    pub(crate) fn is_null(self) -> bool {
        self.address == 0 && self.bytes > 0
    }
}

/// A region that is not registered: a broken invariant of this program, found before any harm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error("nothing is registered for {0:?}")]
    Unregistered(Memory),
    #[error("{region:?} is outside of the {registered} bytes registered for it")]
    OutOfBounds { region: Region, registered: u64 },
    #[error("{0:?} has no buffer to hand over")]
    NoBuffer(Memory),
}

/// All memory that a [`Region`] can name.
#[derive(Debug)]
pub(crate) struct MemoryTable {
    gradients: Vec<Option<UserMemory>>,
    parameters: Vec<Option<UserMemory>>,
    buffers: Vec<Option<ScratchBuffer>>,
    pool: Pool,
}

impl MemoryTable {
    /// Makes a table for `tensors` tensors, with nothing registered.
    pub(crate) fn new(tensors: usize) -> MemoryTable {
        MemoryTable {
            gradients: vec![None; tensors],
            parameters: vec![None; tensors],
            buffers: Vec::new(),
            pool: Pool::default(),
        }
    }

    /// Registers a tensor's gradient for the step that is about to begin for it.
    pub(crate) fn set_gradient(&mut self, tensor: TensorId, memory: UserMemory) {
        if let Some(slot) = self.gradients.get_mut(tensor.index()) {
            *slot = Some(memory);
        }
    }

    /// Registers a parameter itself.
    pub(crate) fn set_parameter(&mut self, tensor: TensorId, memory: UserMemory) {
        if let Some(slot) = self.parameters.get_mut(tensor.index()) {
            *slot = Some(memory);
        }
    }

    /// Returns the address of a region, and allocates a buffer that is new.
    pub(crate) fn locate(&mut self, region: Region) -> Result<Span, MemoryError> {
        let unregistered = MemoryError::Unregistered(region.memory);
        let (pointer, registered) = match region.memory {
            Memory::Gradient(tensor) | Memory::Parameter(tensor) => {
                let table = match region.memory {
                    Memory::Gradient(_) => &self.gradients,
                    _ => &self.parameters,
                };
                let memory = table.get(tensor.index()).copied().flatten().ok_or(unregistered)?;
                (std::ptr::with_exposed_provenance_mut(memory.address), memory.bytes as u64)
            }
            Memory::Buffer(buffer) => (self.buffer(buffer).pointer(), buffer.bytes),
        };
        let end = region.offset.checked_add(region.length);
        if end.is_none_or(|end| end > registered) {
            return Err(MemoryError::OutOfBounds { region, registered });
        }
        if region.length == 0 {
            return Ok(Span::EMPTY);
        }
        // Offset and length are within an allocation, which is never over isize::MAX bytes.
        let pointer: *mut u8 = pointer;
        let pointer = pointer.wrapping_add(region.offset as usize);
        // SAFETY: the region is within memory that `UserMemory::new` vouches for, or within a buffer of
        // the table, which is zeroed when it is made and stays until the engine frees it.
        Ok(unsafe { Span::new(pointer, region.length as usize) })
    }

    fn buffer(&mut self, buffer: BufferRef) -> &ScratchBuffer {
        let index = buffer.id as usize;
        if index >= self.buffers.len() {
            self.buffers.resize_with(index + 1, || None);
        }
        let slot = &mut self.buffers[index];
        match slot {
            // The same number with more bytes is another buffer: the engine has freed the old one.
            Some(scratch) if scratch.capacity() as u64 >= buffer.bytes => {}
            _ => {
                if let Some(old) = slot.take() {
                    self.pool.recycle(old);
                }
                *slot = Some(self.pool.take(buffer.bytes as usize));
            }
        }
        self.buffers[index].as_ref().expect("the slot was filled above")
    }

    /// Takes a buffer back into the pool.
    pub(crate) fn free(&mut self, buffer: BufferRef) {
        if let Some(scratch) = self.buffers.get_mut(buffer.id as usize).and_then(Option::take) {
            self.pool.recycle(scratch);
        }
    }

    /// Moves a buffer out of the table, for as long as its new owner likes.
    pub(crate) fn take(&mut self, buffer: BufferRef) -> Result<ScratchBuffer, MemoryError> {
        let taken = self.buffers.get_mut(buffer.id as usize).and_then(Option::take);
        taken.ok_or(MemoryError::NoBuffer(Memory::Buffer(buffer)))
    }

    /// Takes a buffer that was moved out back into the pool.
    pub(crate) fn recycle(&mut self, scratch: ScratchBuffer) {
        self.pool.recycle(scratch);
    }

    /// Bytes of all scratch buffers, in use or not.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.pool.allocated_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(memory: Memory, offset: u64, length: u64) -> Region {
        Region { memory, offset, length }
    }

    #[test]
    fn no_region_outside_of_what_is_registered_becomes_a_pointer() {
        let mut bytes = [7_u8; 10];
        let mut table = MemoryTable::new(2);
        let tensor = TensorId(1);
        assert!(table.locate(region(Memory::Gradient(tensor), 0, 1)).is_err());
        // SAFETY: `bytes` outlives the table's use.
        let memory = unsafe { UserMemory::new((&raw mut bytes).expose_provenance(), 10) };
        table.set_gradient(tensor, memory);
        let whole = table.locate(region(Memory::Gradient(tensor), 0, 10));
        // SAFETY: nobody writes to `bytes`.
        let whole = whole.map(|span| unsafe { span.read() }.to_vec());
        assert_eq!(whole, Ok(vec![7; 10]));
        for (offset, length) in [(0, 11), (10, 1), (11, 0), (u64::MAX, 1), (1, u64::MAX)] {
            let outside = table.locate(region(Memory::Gradient(tensor), offset, length));
            assert!(matches!(outside, Err(MemoryError::OutOfBounds { .. })), "{offset} {length}");
        }
        assert!(table.locate(region(Memory::Parameter(tensor), 0, 1)).is_err());
        assert!(table.locate(region(Memory::Gradient(TensorId(2)), 0, 1)).is_err());
    }

    #[test]
    fn a_freed_buffer_is_used_again() {
        let mut table = MemoryTable::new(0);
        let buffer = |id, bytes| BufferRef { id, bytes };
        let first = table.locate(region(Memory::Buffer(buffer(3, 1000)), 0, 1000));
        assert!(first.is_ok_and(|span| (span.pointer() as usize).is_multiple_of(64)));
        table.free(buffer(3, 1000));
        let second = table.locate(region(Memory::Buffer(buffer(0, 990)), 0, 990));
        assert_eq!(first.map(Span::pointer), second.map(Span::pointer));
        assert_eq!(table.scratch_bytes(), 1024);
        let beyond = table.locate(region(Memory::Buffer(buffer(0, 990)), 0, 991));
        assert!(matches!(beyond, Err(MemoryError::OutOfBounds { .. })));
    }
}
