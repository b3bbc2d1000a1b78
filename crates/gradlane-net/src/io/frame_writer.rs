//! Frames going out: a short queue of frames that the engine has chosen, written straight from the
//! memory that they lie in.

use crate::memory::ReadSpan;
use crate::sys::socket::Socket;
use gradlane_engine::Transmit;
use gradlane_wire::{checksum, FrameHeader, FrameKind, HEADER_BYTES};
use std::collections::VecDeque;
use std::io::{self, IoSlice};

/// Most pieces of memory in one send: two a frame.
const PIECES_MAX: usize = 64;

/// Bytes after a header.
#[derive(Debug)]
pub(super) enum OutgoingPayload {
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
pub(super) struct OutgoingFrame {
    header: FrameHeader,
    /// The encoded header, once its checksums are computed.
    encoded: Option<[u8; HEADER_BYTES]>,
    payload: OutgoingPayload,
    /// Reported to the engine when the frame is sent; `None` for frames of the driver's own.
    transmit: Option<Transmit>,
}

impl OutgoingFrame {
    /// Makes a frame of which nothing is sent yet.
    pub(super) fn new(
        header: FrameHeader,
        payload: OutgoingPayload,
        transmit: Option<Transmit>,
    ) -> OutgoingFrame {
        OutgoingFrame { header, encoded: None, payload, transmit }
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
pub(super) enum Flushed {
    /// The queue is empty.
    All,
    /// The kernel takes no more for now.
    Blocked,
}

/// Frames going out.
#[derive(Debug, Default)]
pub(super) struct FrameWriter {
    queue: VecDeque<OutgoingFrame>,
    /// Bytes of the first frame that the kernel has.
    first_sent: usize,
}

impl FrameWriter {
    /// Moves frames to the back of the queue.
    pub(super) fn append(&mut self, frames: &mut VecDeque<OutgoingFrame>) {
        self.queue.append(frames);
    }

    /// Whether the queue is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Gives the kernel as much as it takes. Calls `sent` for each frame that the kernel has whole, and
    /// adds the bytes to `total`, also beside an error.
    pub(super) fn flush(
        &mut self,
        socket: &dyn Socket,
        total: &mut usize,
        mut sent: impl FnMut(&FrameHeader, Option<Transmit>),
    ) -> io::Result<Flushed> {
        while !self.queue.is_empty() {
            for frame in &mut self.queue {
                frame.fill_checksums();
            }
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

    /// Lists the bytes to send and returns the number of pieces.
    fn collect<'a>(&'a self, pieces: &mut [IoSlice<'a>; PIECES_MAX]) -> usize {
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

    fn advance(&mut self, count: usize, sent: &mut impl FnMut(&FrameHeader, Option<Transmit>)) {
        self.first_sent += count;
        while let Some(first) = self.queue.front() {
            let length = first.length();
            if self.first_sent < length {
                break;
            }
            self.first_sent -= length;
            if let Some(frame) = self.queue.pop_front() {
                sent(&frame.header, frame.transmit);
            }
        }
    }

    /// Ends all borrows of registered memory. A frame that has begun is copied, so that the stream stays
    /// in order; frames that have not begun are dropped, except for the reason of an abort. Returns the
    /// engine's part of the dropped ones.
    pub(super) fn release_memory(&mut self) -> Vec<Transmit> {
        let begun = usize::from(self.first_sent > 0);
        for frame in self.queue.iter_mut().take(begun) {
            if let OutgoingPayload::Borrowed(span) = &frame.payload {
                frame.payload = OutgoingPayload::Owned(span.to_vec());
            }
        }
        let mut dropped = Vec::new();
        for frame in self.queue.split_off(begun.min(self.queue.len())) {
            if frame.header.kind == FrameKind::Abort {
                self.queue.push_back(frame);
            } else {
                dropped.extend(frame.transmit);
            }
        }
        dropped
    }
}
