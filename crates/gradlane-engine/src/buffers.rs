//! Scratch buffers by number. The engine decides when one is needed and when it is free; the driver
//! owns the bytes. A buffer lives as long as something refers to it: a transmission, a pending
//! installation, a piece of work.

use crate::io::{BufferRef, Event};
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
            self.free.push(buffer.id);
            events.push_back(Event::BufferFree(buffer));
        }
    }

    /// Number of buffers in use.
    pub(crate) fn in_use(&self) -> usize {
        self.references.len() - self.free.len()
    }
}
