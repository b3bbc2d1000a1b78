//! Sealed connections: a handshake that proves the secret and agrees on fresh keys, and frames under
//! them. No sockets: bytes in, bytes out.
//!
//! The handshake is `Noise_NNpsk0_25519_AESGCM_SHA256` by `snow`, frames are sealed by `ring`; the layout is
//! that of `gradlane-wire` (`handshake`, `sealed`). Why so: `docs/decisions/0058-sealed-connections.md`.

#![forbid(unsafe_code)]

mod frames;
mod handshake;
mod keys;

pub use frames::{FrameOpener, FrameSealer, OpenError, Opened};
pub use handshake::{Accepter, Caller, HandshakeSealError, PreSharedKey, SealedHello, SealedPeer};
