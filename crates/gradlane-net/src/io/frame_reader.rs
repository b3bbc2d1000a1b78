//! Frames coming in. Where nothing is sealed they are read straight to their destination; only bytes
//! that follow a payload in the same read (the next header, small frames) pass through a staging buffer. Sealed bytes are verified and
//! decrypted in a buffer of the reader's own first.

use crate::memory::WriteSpan;
use crate::sys::socket::Socket;
use gradlane_seal::{FrameOpener, OpenError, Opened};
use gradlane_wire::{Checksum, FrameHeader, HEADER_BYTES};
use std::io::{self, IoSliceMut};

/// Bytes beyond a payload that one read may take.
const STAGING_BYTES: usize = 4096;
/// After payloads of this size and more, a read takes only the next header: the frame after it is
/// probably as large and is better read straight to its destination.
const LARGE_BYTES: usize = 16 << 10;

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

/// The user of a reader's frames.
pub(crate) trait FrameSink {
    /// Returns the destination of a payload whose header has arrived.
    fn on_header(&mut self, header: &FrameHeader) -> Result<PayloadTarget, Fault>;
    /// Takes a frame whose payload is in place and verified; `control` has the payload of such a target.
    fn on_frame(&mut self, header: &FrameHeader, control: Option<&[u8]>) -> Result<(), Fault>;
    /// Names the frame in a message.
    fn describe(&self, header: &FrameHeader) -> String;
}

/// A frame whose payload has not arrived whole.
#[derive(Debug)]
struct Incoming {
    header: FrameHeader,
    target: PayloadTarget,
    control: Vec<u8>,
    filled: usize,
}

impl Incoming {
    /// Begins a frame whose header has arrived, with its payload's destination, which has room for it.
    fn new(header: FrameHeader, sink: &mut impl FrameSink) -> Result<Incoming, Fault> {
        let target = sink.on_header(&header)?;
        match &target {
            PayloadTarget::Memory(span) if span.len() != header.length as usize => {
                let (room, frame) = (span.len(), sink.describe(&header));
                Err(Fault::Internal(format!("room for {room} of {} bytes: {frame}", header.length)))
            }
            _ => Ok(Incoming { header, target, control: Vec::new(), filled: 0 }),
        }
    }

    fn rest(&self) -> usize {
        self.header.length as usize - self.filled
    }

    fn is_large(&self) -> bool {
        let direct = matches!(self.target, PayloadTarget::Memory(_));
        direct && self.header.length as usize >= LARGE_BYTES
    }

    /// Memory that the rest of the payload can be read to directly.
    fn direct_room(&mut self) -> &mut [u8] {
        match &mut self.target {
            PayloadTarget::Memory(span) => &mut span[self.filled..],
            PayloadTarget::Control => &mut [],
        }
    }

    /// Takes the next bytes of the payload.
    fn take(&mut self, bytes: &[u8]) {
        match &mut self.target {
            PayloadTarget::Memory(span) => {
                span[self.filled..self.filled + bytes.len()].copy_from_slice(bytes);
            }
            PayloadTarget::Control => self.control.extend_from_slice(bytes),
        }
        self.filled += bytes.len();
    }

    /// Ends the borrow of the destination and hands the verified frame on.
    fn hand_on(self, sink: &mut impl FrameSink) -> Result<(), Fault> {
        let Incoming { header, target, control, .. } = self;
        let control = match target {
            PayloadTarget::Memory(_ends_here) => None,
            PayloadTarget::Control => Some(control),
        };
        sink.on_frame(&header, control.as_deref())
    }
}

/// Frames coming in.
#[derive(Debug)]
pub(crate) enum FrameReader {
    /// In the clear.
    Plain(Box<PlainReader>),
    /// Sealed.
    Sealed(Box<SealedReader>),
}

impl FrameReader {
    /// Makes a reader at the start of a stream, which is sealed where there is an opener.
    pub(crate) fn new(opener: Option<FrameOpener>) -> FrameReader {
        match opener {
            None => FrameReader::Plain(Box::new(PlainReader::new())),
            Some(opener) => FrameReader::Sealed(Box::new(SealedReader::new(opener))),
        }
    }

    /// Ends the borrow of registered memory; the rest of the stream cannot be read afterwards.
    pub(crate) fn release_memory(&mut self) {
        match self {
            FrameReader::Plain(reader) => reader.incoming = None,
            FrameReader::Sealed(reader) => reader.release_memory(),
        }
    }

    /// Reads and handles frames until the socket is empty or about `budget` bytes were read.
    /// Returns the bytes read, also beside a fault.
    pub(crate) fn receive(
        &mut self,
        socket: &dyn Socket,
        budget: usize,
        sink: &mut impl FrameSink,
    ) -> (usize, Result<(), Fault>) {
        let mut total = 0;
        while total < budget {
            let read = match self {
                FrameReader::Plain(reader) => reader.read(socket),
                FrameReader::Sealed(reader) => reader.read(socket),
            };
            let (count, wanted) = match read {
                Ok((0, _)) => return (total, Err(Fault::Lost("closed the connection".to_owned()))),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    return (total, Err(Fault::Lost(format!("connection failed: {error}"))))
                }
            };
            total += count;
            let consumed = match self {
                FrameReader::Plain(reader) => reader.consume(sink),
                FrameReader::Sealed(reader) => reader.consume(sink),
            };
            if let Err(fault) = consumed {
                return (total, Err(fault));
            }
            if count < wanted {
                // The socket was empty; another call would only say so.
                break;
            }
        }
        (total, Ok(()))
    }
}

/// Frames coming in that are not sealed.
#[derive(Debug)]
pub(crate) struct PlainReader {
    incoming: Option<Incoming>,
    /// Of the payload that is arriving.
    checksum: Checksum,
    staging: Box<[u8; STAGING_BYTES]>,
    start: usize,
    end: usize,
}

impl PlainReader {
    fn new() -> PlainReader {
        PlainReader {
            incoming: None,
            checksum: Checksum::new(),
            staging: Box::new([0; STAGING_BYTES]),
            start: 0,
            end: 0,
        }
    }

    /// Reads the rest of the payload and bytes that follow it in one system call. Returns the bytes read
    /// and the bytes of room.
    fn read(&mut self, socket: &dyn Socket) -> io::Result<(usize, usize)> {
        if self.start > 0 {
            self.staging.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let large = self.incoming.as_ref().is_some_and(Incoming::is_large);
        let ahead = if large { self.end + HEADER_BYTES } else { STAGING_BYTES };
        let staged = &mut self.staging[self.end..ahead];
        let direct = self.incoming.as_mut().map_or(&mut [][..], Incoming::direct_room);
        let (direct_bytes, wanted) = (direct.len(), direct.len() + staged.len());
        let count = if direct.is_empty() {
            socket.receive(&mut [IoSliceMut::new(staged)])?
        } else {
            socket.receive(&mut [IoSliceMut::new(direct), IoSliceMut::new(staged)])?
        };
        let directly = count.min(direct_bytes);
        if let Some(incoming) = &mut self.incoming {
            self.checksum.update(&incoming.direct_room()[..directly]);
            incoming.filled += directly;
        }
        self.end += count - directly;
        Ok((count, wanted))
    }

    /// Handles all staged bytes.
    fn consume(&mut self, sink: &mut impl FrameSink) -> Result<(), Fault> {
        loop {
            let staged = &self.staging[self.start..self.end];
            let Some(mut incoming) = self.incoming.take() else {
                let Some(bytes) = staged.first_chunk::<HEADER_BYTES>() else {
                    return Ok(());
                };
                let header = FrameHeader::decode(bytes).map_err(|error| {
                    Fault::ProtocolViolation(format!("sent bytes that are no frame: {error}"))
                })?;
                self.incoming = Some(Incoming::new(header, sink)?);
                self.checksum = Checksum::new();
                self.start += HEADER_BYTES;
                continue;
            };
            let count = staged.len().min(incoming.rest());
            incoming.take(&staged[..count]);
            self.checksum.update(&staged[..count]);
            self.start += count;
            if incoming.rest() > 0 {
                self.incoming = Some(incoming);
                return Ok(());
            }
            let (computed, announced) = (self.checksum.value(), incoming.header.payload_checksum);
            if computed != announced {
                return Err(Fault::ProtocolViolation(format!(
                    "sent a corrupted payload: {}: checksum {computed:#010x}, announced {announced:#010x}; \
                     nothing of it was released",
                    sink.describe(&incoming.header)
                )));
            }
            incoming.hand_on(sink)?;
        }
    }
}

// Frames coming in on a sealed connection. Bytes are verified and decrypted in a buffer of the reader's own
// and only then copied to their destination: what does not open never reaches a tensor.

/// Bytes that one read may take: some chunks, which stay in the processor's cache.
const BUFFER_BYTES: usize = 128 << 10;

/// Frames coming in that are sealed.
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
                    let incoming = Incoming::new(header, sink)?;
                    if header.length == 0 {
                        incoming.hand_on(sink)?;
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
                            incoming.hand_on(sink)?;
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

fn refused(error: &OpenError, incoming: Option<&Incoming>, sink: &impl FrameSink) -> Fault {
    let frame = incoming
        .map_or_else(String::new, |incoming| format!(" ({})", sink.describe(&incoming.header)));
    Fault::ProtocolViolation(format!("sent {error}{frame}; nothing of it was released"))
}
