//! The frame header: 64 bytes before every payload.
//!
//! | offset | bytes | field |
//! | ---: | ---: | --- |
//! | 0 | 4 | magic `GLN1` |
//! | 4 | 1 | wire version |
//! | 5 | 1 | kind |
//! | 6 | 1 | form of the payload |
//! | 7 | 1 | flags |
//! | 8 | 8 | step |
//! | 16 | 4 | generation (membership) |
//! | 20 | 4 | plan version |
//! | 24 | 4 | tensor |
//! | 28 | 4 | slice |
//! | 32 | 4 | priority (signed) |
//! | 36 | 4 | sender's rank |
//! | 40 | 8 | offset of the payload in the encoded slice, in bytes; of a block: 4 bytes offset in the block, 4 bytes size of the block |
//! | 48 | 4 | payload length in bytes, at most `MAX_FRAME_BYTES` |
//! | 52 | 2 | hop round the ring, from 1; zero in frames of other kinds |
//! | 54 | 2 | reserved, zero |
//! | 56 | 4 | checksum of the payload: its CRC-32 |
//! | 60 | 4 | checksum of bytes 0 to 59 |
//!
//! A header is verified whole before anything in it is believed.

use crate::kind::{FrameFlags, FrameKind, PayloadForm};
use crate::{checksum, WIRE_VERSION};
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};

/// Size of a header.
pub const HEADER_BYTES: usize = 64;
/// Largest payload of one frame. A header that claims more is refused.
pub const MAX_FRAME_BYTES: u32 = 4 << 20;

const MAGIC: [u8; 4] = *b"GLN1";

/// A frame header without its checksum of itself, which `encode` adds and `decode` verifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// The purpose of the frame.
    pub kind: FrameKind,
    /// How the payload is encoded.
    pub form: PayloadForm,
    /// Qualifying bits.
    pub flags: FrameFlags,
    /// Training step that the frame belongs to.
    pub step: Step,
    /// Membership generation of the sender.
    pub generation: u32,
    /// Version of the priority vector in force at the sender for `step`.
    pub plan_version: u32,
    /// Tensor that the slice belongs to.
    pub tensor: TensorId,
    /// The slice.
    pub slice: SliceId,
    /// Urgency at the sender; the receiving server orders its work by it.
    pub priority: Priority,
    /// The sender.
    pub sender: Rank,
    /// Where the payload starts in the encoded slice, in bytes; of a block (then below 2^32), in the
    /// block.
    pub offset: u64,
    /// Size of the block that the frame is a part of, in bytes; 0 in frames of other kinds.
    pub block_bytes: u32,
    /// Payload length in bytes.
    pub length: u32,
    /// Which hop round the ring this is, from 1; 0 in frames of other kinds.
    pub hop: u16,
    /// Checksum of the payload, see [`crate::checksum()`].
    pub payload_checksum: u32,
}

/// Why 64 bytes are not a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The first four bytes are not gradlane's.
    #[error("not a gradlane frame: magic bytes {found:02x?}")]
    Magic {
        /// The bytes found.
        found: [u8; 4],
    },
    /// The header does not match its own checksum.
    #[error("header checksum {found:#010x}, computed {computed:#010x}")]
    Checksum {
        /// Checksum in the header.
        found: u32,
        /// Checksum of the header's bytes.
        computed: u32,
    },
    /// Another version of the wire format.
    #[error("wire version {found}, this rank speaks {}", WIRE_VERSION)]
    Version {
        /// The sender's version.
        found: u8,
    },
    /// A kind that this version does not know.
    #[error("unknown frame kind {found}")]
    Kind {
        /// The code.
        found: u8,
    },
    /// A form that this version does not know.
    #[error("unknown payload form {found}")]
    Form {
        /// The code.
        found: u8,
    },
    /// A flag or a reserved field that this version does not know.
    #[error("unknown flags or reserved field: flags {flags:#04x}, reserved {reserved:#06x}")]
    Reserved {
        /// The flags.
        flags: u8,
        /// The reserved field.
        reserved: u16,
    },
    /// A hop of a kind that does not go round a ring, or none of one that does.
    #[error("hop {found} in a frame of kind {kind:?}")]
    Hop {
        /// The kind.
        kind: FrameKind,
        /// The hop.
        found: u16,
    },
    /// A payload longer than any frame may be.
    #[error("payload of {found} bytes, at most {} are allowed", MAX_FRAME_BYTES)]
    Length {
        /// The length claimed.
        found: u32,
    },
}

impl FrameHeader {
    /// The 64 bytes of this header.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0_u8; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4] = WIRE_VERSION;
        bytes[5] = self.kind.code();
        bytes[6] = self.form.code();
        bytes[7] = self.flags.0;
        bytes[8..16].copy_from_slice(&self.step.0.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.generation.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.plan_version.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.tensor.0.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.slice.0.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.priority.0.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.sender.0.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.offset.to_le_bytes());
        if self.kind == FrameKind::Block {
            bytes[44..48].copy_from_slice(&self.block_bytes.to_le_bytes());
        }
        bytes[48..52].copy_from_slice(&self.length.to_le_bytes());
        bytes[52..54].copy_from_slice(&self.hop.to_le_bytes());
        bytes[56..60].copy_from_slice(&self.payload_checksum.to_le_bytes());
        let sum = checksum(&bytes[..60]);
        bytes[60..64].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a header, verifying magic, checksum, version, kind, form, flags, length and hop.
    ///
    /// # Errors
    /// A [`HeaderError`] that says what was wrong. Nothing of a refused header is returned.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<FrameHeader, HeaderError> {
        if bytes[0..4] != MAGIC {
            return Err(HeaderError::Magic { found: array(bytes, 0) });
        }
        let found = u32::from_le_bytes(array(bytes, 60));
        let computed = checksum(&bytes[..60]);
        if found != computed {
            return Err(HeaderError::Checksum { found, computed });
        }
        if bytes[4] != WIRE_VERSION {
            return Err(HeaderError::Version { found: bytes[4] });
        }
        let kind = FrameKind::from_code(bytes[5]).ok_or(HeaderError::Kind { found: bytes[5] })?;
        let form = PayloadForm::from_code(bytes[6]).ok_or(HeaderError::Form { found: bytes[6] })?;
        let flags = FrameFlags(bytes[7]);
        let reserved = u16::from_le_bytes(array(bytes, 54));
        if flags.has_unknown() || reserved != 0 {
            return Err(HeaderError::Reserved { flags: flags.0, reserved });
        }
        let length = u32::from_le_bytes(array(bytes, 48));
        if length > MAX_FRAME_BYTES {
            return Err(HeaderError::Length { found: length });
        }
        let hop = u16::from_le_bytes(array(bytes, 52));
        if kind.is_ring() != (hop > 0) {
            return Err(HeaderError::Hop { kind, found: hop });
        }
        let mut offset = u64::from_le_bytes(array(bytes, 40));
        let mut block_bytes = 0;
        if kind == FrameKind::Block {
            offset &= u64::from(u32::MAX);
            block_bytes = u32::from_le_bytes(array(bytes, 44));
        }
        Ok(FrameHeader {
            kind,
            form,
            flags,
            step: Step(u64::from_le_bytes(array(bytes, 8))),
            generation: u32::from_le_bytes(array(bytes, 16)),
            plan_version: u32::from_le_bytes(array(bytes, 20)),
            tensor: TensorId(u32::from_le_bytes(array(bytes, 24))),
            slice: SliceId(u32::from_le_bytes(array(bytes, 28))),
            priority: Priority(i32::from_le_bytes(array(bytes, 32))),
            sender: Rank(u32::from_le_bytes(array(bytes, 36))),
            offset,
            block_bytes,
            length,
            hop,
            payload_checksum: u32::from_le_bytes(array(bytes, 56)),
        })
    }
}

/// `N` bytes of `bytes` from `start`; the callers' ranges are constants inside the array.
pub(crate) fn array<const N: usize>(bytes: &[u8], start: usize) -> [u8; N] {
    let mut out = [0_u8; N];
    out.copy_from_slice(&bytes[start..start + N]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_header() -> impl Strategy<Value = FrameHeader> {
        let kinds = proptest::sample::select(FrameKind::ALL);
        let identity = (any::<u64>(), any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>());
        let rest = (any::<i32>(), any::<u32>(), any::<u64>(), 0..=MAX_FRAME_BYTES, any::<u32>());
        (kinds, 0..8_u8, identity, rest).prop_map(|(kind, flags, a, b)| FrameHeader {
            kind,
            form: PayloadForm::Raw,
            flags: FrameFlags(flags),
            step: Step(a.0),
            generation: a.1,
            plan_version: a.2,
            tensor: TensorId(a.3),
            slice: SliceId(a.4),
            priority: Priority(b.0),
            sender: Rank(b.1),
            offset: if kind == FrameKind::Block { b.2 >> 32 } else { b.2 },
            block_bytes: if kind == FrameKind::Block { a.3 } else { 0 },
            length: b.3,
            hop: if kind.is_ring() { (b.4 as u16).max(1) } else { 0 },
            payload_checksum: b.4,
        })
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(header in any_header()) {
            prop_assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn any_flipped_bit_is_refused(header in any_header(), bit in 0..HEADER_BYTES * 8) {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(FrameHeader::decode(&bytes).is_err());
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::array::uniform32(any::<u8>())) {
            let mut whole = [0_u8; HEADER_BYTES];
            whole[..32].copy_from_slice(&bytes);
            whole[32..].copy_from_slice(&bytes);
            prop_assert!(FrameHeader::decode(&whole).is_err());
        }
    }

    /// Sets one byte and mends the checksum, as a hostile but careful peer would.
    fn with_byte(at: usize, value: u8) -> [u8; HEADER_BYTES] {
        let mut bytes = FrameHeader {
            kind: FrameKind::Push,
            form: PayloadForm::Raw,
            flags: FrameFlags::NONE,
            step: Step(1),
            generation: 0,
            plan_version: 0,
            tensor: TensorId(0),
            slice: SliceId(0),
            priority: Priority(0),
            sender: Rank(0),
            offset: 0,
            block_bytes: 0,
            length: 0,
            hop: 0,
            payload_checksum: 0,
        }
        .encode();
        bytes[at] = value;
        let sum = checksum(&bytes[..60]);
        bytes[60..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    #[test]
    fn each_field_is_checked_even_under_a_right_checksum() {
        let decode = |at, value| FrameHeader::decode(&with_byte(at, value));
        assert_eq!(decode(4, 9), Err(HeaderError::Version { found: 9 }));
        assert_eq!(decode(5, 0), Err(HeaderError::Kind { found: 0 }));
        assert_eq!(decode(6, 77), Err(HeaderError::Form { found: 77 }));
        assert_eq!(decode(7, 0x80), Err(HeaderError::Reserved { flags: 0x80, reserved: 0 }));
        assert_eq!(decode(54, 1), Err(HeaderError::Reserved { flags: 0, reserved: 1 }));
        assert_eq!(decode(52, 1), Err(HeaderError::Hop { kind: FrameKind::Push, found: 1 }));
        let kind = FrameKind::RingReduce;
        assert_eq!(decode(5, kind.code()), Err(HeaderError::Hop { kind, found: 0 }));
        assert_eq!(decode(51, 0xff), Err(HeaderError::Length { found: 0xff00_0000 }));
    }
}
