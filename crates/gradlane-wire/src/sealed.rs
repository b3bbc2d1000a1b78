//! Frames of sealed connections: the same bytes under authenticated encryption.
//!
//! A frame is its header (64 bytes, with a payload checksum of zero) and a tag (16), then the payload in
//! chunks of `CHUNK_BYTES`, the last one shorter, each followed by a tag. Each of these pieces is a
//! message of its own; the messages of a direction are numbered from the handshake on, and the
//! number is a part of what the tag covers, so none can be left out, repeated or moved. A frame without
//! payload has no chunks.

use crate::header::HEADER_BYTES;

/// Size of a tag.
pub const TAG_BYTES: usize = 16;
/// Size of a sealed header.
pub const SEALED_HEADER_BYTES: usize = HEADER_BYTES + TAG_BYTES;
/// Most bytes of a payload under one tag.
pub const CHUNK_BYTES: usize = 32 << 10;

/// Returns the bytes on the wire of a sealed frame whose payload has `length` bytes.
#[must_use]
pub const fn sealed_bytes(length: usize) -> usize {
    SEALED_HEADER_BYTES + length + length.div_ceil(CHUNK_BYTES) * TAG_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_chunk_has_a_tag() {
        assert_eq!(sealed_bytes(0), 80);
        assert_eq!(sealed_bytes(1), 97);
        assert_eq!(sealed_bytes(CHUNK_BYTES), 80 + CHUNK_BYTES + 16);
        assert_eq!(sealed_bytes(CHUNK_BYTES + 1), 80 + CHUNK_BYTES + 1 + 32);
    }
}
