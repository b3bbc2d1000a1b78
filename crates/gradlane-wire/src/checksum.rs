//! CRC-32C (Castagnoli's polynomial, as in iSCSI, SCTP and ext4): the checksum of headers and
//! payloads. x86 and aarch64 have instructions for it.

use crc_fast::{crc32_iscsi, CrcAlgorithm, Digest};

/// The checksum of `bytes`; 0 for none.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32_iscsi(bytes)
}

/// A checksum of bytes that come in pieces.
#[derive(Clone, Debug)]
pub struct Checksum(Digest);

impl Checksum {
    /// The checksum of no bytes yet.
    #[must_use]
    pub fn new() -> Checksum {
        Checksum(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Goes on with `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes so far, the same as [`checksum`] of them in one piece.
    #[must_use]
    pub fn value(&self) -> u32 {
        // The library's sums of every width are 64 bits; of this one the upper half is zero.
        self.0.finalize() as u32
    }
}

impl Default for Checksum {
    fn default() -> Checksum {
        Checksum::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Bit by bit, as the definition has it.
    fn by_definition(bytes: &[u8]) -> u32 {
        let reversed_polynomial = 0x1edc_6f41_u32.reverse_bits();
        let mut register = u32::MAX;
        for &byte in bytes {
            register ^= u32::from(byte);
            for _ in 0..8 {
                let carry = if register & 1 == 1 { reversed_polynomial } else { 0 };
                register = (register >> 1) ^ carry;
            }
        }
        !register
    }

    /// RFC 3720, section B.4, and the polynomial's check value.
    #[test]
    fn published_values_hold() {
        let ascending: [u8; 32] = core::array::from_fn(|index| index as u8);
        assert_eq!(checksum(b""), 0);
        assert_eq!(checksum(b"123456789"), 0xe306_9283);
        assert_eq!(checksum(&[0; 32]), 0x8a91_36aa);
        assert_eq!(checksum(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(checksum(&ascending), 0x46dd_794e);
    }

    proptest! {
        #[test]
        fn every_length_at_every_alignment_is_as_defined(
            bytes in proptest::collection::vec(any::<u8>(), 0..3000), start in 0..70_usize,
        ) {
            let bytes = &bytes[start.min(bytes.len())..];
            prop_assert_eq!(checksum(bytes), by_definition(bytes));
        }

        #[test]
        fn pieces_make_the_sum_of_the_whole(
            bytes in proptest::collection::vec(any::<u8>(), 0..3000), cuts in any::<(u16, u16)>(),
        ) {
            let (one, other) = (cuts.0 as usize % (bytes.len() + 1), cuts.1 as usize % (bytes.len() + 1));
            let (first, second) = (one.min(other), one.max(other));
            let mut sum = Checksum::new();
            for piece in [&bytes[..first], &bytes[first..second], &bytes[second..]] {
                sum.update(piece);
            }
            prop_assert_eq!(sum.value(), checksum(&bytes));
        }
    }
}
