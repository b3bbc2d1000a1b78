//! The checksum of headers and payloads: CRC-32 (of IEEE 802.3, as in gzip), computed with carry-less
//! multiplication where the processor has it (decision 86).

use crc32fast::Hasher;

/// The checksum of `bytes`.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// A checksum of bytes that come in pieces: the [`checksum`] of all of them together.
#[derive(Clone, Default)]
pub struct Checksum(Hasher);

impl Checksum {
    /// The checksum of no bytes yet.
    #[must_use]
    pub fn new() -> Checksum {
        Checksum(Hasher::new())
    }

    /// Goes on with `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of the bytes so far.
    #[must_use]
    pub fn value(&self) -> u32 {
        self.0.clone().finalize()
    }
}

impl core::fmt::Debug for Checksum {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(formatter, "Checksum({:#010x})", self.value())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    /// Values of zlib, and the check value of the catalogue of CRCs.
    #[test]
    fn published_values_hold() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        for (bytes, sum) in [
            (&[0; 32][..], 0x190a_55ad),
            (&[0xff; 32], 0xff6c_ab0b),
            (&ascending, 0x9126_7e8a),
            (&descending, 0x9ab0_ef72),
            (b"123456789", 0xcbf4_3926),
        ] {
            assert_eq!(checksum(bytes), sum, "of {bytes:?}");
        }
    }

    /// Bit by bit, as the polynomial defines it.
    fn by_definition(bytes: &[u8]) -> u32 {
        let mut state = u32::MAX;
        for byte in bytes {
            state ^= u32::from(*byte);
            for _ in 0..8 {
                state = (state >> 1) ^ (0xedb8_8320 & (state & 1).wrapping_neg());
            }
        }
        !state
    }

    /// There is code of its own for lengths in many ranges.
    #[test]
    fn frames_have_the_sum_that_the_polynomial_defines() {
        let bytes: Vec<u8> =
            (0..70_000_u32).map(|it| (it.wrapping_mul(40_503) >> 7) as u8).collect();
        for length in [60, 255, 256, 257, 1023, 1024, 4097, 16_384, 65_535, 69_999] {
            for start in [0, 1] {
                let piece = &bytes[start..start + length];
                assert_eq!(checksum(piece), by_definition(piece), "{length} bytes from {start}");
            }
        }
    }

    proptest! {
        /// There is code of its own for short, middling and long pieces.
        #[test]
        fn any_pieces_at_any_place_have_the_sum_of_the_whole(
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
            prop_assert_eq!(sum.value(), checksum(bytes));
        }
    }

    #[test]
    fn every_short_length_has_the_same_sum_in_pieces() {
        let bytes: Vec<u8> = (0..700_u32).map(|index| ((index * 167) >> 2) as u8).collect();
        for length in 0..=bytes.len() {
            let mut sum = Checksum::new();
            sum.update(&bytes[..length / 3]);
            sum.update(&bytes[length / 3..length]);
            assert_eq!(sum.value(), checksum(&bytes[..length]), "{length}");
        }
    }
}
