//! The registered memory, by the names that the engine has for it.

use super::span::Span;
use gradlane_engine::{BufferRef, Memory, Region};
use gradlane_units::TensorId;
use std::alloc::{alloc_zeroed, dealloc, Layout};

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

// Scratch buffers, reused by size class, so that a steady state allocates nothing.

/// One allocation of the pool.
#[derive(Debug)]
pub(crate) struct ScratchBuffer {
    pointer: *mut u8,
    layout: Layout,
}

// SAFETY: a buffer owns its memory, like a `Box`.
unsafe impl Send for ScratchBuffer {}

// SAFETY: through a shared reference its bytes are only read.
unsafe impl Sync for ScratchBuffer {}

impl ScratchBuffer {
    /// The first byte.
    fn pointer(&self) -> *mut u8 {
        self.pointer
    }

    /// Number of bytes.
    fn capacity(&self) -> usize {
        self.layout.size()
    }

    /// The first `length` bytes, of a buffer that was moved out of the table.
    ///
    /// # Panics
    /// When there are fewer.
    pub(crate) fn bytes(&self, length: usize) -> &[u8] {
        assert!(length <= self.layout.size(), "{length} bytes of {}", self.layout.size());
        // SAFETY: the allocation has that many bytes, zeroed when it was made; the engine has
        // given up a buffer that was moved out of the table, so nobody writes to it.
        unsafe { std::slice::from_raw_parts(self.pointer, length) }
    }
}

impl Drop for ScratchBuffer {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `alloc_zeroed` with this layout.
        unsafe { dealloc(self.pointer, self.layout) };
    }
}

/// Free buffers by size class: four classes between a power of two and the next.
#[derive(Debug, Default)]
struct Pool {
    free: std::collections::BTreeMap<usize, Vec<ScratchBuffer>>,
    allocated_bytes: u64,
    in_use_bytes: u64,
    /// The most bytes in use at once.
    peak_bytes: u64,
}

impl Pool {
    const ALIGNMENT: usize = 64;
    const SMALLEST: usize = 256;
    /// The pool keeps at most this multiple of its peak use.
    const PEAKS_KEPT: u64 = 2;

    /// Bytes of all buffers, in use or not.
    fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes
    }

    fn class(bytes: usize) -> usize {
        let bytes = bytes.max(Pool::SMALLEST);
        let step = (bytes.next_power_of_two() / 8).max(Pool::ALIGNMENT);
        bytes.next_multiple_of(step)
    }

    /// Returns a buffer of at least `bytes` bytes, a free one where there is one.
    fn take(&mut self, bytes: usize) -> ScratchBuffer {
        let class = Pool::class(bytes);
        self.in_use_bytes += class as u64;
        self.peak_bytes = self.peak_bytes.max(self.in_use_bytes);
        if let Some(scratch) = self.free.get_mut(&class).and_then(Vec::pop) {
            return scratch;
        }
        let layout = Layout::from_size_align(class, Pool::ALIGNMENT)
            .expect("slices are parts of tensors, which are never over isize::MAX bytes");
        // SAFETY: a class is never of size zero.
        let pointer = unsafe { alloc_zeroed(layout) };
        if pointer.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        self.allocated_bytes += class as u64;
        self.shrink();
        ScratchBuffer { pointer, layout }
    }

    /// Frees a buffer for reuse.
    fn recycle(&mut self, scratch: ScratchBuffer) {
        self.in_use_bytes = self.in_use_bytes.saturating_sub(scratch.layout.size() as u64);
        self.free.entry(scratch.layout.size()).or_default().push(scratch);
    }

    /// Returns free buffers to the system, the largest first: buffers of a new size in each step would
    /// otherwise pile up over weeks.
    fn shrink(&mut self) {
        let most = Pool::PEAKS_KEPT * self.peak_bytes;
        while self.allocated_bytes > most {
            let Some(mut largest) = self.free.last_entry() else {
                return;
            };
            if let Some(scratch) = largest.get_mut().pop() {
                self.allocated_bytes -= scratch.layout.size() as u64;
            }
            if largest.get().is_empty() {
                largest.remove();
            }
        }
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

    #[test]
    fn blocks_of_ever_other_sizes_leave_no_more_behind_than_was_used_at_once() {
        let mut pool = Pool::default();
        let mut rng = gradlane_units::Rng::new(3);
        for _ in 0..2_000 {
            let held: Vec<_> = (0..3)
                .map(|_| pool.take(1 << (10 + rng.below(9)) | rng.below(1024) as usize))
                .collect();
            held.into_iter().for_each(|block| pool.recycle(block));
        }
        assert_eq!(pool.in_use_bytes, 0);
        let free: usize = pool.free.values().flatten().map(|block| block.layout.size()).sum();
        assert_eq!(pool.allocated_bytes, free as u64);
        assert!(pool.allocated_bytes <= 2 * pool.peak_bytes, "{pool:?}");
        assert!(pool.peak_bytes < 3 * 400_000, "three at once");
    }

    #[test]
    fn blocks_of_the_same_sizes_are_never_given_back() {
        let mut pool = Pool::default();
        let held: Vec<_> = [1_000, 70_000, 9_000].map(|bytes| pool.take(bytes)).into();
        let before: Vec<_> = held.iter().map(|block| block.pointer).collect();
        held.into_iter().for_each(|block| pool.recycle(block));
        let again = [1_000, 70_000, 9_000].map(|bytes| pool.take(bytes));
        assert_eq!(again.iter().map(|block| block.pointer).collect::<Vec<_>>(), before);
    }

    #[test]
    fn classes_waste_at_most_a_quarter() {
        for bytes in [1, 255, 256, 257, 1000, 65_536, 65_537, 200_000, 1 << 30] {
            let class = Pool::class(bytes);
            assert!(class >= bytes && class.is_multiple_of(Pool::ALIGNMENT));
            assert!(bytes < Pool::SMALLEST || class <= bytes + bytes / 4 + Pool::ALIGNMENT);
        }
    }
}
