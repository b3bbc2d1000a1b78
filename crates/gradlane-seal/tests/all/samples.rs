//! Samples of all that travels on a sealed connection, for every test of sealing: handshakes of any job and
//! generation, and frames of every kind.
//!
//! The transport's tests and `gradlane-fuzz` include this file by its path.
#![allow(dead_code, reason = "each user needs its own part")]

use gradlane_seal::{
    Accepter, Caller, FrameOpener, FrameSealer, Opened, PreSharedKey, SealedHello, SealedPeer,
};
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{
    FrameFlags, FrameHeader, FrameKind, Hello, PayloadForm, Preamble, CHUNK_BYTES,
    SEALED_HEADER_BYTES, SEALED_HELLO_BYTES, SEALED_PROOF_BYTES, TAG_BYTES, WIRE_VERSION,
};

/// The secret of all samples.
pub const SECRET: &[u8] = b"a secret of the tests";

/// Bytes of a handshake in each direction: a hello, then a proof.
pub const HANDSHAKE_BYTES: usize = SEALED_HELLO_BYTES + SEALED_PROOF_BYTES;

/// Rank 1 calls rank 0.
pub const PREAMBLE: Preamble = Preamble { version: WIRE_VERSION, caller: Rank(1), called: Rank(0) };

/// A job in one of its generations.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub digest: [u8; 32],
    pub generation: u32,
}

/// The job of most samples.
pub const JOB: Job = Job { digest: [1; 32], generation: 0 };

impl Job {
    pub fn key(self) -> PreSharedKey {
        PreSharedKey::new(SECRET, &self.digest)
    }

    /// What a rank says of itself.
    pub fn hello(self, rank: u32) -> SealedHello {
        let hello = Hello {
            version: WIRE_VERSION,
            rank: Rank(rank),
            world_size: 2,
            generation: self.generation,
            lane: 0,
            lanes: 1,
            job_digest: self.digest,
            table_digest: [2; 32],
            nonce: [3; 32],
        };
        SealedHello { hello, caller_address: [4; 32], called_address: [5; 32] }
    }

    /// Begins a handshake.
    pub fn call(self) -> (Caller, [u8; SEALED_HELLO_BYTES]) {
        Caller::new(&self.key(), PREAMBLE, &self.hello(1)).expect("a call")
    }

    /// Accepts a call.
    pub fn reply(self, call: &[u8; SEALED_HELLO_BYTES]) -> (SealedPeer, [u8; SEALED_HELLO_BYTES]) {
        let accepter = Accepter::read(&self.key(), call).expect("a caller");
        accepter.reply(&self.hello(0)).expect("a reply")
    }

    /// Connects two ranks without their proofs: the caller, the accepter.
    pub fn connect(self) -> [SealedPeer; 2] {
        let (caller, call) = self.call();
        let (accepter, reply) = self.reply(&call);
        [caller.read(&reply).expect("a reply"), accepter]
    }
}

/// A frame before it is sealed.
pub type Frame = (FrameHeader, Vec<u8>);

/// Makes a frame with a payload of `length` bytes, which differ in all arguments.
pub fn frame(kind: FrameKind, generation: u32, number: u64, length: usize) -> Frame {
    let byte = |index: usize| {
        let mixed = (number << 32 | u64::from(kind.code()) << 24 | index as u64)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed >> 56) as u8 ^ (mixed >> 40) as u8
    };
    let header = FrameHeader {
        kind,
        form: PayloadForm::Raw,
        flags: FrameFlags::LAST,
        step: Step(number),
        generation,
        plan_version: 1,
        tensor: TensorId(2),
        slice: SliceId(3),
        priority: Priority(-4),
        sender: Rank(1),
        offset: 8,
        block_bytes: if kind == FrameKind::Block { 9 } else { 0 },
        length: length as u32,
        hop: u16::from(kind.is_ring()),
        payload_checksum: 0,
    };
    (header, (0..length).map(byte).collect())
}

/// Makes a short frame of every kind, each of another length, the first without a payload.
pub fn every_kind(generation: u32, number: u64) -> Vec<Frame> {
    let kinds = FrameKind::ALL.iter().enumerate();
    kinds.map(|(index, &kind)| frame(kind, generation, number, index)).collect()
}

/// Seals frames one after another.
pub fn seal(frames: &[Frame], sealer: &mut FrameSealer) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (header, payload) in frames {
        sealer.seal_header(header, &mut bytes);
        for chunk in payload.chunks(CHUNK_BYTES) {
            sealer.seal_chunk(chunk, &mut bytes);
        }
    }
    bytes
}

/// Opens frames until bytes end or do not open, after which nothing opens any more.
pub fn open(opener: &mut FrameOpener, mut bytes: &mut [u8]) -> Vec<Frame> {
    let mut taken = Vec::new();
    let mut incoming: Option<Frame> = None;
    while bytes.len() >= opener.piece_bytes() {
        let (piece, rest) = bytes.split_at_mut(opener.piece_bytes());
        bytes = rest;
        let is_last = match opener.open(piece) {
            Ok(Opened::Header(header)) => {
                incoming = Some((header, Vec::new()));
                header.length == 0
            }
            Ok(Opened::Chunk { bytes, is_last }) => {
                incoming.as_mut().expect("a header").1.extend_from_slice(bytes);
                is_last
            }
            Err(error) => {
                let mut next = vec![0; opener.piece_bytes()];
                assert_eq!(opener.open(&mut next), Err(error), "something opens after an error");
                break;
            }
        };
        if is_last {
            taken.extend(incoming.take());
        }
    }
    taken
}

/// Returns the bytes of each piece of sealed frames with payloads of these lengths, in order: of a header, or
/// of a chunk of payload.
pub fn piece_bytes(lengths: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let chunks = |length: usize| {
        let starts = (0..length).step_by(CHUNK_BYTES);
        starts.map(move |start| (length - start).min(CHUNK_BYTES) + TAG_BYTES)
    };
    let frame = |length| std::iter::once(SEALED_HEADER_BYTES).chain(chunks(length));
    lengths.into_iter().flat_map(frame).collect()
}
