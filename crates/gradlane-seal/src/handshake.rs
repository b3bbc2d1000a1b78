//! The sealed handshake: two messages of Noise, and a proof in each direction that the other side holds
//! the same keys.
//!
//! A caller's message can be replayed by anybody who has seen it, so an accepter believes it only after
//! the caller's proof, which is under fresh keys of both.

use crate::frames::{FrameOpener, FrameSealer};
use crate::keys::{expand, DirectionKeys, MESSAGES_PER_KEY, SECRET_BYTES};
use gradlane_wire::{
    Hello, Preamble, HELLO_BYTES, PREAMBLE_BYTES, SEALED_HELLO_BYTES, SEALED_HELLO_PAYLOAD_BYTES,
};
use hmac::{Hmac, KeyInit, Mac};
use ring::hkdf::{Salt, HKDF_SHA256};
use sha2::Sha256;
use snow::{Builder, HandshakeState};

const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
const PSK_LABEL: &[u8] = b"gradlane pre-shared key v1";
const PROLOGUE_LABEL: &[u8] = b"gradlane sealed handshake v1";

/// The key that the ranks of a job share before they have met.
pub struct PreSharedKey([u8; 32]);

impl PreSharedKey {
    /// Derives the key of a job from the user's secret.
    #[must_use]
    pub fn new(secret: &[u8], job_digest: &[u8; 32]) -> PreSharedKey {
        let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(secret) else {
            unreachable!("an HMAC takes keys of every length")
        };
        mac.update(PSK_LABEL);
        mac.update(job_digest);
        PreSharedKey(mac.finalize().into_bytes().into())
    }
}

/// The identity of one side, under encryption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedHello {
    /// As where nothing is sealed.
    pub hello: Hello,
    /// SHA-256 of the caller's address as the sender knows it.
    pub caller_address: [u8; 32],
    /// SHA-256 of the called rank's address as the sender knows it.
    pub called_address: [u8; 32],
}

impl SealedHello {
    fn encode(&self) -> [u8; SEALED_HELLO_PAYLOAD_BYTES] {
        let mut bytes = [0; SEALED_HELLO_PAYLOAD_BYTES];
        bytes[..HELLO_BYTES].copy_from_slice(&self.hello.encode());
        bytes[HELLO_BYTES..HELLO_BYTES + 32].copy_from_slice(&self.caller_address);
        bytes[HELLO_BYTES + 32..].copy_from_slice(&self.called_address);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<SealedHello> {
        let (hello, addresses) = bytes.split_first_chunk()?;
        let (caller_address, called_address) = addresses.split_first_chunk()?;
        Some(SealedHello {
            hello: Hello::decode(hello)?,
            caller_address: *caller_address,
            called_address: called_address.try_into().ok()?,
        })
    }
}

/// Why a message of a handshake is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeSealError {
    /// No message of this protocol.
    #[error("not a sealed hello")]
    NotSealed,
    /// The message does not open: another secret, another job, or altered on the way.
    #[error("a sealed hello that does not open")]
    NotAuthentic,
    /// The library refused something that cannot fail.
    #[error("the handshake library failed")]
    Library,
}

/// The two directions of a connection after the messages of both sides.
#[derive(Debug)]
pub struct SealedPeer {
    /// What the other side says of itself.
    pub hello: SealedHello,
    /// The frames to the other side.
    pub sealer: FrameSealer,
    /// The frames from the other side.
    pub opener: FrameOpener,
}

fn builder<'a>(key: &'a PreSharedKey, prologue: &'a [u8]) -> Result<Builder<'a>, snow::Error> {
    Builder::new(PATTERN.parse()?).psk(0, &key.0)?.prologue(prologue)
}

fn prologue(preamble: &Preamble) -> Vec<u8> {
    [PROLOGUE_LABEL, &preamble.encode()].concat()
}

/// Writes the next message of a handshake behind the preamble.
fn write(
    noise: &mut HandshakeState,
    preamble: &Preamble,
    hello: &SealedHello,
) -> Result<[u8; SEALED_HELLO_BYTES], HandshakeSealError> {
    let mut message = [0; SEALED_HELLO_BYTES];
    message[..PREAMBLE_BYTES].copy_from_slice(&preamble.encode());
    match noise.write_message(&hello.encode(), &mut message[PREAMBLE_BYTES..]) {
        Ok(count) if count == SEALED_HELLO_BYTES - PREAMBLE_BYTES => Ok(message),
        _ => Err(HandshakeSealError::Library),
    }
}

/// Reads the other side's message.
fn read(
    noise: &mut HandshakeState,
    message: &[u8; SEALED_HELLO_BYTES],
) -> Result<SealedHello, HandshakeSealError> {
    // Noise wants room for the tag as well.
    let mut payload = [0; SEALED_HELLO_BYTES];
    let count = noise
        .read_message(&message[PREAMBLE_BYTES..], &mut payload)
        .map_err(|_| HandshakeSealError::NotAuthentic)?;
    SealedHello::decode(&payload[..count]).ok_or(HandshakeSealError::NotAuthentic)
}

/// Derives the keys of frames from a finished handshake: HKDF over both of Noise's keys, with the hash
/// of all that was said as salt, so that Noise's own keys are used for nothing else.
fn frames(noise: &mut HandshakeState, is_caller: bool) -> (FrameSealer, FrameOpener) {
    let (one, other) = noise.dangerously_get_raw_split();
    let salt = Salt::new(HKDF_SHA256, noise.get_handshake_hash());
    let secret = salt.extract(&[one, other].concat());
    let keys = |label| DirectionKeys::new(expand::<SECRET_BYTES>(&secret, label), MESSAGES_PER_KEY);
    let (by_caller, by_accepter) =
        (keys(b"gradlane v1 frames of the caller"), keys(b"gradlane v1 frames of the accepter"));
    if is_caller {
        (FrameSealer::new(by_caller), FrameOpener::new(by_accepter))
    } else {
        (FrameSealer::new(by_accepter), FrameOpener::new(by_caller))
    }
}

/// The calling side, which has spoken.
pub struct Caller {
    noise: HandshakeState,
    preamble: Preamble,
}

impl Caller {
    /// Makes the first message of a handshake.
    ///
    /// # Errors
    /// [`HandshakeSealError::Library`], which cannot happen.
    pub fn new(
        key: &PreSharedKey,
        preamble: Preamble,
        hello: &SealedHello,
    ) -> Result<(Caller, [u8; SEALED_HELLO_BYTES]), HandshakeSealError> {
        let prologue = prologue(&preamble);
        let mut noise = builder(key, &prologue)
            .and_then(Builder::build_initiator)
            .map_err(|_| HandshakeSealError::Library)?;
        let message = write(&mut noise, &preamble, hello)?;
        Ok((Caller { noise, preamble }, message))
    }

    /// Reads the accepter's message.
    ///
    /// # Errors
    /// [`HandshakeSealError::NotSealed`] for bytes that are none, [`HandshakeSealError::NotAuthentic`] for
    /// a message that answers another one or that somebody without the secret has made.
    pub fn read(
        mut self,
        message: &[u8; SEALED_HELLO_BYTES],
    ) -> Result<SealedPeer, HandshakeSealError> {
        if message[..PREAMBLE_BYTES] != self.preamble.encode() {
            return Err(HandshakeSealError::NotSealed);
        }
        let hello = read(&mut self.noise, message)?;
        let (sealer, opener) = frames(&mut self.noise, true);
        Ok(SealedPeer { hello, sealer, opener })
    }
}

/// The accepting side, which has heard a caller.
pub struct Accepter {
    noise: HandshakeState,
    preamble: Preamble,
    hello: SealedHello,
}

impl Accepter {
    /// Reads a caller's message.
    ///
    /// # Errors
    /// [`HandshakeSealError::NotSealed`] for bytes that are none, [`HandshakeSealError::NotAuthentic`] for
    /// a message that somebody without the secret has made.
    pub fn read(
        key: &PreSharedKey,
        message: &[u8; SEALED_HELLO_BYTES],
    ) -> Result<Accepter, HandshakeSealError> {
        let preamble = message.first_chunk().and_then(Preamble::decode);
        let preamble = preamble.ok_or(HandshakeSealError::NotSealed)?;
        let prologue = prologue(&preamble);
        let mut noise = builder(key, &prologue)
            .and_then(Builder::build_responder)
            .map_err(|_| HandshakeSealError::Library)?;
        let hello = read(&mut noise, message)?;
        Ok(Accepter { noise, preamble, hello })
    }

    /// What the caller says of itself. The message may be a replay of an old one.
    #[must_use]
    pub fn hello(&self) -> &SealedHello {
        &self.hello
    }

    /// Makes the reply.
    ///
    /// # Errors
    /// [`HandshakeSealError::Library`], which cannot happen.
    pub fn reply(
        mut self,
        hello: &SealedHello,
    ) -> Result<(SealedPeer, [u8; SEALED_HELLO_BYTES]), HandshakeSealError> {
        let message = write(&mut self.noise, &self.preamble, hello)?;
        let (sealer, opener) = frames(&mut self.noise, false);
        Ok((SealedPeer { hello: self.hello, sealer, opener }, message))
    }
}
