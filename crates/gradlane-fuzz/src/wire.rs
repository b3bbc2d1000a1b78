//! Any bytes as a frame header, a hello or a refusal: no panic, and what is accepted encodes back to
//! the same bytes.

use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{
    checksum, FrameFlags, FrameHeader, FrameKind, Hello, PayloadForm, Reject, HEADER_BYTES,
    HELLO_BYTES, REJECT_BYTES, WIRE_VERSION,
};

/// Checks that bytes are refused, or mean what they encode. Returns whether they are a header but for its checksum.
///
/// # Panics
/// Where they are taken for something else.
pub fn check(bytes: &[u8]) -> bool {
    let mut is_header = false;
    if let Some(header) = bytes.first_chunk::<HEADER_BYTES>() {
        if let Ok(decoded) = FrameHeader::decode(header) {
            assert_eq!(&decoded.encode(), header);
        }
        // The same bytes under a right checksum reach the checks of the single fields.
        let mut mended = *header;
        mended[..4].copy_from_slice(b"GLN1");
        let sum = checksum(&mended[..60]);
        mended[60..].copy_from_slice(&sum.to_le_bytes());
        if let Ok(decoded) = FrameHeader::decode(&mended) {
            assert_eq!(decoded.encode(), mended);
            is_header = true;
        }
    }
    if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>() {
        let _ = Hello::decode(hello);
    }
    if let Some(reject) = bytes.first_chunk::<REJECT_BYTES>() {
        let _ = Reject::decode(reject);
    }
    is_header
}

/// Returns a header of every kind and a hello, to be changed.
#[must_use]
pub fn samples() -> Vec<Vec<u8>> {
    let header = |&kind: &FrameKind| FrameHeader {
        kind,
        form: PayloadForm::Raw,
        flags: FrameFlags::LAST,
        step: Step(5),
        generation: 1,
        plan_version: 1,
        tensor: TensorId(2),
        slice: SliceId(3),
        priority: Priority(-4),
        sender: Rank(1),
        offset: 8,
        block_bytes: if kind == FrameKind::Block { 9 } else { 0 },
        length: 40,
        hop: u16::from(kind.is_ring()),
        payload_checksum: 0,
    };
    let hello = Hello {
        version: WIRE_VERSION,
        rank: Rank(1),
        world_size: 2,
        generation: 0,
        lane: 0,
        lanes: 1,
        job_digest: [1; 32],
        table_digest: [2; 32],
        nonce: [3; 32],
    };
    let headers = FrameKind::ALL.iter().map(|kind| header(kind).encode().to_vec());
    headers.chain([hello.encode().to_vec()]).collect()
}
