//! Checksums of payloads: [`gradlane_wire::checksum`] by the instructions of the processor, of bytes
//! that come in pieces.

use crc_fast::{CrcAlgorithm, Digest};

/// A checksum of the bytes so far.
#[derive(Clone, Debug)]
pub(crate) struct Checksum(Digest);

impl Checksum {
    /// The checksum of no bytes yet.
    pub(crate) fn new() -> Checksum {
        Checksum(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Goes on with `bytes`.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// What [`gradlane_wire::checksum`] is of all bytes in one piece.
    pub(crate) fn value(&self) -> u32 {
        // The library's sums of every width are 64 bits; of this one the upper half is zero.
        self.0.finalize() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The library has code of its own for short, middling and long pieces.
        #[test]
        fn any_pieces_at_any_place_have_the_sum_that_the_wire_defines(
            bytes in proptest::collection::vec(any::<u8>(), 0..9000),
            start in 0..70_usize,
            cuts in any::<(u16, u16)>(),
        ) {
            let bytes = &bytes[start.min(bytes.len())..];
            let cut = |at: u16| usize::from(at) % (bytes.len() + 1);
            let (one, other) = (cut(cuts.0), cut(cuts.1));
            let (first, second) = (one.min(other), one.max(other));
            let mut sum = Checksum::new();
            for piece in [&bytes[..first], &bytes[first..second], &bytes[second..]] {
                sum.update(piece);
            }
            prop_assert_eq!(sum.value(), gradlane_wire::checksum(bytes));
        }
    }

    #[test]
    fn every_short_length_has_the_sum_that_the_wire_defines() {
        let bytes: Vec<u8> = (0..700_u32).map(|index| ((index * 167) >> 2) as u8).collect();
        for length in 0..=bytes.len() {
            let mut sum = Checksum::new();
            sum.update(&bytes[..length]);
            assert_eq!(sum.value(), gradlane_wire::checksum(&bytes[..length]), "{length}");
        }
    }
}
