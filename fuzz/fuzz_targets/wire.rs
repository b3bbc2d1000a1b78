//! Any bytes as a frame header, a hello or a refusal: no panic, and what is accepted encodes back to
//! the same bytes.
#![no_main]

use gradlane_wire::{FrameHeader, Hello, Reject, HEADER_BYTES, HELLO_BYTES, REJECT_BYTES};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Some(header) = bytes.first_chunk::<HEADER_BYTES>() {
        if let Ok(decoded) = FrameHeader::decode(header) {
            assert_eq!(&decoded.encode(), header);
        }
        // The same bytes under a right checksum reach the checks of the single fields.
        let mut mended = *header;
        mended[..4].copy_from_slice(b"GLN1");
        let sum = gradlane_wire::checksum(&mended[..60]);
        mended[60..].copy_from_slice(&sum.to_le_bytes());
        if let Ok(decoded) = FrameHeader::decode(&mended) {
            assert_eq!(decoded.encode(), mended);
        }
    }
    if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>() {
        let _ = Hello::decode(hello);
    }
    if let Some(reject) = bytes.first_chunk::<REJECT_BYTES>() {
        let _ = Reject::decode(reject);
    }
});
