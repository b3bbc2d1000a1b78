//! Frames on their way, by number; numbers are reused. Only control frames have a payload here.

use gradlane_engine::{Payload, Transmit};
use gradlane_wire::FrameHeader;
use std::collections::BTreeMap;

/// A header in a line of the cache of its own: there may be a million of them on their way.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Slot(Option<FrameHeader>);

const _: () = assert!(size_of::<Slot>() == 64, "one line");

#[derive(Debug, Default)]
pub(crate) struct FrameTable {
    frames: Vec<Slot>,
    free: Vec<u32>,
    /// Payloads of control frames.
    payloads: BTreeMap<u32, Vec<u8>>,
}

impl FrameTable {
    pub(crate) fn insert(&mut self, transmit: &Transmit) -> u32 {
        let slot = Slot(Some(transmit.header));
        let number = match self.free.pop() {
            Some(number) => {
                self.frames[number as usize] = slot;
                number
            }
            None => {
                self.frames.push(slot);
                (self.frames.len() - 1) as u32
            }
        };
        if let Payload::Inline(bytes) = &transmit.payload {
            self.payloads.insert(number, bytes.clone());
        }
        number
    }

    pub(crate) fn get(&self, number: u32) -> FrameHeader {
        self.frames[number as usize].0.expect("a frame on its way has a header")
    }

    /// Takes a frame that has arrived, which it does once; its payload is empty but for control.
    pub(crate) fn remove(&mut self, number: u32) -> (FrameHeader, Vec<u8>) {
        self.free.push(number);
        let header = self.frames[number as usize].0.take().expect("a frame arrives once");
        (header, self.payloads.remove(&number).unwrap_or_default())
    }

    /// Number of frames on their way.
    pub(crate) fn len(&self) -> usize {
        self.frames.len() - self.free.len()
    }
}
