//! Scratch buffers by number. The engine decides when one is needed and when it is free; the driver
//! owns the bytes. A buffer lives as long as something refers to it: a transmission, a pending
//! installation, a job. Its number is used again only after the driver has heard that it
//! is free: the driver would otherwise free the bytes of the next buffer of that number.

use crate::api::{BufferRef, Event};
use alloc::collections::VecDeque;
use alloc::vec::Vec;

#[derive(Debug, Default)]
pub(crate) struct BufferTable {
    /// By number: references, and bytes.
    buffers: Vec<(u32, u64)>,
    free: Vec<u32>,
}

impl BufferTable {
    /// A buffer with one reference.
    pub(crate) fn acquire(&mut self, bytes: u64) -> BufferRef {
        let id = self.free.pop().unwrap_or_else(|| {
            self.buffers.push((0, 0));
            (self.buffers.len() - 1) as u32
        });
        self.buffers[id as usize] = (1, bytes);
        BufferRef { id, bytes }
    }

    /// One more reference.
    pub(crate) fn retain(&mut self, buffer: BufferRef) {
        debug_assert!(self.buffers[buffer.id as usize].0 > 0, "a free buffer was retained");
        self.buffers[buffer.id as usize].0 += 1;
    }

    /// One reference less; the last one frees the buffer.
    pub(crate) fn release(&mut self, buffer: BufferRef, events: &mut VecDeque<Event>) {
        let (count, _) = &mut self.buffers[buffer.id as usize];
        assert!(*count > 0, "buffer {} was released twice", buffer.id);
        *count -= 1;
        if *count == 0 {
            events.push_back(Event::BufferFree(buffer));
        }
    }

    /// Frees all buffers but these, each of which has one reference for each time that it is listed.
    pub(crate) fn free_all_but(&mut self, kept: &[BufferRef], events: &mut VecDeque<Event>) {
        let mut left = alloc::vec![0; self.buffers.len()];
        kept.iter().for_each(|buffer| left[buffer.id as usize] += 1);
        for ((id, (count, bytes)), left) in (0..).zip(&mut self.buffers).zip(left) {
            if *count > 0 && left == 0 {
                events.push_back(Event::BufferFree(BufferRef { id, bytes: *bytes }));
            }
            *count = left;
        }
    }

    /// The driver has heard that a buffer is free.
    pub(crate) fn recycle(&mut self, buffer: BufferRef) {
        debug_assert_eq!(self.buffers[buffer.id as usize].0, 0, "a buffer in use is recycled");
        self.free.push(buffer.id);
    }

    /// Number of buffers in use, those included of which the driver has not heard that they are
    /// free.
    pub(crate) fn in_use(&self) -> usize {
        self.buffers.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_used_again_only_after_the_driver_has_heard_of_it() {
        let (mut table, mut events) = (BufferTable::default(), VecDeque::new());
        let first = table.acquire(10);
        table.release(first, &mut events);
        let second = table.acquire(20);
        assert_ne!(first.id, second.id);
        assert_eq!(events, [Event::BufferFree(first)]);
        table.recycle(first);
        assert_eq!(table.acquire(30).id, first.id);
        assert_eq!(table.in_use(), 2);
    }
}
