//! Frames without a transport.

use crate::samples::{every_kind, open, seal, JOB};
use gradlane_wire::sealed_bytes;

#[test]
fn frames_of_every_kind_open_as_they_were_sealed() {
    let [mut caller, mut accepter] = JOB.connect();
    for number in 0..3 {
        let frames = every_kind(0, number);
        let mut bytes = seal(&frames, &mut caller.sealer);
        assert_eq!(bytes.len(), frames.iter().map(|it| sealed_bytes(it.1.len())).sum::<usize>());
        assert_eq!(open(&mut accepter.opener, &mut bytes), frames);
    }
}

#[test]
fn nothing_opens_after_a_frame_that_does_not() {
    let [mut caller, mut accepter] = JOB.connect();
    let frames = every_kind(0, 1);
    let mut bytes = seal(&frames, &mut caller.sealer);
    let third: usize = frames[..2].iter().map(|it| sealed_bytes(it.1.len())).sum();
    bytes[third] ^= 1;
    assert_eq!(open(&mut accepter.opener, &mut bytes), frames[..2]);
}
