//! Frames coming in. Where nothing is sealed they are read straight to their destination; only bytes
//! that follow a payload in the same read (the next header, small frames) pass through a staging buffer.

use super::frame_sink::{target_of, Fault, FrameSink, PayloadTarget};
use super::sealed_reader::SealedReader;
use crate::memory::WriteSpan;
use crate::sys::socket::Socket;
use gradlane_seal::FrameOpener;
use gradlane_wire::{Checksum, FrameHeader, HEADER_BYTES};
use std::io::{self, IoSliceMut};

/// Bytes beyond a payload that one read may take.
const STAGING_BYTES: usize = 4096;
/// After payloads of this size and more, a read takes only the next header: the frame after it is
/// probably as large and is better read straight to its destination.
const LARGE_BYTES: usize = 16 << 10;

/// A payload that is being received.
#[derive(Debug)]
struct Incoming {
    header: FrameHeader,
    target: PayloadTarget,
    control: Vec<u8>,
    filled: usize,
    checksum: Checksum,
}

impl Incoming {
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

    /// Notes bytes that were read to `direct_room`.
    fn filled_directly(&mut self, count: usize) {
        if let PayloadTarget::Memory(span) = &self.target {
            self.checksum.update(&span[self.filled..self.filled + count]);
            self.filled += count;
        }
    }

    /// Takes bytes from the staging buffer.
    fn take(&mut self, bytes: &[u8]) {
        self.checksum.update(bytes);
        match &mut self.target {
            PayloadTarget::Memory(span) => {
                span[self.filled..self.filled + bytes.len()].copy_from_slice(bytes);
            }
            PayloadTarget::Control => self.control.extend_from_slice(bytes),
        }
        self.filled += bytes.len();
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
    staging: Box<[u8; STAGING_BYTES]>,
    start: usize,
    end: usize,
}

impl PlainReader {
    fn new() -> PlainReader {
        PlainReader { incoming: None, staging: Box::new([0; STAGING_BYTES]), start: 0, end: 0 }
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
            incoming.filled_directly(directly);
        }
        self.end += count - directly;
        Ok((count, wanted))
    }

    /// Handles all staged bytes.
    fn consume(&mut self, sink: &mut impl FrameSink) -> Result<(), Fault> {
        loop {
            let staged = &self.staging[self.start..self.end];
            if let Some(incoming) = &mut self.incoming {
                let count = staged.len().min(incoming.rest());
                incoming.take(&staged[..count]);
                self.start += count;
                if incoming.rest() > 0 {
                    return Ok(());
                }
                // In place: `Incoming` is large, since the checksum holds a part of the payload.
                let finished = finish(incoming, sink);
                self.incoming = None;
                finished?;
            } else {
                let Some(bytes) = staged.first_chunk::<HEADER_BYTES>() else {
                    return Ok(());
                };
                let header = FrameHeader::decode(bytes).map_err(|error| {
                    Fault::ProtocolViolation(format!("sent bytes that are no frame: {error}"))
                })?;
                let target = target_of(&header, sink)?;
                self.start += HEADER_BYTES;
                self.incoming = Some(Incoming {
                    header,
                    target,
                    control: Vec::new(),
                    filled: 0,
                    checksum: Checksum::new(),
                });
            }
        }
    }
}

/// Verifies the checksum, ends the borrow of the destination and hands the frame on.
fn finish(incoming: &mut Incoming, sink: &mut impl FrameSink) -> Result<(), Fault> {
    let Incoming { header, target, control, checksum, .. } = incoming;
    let computed = checksum.value();
    if computed != header.payload_checksum {
        return Err(Fault::ProtocolViolation(format!(
            "sent a corrupted payload: {}: checksum {computed:#010x}, announced {:#010x}; nothing \
             of it was released",
            sink.describe(header),
            header.payload_checksum
        )));
    }
    match std::mem::replace(target, PayloadTarget::Memory(WriteSpan::empty())) {
        PayloadTarget::Memory(_) => sink.on_frame(header, None),
        PayloadTarget::Control => sink.on_frame(header, Some(control)),
    }
}
