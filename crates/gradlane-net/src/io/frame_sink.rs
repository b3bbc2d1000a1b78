//! What becomes of frames that come in: where their payloads go, and why a connection cannot go on.

use crate::memory::WriteSpan;
use gradlane_wire::FrameHeader;

/// Why a connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The peer is gone: the reason without its name.
    Lost(String),
    /// The peer violated the protocol: the sentence without its name at the front.
    ProtocolViolation(String),
    /// This rank broke an invariant of its own: the whole sentence.
    Internal(String),
}

/// Where a payload goes.
#[derive(Debug)]
pub(crate) enum PayloadTarget {
    /// Straight to memory.
    Memory(WriteSpan),
    /// To a buffer that grows with the bytes that have really arrived.
    Control,
}

impl PayloadTarget {
    /// Bytes of room, where that is bounded.
    fn room(&self) -> Option<usize> {
        match self {
            PayloadTarget::Memory(span) => Some(span.len()),
            PayloadTarget::Control => None,
        }
    }
}

/// The user of a reader's frames.
pub(crate) trait FrameSink {
    /// Returns the destination of a payload whose header has arrived.
    fn on_header(&mut self, header: &FrameHeader) -> Result<PayloadTarget, Fault>;
    /// Takes a frame whose payload is in place and verified; `control` has the payload of such a target.
    fn on_frame(&mut self, header: &FrameHeader, control: Option<&[u8]>) -> Result<(), Fault>;
    /// Names the frame in a message.
    fn describe(&self, header: &FrameHeader) -> String;
}

/// Returns the destination of a payload, which has room for it.
pub(super) fn target_of(
    header: &FrameHeader,
    sink: &mut impl FrameSink,
) -> Result<PayloadTarget, Fault> {
    let target = sink.on_header(header)?;
    let length = header.length as usize;
    match target.room().filter(|&room| room != length) {
        None => Ok(target),
        Some(room) => {
            let frame = sink.describe(header);
            Err(Fault::Internal(format!("room for {room} of {length} bytes: {frame}")))
        }
    }
}
