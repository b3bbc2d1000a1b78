//! The handshake against everybody who lacks the secret or changes a message, and proofs.

use crate::samples::{JOB, PREAMBLE, SECRET};
use gradlane_seal::{Accepter, HandshakeSealError, PreSharedKey};
use gradlane_wire::SEALED_HELLO_BYTES;

#[test]
fn both_sides_hear_each_other_and_prove_that_they_did() {
    let (caller, message) = JOB.call();
    let (mut accepter, reply) = JOB.reply(&message);
    let mut caller = caller.read(&reply).expect("a reply");
    assert_eq!((caller.hello, accepter.hello), (JOB.hello(0), JOB.hello(1)));
    let mut proof = caller.sealer.prove(&PREAMBLE);
    assert!(accepter.opener.verify_proof(&PREAMBLE, &mut proof));
    let mut proof = accepter.sealer.prove(&PREAMBLE);
    assert!(caller.opener.verify_proof(&PREAMBLE, &mut proof));
}

#[test]
fn nothing_of_a_hello_can_be_read_on_the_way() {
    let (_, message) = JOB.call();
    for secret in [[1; 32], [2; 32], [3; 32], [4; 32], [5; 32]] {
        assert!(!message.windows(8).any(|it| it == &secret[..8]));
    }
}

#[test]
fn every_changed_bit_of_either_message_is_refused() {
    for bit in 0..SEALED_HELLO_BYTES * 8 {
        let (caller, mut message) = JOB.call();
        let (_, mut answer) = JOB.reply(&message);
        message[bit / 8] ^= 1 << (bit % 8);
        assert!(Accepter::read(&JOB.key(), &message).is_err(), "bit {bit} of the call");
        answer[bit / 8] ^= 1 << (bit % 8);
        assert!(caller.read(&answer).is_err(), "bit {bit} of the reply");
    }
}

#[test]
fn another_secret_another_job_and_another_caller_are_refused() {
    let (_, message) = JOB.call();
    for other in [
        PreSharedKey::new(b"a secret of the testt", &JOB.digest),
        PreSharedKey::new(SECRET, &[0; 32]),
    ] {
        let refused = Accepter::read(&other, &message).err();
        assert_eq!(refused, Some(HandshakeSealError::NotAuthentic));
    }
    // A reply to one call is none to another.
    let ((caller, _), (_, second)) = (JOB.call(), JOB.call());
    assert!(caller.read(&JOB.reply(&second).1).is_err());
}

/// A repeated call opens, since nothing in it tells when it was made; whoever repeats it cannot prove the
/// keys, nor can who reflects the accepter's own proof.
#[test]
fn whoever_repeats_a_call_cannot_prove_it() {
    let (caller, message) = JOB.call();
    let (mut first, answer) = JOB.reply(&message);
    let mut caller = caller.read(&answer).expect("a reply");
    let proof = caller.sealer.prove(&PREAMBLE);
    assert!(first.opener.verify_proof(&PREAMBLE, &mut proof.clone()));
    let (mut again, _) = JOB.reply(&message);
    assert!(!again.opener.verify_proof(&PREAMBLE, &mut proof.clone()));
    let (mut third, _) = JOB.reply(&message);
    let mut reflected = third.sealer.prove(&PREAMBLE);
    assert!(!third.opener.verify_proof(&PREAMBLE, &mut reflected));
}
