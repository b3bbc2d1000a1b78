//! Scratch buffers, reused by size class, so that a steady state allocates nothing.

use std::alloc::{alloc_zeroed, dealloc, Layout};

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
    pub(super) fn pointer(&self) -> *mut u8 {
        self.pointer
    }

    /// Number of bytes.
    pub(super) fn capacity(&self) -> usize {
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
pub(super) struct Pool {
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
    pub(super) fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes
    }

    fn class(bytes: usize) -> usize {
        let bytes = bytes.max(Pool::SMALLEST);
        let step = (bytes.next_power_of_two() / 8).max(Pool::ALIGNMENT);
        bytes.next_multiple_of(step)
    }

    /// Returns a buffer of at least `bytes` bytes, a free one where there is one.
    pub(super) fn take(&mut self, bytes: usize) -> ScratchBuffer {
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
    pub(super) fn recycle(&mut self, scratch: ScratchBuffer) {
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
