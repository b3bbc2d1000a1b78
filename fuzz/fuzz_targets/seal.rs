//! Any bytes, and changed ones, as messages of a sealed handshake and as sealed frames: no panic, nothing is
//! taken that was not sent, and everything is taken that was.
#![no_main]

use arbitrary::Arbitrary;
use gradlane_seal::{Accepter, SealedPeer};
use gradlane_wire::{FrameKind, SEALED_HELLO_BYTES};
use libfuzzer_sys::fuzz_target;
use samples::{frame, open, seal, JOB};

#[path = "../../crates/gradlane-seal/tests/all/samples.rs"]
mod samples;

#[derive(Arbitrary, Debug)]
struct Case<'a> {
    in_reply: bool,
    at: u32,
    flipped: u8,
    kinds: [u8; 4],
    lengths: [u16; 4],
    foreign: &'a [u8],
}

/// A handshake in which one byte of one message may be changed, and the bytes of a stranger.
fn shake_hands(case: &Case<'_>) {
    let at = case.at as usize % SEALED_HELLO_BYTES;
    let change = |message: &mut [u8; SEALED_HELLO_BYTES], now: bool| {
        if now {
            message[at] ^= case.flipped;
        }
        now && case.flipped != 0
    };
    let (caller, mut message) = JOB.call();
    let mut stranger = message;
    for (byte, foreign) in stranger[16..].iter_mut().zip(case.foreign) {
        *byte = *foreign;
    }
    assert_eq!(Accepter::read(&JOB.key(), &stranger).is_ok(), stranger == message);
    let is_changed = change(&mut message, !case.in_reply);
    let accepter = Accepter::read(&JOB.key(), &message);
    assert_eq!(accepter.is_err(), is_changed);
    let Ok(accepter) = accepter else { return };
    assert_eq!(*accepter.hello(), JOB.hello(1));
    let (accepter, mut reply) = accepter.reply(&JOB.hello(0)).expect("a reply");
    let is_changed = change(&mut reply, case.in_reply);
    let caller = caller.read(&reply);
    assert_eq!(caller.is_err(), is_changed);
    if let Ok(caller) = caller {
        exchange(case, caller, accepter);
    }
}

/// Frames of which one byte may be changed, and the bytes of a stranger after them.
fn exchange(case: &Case<'_>, mut caller: SealedPeer, mut accepter: SealedPeer) {
    let (mut bytes, mut sent, mut ends) = (Vec::new(), Vec::new(), Vec::new());
    for (kind, length) in case.kinds.iter().zip(case.lengths) {
        let kind = FrameKind::ALL[usize::from(*kind) % FrameKind::ALL.len()];
        let frame = frame(kind, 0, 1, length.into());
        bytes.extend(seal(std::slice::from_ref(&frame), &mut caller.sealer));
        sent.push(frame);
        ends.push(bytes.len());
    }
    let (length, at) = (bytes.len(), case.at as usize);
    if at < length {
        bytes[at] ^= case.flipped;
    }
    let is_changed = at < length && case.flipped != 0;
    bytes.extend_from_slice(case.foreign);
    let whole = ends.iter().filter(|&&end| !is_changed || end <= at).count();
    assert_eq!(open(&mut accepter.opener, &mut bytes), sent[..whole]);
}

fuzz_target!(|case: Case<'_>| shake_hands(&case));
