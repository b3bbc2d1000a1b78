//! The handshake: the caller's rank, job and tensors, and proof of the secret.
//!
//! Both sides send a hello; each then proves that it knows the job's secret by a keyed hash over both
//! hellos (`MAC_BYTES` bytes, computed above this crate). A side that refuses sends a reject
//! instead and closes.
//!
//! Hello (128 bytes): magic `GLNH` (4), wire version (1), reserved zero (3), rank (4), world size
//! (4), generation (4), lane (2), number of lanes (2), job digest (32), tensor-table digest (32), nonce (32),
//! reserved zero (8). Reject (256 bytes): magic `GLNR` (4), reason code (1), reserved (1), length of
//! the text (2), text in UTF-8, zero padding up to byte 224, keyed hash (32): a refusal whose
//! hash is wrong may come from anyone.
//!
//! Where connections are sealed, all messages but a reject begin with a preamble (16 bytes), the same
//! in both directions: magic `GLNS` (4), wire version (1), reserved zero (3), the caller's rank (4),
//! the called rank (4). After it, the first message of either side (256 bytes) has a message of
//! the Noise pattern NNpsk0 (240), whose payload is the sender's hello (128) and the SHA-256 of the
//! caller's and of the called rank's published address (32 each); the second one has the tag of no
//! bytes under the keys of the sender's frames (16).

use crate::header::array;
use crate::sealed::TAG_BYTES;
use crate::untrusted::escaped;
use crate::WIRE_VERSION;
use alloc::string::String;
use gradlane_units::Rank;

/// Size of a hello.
pub const HELLO_BYTES: usize = 128;
/// Size of a reject.
pub const REJECT_BYTES: usize = 256;
/// Bytes that the keyed hash at a reject's end covers.
pub const REJECT_SIGNED_BYTES: usize = REJECT_BYTES - MAC_BYTES;
/// Size of the proof that follows the hellos.
pub const MAC_BYTES: usize = 32;
/// Size of a nonce.
pub const NONCE_BYTES: usize = 32;

/// Size of the preamble of sealed handshakes.
pub const PREAMBLE_BYTES: usize = 16;
/// Size of the payload of a sealed hello.
pub const SEALED_HELLO_PAYLOAD_BYTES: usize = HELLO_BYTES + 2 * 32;
/// Size of a sealed hello: preamble, ephemeral key, payload and tag.
pub const SEALED_HELLO_BYTES: usize = PREAMBLE_BYTES + 32 + SEALED_HELLO_PAYLOAD_BYTES + TAG_BYTES;
/// Size of the proof that follows a sealed hello: preamble and tag.
pub const SEALED_PROOF_BYTES: usize = PREAMBLE_BYTES + TAG_BYTES;

const HELLO_MAGIC: [u8; 4] = *b"GLNH";
const PREAMBLE_MAGIC: [u8; 4] = *b"GLNS";
const REJECT_MAGIC: [u8; 4] = *b"GLNR";
const REJECT_TEXT_BYTES: usize = REJECT_SIGNED_BYTES - 8;

/// First message of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Version of the wire format that the sender speaks.
    pub version: u8,
    /// The sender.
    pub rank: Rank,
    /// Number of ranks that the sender expects.
    pub world_size: u32,
    /// Membership generation.
    pub generation: u32,
    /// The lane that the connection is of.
    pub lane: u16,
    /// Number of lanes that the sender has.
    pub lanes: u16,
    /// SHA-256 of the job id.
    pub job_digest: [u8; 32],
    /// SHA-256 of the tensor table and the plan.
    pub table_digest: [u8; 32],
    /// Fresh random bytes.
    pub nonce: [u8; NONCE_BYTES],
}

impl Hello {
    /// The 128 bytes of this hello.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0_u8; HELLO_BYTES];
        bytes[0..4].copy_from_slice(&HELLO_MAGIC);
        bytes[4] = self.version;
        bytes[8..12].copy_from_slice(&self.rank.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.world_size.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.generation.to_le_bytes());
        bytes[20..22].copy_from_slice(&self.lane.to_le_bytes());
        bytes[22..24].copy_from_slice(&self.lanes.to_le_bytes());
        bytes[24..56].copy_from_slice(&self.job_digest);
        bytes[56..88].copy_from_slice(&self.table_digest);
        bytes[88..120].copy_from_slice(&self.nonce);
        bytes
    }

    /// Whether these first four bytes begin a hello.
    #[must_use]
    pub fn begins(bytes: &[u8]) -> bool {
        bytes.starts_with(&HELLO_MAGIC)
    }

    /// Reads a hello. A hello of another version is returned too, so that the refusal can name it.
    ///
    /// # Errors
    /// `None` when the bytes are no hello at all (not gradlane, or reserved fields are set).
    #[must_use]
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Hello> {
        if bytes[0..4] != HELLO_MAGIC {
            return None;
        }
        let reserved = bytes[5..8].iter().chain(&bytes[120..128]);
        if bytes[4] == WIRE_VERSION && reserved.into_iter().any(|&byte| byte != 0) {
            return None;
        }
        Some(Hello {
            version: bytes[4],
            rank: Rank(u32::from_le_bytes(array(bytes, 8))),
            world_size: u32::from_le_bytes(array(bytes, 12)),
            generation: u32::from_le_bytes(array(bytes, 16)),
            lane: u16::from_le_bytes(array(bytes, 20)),
            lanes: u16::from_le_bytes(array(bytes, 22)),
            job_digest: array(bytes, 24),
            table_digest: array(bytes, 56),
            nonce: array(bytes, 88),
        })
    }
}

/// The first bytes of each message of a sealed handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// Version of the wire format that the caller speaks.
    pub version: u8,
    /// The rank that calls.
    pub caller: Rank,
    /// The rank that the caller wants.
    pub called: Rank,
}

impl Preamble {
    /// The 16 bytes of this preamble.
    #[must_use]
    pub fn encode(&self) -> [u8; PREAMBLE_BYTES] {
        let mut bytes = [0_u8; PREAMBLE_BYTES];
        bytes[0..4].copy_from_slice(&PREAMBLE_MAGIC);
        bytes[4] = self.version;
        bytes[8..12].copy_from_slice(&self.caller.0.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.called.0.to_le_bytes());
        bytes
    }

    /// Whether these first four bytes begin a preamble.
    #[must_use]
    pub fn begins(bytes: &[u8]) -> bool {
        bytes.starts_with(&PREAMBLE_MAGIC)
    }

    /// Reads a preamble, also of another version; `None` when the bytes are none.
    #[must_use]
    pub fn decode(bytes: &[u8; PREAMBLE_BYTES]) -> Option<Preamble> {
        let is_known = bytes[4] != WIRE_VERSION || bytes[5..8] == [0; 3];
        (Preamble::begins(bytes) && is_known).then(|| Preamble {
            version: bytes[4],
            caller: Rank(u32::from_le_bytes(array(bytes, 8))),
            called: Rank(u32::from_le_bytes(array(bytes, 12))),
        })
    }
}

/// Why a rank refuses a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RejectReason {
    /// Another wire version.
    Version = 1,
    /// Another job.
    Job = 2,
    /// Another world size, or a rank outside it.
    WorldSize = 3,
    /// Another tensor table or plan.
    Table = 4,
    /// A rank that is connected already.
    RankTaken = 5,
    /// The proof of the secret was wrong.
    Secret = 6,
    /// Another membership generation.
    Generation = 7,
    /// One side seals its connections, the other does not.
    Sealing = 8,
    /// An address other than the published one.
    Address = 9,
    /// Another number of lanes.
    Lanes = 10,
}

impl RejectReason {
    const ALL: [RejectReason; 10] = [
        RejectReason::Version,
        RejectReason::Job,
        RejectReason::WorldSize,
        RejectReason::Table,
        RejectReason::RankTaken,
        RejectReason::Secret,
        RejectReason::Generation,
        RejectReason::Sealing,
        RejectReason::Address,
        RejectReason::Lanes,
    ];
}

/// A refusal with its reason in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// The reason.
    pub reason: RejectReason,
    /// The reason for a person; cut to 216 bytes on the wire, escaped when it comes from there.
    pub text: String,
}

impl Reject {
    /// The 256 bytes of this refusal, the keyed hash left zero.
    #[must_use]
    pub fn encode(&self) -> [u8; REJECT_BYTES] {
        let mut bytes = [0_u8; REJECT_BYTES];
        bytes[0..4].copy_from_slice(&REJECT_MAGIC);
        bytes[4] = self.reason as u8;
        let mut length = self.text.len().min(REJECT_TEXT_BYTES);
        while !self.text.is_char_boundary(length) {
            length -= 1;
        }
        bytes[6..8].copy_from_slice(&(length as u16).to_le_bytes());
        bytes[8..8 + length].copy_from_slice(&self.text.as_bytes()[..length]);
        bytes
    }

    /// Whether these first four bytes begin a reject.
    #[must_use]
    pub fn begins(bytes: &[u8]) -> bool {
        bytes.starts_with(&REJECT_MAGIC)
    }

    /// Reads a refusal; `None` when the bytes are none.
    #[must_use]
    pub fn decode(bytes: &[u8; REJECT_BYTES]) -> Option<Reject> {
        if !Reject::begins(bytes) {
            return None;
        }
        let reason = RejectReason::ALL.into_iter().find(|&reason| reason as u8 == bytes[4])?;
        let length = usize::from(u16::from_le_bytes(array(bytes, 6)));
        let text = bytes[..REJECT_SIGNED_BYTES].get(8..8 + length)?;
        Some(Reject { reason, text: escaped(text, REJECT_TEXT_BYTES) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn hello_survives_the_wire(rank in any::<u32>(), world_size in any::<u32>(),
                                   generation in any::<u32>(), lane in any::<u16>(),
                                   lanes in any::<u16>(), fill in any::<u8>()) {
            let hello = Hello {
                version: WIRE_VERSION, rank: Rank(rank), world_size, generation, lane, lanes,
                job_digest: [fill; 32], table_digest: [!fill; 32], nonce: [fill ^ 0x55; 32],
            };
            prop_assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        }

        #[test]
        fn preamble_survives_the_wire(version in any::<u8>(), caller in any::<u32>(),
                                      called in any::<u32>()) {
            let preamble = Preamble { version, caller: Rank(caller), called: Rank(called) };
            prop_assert_eq!(Preamble::decode(&preamble.encode()), Some(preamble));
            prop_assert!(!Hello::begins(&preamble.encode()));
        }

        #[test]
        fn reject_survives_the_wire_cut_at_a_character(text in ".{0,200}") {
            let reject = Reject { reason: RejectReason::Job, text };
            let back = Reject::decode(&reject.encode());
            let back = back.map(|it| it.text).unwrap_or_default();
            let whole = escaped(reject.text.as_bytes(), usize::MAX);
            prop_assert!(whole.starts_with(&back));
            prop_assert!(back.len() == whole.len() || back.len() > REJECT_TEXT_BYTES - 4);
        }

        #[test]
        fn hostile_reject_lengths_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), REJECT_BYTES)) {
            bytes[..4].copy_from_slice(&REJECT_MAGIC);
            bytes[4] = bytes[4] % 10 + 1;
            bytes[7] = 0;
            let bytes: [u8; REJECT_BYTES] = array(&bytes, 0);
            let length = usize::from(bytes[6]);
            let text = Reject::decode(&bytes).map(|it| it.text);
            prop_assert_eq!(text.is_some(), length <= REJECT_TEXT_BYTES);
            prop_assert!(!text.unwrap_or_default().contains(char::is_control));
        }
    }

    #[test]
    fn a_hello_of_another_version_can_still_be_named() {
        let hello = Hello {
            version: 9,
            rank: Rank(1),
            world_size: 2,
            generation: 0,
            lane: 0,
            lanes: 1,
            job_digest: [0; 32],
            table_digest: [0; 32],
            nonce: [0; 32],
        };
        assert_eq!(Hello::decode(&hello.encode()).map(|it| it.version), Some(9));
        assert_eq!(Hello::decode(&[0; HELLO_BYTES]), None);
        assert_eq!("rank 1", Rank(1).to_string());
    }
}
