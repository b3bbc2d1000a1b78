//! Frames going out: a short queue of frames that the engine has chosen, written straight from the
//! memory that they lie in, or sealed into a buffer right before the kernel copies them.

use crate::memory::ReadSpan;
use crate::sys::socket::Socket;
use gradlane_seal::FrameSealer;
use gradlane_wire::{checksum, FrameHeader, FrameKind, CHUNK_BYTES, HEADER_BYTES, TAG_BYTES};
use std::collections::VecDeque;
use std::io::{self, IoSlice};

/// Most pieces of memory in one send: two a frame.
const PIECES_MAX: usize = 64;

/// Sealed bytes that wait for the kernel at most, but for those of one piece: as many as stay in the
/// processor's cache.
const SEALED_AHEAD_BYTES: usize = 64 << 10;

/// Bytes after a header.
#[derive(Debug)]
pub(crate) enum OutgoingPayload {
    /// In registered memory.
    Borrowed(ReadSpan),
    /// In memory of its own.
    Owned(Vec<u8>),
}

impl OutgoingPayload {
    fn bytes(&self) -> &[u8] {
        match self {
            OutgoingPayload::Borrowed(span) => span,
            OutgoingPayload::Owned(bytes) => bytes,
        }
    }
}

/// A frame on its way out.
#[derive(Debug)]
pub(crate) struct OutgoingFrame {
    header: FrameHeader,
    /// The encoded header, once its checksums are computed.
    encoded: Option<[u8; HEADER_BYTES]>,
    payload: OutgoingPayload,
    /// Whether the engine has chosen it, and hears when it is sent.
    is_engines: bool,
}

impl OutgoingFrame {
    /// Makes a frame of which nothing is sent yet.
    pub(crate) fn new(
        header: FrameHeader,
        payload: OutgoingPayload,
        is_engines: bool,
    ) -> OutgoingFrame {
        OutgoingFrame { header, encoded: None, payload, is_engines }
    }

    /// Whether the engine has chosen the frame.
    pub(crate) fn is_engines(&self) -> bool {
        self.is_engines
    }

    fn length(&self) -> usize {
        HEADER_BYTES + self.payload.bytes().len()
    }

    /// Computes the checksums, right before the kernel reads the bytes: they are fetched from memory once.
    fn fill_checksums(&mut self) {
        if self.encoded.is_none() {
            self.header.payload_checksum = checksum(self.payload.bytes());
            self.encoded = Some(self.header.encode());
        }
    }
}

/// The outcome of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flushed {
    /// The queue is empty.
    All,
    /// The kernel takes no more for now.
    Blocked,
}

/// Sealed bytes on their way out.
#[derive(Debug)]
struct SealedBuffer {
    sealer: FrameSealer,
    bytes: Vec<u8>,
    /// Bytes of the buffer that the kernel has.
    sent: usize,
    /// Where the frames that are sealed whole end in the buffer: the first ones of the queue.
    ends: VecDeque<usize>,
    /// Payload bytes that are sealed of the frame after them, once its header is.
    begun: Option<usize>,
}

impl SealedBuffer {
    fn new(sealer: FrameSealer) -> SealedBuffer {
        SealedBuffer {
            sealer,
            bytes: Vec::with_capacity(SEALED_AHEAD_BYTES + CHUNK_BYTES + TAG_BYTES),
            sent: 0,
            ends: VecDeque::new(),
            begun: None,
        }
    }

    /// Seals frames of the queue, once the kernel has all bytes of the buffer.
    fn refill(&mut self, queue: &VecDeque<OutgoingFrame>) {
        if self.sent == self.bytes.len() {
            self.bytes.clear();
            self.sent = 0;
            while self.bytes.len() < SEALED_AHEAD_BYTES {
                let Some(frame) = queue.get(self.ends.len()) else {
                    break;
                };
                self.seal_piece(frame);
            }
        }
    }

    /// Seals the next piece of a frame, its header or a chunk of its payload.
    fn seal_piece(&mut self, frame: &OutgoingFrame) {
        let payload = frame.payload.bytes();
        let sealed = match self.begun {
            None => {
                self.sealer.seal_header(&frame.header, &mut self.bytes);
                0
            }
            Some(sealed) => {
                let end = payload.len().min(sealed + CHUNK_BYTES);
                self.sealer.seal_chunk(&payload[sealed..end], &mut self.bytes);
                end
            }
        };
        self.begun = (sealed < payload.len()).then_some(sealed);
        if self.begun.is_none() {
            self.ends.push_back(self.bytes.len());
        }
    }

    /// Notes bytes that the kernel took. Returns the number of frames that it has whole by them.
    fn advance(&mut self, count: usize) -> usize {
        self.sent += count;
        let whole = self.ends.iter().take_while(|end| **end <= self.sent).count();
        self.ends.drain(..whole);
        whole
    }

    /// Seals the rest of a frame that has begun. Returns the number of frames with bytes in the buffer.
    fn complete(&mut self, queue: &VecDeque<OutgoingFrame>) -> usize {
        while self.begun.is_some() {
            let Some(frame) = queue.get(self.ends.len()) else {
                break;
            };
            self.seal_piece(frame);
        }
        self.ends.len()
    }
}

/// Frames going out.
#[derive(Debug)]
pub(crate) struct FrameWriter {
    queue: VecDeque<OutgoingFrame>,
    /// Bytes of the first frame that the kernel has, where nothing is sealed.
    first_sent: usize,
    /// `None` where nothing is sealed.
    sealed: Option<SealedBuffer>,
}

impl FrameWriter {
    /// Makes a writer at the start of a stream, which is sealed where there is a sealer.
    pub(crate) fn new(sealer: Option<FrameSealer>) -> FrameWriter {
        let sealed = sealer.map(SealedBuffer::new);
        FrameWriter { queue: VecDeque::new(), first_sent: 0, sealed }
    }

    /// Moves frames to the back of the queue.
    pub(crate) fn append(&mut self, frames: &mut VecDeque<OutgoingFrame>) {
        self.queue.append(frames);
    }

    /// Whether the queue is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Gives the kernel as much as it takes. Calls `sent` for each frame that the kernel has whole, and
    /// adds the bytes to `total`, also beside an error.
    pub(crate) fn flush(
        &mut self,
        socket: &dyn Socket,
        total: &mut usize,
        mut sent: impl FnMut(&FrameHeader, bool),
    ) -> io::Result<Flushed> {
        while !self.queue.is_empty() {
            let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
            let count = self.collect(&mut pieces);
            let offered: usize = pieces[..count].iter().map(|piece| piece.len()).sum();
            let taken = match socket.send(&pieces[..count]) {
                Ok(taken) => taken,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Flushed::Blocked);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            *total += taken;
            self.advance(taken, &mut sent);
            if taken < offered {
                return Ok(Flushed::Blocked);
            }
        }
        Ok(Flushed::All)
    }

    /// Lists the bytes to send, checksummed or sealed, and returns the number of pieces.
    fn collect<'a>(&'a mut self, pieces: &mut [IoSlice<'a>; PIECES_MAX]) -> usize {
        if let Some(sealed) = &mut self.sealed {
            sealed.refill(&self.queue);
            pieces[0] = IoSlice::new(&sealed.bytes[sealed.sent..]);
            return 1;
        }
        for frame in &mut self.queue {
            frame.fill_checksums();
        }
        let (mut count, mut skip) = (0, self.first_sent);
        for frame in &self.queue {
            let Some(encoded) = frame.encoded.as_ref().filter(|_| count + 2 <= PIECES_MAX) else {
                break;
            };
            let header = &encoded[skip.min(HEADER_BYTES)..];
            let payload = &frame.payload.bytes()[skip.saturating_sub(HEADER_BYTES)..];
            for piece in [header, payload] {
                if !piece.is_empty() {
                    pieces[count] = IoSlice::new(piece);
                    count += 1;
                }
            }
            skip = 0;
        }
        count
    }

    fn advance(&mut self, count: usize, sent: &mut impl FnMut(&FrameHeader, bool)) {
        let Some(sealed) = &mut self.sealed else {
            self.first_sent += count;
            while let Some(length) = self.queue.front().map(OutgoingFrame::length) {
                if self.first_sent < length {
                    break;
                }
                self.first_sent -= length;
                self.pop(sent);
            }
            return;
        };
        for _ in 0..sealed.advance(count) {
            self.pop(sent);
        }
    }

    fn pop(&mut self, sent: &mut impl FnMut(&FrameHeader, bool)) {
        if let Some(frame) = self.queue.pop_front() {
            sent(&frame.header, frame.is_engines);
        }
    }

    /// How many frames wait that the engine has chosen.
    pub(crate) fn engines_frames(&self) -> u64 {
        self.queue.iter().filter(|frame| frame.is_engines).count() as u64
    }

    /// Ends all borrows of registered memory. A frame that has begun is copied or sealed, so that the stream
    /// stays in order; frames that have not begun are dropped, except for the reason of an abort.
    /// Returns the dropped ones that the engine has chosen.
    pub(crate) fn release_memory(&mut self) -> Vec<FrameHeader> {
        let begun = match &mut self.sealed {
            Some(sealed) => sealed.complete(&self.queue),
            None => usize::from(self.first_sent > 0),
        };
        for frame in self.queue.iter_mut().take(begun) {
            if let OutgoingPayload::Borrowed(span) = &frame.payload {
                let kept = if self.sealed.is_some() { Vec::new() } else { span.to_vec() };
                frame.payload = OutgoingPayload::Owned(kept);
            }
        }
        let mut dropped = Vec::new();
        for frame in self.queue.split_off(begun.min(self.queue.len())) {
            if frame.header.kind == FrameKind::Abort {
                self.queue.push_back(frame);
            } else if frame.is_engines {
                dropped.push(frame.header);
            }
        }
        dropped
    }
}
