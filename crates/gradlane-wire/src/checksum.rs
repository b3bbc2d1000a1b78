//! The checksum of headers and payloads: the lower half of XXH3-64 (Collet, xxHash 0.8), which keeps
//! up with memory on every processor with vectors of 128 bits and more (decision 43).

use core::hash::Hasher;
use twox_hash::xxhash3_64::{
    Hasher as WholeHasher, RawHasher, SecretBuffer, DEFAULT_SECRET_LENGTH,
};

/// The checksum of `bytes`.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    lower_half(WholeHasher::oneshot(bytes))
}

/// A checksum of bytes that come in pieces: the [`checksum`] of all of them together.
#[derive(Clone)]
pub struct Checksum(RawHasher<&'static [u8; DEFAULT_SECRET_LENGTH]>);

impl Checksum {
    /// The checksum of no bytes yet.
    #[must_use]
    pub fn new() -> Checksum {
        Checksum(RawHasher::new(SecretBuffer::default()))
    }

    /// Goes on with `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// The checksum of the bytes so far.
    #[must_use]
    pub fn value(&self) -> u32 {
        lower_half(self.0.finish())
    }
}

impl Default for Checksum {
    fn default() -> Checksum {
        Checksum::new()
    }
}

impl core::fmt::Debug for Checksum {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(formatter, "Checksum({:#010x})", self.value())
    }
}

fn lower_half(hash: u64) -> u32 {
    hash as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    /// xxHash's own sanity test (`tests/sanity_test_vectors.h`): its bytes, and what XXH3-64 of the
    /// first so many of them is without a seed.
    #[test]
    fn published_values_hold() {
        let mut generator = 2_654_435_761_u64;
        let mut next = || {
            let byte = (generator >> 56) as u8;
            generator = generator.wrapping_mul(11_400_714_785_074_694_797);
            byte
        };
        let bytes: Vec<u8> = (0..2367).map(|_| next()).collect();
        for (length, hash) in [
            (0, 0x2d06_8005_38d3_94c2_u64),
            (1, 0xc44b_dff4_074e_ecdb),
            (6, 0x27b5_6a84_cd2d_7325),
            (12, 0xa713_daf0_dfbb_77e7),
            (24, 0xa3fe_70bf_9d35_10eb),
            (48, 0x397d_a259_ecba_1f11),
            (80, 0xbcde_fbbb_2c47_c90a),
            (195, 0xcd94_217e_e362_ec3a),
            (403, 0xcdeb_804d_65c6_dea4),
            (512, 0x617e_4959_9013_cb6b),
            (2048, 0xdd59_e2c3_a5f0_38e0),
            (2240, 0x6e73_a905_39cf_2948),
            (2367, 0xcb37_aeb9_e5d3_61ed),
        ] {
            assert_eq!(checksum(&bytes[..length]), lower_half(hash), "of {length} bytes");
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
