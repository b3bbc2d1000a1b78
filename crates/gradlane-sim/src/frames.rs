//! Frames on their way, by number; numbers are reused. Only control frames have a payload here.

use gradlane_engine::{Payload, Transmit};
use gradlane_wire::FrameHeader;

#[derive(Debug, Default)]
pub(crate) struct FrameTable {
    frames: Vec<Option<(FrameHeader, Vec<u8>)>>,
    free: Vec<u32>,
}

impl FrameTable {
    pub(crate) fn insert(&mut self, transmit: &Transmit) -> u32 {
        let payload = match &transmit.payload {
            Payload::Inline(bytes) => bytes.clone(),
            Payload::None | Payload::Region(_) => Vec::new(),
        };
        let frame = Some((transmit.header, payload));
        if let Some(number) = self.free.pop() {
            self.frames[number as usize] = frame;
            return number;
        }
        self.frames.push(frame);
        (self.frames.len() - 1) as u32
    }

    pub(crate) fn get(&self, number: u32) -> FrameHeader {
        self.frames[number as usize].as_ref().expect("a frame on its way has a header").0
    }

    pub(crate) fn remove(&mut self, number: u32) -> (FrameHeader, Vec<u8>) {
        self.free.push(number);
        self.frames[number as usize].take().expect("a frame arrives once")
    }

    /// Number of frames on their way.
    pub(crate) fn len(&self) -> usize {
        self.frames.len() - self.free.len()
    }
}
