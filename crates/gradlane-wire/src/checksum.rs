//! CRC-32C (Castagnoli's polynomial, as in iSCSI, SCTP and ext4): the checksum of headers and
//! payloads.

use crc::{Crc, Table, CRC_32_ISCSI};

/// By tables of 16 kB, 16 bytes at a time: for headers, of which every frame has one. Payloads want
/// the instructions that processors have for it, and those a crate with a host under it
/// (`gradlane-net`).
static CRC: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISCSI);

/// The checksum of `bytes`; 0 for none.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u32 {
    CRC.checksum(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
