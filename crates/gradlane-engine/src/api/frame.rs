//! Frames between the engine and its driver.
#![allow(missing_docs, reason = "fields with the name of their type")]

use crate::api::Region;
use alloc::vec::Vec;
use gradlane_units::Rank;
use gradlane_wire::FrameHeader;

/// Where the payload of an announced frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadDest {
    /// Straight into this memory.
    Region(Region),
    /// Into a buffer of the driver's own, to be given to the engine (`Input::Control`).
    Control,
    /// There is no payload: `Input::Frame` follows at once. Also the answer to every input but a header.
    Nothing,
}

/// The bytes after the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Nothing.
    None,
    /// These bytes of the driver's memory.
    Region(Region),
    /// These bytes, made by the engine (control frames).
    Inline(Vec<u8>),
}

/// One frame to send. `header.payload_checksum` is zero: the driver fills it in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// To whom.
    pub peer: Rank,
    pub header: FrameHeader,
    pub payload: Payload,
}
