//! Frames under encryption, piece by piece: a header, then chunks of its payload.

use crate::keys::DirectionKeys;
use gradlane_wire::{
    FrameHeader, HeaderError, Preamble, CHUNK_BYTES, HEADER_BYTES, PREAMBLE_BYTES,
    SEALED_HEADER_BYTES, SEALED_PROOF_BYTES, TAG_BYTES,
};

/// Frames to one peer.
#[derive(Debug)]
pub struct FrameSealer {
    keys: DirectionKeys,
}

impl FrameSealer {
    pub(crate) fn new(keys: DirectionKeys) -> FrameSealer {
        FrameSealer { keys }
    }

    /// Makes the proof at the end of the handshake, the first message under these keys.
    pub fn prove(&mut self, preamble: &Preamble) -> [u8; SEALED_PROOF_BYTES] {
        let mut message = preamble.encode().to_vec();
        self.keys.seal(&mut message, PREAMBLE_BYTES);
        message.try_into().expect("a preamble and a tag")
    }

    /// Appends a sealed header.
    pub fn seal_header(&mut self, header: &FrameHeader, bytes: &mut Vec<u8>) {
        // The tags of the payload take the place of its checksum.
        let header = FrameHeader { payload_checksum: 0, ..*header };
        self.seal(&header.encode(), bytes);
    }

    /// Appends the sealed next chunk of the payload of the last header: `CHUNK_BYTES`, or the rest.
    ///
    /// # Panics
    /// When it is longer.
    pub fn seal_chunk(&mut self, chunk: &[u8], bytes: &mut Vec<u8>) {
        assert!(chunk.len() <= CHUNK_BYTES, "a chunk of {} bytes", chunk.len());
        self.seal(chunk, bytes);
    }

    fn seal(&mut self, message: &[u8], bytes: &mut Vec<u8>) {
        let start = bytes.len();
        bytes.extend_from_slice(message);
        self.keys.seal(bytes, start);
    }
}

/// One piece of a frame.
#[derive(Debug, PartialEq, Eq)]
pub enum Opened<'a> {
    /// A frame begins.
    Header(FrameHeader),
    /// The next bytes of the payload; `is_last` tells whether the frame ends with them.
    Chunk {
        /// The bytes.
        bytes: &'a [u8],
        /// Whether the frame is complete.
        is_last: bool,
    },
}

/// Why bytes are not the next piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// They are not the next message of the peer under the keys of this connection.
    #[error(
        "a sealed {} that does not open: it was altered, repeated, left out or moved on the way, or \
         is of another connection",
        if *.in_payload { "payload" } else { "header" }
    )]
    NotAuthentic {
        /// Whether a payload was due.
        in_payload: bool,
    },
    /// The peer has sealed bytes that are no header.
    #[error("bytes that are no frame: {0}")]
    Header(#[from] HeaderError),
}

/// Frames from one peer.
#[derive(Debug)]
pub struct FrameOpener {
    keys: DirectionKeys,
    /// Payload bytes of the current frame that have not arrived.
    rest: usize,
    /// After an error nothing opens any more.
    failed: Option<OpenError>,
}

impl FrameOpener {
    pub(crate) fn new(keys: DirectionKeys) -> FrameOpener {
        FrameOpener { keys, rest: 0, failed: None }
    }

    /// Whether these bytes are the peer's proof at the end of the handshake.
    pub fn verify_proof(
        &mut self,
        preamble: &Preamble,
        message: &mut [u8; SEALED_PROOF_BYTES],
    ) -> bool {
        let (found, tag) = message.split_at_mut(PREAMBLE_BYTES);
        *found == preamble.encode() && self.open_message(tag).is_ok()
    }

    /// Bytes of the next piece, tag included.
    #[must_use]
    pub fn piece_bytes(&self) -> usize {
        match self.rest {
            0 => SEALED_HEADER_BYTES,
            rest => rest.min(CHUNK_BYTES) + TAG_BYTES,
        }
    }

    /// Verifies and decrypts the next piece in place.
    ///
    /// # Errors
    /// [`OpenError`], now and for every piece after this one.
    ///
    /// # Panics
    /// When it is not of [`FrameOpener::piece_bytes`] bytes.
    pub fn open<'a>(&mut self, piece: &'a mut [u8]) -> Result<Opened<'a>, OpenError> {
        assert_eq!(piece.len(), self.piece_bytes(), "bytes of a piece");
        let in_payload = self.rest > 0;
        let bytes = self.open_message(piece)?;
        if in_payload {
            self.rest -= bytes.len();
            return Ok(Opened::Chunk { bytes, is_last: self.rest == 0 });
        }
        let header: &[u8; HEADER_BYTES] = bytes.first_chunk().expect("a header and its tag");
        let header = FrameHeader::decode(header).map_err(|error| self.fail(error.into()))?;
        self.rest = header.length as usize;
        Ok(Opened::Header(header))
    }

    fn open_message<'a>(&mut self, message: &'a mut [u8]) -> Result<&'a mut [u8], OpenError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let error = OpenError::NotAuthentic { in_payload: self.rest > 0 };
        match self.keys.open(message) {
            Some(bytes) => Ok(bytes),
            None => Err(self.fail(error)),
        }
    }

    fn fail(&mut self, error: OpenError) -> OpenError {
        *self.failed.get_or_insert(error)
    }
}
