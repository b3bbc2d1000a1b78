//! The memory that frames are sent from and received into: gradients and parameters that the
//! application registered, and scratch buffers from a pool.
//!
//! A region becomes a pointer only after its bounds were checked against what is registered. The
//! pool reuses buffers by size class, so that a steady state allocates nothing.

use gradlane_engine::{BufferRef, Memory, Region};
use gradlane_units::TensorId;
use gradlane_wire::{checksum, Checksum};
use std::alloc::{alloc_zeroed, dealloc, Layout};

/// Checked bytes of registered memory. Who holds one is on a thread of the channel, and uses it
/// only while the session runs: before the session's end is told to the application, every use of
/// spans has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pointer: *mut u8,
    length: usize,
}

// SAFETY: a span is an address; the engine hands out each range to one user at a time.
unsafe impl Send for Span {}

impl Span {
    /// No bytes.
    pub(crate) const EMPTY: Span = Span { pointer: std::ptr::dangling_mut(), length: 0 };

    /// Bytes of this crate's own, for as long as they live.
    pub(crate) fn over(bytes: &mut [u8]) -> Span {
        Span { pointer: bytes.as_mut_ptr(), length: bytes.len() }
    }

    /// The first byte.
    pub(crate) fn pointer(self) -> *mut u8 {
        self.pointer
    }

    /// Number of bytes.
    pub(crate) fn length(self) -> usize {
        self.length
    }

    /// The bytes from `start` on; none when `start` is past the end.
    pub(crate) fn from(self, start: usize) -> Span {
        let start = start.min(self.length);
        Span { pointer: self.pointer.wrapping_add(start), length: self.length - start }
    }

    /// The first `length` bytes; all when there are fewer.
    pub(crate) fn first(self, length: usize) -> Span {
        Span { length: length.min(self.length), ..self }
    }

    /// Adds the bytes to a checksum.
    pub(crate) fn add_to(self, checksum: &mut Checksum) {
        // SAFETY: the bytes are registered and initialized, and nobody writes to what the engine
        // lets this thread send or has let it receive.
        checksum.update(unsafe { self.bytes() });
    }

    /// The checksum of the bytes.
    pub(crate) fn checksum(self) -> u32 {
        // SAFETY: as in `add_to`.
        checksum(unsafe { self.bytes() })
    }

    /// The bytes themselves.
    ///
    /// # Safety
    /// Nobody writes to them while the result is in use.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: the bytes are registered and initialized; the caller knows that nobody writes.
        unsafe { std::slice::from_raw_parts(self.pointer, self.length) }
    }

    /// The bytes themselves, to be written.
    ///
    /// # Safety
    /// Nobody else touches them while the result is in use.
    pub(crate) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: the bytes are registered and initialized; the caller has them for itself.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.length) }
    }

    /// Writes `bytes` to the front.
    pub(crate) fn write(self, bytes: &[u8]) {
        assert!(bytes.len() <= self.length, "{} bytes into {}", bytes.len(), self.length);
        // SAFETY: there is room for that many bytes, in memory apart from `bytes`.
        unsafe { self.pointer.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// A copy of the bytes.
    pub(crate) fn to_vec(self) -> Vec<u8> {
        // SAFETY: as in `add_to`.
        unsafe { self.bytes() }.to_vec()
    }

    /// Copies as many bytes as both spans have; they may overlap.
    pub(crate) fn copy_to(self, target: Span) {
        let length = self.length.min(target.length);
        // SAFETY: both spans are registered for at least `length` bytes.
        unsafe { std::ptr::copy(self.pointer, target.pointer, length) };
    }
}

/// Memory of the application: an address and a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UserMemory {
    address: usize,
    bytes: usize,
}

impl UserMemory {
    /// Memory of `bytes` bytes from `address` on.
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

    /// Whether there are bytes but no address.
    pub(crate) fn is_null(self) -> bool {
        self.address == 0 && self.bytes > 0
    }
}

/// Why a region is not memory. It is a broken invariant of this program, found before any harm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error("nothing is registered for {0:?}")]
    Unregistered(Memory),
    #[error("{region:?} is outside of the {registered} bytes registered for it")]
    OutOfBounds { region: Region, registered: u64 },
}

/// Everything that can be named by a [`Region`].
#[derive(Debug)]
pub(crate) struct MemoryTable {
    gradients: Vec<Option<UserMemory>>,
    parameters: Vec<Option<UserMemory>>,
    buffers: Vec<Option<ScratchBuffer>>,
    pool: Pool,
}

impl MemoryTable {
    /// A table for `tensors` tensors, nothing registered.
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

    /// The bytes of a region. A buffer met for the first time is allocated.
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
            Memory::Buffer(buffer) => (self.buffer(buffer).pointer, buffer.bytes),
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
        Ok(Span {
            pointer: pointer.wrapping_add(region.offset as usize),
            length: region.length as usize,
        })
    }

    fn buffer(&mut self, buffer: BufferRef) -> &ScratchBuffer {
        let index = buffer.id as usize;
        if index >= self.buffers.len() {
            self.buffers.resize_with(index + 1, || None);
        }
        let slot = &mut self.buffers[index];
        match slot {
            // The same number with more bytes is another buffer: the engine has freed the old one.
            Some(block) if block.layout.size() as u64 >= buffer.bytes => {}
            _ => {
                if let Some(old) = slot.take() {
                    self.pool.give_back(old);
                }
                *slot = Some(self.pool.take(buffer.bytes as usize));
            }
        }
        self.buffers[index].as_ref().expect("the slot was filled above")
    }

    /// Takes a buffer back into the pool.
    pub(crate) fn free(&mut self, buffer: BufferRef) {
        if let Some(block) = self.buffers.get_mut(buffer.id as usize).and_then(Option::take) {
            self.pool.give_back(block);
        }
    }

    /// Moves a buffer out of the table: who has it may keep it as long as it likes.
    pub(crate) fn take(&mut self, buffer: BufferRef) -> Option<ScratchBuffer> {
        self.buffers.get_mut(buffer.id as usize).and_then(Option::take)
    }

    /// Takes what was moved out back into the pool.
    pub(crate) fn give_back(&mut self, block: ScratchBuffer) {
        self.pool.give_back(block);
    }

    /// Bytes of all scratch buffers, in use or not.
    pub(crate) fn scratch_bytes(&self) -> u64 {
        self.pool.allocated_bytes
    }
}

/// One allocation of the pool.
#[derive(Debug)]
pub(crate) struct ScratchBuffer {
    pointer: *mut u8,
    layout: Layout,
}

// SAFETY: a block owns its memory, like a `Box`.
unsafe impl Send for ScratchBuffer {}

// SAFETY: through a shared reference its bytes are only read.
unsafe impl Sync for ScratchBuffer {}

impl ScratchBuffer {
    /// The first `length` bytes, of a block that was moved out of the table.
    ///
    /// # Panics
    /// When there are fewer.
    pub(crate) fn bytes(&self, length: usize) -> &[u8] {
        assert!(length <= self.layout.size(), "{length} bytes of {}", self.layout.size());
        // SAFETY: the allocation has that many bytes, zeroed when it was made; nobody else knows
        // of a block that was moved out of the table, so nobody writes to it.
        unsafe { std::slice::from_raw_parts(self.pointer, length) }
    }
}

impl Drop for ScratchBuffer {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `alloc_zeroed` with this layout.
        unsafe { dealloc(self.pointer, self.layout) };
    }
}

/// Free blocks by size class: four classes between a power of two and the next.
#[derive(Debug, Default)]
struct Pool {
    free: std::collections::BTreeMap<usize, Vec<ScratchBuffer>>,
    allocated_bytes: u64,
    in_use_bytes: u64,
    /// The most that was in use at once.
    peak_bytes: u64,
}

impl Pool {
    const ALIGNMENT: usize = 64;
    const SMALLEST: usize = 256;
    /// The pool keeps at most so many times what was in use at once.
    const PEAKS_KEPT: u64 = 2;

    fn class(bytes: usize) -> usize {
        let bytes = bytes.max(Pool::SMALLEST);
        let step = (bytes.next_power_of_two() / 8).max(Pool::ALIGNMENT);
        bytes.next_multiple_of(step)
    }

    fn take(&mut self, bytes: usize) -> ScratchBuffer {
        let class = Pool::class(bytes);
        self.in_use_bytes += class as u64;
        self.peak_bytes = self.peak_bytes.max(self.in_use_bytes);
        if let Some(block) = self.free.get_mut(&class).and_then(Vec::pop) {
            return block;
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

    fn give_back(&mut self, block: ScratchBuffer) {
        self.in_use_bytes = self.in_use_bytes.saturating_sub(block.layout.size() as u64);
        self.free.entry(block.layout.size()).or_default().push(block);
    }

    /// Gives free blocks of other sizes back to the system: blocks that are of another size in each
    /// step would otherwise leave some of every size behind, in weeks many times what is used.
    fn shrink(&mut self) {
        let most = Pool::PEAKS_KEPT * self.peak_bytes;
        while self.allocated_bytes > most {
            let Some(mut largest) = self.free.last_entry() else {
                return;
            };
            if let Some(block) = largest.get_mut().pop() {
                self.allocated_bytes -= block.layout.size() as u64;
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
        assert_eq!(whole.map(Span::to_vec), Ok(vec![7; 10]));
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
            held.into_iter().for_each(|block| pool.give_back(block));
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
        held.into_iter().for_each(|block| pool.give_back(block));
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
