//! Frames going out: a short queue of those that the engine has chosen, written straight from the
//! memory they lie in.

use crate::memory::Span;
use crate::sys::syscall::VectoredSend;
use gradlane_engine::Transmit;
use gradlane_wire::{checksum, FrameHeader, FrameKind, HEADER_BYTES};
use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

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
pub(crate) struct OutgoingFrame {
    header: FrameHeader,
    /// The encoded header with its checksums, once they are computed.
    encoded: Option<[u8; HEADER_BYTES]>,
    payload: OutgoingPayload,
    /// To be reported to the engine when it is sent; none for frames of the driver's own.
    transmit: Option<Transmit>,
}

impl OutgoingFrame {
    /// A frame that nothing has been sent of. The engine hears of `transmit` once it is sent.
    pub(crate) fn new(
        header: FrameHeader,
        payload: OutgoingPayload,
        transmit: Option<Transmit>,
    ) -> OutgoingFrame {
        OutgoingFrame { header, encoded: None, payload, transmit }
    }

    fn length(&self) -> usize {
        HEADER_BYTES + self.payload.length()
    }

    /// Computes the checksums. This is done right before the bytes are read for sending, so that
    /// they are read from memory once.
    fn fill_checksums(&mut self) {
        if self.encoded.is_none() {
            self.header.payload_checksum = match &self.payload {
                OutgoingPayload::Span(span) => span.checksum(),
                OutgoingPayload::Owned(bytes) => checksum(bytes),
            };
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
pub(crate) struct FrameWriter {
    queue: VecDeque<OutgoingFrame>,
    /// Bytes of the first frame that the kernel has.
    first_sent: usize,
}

impl FrameWriter {
    /// Moves frames behind those that are waiting.
    pub(crate) fn append(&mut self, frames: &mut VecDeque<OutgoingFrame>) {
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
                outgoing.fill_checksums();
            }
            let mut vectors = self.vectors();
            let offered = vectors.bytes();
            let count = match vectors.send(socket) {
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

    fn vectors(&self) -> VectoredSend<'_> {
        let mut vectors = VectoredSend::new();
        let mut skip = self.first_sent;
        for outgoing in &self.queue {
            let Some(encoded) = outgoing.encoded.as_ref().filter(|_| vectors.has_room()) else {
                break;
            };
            vectors.push_bytes(&encoded[skip.min(HEADER_BYTES)..]);
            let skip_payload = skip.saturating_sub(HEADER_BYTES);
            match &outgoing.payload {
                OutgoingPayload::Span(span) => vectors.push_span(span.from(skip_payload)),
                OutgoingPayload::Owned(bytes) => vectors.push_bytes(&bytes[skip_payload..]),
            }
            skip = 0;
        }
        vectors
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
    pub(crate) fn release_memory(&mut self) -> Vec<Transmit> {
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
