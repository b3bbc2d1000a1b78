//! Frames of a group, in the fields of a frame's header.
//!
//! | field | in a frame of kind `Collective` |
//! | --- | --- |
//! | step | number of the collective in the group; of a message between two ranks, its number from the sender |
//! | tensor | strand and round (`cell`); of a message between two ranks, its tag |
//! | slice | operation, type of the elements, reduction, purpose of the frame, root |
//! | plan version, priority | lower and upper half of the number of elements |
//! | offset | upper half: bytes of the message; lower half: where in it the payload begins |
//!
//! A heartbeat has the number of collectives that its sender has begun as its step, and describes the oldest one
//! that has not ended; its number is the offset.

use super::call::Description;
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

const PURPOSE_SHIFT: u32 = 15;
const PURPOSE_BITS: u32 = 7 << PURPOSE_SHIFT;

/// The purpose of a frame of kind `Collective`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum FramePurpose {
    /// A message or a piece of it.
    Data = 0,
    /// The sender has a message, and sends it when the receiver grants it.
    Offer = 1,
    /// The receiver has a place for a message.
    Grant = 2,
    /// Bytes that came without asking have reached their calls: the number of elements.
    Credit = 3,
}

impl FramePurpose {
    /// The purpose of a frame.
    pub(super) fn of(header: &FrameHeader) -> Option<FramePurpose> {
        match (header.slice.0 & PURPOSE_BITS) >> PURPOSE_SHIFT {
            0 => Some(FramePurpose::Data),
            1 => Some(FramePurpose::Offer),
            2 => Some(FramePurpose::Grant),
            3 => Some(FramePurpose::Credit),
            _ => None,
        }
    }

    /// Makes a header without a description.
    pub(super) fn header(self, rank: u32, elements: u64) -> FrameHeader {
        FrameHeader {
            slice: SliceId((self as u32) << PURPOSE_SHIFT),
            plan_version: elements as u32,
            priority: Priority((elements >> 32) as u32 as i32),
            ..plain(FrameKind::Collective, rank)
        }
    }

    /// Makes the header of a message of `total` bytes.
    pub(super) fn message(
        self,
        rank: u32,
        description: Description,
        number: u64,
        cell: u32,
        total: usize,
    ) -> FrameHeader {
        let (code, elements) = description.encode();
        let header = self.header(rank, elements);
        FrameHeader {
            step: Step(number),
            tensor: TensorId(cell),
            slice: SliceId(code | header.slice.0),
            offset: (total as u64) << 32,
            ..header
        }
    }
}

/// The number of elements in a header.
pub(super) fn elements_of(header: &FrameHeader) -> u64 {
    u64::from(header.priority.0 as u32) << 32 | u64::from(header.plan_version)
}

/// The description in a header, if there is one.
pub(super) fn description_of(header: &FrameHeader) -> Option<Description> {
    Description::decode(header.slice.0 & !PURPOSE_BITS, elements_of(header))
}

/// Makes a heartbeat.
pub(super) fn heartbeat(rank: u32, begun: u64, oldest: Option<(u64, Description)>) -> FrameHeader {
    let (number, (code, elements)) =
        oldest.map_or((0, (0, 0)), |(number, description)| (number, description.encode()));
    FrameHeader {
        step: Step(begun),
        slice: SliceId(code),
        plan_version: elements as u32,
        priority: Priority((elements >> 32) as u32 as i32),
        offset: number,
        ..plain(FrameKind::Heartbeat, rank)
    }
}

/// Makes a header whose fields are zero.
pub(super) fn plain(kind: FrameKind, rank: u32) -> FrameHeader {
    FrameHeader {
        kind,
        form: PayloadForm::Raw,
        flags: FrameFlags::NONE,
        step: Step(0),
        generation: 0,
        plan_version: 0,
        tensor: TensorId(0),
        slice: SliceId(0),
        priority: Priority(0),
        sender: Rank(rank),
        offset: 0,
        block_bytes: 0,
        length: 0,
        hop: 0,
        payload_checksum: 0,
    }
}
