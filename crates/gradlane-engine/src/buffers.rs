//! Scratch buffers by number. The engine decides when one is needed and when it is free; the driver
//! owns the bytes. A buffer lives as long as something refers to it: a transmission, a pending
//! installation, a job. Its number is used again only after the driver has heard that it
//! is free: the driver would otherwise free the bytes of the next buffer of that number.

use crate::api::{BufferRef, Event};
use alloc::collections::VecDeque;
use alloc::vec::Vec;

#[derive(Debug, Default)]
pub(crate) struct BufferTable {
    references: Vec<u32>,
    free: Vec<u32>,
}

impl BufferTable {
    /// A buffer with one reference.
    pub(crate) fn acquire(&mut self, bytes: u64) -> BufferRef {
        let id = self.free.pop().unwrap_or_else(|| {
            self.references.push(0);
            (self.references.len() - 1) as u32
        });
        self.references[id as usize] = 1;
        BufferRef { id, bytes }
    }

    /// One more reference.
    pub(crate) fn retain(&mut self, buffer: BufferRef) {
        debug_assert!(self.references[buffer.id as usize] > 0, "a free buffer was retained");
        self.references[buffer.id as usize] += 1;
    }

    /// One reference less; the last one frees the buffer.
    pub(crate) fn release(&mut self, buffer: BufferRef, events: &mut VecDeque<Event>) {
        let count = &mut self.references[buffer.id as usize];
        assert!(*count > 0, "buffer {} was released twice", buffer.id);
        *count -= 1;
        if *count == 0 {
            events.push_back(Event::BufferFree(buffer));
        }
    }

    /// The driver has heard that a buffer is free.
    pub(crate) fn recycle(&mut self, buffer: BufferRef) {
        debug_assert_eq!(self.references[buffer.id as usize], 0, "a buffer in use is recycled");
        self.free.push(buffer.id);
    }

    /// Number of buffers in use, those included of which the driver has not heard that they are
    /// free.
    pub(crate) fn in_use(&self) -> usize {
        self.references.len() - self.free.len()
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
