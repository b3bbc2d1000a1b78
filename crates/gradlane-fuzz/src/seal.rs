//! Any bytes, and changed ones, as messages of a sealed handshake and as sealed frames: no panic, nothing is
//! taken that was not sent, and everything is taken that was.

use arbitrary::{Arbitrary, Unstructured};
use gradlane_seal::{Accepter, SealedPeer};
use gradlane_wire::{FrameKind, SEALED_HELLO_BYTES};
use samples::{frame, open, seal, JOB};
use std::num::NonZeroU8;

#[path = "../../gradlane-seal/tests/all/samples.rs"]
mod samples;

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq)]
enum Changed {
    Nothing,
    Call,
    Reply,
    Frames,
}

#[derive(Arbitrary, Debug)]
struct Case<'a> {
    changed: Changed,
    at: u32,
    flipped: NonZeroU8,
    kinds: [u8; 4],
    lengths: [u16; 4],
    foreign: &'a [u8],
}

/// Checks a connection of which a byte may be changed. Returns whether its handshake succeeded.
///
/// # Panics
/// Where something is taken that was not sent, or not taken that was.
pub fn check(bytes: &[u8]) -> bool {
    Case::arbitrary_take_rest(Unstructured::new(bytes)).is_ok_and(|case| shake_hands(&case))
}

/// A handshake in which one byte of one message may be changed, and the bytes of a stranger.
fn shake_hands(case: &Case<'_>) -> bool {
    let change = |message: &mut [u8; SEALED_HELLO_BYTES], which: Changed| {
        if case.changed == which {
            message[case.at as usize % SEALED_HELLO_BYTES] ^= case.flipped.get();
        }
        case.changed == which
    };
    let (caller, mut message) = JOB.call();
    let mut stranger = message;
    for (byte, foreign) in stranger[16..].iter_mut().zip(case.foreign) {
        *byte = *foreign;
    }
    assert_eq!(Accepter::read(&JOB.key(), &stranger).is_ok(), stranger == message);
    let is_changed = change(&mut message, Changed::Call);
    let accepter = Accepter::read(&JOB.key(), &message);
    assert_eq!(accepter.is_err(), is_changed);
    let Ok(accepter) = accepter else { return false };
    assert_eq!(*accepter.hello(), JOB.hello(1));
    let (accepter, mut reply) = accepter.reply(&JOB.hello(0)).expect("a reply");
    let is_changed = change(&mut reply, Changed::Reply);
    let caller = caller.read(&reply);
    assert_eq!(caller.is_err(), is_changed);
    let Ok(caller) = caller else { return false };
    exchange(case, caller, accepter);
    true
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
    let at = case.at as usize % bytes.len();
    let is_changed = case.changed == Changed::Frames;
    if is_changed {
        bytes[at] ^= case.flipped.get();
    }
    bytes.extend_from_slice(case.foreign);
    let whole = ends.iter().filter(|&&end| !is_changed || end <= at).count();
    assert_eq!(open(&mut accepter.opener, &mut bytes), sent[..whole]);
}
