//! Frames coming in on a sealed connection. Bytes are verified and decrypted in a buffer of the reader's own
//! and only then copied to their destination: what does not open never reaches a tensor.

use super::frame_sink::{target_of, Fault, FrameSink, PayloadTarget};
use crate::sys::socket::Socket;
use gradlane_seal::{FrameOpener, OpenError, Opened};
use gradlane_wire::FrameHeader;
use std::io::{self, IoSliceMut};

/// Bytes that one read may take: some chunks, which stay in the processor's cache.
const BUFFER_BYTES: usize = 128 << 10;

/// A frame whose payload has not arrived whole.
#[derive(Debug)]
struct Incoming {
    header: FrameHeader,
    target: PayloadTarget,
    control: Vec<u8>,
    filled: usize,
}

/// Frames coming in.
#[derive(Debug)]
pub(crate) struct SealedReader {
    opener: FrameOpener,
    incoming: Option<Incoming>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl SealedReader {
    /// Makes a reader at the start of a stream.
    pub(super) fn new(opener: FrameOpener) -> SealedReader {
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        SealedReader { opener, incoming: None, buffer, start: 0, end: 0 }
    }

    /// Ends the borrow of registered memory; the rest of the stream cannot be read afterwards.
    pub(super) fn release_memory(&mut self) {
        self.incoming = None;
    }

    /// Reads what has arrived. Returns the bytes read and the bytes of room.
    pub(super) fn read(&mut self, socket: &dyn Socket) -> io::Result<(usize, usize)> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let room = &mut self.buffer[self.end..];
        let wanted = room.len();
        let count = socket.receive(&mut [IoSliceMut::new(room)])?;
        self.end += count;
        Ok((count, wanted))
    }

    /// Opens all pieces that have arrived whole.
    pub(super) fn consume(&mut self, sink: &mut impl FrameSink) -> Result<(), Fault> {
        loop {
            let length = self.opener.piece_bytes();
            if self.end - self.start < length {
                return Ok(());
            }
            let piece = &mut self.buffer[self.start..self.start + length];
            self.start += length;
            match self.opener.open(piece) {
                Ok(Opened::Header(header)) => {
                    let target = target_of(&header, sink)?;
                    let incoming = Incoming { header, target, control: Vec::new(), filled: 0 };
                    if header.length == 0 {
                        finish(incoming, sink)?;
                    } else {
                        self.incoming = Some(incoming);
                    }
                }
                Ok(Opened::Chunk { bytes, is_last }) => {
                    // After `release_memory` there is no place for it.
                    let Some(incoming) = &mut self.incoming else {
                        return Ok(());
                    };
                    incoming.take(bytes);
                    if is_last {
                        if let Some(incoming) = self.incoming.take() {
                            finish(incoming, sink)?;
                        }
                    }
                }
                Err(error) => {
                    let incoming = self.incoming.take();
                    return Err(refused(&error, incoming.as_ref(), sink));
                }
            }
        }
    }
}

impl Incoming {
    /// Takes the next bytes of the payload, which are verified.
    fn take(&mut self, bytes: &[u8]) {
        match &mut self.target {
            PayloadTarget::Memory(span) => {
                span[self.filled..self.filled + bytes.len()].copy_from_slice(bytes);
            }
            PayloadTarget::Control => self.control.extend_from_slice(bytes),
        }
        self.filled += bytes.len();
    }
}

/// Ends the borrow of the destination and hands the frame on.
fn finish(incoming: Incoming, sink: &mut impl FrameSink) -> Result<(), Fault> {
    let Incoming { header, target, control, .. } = incoming;
    let control = match target {
        PayloadTarget::Memory(_ends_here) => None,
        PayloadTarget::Control => Some(control),
    };
    sink.on_frame(&header, control.as_deref())
}

fn refused(error: &OpenError, incoming: Option<&Incoming>, sink: &impl FrameSink) -> Fault {
    let frame = incoming
        .map_or_else(String::new, |incoming| format!(" ({})", sink.describe(&incoming.header)));
    Fault::ProtocolViolation(format!("sent {error}{frame}; nothing of it was released"))
}
