//! The keys of one direction of a connection, and the messages under them.
//!
//! As in TLS 1.3 (RFC 8446, 5.3 and 7.2): keys and first nonce follow from a traffic secret by HKDF, the
//! nonce of a message is that first one xor the message's number, and after `MESSAGES_PER_KEY` messages
//! the next secret takes the place of this one. Both ends count, so nothing announces it.

use ring::aead::{Aad, LessSafeKey, Nonce, UnboundKey, AES_256_GCM, NONCE_LEN};
use ring::hkdf::{KeyType, Prk, HKDF_SHA256};

/// Messages under one key. Of at most `CHUNK_BYTES` each these are 32 GiB, a twelfth of what RFC 8446
/// (5.5) allows for one key of AES-GCM.
pub(crate) const MESSAGES_PER_KEY: u64 = 1 << 20;

/// Bytes of a traffic secret.
pub(crate) const SECRET_BYTES: usize = 32;

/// A length for `ring`'s HKDF.
struct Length(usize);

impl KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

/// Returns `N` bytes that follow from a secret and a label.
pub(crate) fn expand<const N: usize>(secret: &Prk, label: &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    let expanded = secret.expand(&[label], Length(N)).and_then(|it| it.fill(&mut bytes));
    expanded.expect("HKDF-SHA256 gives up to 8,160 bytes");
    bytes
}

/// The keys of one direction, and the number of its next message.
pub(crate) struct DirectionKeys {
    secret: [u8; SECRET_BYTES],
    key: LessSafeKey,
    first_nonce: [u8; NONCE_LEN],
    /// Messages under this key.
    used: u64,
    messages_per_key: u64,
}

impl DirectionKeys {
    /// Makes the keys that follow from a traffic secret.
    pub(crate) fn new(secret: [u8; SECRET_BYTES], messages_per_key: u64) -> DirectionKeys {
        let expanded = Prk::new_less_safe(HKDF_SHA256, &secret);
        let key: [u8; 32] = expand(&expanded, b"gradlane v1 key");
        let key = UnboundKey::new(&AES_256_GCM, &key).expect("a key of 256 bits");
        DirectionKeys {
            secret,
            key: LessSafeKey::new(key),
            first_nonce: expand(&expanded, b"gradlane v1 nonce"),
            used: 0,
            messages_per_key,
        }
    }

    /// Returns the nonce of the next message, which no other message has under its key.
    fn next_nonce(&mut self) -> Nonce {
        if self.used == self.messages_per_key {
            let secret = Prk::new_less_safe(HKDF_SHA256, &self.secret);
            let next = expand(&secret, b"gradlane v1 next");
            *self = DirectionKeys::new(next, self.messages_per_key);
        }
        let mut nonce = self.first_nonce;
        for (byte, number) in nonce[NONCE_LEN - 8..].iter_mut().zip(self.used.to_be_bytes()) {
            *byte ^= number;
        }
        self.used += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts the next message, `bytes` from `start` on, in place, and appends its tag.
    pub(crate) fn seal(&mut self, bytes: &mut Vec<u8>, start: usize) {
        let nonce = self.next_nonce();
        let message = &mut bytes[start..];
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::empty(), message);
        let tag = tag.expect("a message is far below 64 GiB");
        bytes.extend_from_slice(tag.as_ref());
    }

    /// Verifies and decrypts the next message, which ends with its tag, in place. Returns it without
    /// the tag; `None` where it is any other than the next one of the peer.
    pub(crate) fn open<'a>(&mut self, message: &'a mut [u8]) -> Option<&'a mut [u8]> {
        let nonce = self.next_nonce();
        self.key.open_in_place(nonce, Aad::empty(), message).ok()
    }
}

impl std::fmt::Debug for DirectionKeys {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("DirectionKeys").field("used", &self.used).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_change_with_the_volume_at_both_ends() {
        let (mut one, mut other) = (DirectionKeys::new([7; 32], 3), DirectionKeys::new([7; 32], 3));
        let mut secrets = Vec::new();
        for number in 0..10_u8 {
            let mut bytes = vec![0xee, number, number];
            one.seal(&mut bytes, 1);
            assert_eq!(bytes[0], 0xee);
            assert_eq!(other.open(&mut bytes[1..]).as_deref(), Some(&[number, number][..]));
            secrets.push(one.secret);
        }
        secrets.dedup();
        assert_eq!(secrets.len(), 4);
    }

    #[test]
    fn each_message_opens_in_its_place_alone() {
        let mut keys = DirectionKeys::new([1; 32], 4);
        let messages: Vec<Vec<u8>> = (0..8)
            .map(|_| {
                let mut bytes = b"the same".to_vec();
                keys.seal(&mut bytes, 0);
                bytes
            })
            .collect();
        for place in 0..messages.len() {
            for (number, message) in messages.iter().enumerate() {
                let mut keys = DirectionKeys::new([1; 32], 4);
                for before in &messages[..place] {
                    assert!(keys.open(&mut before.clone()).is_some());
                }
                assert_eq!(keys.open(&mut message.clone()).is_some(), number == place);
            }
        }
    }
}
