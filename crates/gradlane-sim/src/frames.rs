//! Headers of the frames on their way, by number; numbers are reused.

use gradlane_wire::FrameHeader;

#[derive(Debug, Default)]
pub(crate) struct FrameTable {
    headers: Vec<Option<FrameHeader>>,
    free: Vec<u32>,
}

impl FrameTable {
    pub(crate) fn insert(&mut self, header: FrameHeader) -> u32 {
        if let Some(number) = self.free.pop() {
            self.headers[number as usize] = Some(header);
            return number;
        }
        self.headers.push(Some(header));
        (self.headers.len() - 1) as u32
    }

    pub(crate) fn get(&self, number: u32) -> FrameHeader {
        self.headers[number as usize].expect("a frame on its way has a header")
    }

    pub(crate) fn remove(&mut self, number: u32) -> FrameHeader {
        self.free.push(number);
        self.headers[number as usize].take().expect("a frame arrives once")
    }

    /// Number of frames on their way.
    pub(crate) fn len(&self) -> usize {
        self.headers.len() - self.free.len()
    }
}
