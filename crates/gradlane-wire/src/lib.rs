//! Frames that travel between ranks, documented to the byte.
//!
//! The parser never panics and never allocates what a header merely claims: it works on fixed-size
//! arrays and returns plain values. All integers are little-endian.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod checksum;
mod handshake;
mod header;
mod kind;
mod sealed;
mod untrusted;

pub use checksum::{checksum, Checksum};
pub use handshake::{
    Hello, Preamble, Reject, RejectReason, HELLO_BYTES, MAC_BYTES, NONCE_BYTES, PREAMBLE_BYTES,
    REJECT_BYTES, REJECT_SIGNED_BYTES, SEALED_HELLO_BYTES, SEALED_HELLO_PAYLOAD_BYTES,
    SEALED_PROOF_BYTES,
};
pub use header::{FrameHeader, HeaderError, HEADER_BYTES, MAX_FRAME_BYTES};
pub use kind::{FrameFlags, FrameKind, PayloadForm};
pub use sealed::{sealed_bytes, CHUNK_BYTES, SEALED_HEADER_BYTES, TAG_BYTES};
pub use untrusted::escaped;

/// Version of everything in this crate. Ranks of different versions refuse each other.
pub const WIRE_VERSION: u8 = 7;
