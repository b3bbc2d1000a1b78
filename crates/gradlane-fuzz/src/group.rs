//! Frames of a member of a group that sends what it likes, between any calls of this rank: no panic, and nothing
//! of this rank grows without bound.

use gradlane_net::hostile_peer;

/// Lets any bytes choose the calls and the frames. Returns whether a frame was taken.
///
/// # Panics
/// Where the group breaks a promise.
pub fn check(bytes: &[u8]) -> bool {
    let mut rest = bytes.iter();
    let outcome = hostile_peer(&mut |end| {
        let width = if end <= 256 { 1 } else { 8 };
        rest.by_ref().take(width).fold(0, |number, byte| number << 8 | u64::from(*byte)) % end
    });
    outcome.taken > 0
}
