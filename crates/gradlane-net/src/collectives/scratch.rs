//! Scratch memory of strands, kept for the next ones: fresh memory costs a page fault every 4 KiB.

/// Memory that is kept at most, in bytes.
const KEPT_BYTES_MAX: usize = 32 << 20;

/// Buffers that are free.
#[derive(Debug, Default)]
pub(super) struct ScratchPool {
    free: Vec<Box<[u8]>>,
    kept: usize,
}

impl ScratchPool {
    /// Returns a buffer of `size` bytes, of any content.
    pub(super) fn take(&mut self, size: usize) -> Box<[u8]> {
        match self.free.iter().position(|it| it.len() == size) {
            Some(index) => {
                self.kept -= size;
                self.free.swap_remove(index)
            }
            None => vec![0; size].into_boxed_slice(),
        }
    }

    /// Keeps buffers, as far as there is room.
    pub(super) fn give_back(&mut self, buffers: impl IntoIterator<Item = Box<[u8]>>) {
        for buffer in buffers {
            if self.kept + buffer.len() > KEPT_BYTES_MAX {
                self.free.clear();
                self.kept = 0;
            }
            self.kept += buffer.len();
            self.free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again_and_their_bytes_are_bounded() {
        let mut pool = ScratchPool::default();
        let mut buffer = pool.take(8);
        buffer[0] = 7;
        pool.give_back([buffer]);
        assert_eq!(pool.take(4).len(), 4, "another size");
        assert_eq!(pool.take(8)[0], 7, "the same buffer");
        for size in 0..40 {
            pool.give_back([vec![0; (1 << 20) + size].into_boxed_slice()]);
            assert!(pool.kept <= KEPT_BYTES_MAX, "{}", pool.kept);
        }
        let kept: usize = pool.free.iter().map(|it| it.len()).sum();
        assert_eq!(kept, pool.kept);
    }
}
