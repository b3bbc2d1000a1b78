//! Messages, and the frames that they are cut into.

use crate::api::{Payload, Region, Transmit};
use alloc::vec::Vec;
use gradlane_units::Rank;
use gradlane_wire::{FrameFlags, FrameHeader, MAX_FRAME_BYTES};

/// A rest of up to this share of a frame, 1/8, goes with the frame before it.
const REST_SHIFT: u32 = 3;

/// A whole message: one slice or one control payload, cut into frames when sent.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    /// Header of all its frames, but for length and the flag of the last; its offset is that of the
    /// first.
    pub(crate) header: FrameHeader,
    pub(crate) body: Body,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    Empty,
    Region(Region),
    Inline(Vec<u8>),
}

impl Message {
    pub(crate) fn bytes(&self) -> u64 {
        match &self.body {
            Body::Empty => 0,
            Body::Region(region) => region.length,
            Body::Inline(bytes) => bytes.len() as u64,
        }
    }

    /// Length of the frame that starts at `offset`. Control payloads travel whole, and a small rest
    /// goes with the frame before it: a frame costs both ends the same, however small it is.
    pub(crate) fn frame_length(&self, offset: u64, frame_bytes: u32) -> u32 {
        let rest = self.bytes() - offset;
        let most = frame_bytes.saturating_add(frame_bytes >> REST_SHIFT).min(MAX_FRAME_BYTES);
        match self.body {
            Body::Inline(_) => rest as u32,
            _ if rest <= u64::from(most) => rest as u32,
            _ => frame_bytes,
        }
    }

    pub(crate) fn frame(&self, peer: Rank, offset: u64, length: u32) -> Transmit {
        let mut header = self.header;
        header.offset += offset;
        header.length = length;
        if offset + u64::from(length) == self.bytes() {
            header.flags = header.flags.with(FrameFlags::LAST);
        }
        let payload = match &self.body {
            _ if length == 0 => Payload::None,
            Body::Empty => Payload::None,
            Body::Inline(bytes) => Payload::Inline(bytes.clone()),
            Body::Region(region) => Payload::Region(Region {
                memory: region.memory,
                offset: region.offset + offset,
                length: u64::from(length),
            }),
        };
        Transmit { peer, header, payload }
    }
}
