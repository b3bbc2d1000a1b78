//! One connection: frames going out, frames coming in.
//!
//! What goes out is a short queue of frames that the engine has chosen, written straight from the
//! memory they lie in. What comes in is read straight to where it belongs; only what follows a
//! payload in the same read (the next header, small frames) passes through a staging buffer.

use crate::descriptors::Tracked;
use crate::memory::Span;
use crate::syscall::{Gather, Scatter};
use gradlane_engine::Transmit;
use gradlane_wire::{FrameHeader, FrameKind, HEADER_BYTES};
use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Bytes of what follows a payload that one read may take along.
const STAGING_BYTES: usize = 4096;
/// After payloads of this size and more, a read takes along only the next header: what follows is
/// probably as large and is better read straight to its place.
const LARGE_BYTES: usize = 16 << 10;

/// Bytes after a header.
#[derive(Debug)]
pub(crate) enum OutgoingPayload {
    /// In registered memory.
    Span(Span),
    /// The driver's own.
    Owned(Vec<u8>),
}

impl OutgoingPayload {
    fn length(&self) -> usize {
        match self {
            OutgoingPayload::Span(span) => span.length(),
            OutgoingPayload::Owned(bytes) => bytes.len(),
        }
    }
}

/// A frame on its way out.
#[derive(Debug)]
pub(crate) struct Outgoing {
    header: FrameHeader,
    /// The encoded header with its checksums, once they are computed.
    encoded: Option<[u8; HEADER_BYTES]>,
    payload: OutgoingPayload,
    /// To be reported to the engine when it is sent; none for frames of the driver's own.
    transmit: Option<Transmit>,
}

impl Outgoing {
    /// A frame that nothing has been sent of. The engine hears of `transmit` once it is sent.
    pub(crate) fn new(
        header: FrameHeader,
        payload: OutgoingPayload,
        transmit: Option<Transmit>,
    ) -> Outgoing {
        Outgoing { header, encoded: None, payload, transmit }
    }

    fn length(&self) -> usize {
        HEADER_BYTES + self.payload.length()
    }

    /// Computes the checksums. This is done right before the bytes are read for sending, so that
    /// they are read from memory once.
    fn seal(&mut self) {
        if self.encoded.is_none() {
            let mut checksum = crc32fast::Hasher::new();
            match &self.payload {
                OutgoingPayload::Span(span) => span.add_to(&mut checksum),
                OutgoingPayload::Owned(bytes) => checksum.update(bytes),
            }
            self.header.payload_crc = checksum.finalize();
            self.encoded = Some(self.header.encode());
        }
    }
}

/// What a flush has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// Nothing is left.
    All,
    /// The kernel takes no more for now.
    Blocked,
}

/// Frames going out.
#[derive(Debug, Default)]
pub(crate) struct Sender {
    queue: VecDeque<Outgoing>,
    /// Bytes of the first frame that the kernel has.
    first_sent: usize,
}

impl Sender {
    /// Moves frames behind those that are waiting.
    pub(crate) fn append(&mut self, frames: &mut VecDeque<Outgoing>) {
        self.queue.append(frames);
    }

    /// Whether nothing is waiting.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Gives the kernel as much as it takes. Calls `sent` for each frame that it has whole, and
    /// adds the bytes that it took to `total`, also beside an error.
    pub(crate) fn flush(
        &mut self,
        socket: BorrowedFd<'_>,
        total: &mut usize,
        mut sent: impl FnMut(&FrameHeader, Option<Transmit>),
    ) -> io::Result<Flushed> {
        while !self.queue.is_empty() {
            for outgoing in &mut self.queue {
                outgoing.seal();
            }
            let gather = self.gather();
            let offered = gather.bytes();
            let count = match gather.send(socket) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Flushed::Blocked);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            *total += count;
            self.advance(count, &mut sent);
            if count < offered {
                return Ok(Flushed::Blocked);
            }
        }
        Ok(Flushed::All)
    }

    fn gather(&self) -> Gather<'_> {
        let mut gather = Gather::new();
        let mut skip = self.first_sent;
        for outgoing in &self.queue {
            let Some(encoded) = outgoing.encoded.as_ref().filter(|_| gather.has_room()) else {
                break;
            };
            gather.push_bytes(&encoded[skip.min(HEADER_BYTES)..]);
            let skip_payload = skip.saturating_sub(HEADER_BYTES);
            match &outgoing.payload {
                OutgoingPayload::Span(span) => gather.push_span(span.from(skip_payload)),
                OutgoingPayload::Owned(bytes) => gather.push_bytes(&bytes[skip_payload..]),
            }
            skip = 0;
        }
        gather
    }

    fn advance(&mut self, count: usize, sent: &mut impl FnMut(&FrameHeader, Option<Transmit>)) {
        self.first_sent += count;
        while let Some(first) = self.queue.front() {
            let length = first.length();
            if self.first_sent < length {
                break;
            }
            self.first_sent -= length;
            if let Some(outgoing) = self.queue.pop_front() {
                sent(&outgoing.header, outgoing.transmit);
            }
        }
    }

    /// Lets go of registered memory: drops frames that have not begun, but for the reason of an
    /// abort, and copies one that has, so that what follows still finds the stream in order. Returns
    /// what the engine had chosen and is dropped.
    pub(crate) fn let_go_of_memory(&mut self) -> Vec<Transmit> {
        let begun = usize::from(self.first_sent > 0);
        for outgoing in self.queue.iter_mut().take(begun) {
            if let OutgoingPayload::Span(span) = outgoing.payload {
                outgoing.payload = OutgoingPayload::Owned(span.to_vec());
            }
        }
        let mut dropped = Vec::new();
        for outgoing in self.queue.split_off(begun.min(self.queue.len())) {
            if outgoing.header.kind == FrameKind::Abort {
                self.queue.push_back(outgoing);
            } else {
                dropped.extend(outgoing.transmit);
            }
        }
        dropped
    }
}

/// Why a connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The peer is gone; the reason without its name.
    Lost(String),
    /// The peer sent what it must not; the sentence without its name at the front.
    Broken(String),
    /// This rank broke an invariant of its own; the whole sentence.
    Internal(String),
}

/// Where a payload goes.
#[derive(Debug)]
pub(crate) enum Target {
    /// Straight to memory.
    Span(Span),
    /// To a buffer that grows with the bytes that have really come.
    Control,
}

impl Target {
    /// Bytes that there is room for, where that is bounded.
    fn room(&self) -> Option<usize> {
        match self {
            Target::Span(span) => Some(span.length()),
            Target::Control => None,
        }
    }
}

/// What a receiver asks for and tells about each frame.
pub(crate) trait FrameSink {
    /// A header has come; where does its payload go?
    fn frame_announced(&mut self, header: &FrameHeader) -> Result<Target, Fault>;
    /// The payload is in place and its checksum is right; `control` has it when it went there.
    fn frame_arrived(&mut self, header: &FrameHeader, control: Option<&[u8]>) -> Result<(), Fault>;
    /// Names the frame in a message.
    fn describe(&self, header: &FrameHeader) -> String;
}

/// A payload that is being received.
#[derive(Debug)]
struct Incoming {
    header: FrameHeader,
    target: Target,
    control: Vec<u8>,
    filled: usize,
    checksum: crc32fast::Hasher,
}

impl Incoming {
    fn rest(&self) -> usize {
        self.header.length as usize - self.filled
    }

    fn is_large(&self) -> bool {
        self.header.length as usize >= LARGE_BYTES && matches!(self.target, Target::Span(_))
    }

    /// Memory that the rest of the payload can be read to directly.
    fn direct_room(&self) -> Span {
        match self.target {
            Target::Span(span) => span.from(self.filled),
            Target::Control => Span::EMPTY,
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
            Target::Span(span) => span.from(self.filled).write(bytes),
            Target::Control => self.control.extend_from_slice(bytes),
        }
        self.filled += bytes.len();
    }
}

/// Frames coming in.
#[derive(Debug)]
pub(crate) struct Receiver {
    incoming: Option<Incoming>,
    staging: Box<[u8; STAGING_BYTES]>,
    start: usize,
    end: usize,
}

impl Receiver {
    /// A receiver at the start of a stream.
    pub(crate) fn new() -> Receiver {
        Receiver { incoming: None, staging: Box::new([0; STAGING_BYTES]), start: 0, end: 0 }
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
        let mut scatter = Scatter::new();
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
                if let Some(whole) = self.incoming.take() {
                    finish(whole, sink)?;
                }
            } else {
                let Some(bytes) = staged.first_chunk::<HEADER_BYTES>() else {
                    return Ok(());
                };
                let header = FrameHeader::decode(bytes).map_err(|error| {
                    Fault::Broken(format!("sent bytes that are no frame: {error}"))
                })?;
                let target = sink.frame_announced(&header)?;
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
                    checksum: crc32fast::Hasher::new(),
                });
            }
        }
    }
}

fn finish(incoming: Incoming, sink: &mut impl FrameSink) -> Result<(), Fault> {
    let Incoming { header, target, control, checksum, .. } = incoming;
    let computed = checksum.finalize();
    if computed != header.payload_crc {
        return Err(Fault::Broken(format!(
            "sent a corrupted payload: {}: checksum {computed:#010x}, announced {:#010x}; nothing \
             of it was released",
            sink.describe(&header),
            header.payload_crc
        )));
    }
    let control = matches!(target, Target::Control).then_some(control.as_slice());
    sink.frame_arrived(&header, control)
}

/// The socket of a connection with both directions.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: Arc<Tracked<TcpStream>>,
    pub(crate) sender: Sender,
    pub(crate) receiver: Receiver,
}

impl Connection {
    /// A connection on which the handshake is done.
    pub(crate) fn new(socket: Arc<Tracked<TcpStream>>) -> Connection {
        Connection { socket, sender: Sender::default(), receiver: Receiver::new() }
    }

    /// Gives the kernel what is waiting to be sent, as [`Sender::flush`].
    pub(crate) fn flush(
        &mut self,
        total: &mut usize,
        sent: impl FnMut(&FrameHeader, Option<Transmit>),
    ) -> io::Result<Flushed> {
        self.sender.flush(self.socket.as_fd(), total, sent)
    }

    /// Reads what has come.
    pub(crate) fn receive(
        &mut self,
        budget: usize,
        sink: &mut impl FrameSink,
    ) -> (usize, Result<(), Fault>) {
        self.receiver.receive(self.socket.as_fd(), budget, sink)
    }
}
