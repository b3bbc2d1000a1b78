//! Frames coming in, read straight to where they belong. Only what follows a payload in the same
//! read (the next header, small frames) passes through a staging buffer.

use super::connection::Fault;
use crate::memory::Span;
use crate::sys::syscall::VectoredReceive;
use gradlane_wire::{Checksum, FrameHeader, HEADER_BYTES};
use std::io;
use std::os::fd::BorrowedFd;

/// Bytes of what follows a payload that one read may take along.
const STAGING_BYTES: usize = 4096;
/// After payloads of this size and more, a read takes along only the next header: what follows is
/// probably as large and is better read straight to its place.
const LARGE_BYTES: usize = 16 << 10;

/// Where a payload goes.
#[derive(Debug)]
pub(crate) enum PayloadTarget {
    /// Straight to memory.
    Span(Span),
    /// To a buffer that grows with the bytes that have really come.
    Control,
}

impl PayloadTarget {
    /// Bytes that there is room for, where that is bounded.
    fn room(&self) -> Option<usize> {
        match self {
            PayloadTarget::Span(span) => Some(span.length()),
            PayloadTarget::Control => None,
        }
    }
}

/// What a receiver asks for and tells about each frame.
pub(crate) trait FrameSink {
    /// A header has come; where does its payload go?
    fn on_header(&mut self, header: &FrameHeader) -> Result<PayloadTarget, Fault>;
    /// The payload is in place and its checksum is right; `control` has it when it went there.
    fn on_frame(&mut self, header: &FrameHeader, control: Option<&[u8]>) -> Result<(), Fault>;
    /// Names the frame in a message.
    fn describe(&self, header: &FrameHeader) -> String;
}

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
        self.header.length as usize >= LARGE_BYTES && matches!(self.target, PayloadTarget::Span(_))
    }

    /// Memory that the rest of the payload can be read to directly.
    fn direct_room(&self) -> Span {
        match self.target {
            PayloadTarget::Span(span) => span.from(self.filled),
            PayloadTarget::Control => Span::EMPTY,
        }
    }

    /// Notes bytes that were read to `direct_room`.
    fn filled_directly(&mut self, count: usize) {
        self.direct_room().first(count).add_to(&mut self.checksum);
        self.filled += count;
    }

    /// Takes bytes from the staging buffer.
    fn take(&mut self, bytes: &[u8]) {
        self.checksum.update(bytes);
        match self.target {
            PayloadTarget::Span(span) => span.from(self.filled).write(bytes),
            PayloadTarget::Control => self.control.extend_from_slice(bytes),
        }
        self.filled += bytes.len();
    }
}

/// Frames coming in.
#[derive(Debug)]
pub(crate) struct FrameReader {
    incoming: Option<Incoming>,
    staging: Box<[u8; STAGING_BYTES]>,
    start: usize,
    end: usize,
}

impl FrameReader {
    /// A receiver at the start of a stream.
    pub(crate) fn new() -> FrameReader {
        FrameReader { incoming: None, staging: Box::new([0; STAGING_BYTES]), start: 0, end: 0 }
    }

    /// Reads and handles frames until the socket is empty or about `budget` bytes were read.
    /// Returns the bytes read, also beside a fault.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        budget: usize,
        sink: &mut impl FrameSink,
    ) -> (usize, Result<(), Fault>) {
        let mut total = 0;
        while total < budget {
            let (count, wanted) = match self.read(socket) {
                Ok((0, _)) => return (total, Err(Fault::Lost("closed the connection".to_owned()))),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    return (total, Err(Fault::Lost(format!("connection failed: {error}"))))
                }
            };
            total += count;
            if let Err(fault) = self.consume(sink) {
                return (total, Err(fault));
            }
            if count < wanted {
                // The socket was empty; a further call would only say so.
                break;
            }
        }
        (total, Ok(()))
    }

    /// One system call: the rest of the payload, and what follows it.
    fn read(&mut self, socket: BorrowedFd<'_>) -> io::Result<(usize, usize)> {
        if self.start > 0 {
            self.staging.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let direct = self.incoming.as_ref().map_or(Span::EMPTY, Incoming::direct_room);
        let large = self.incoming.as_ref().is_some_and(Incoming::is_large);
        let ahead = if large { self.end + HEADER_BYTES } else { STAGING_BYTES };
        let mut scatter = VectoredReceive::new();
        scatter.push_span(direct);
        scatter.push_room(&mut self.staging[self.end..ahead]);
        let wanted = scatter.bytes();
        let count = scatter.receive(socket)?;
        let directly = count.min(direct.length());
        if let Some(incoming) = &mut self.incoming {
            incoming.filled_directly(directly);
        }
        self.end += count - directly;
        Ok((count, wanted))
    }

    /// Handles everything that has come.
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
                // Where it lies: it is large, for the checksum holds a part of the payload.
                let finished = finish(incoming, sink);
                self.incoming = None;
                finished?;
            } else {
                let Some(bytes) = staged.first_chunk::<HEADER_BYTES>() else {
                    return Ok(());
                };
                let header = FrameHeader::decode(bytes).map_err(|error| {
                    Fault::Broken(format!("sent bytes that are no frame: {error}"))
                })?;
                let target = sink.on_header(&header)?;
                let length = header.length as usize;
                if let Some(room) = target.room().filter(|&room| room != length) {
                    let frame = sink.describe(&header);
                    let what = format!("room for {room} of {length} bytes: {frame}");
                    return Err(Fault::Internal(what));
                }
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

fn finish(incoming: &Incoming, sink: &mut impl FrameSink) -> Result<(), Fault> {
    let Incoming { header, target, control, checksum, .. } = incoming;
    let computed = checksum.value();
    if computed != header.payload_checksum {
        return Err(Fault::Broken(format!(
            "sent a corrupted payload: {}: checksum {computed:#010x}, announced {:#010x}; nothing \
             of it was released",
            sink.describe(header),
            header.payload_checksum
        )));
    }
    let control = matches!(target, PayloadTarget::Control).then_some(control.as_slice());
    sink.on_frame(header, control)
}
