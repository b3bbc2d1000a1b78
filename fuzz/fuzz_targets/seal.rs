//! Any bytes, and changed ones, as messages of a sealed handshake and as sealed frames: no panic, nothing is
//! taken that was not sent, and everything is taken that was.
#![no_main]

use arbitrary::Arbitrary;
use gradlane_seal::{Accepter, Caller, FrameOpener, Opened, PreSharedKey, SealedHello, SealedPeer};
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{
    FrameFlags, FrameHeader, FrameKind, Hello, PayloadForm, Preamble, CHUNK_BYTES,
    SEALED_HELLO_BYTES, WIRE_VERSION,
};
use libfuzzer_sys::fuzz_target;

const PREAMBLE: Preamble = Preamble { version: WIRE_VERSION, caller: Rank(1), called: Rank(0) };

#[derive(Arbitrary, Debug)]
struct Case<'a> {
    in_reply: bool,
    at: u32,
    flipped: u8,
    kinds: [u8; 4],
    lengths: [u16; 4],
    foreign: &'a [u8],
}

fn hello() -> SealedHello {
    let hello = Hello {
        version: WIRE_VERSION,
        rank: Rank(1),
        world_size: 2,
        generation: 0,
        job_digest: [1; 32],
        table_digest: [2; 32],
        nonce: [3; 32],
    };
    SealedHello { hello, caller_address: [4; 32], called_address: [5; 32] }
}

/// A handshake in which one byte of one message may be changed, and the bytes of a stranger.
fn shake_hands(case: &Case<'_>) {
    let key = PreSharedKey::new(b"a secret of the fuzzer", &[1; 32]);
    let at = case.at as usize % SEALED_HELLO_BYTES;
    let change = |message: &mut [u8; SEALED_HELLO_BYTES], now: bool| {
        if now {
            message[at] ^= case.flipped;
        }
        now && case.flipped != 0
    };
    let (caller, mut message) = Caller::new(&key, PREAMBLE, &hello()).expect("a call");
    let mut stranger = message;
    for (byte, foreign) in stranger[16..].iter_mut().zip(case.foreign) {
        *byte = *foreign;
    }
    assert_eq!(Accepter::read(&key, &stranger).is_ok(), stranger == message);
    let is_changed = change(&mut message, !case.in_reply);
    let accepter = Accepter::read(&key, &message);
    assert_eq!(accepter.is_err(), is_changed);
    let Ok(accepter) = accepter else { return };
    assert_eq!(*accepter.hello(), hello());
    let (accepter, mut reply) = accepter.reply(&hello()).expect("a reply");
    let is_changed = change(&mut reply, case.in_reply);
    let caller = caller.read(&reply);
    assert_eq!(caller.is_err(), is_changed);
    if let Ok(caller) = caller {
        exchange(case, caller, accepter);
    }
}

/// Frames of which one byte may be changed, and the bytes of a stranger after them.
fn exchange(case: &Case<'_>, mut caller: SealedPeer, accepter: SealedPeer) {
    let (mut bytes, mut sent) = (Vec::new(), Vec::new());
    for (kind, length) in case.kinds.iter().zip(case.lengths) {
        let kind = FrameKind::ALL[usize::from(*kind) % FrameKind::ALL.len()];
        let payload: Vec<u8> = (0..length).map(|it| (it as u8).wrapping_mul(31)).collect();
        let header = FrameHeader {
            kind,
            form: PayloadForm::Raw,
            flags: FrameFlags::NONE,
            step: Step(1),
            generation: 0,
            plan_version: 0,
            tensor: TensorId(0),
            slice: SliceId(0),
            priority: Priority(0),
            sender: Rank(1),
            offset: 0,
            block_bytes: 0,
            length: length.into(),
            hop: u16::from(kind.is_ring()),
            payload_checksum: 0,
        };
        caller.sealer.seal_header(&header, &mut bytes);
        for chunk in payload.chunks(CHUNK_BYTES) {
            caller.sealer.seal_chunk(chunk, &mut bytes);
        }
        sent.push((bytes.len(), header, payload));
    }
    let (length, at) = (bytes.len(), case.at as usize);
    if at < length {
        bytes[at] ^= case.flipped;
    }
    let is_changed = at < length && case.flipped != 0;
    bytes.extend_from_slice(case.foreign);
    let taken = open_all(accepter.opener, &mut bytes);
    let whole = sent.iter().filter(|it| !is_changed || it.0 <= at).count();
    let expected: Vec<_> = sent.into_iter().take(whole).map(|it| (it.1, it.2)).collect();
    assert_eq!(taken, expected);
}

/// Opens frames until bytes do not open or end.
fn open_all(mut opener: FrameOpener, mut bytes: &mut [u8]) -> Vec<(FrameHeader, Vec<u8>)> {
    let mut taken = Vec::new();
    let mut incoming: Option<(FrameHeader, Vec<u8>)> = None;
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
                // Nothing opens after an error.
                let mut next = vec![0; opener.piece_bytes()];
                assert_eq!(opener.open(&mut next), Err(error));
                break;
            }
        };
        if is_last {
            taken.extend(incoming.take());
        }
    }
    taken
}

fuzz_target!(|case: Case<'_>| shake_hands(&case));
