//! The handshake on a fresh connection: hello both ways, then proof of the secret both ways.
//!
//! The caller proves first, so that a stranger learns only that gradlane listens. The proofs are
//! HMAC-SHA256 over both hellos, different for each direction, compared in constant time. Both
//! sides read exactly the bytes of the handshake: the next byte is the first frame's.
//!
//! A refusal carries a keyed hash as well, over the caller's hello and the refuser's job, so that a
//! caller can tell a refusal by a rank of its job from one by a stranger.
//!
//! Where connections are sealed, the hellos are messages of `gradlane-seal`, and the proofs are the first
//! messages under the keys of frames. Sealed hellos also hold digests of both ranks' addresses as
//! published, so that nobody can stand between two ranks at an address of their own.

use gradlane_seal::{
    Accepter, Caller, FrameOpener, FrameSealer, HandshakeSealError, PreSharedKey, SealedHello,
    SealedPeer,
};
use gradlane_units::Rank;
use gradlane_wire::{
    escaped, Hello, Preamble, Reject, RejectReason, HELLO_BYTES, MAC_BYTES, NONCE_BYTES,
    REJECT_BYTES, REJECT_SIGNED_BYTES, SEALED_HELLO_BYTES, SEALED_PROOF_BYTES, WIRE_VERSION,
};
use hmac::{Hmac, KeyInit, Mac};
use rustix::io::retry_on_intr;
use rustix::rand::{getrandom, GetRandomFlags};
use sha2::{Digest, Sha256};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const CALLER_LABEL: &[u8] = b"gradlane caller v1";
/// Part of the protocol, so its old word stays.
const ACCEPTER_LABEL: &[u8] = b"gradlane answerer v1";
const REJECT_LABEL: &[u8] = b"gradlane reject v1";
/// Longest address in a message.
pub(super) const ADDRESS_BYTES_MAX: usize = 200;
/// Longest wait in one system call: a cancelled handshake ends soon.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The facts that all ranks of a job agree on, and this rank.
pub(crate) struct Identity {
    pub(crate) rank: Rank,
    pub(crate) world_size: u32,
    pub(crate) generation: u32,
    /// Number of lanes.
    pub(crate) lanes: u16,
    pub(crate) job_digest: [u8; 32],
    pub(crate) table_digest: [u8; 32],
    pub(crate) secret: Vec<u8>,
    /// Addresses by rank, as the ranks have published them.
    pub(crate) published: Vec<String>,
    /// Whether all that is sent is sealed.
    pub(crate) seals: bool,
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) rank: Rank,
    pub(crate) lane: u16,
}

/// The keys that seal and open the frames of a sealed connection.
#[derive(Debug)]
pub(crate) struct FrameSeals {
    pub(crate) sealer: FrameSealer,
    pub(crate) opener: FrameOpener,
}

/// Why a handshake fails.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HandshakeError {
    #[error("not a gradlane peer")]
    NotGradlane,
    #[error("{0}")]
    Sealing(#[from] HandshakeSealError),
    /// This rank refuses the other side.
    #[error("{}", .0.text)]
    Refused(Reject),
    /// This rank refuses another one, which has proved that it knows the secret.
    #[error("{rank} was refused: {}", .reject.text)]
    RefusedRank { rank: Rank, reject: Reject },
    /// A rank of this job, with its secret, refuses this one.
    #[error("it refused this rank: {}", .0.text)]
    RefusedByPeer(Reject),
    /// The other side refuses this rank without a proof.
    #[error("it refused this rank, without proof that it knows the job and its secret: {}", .0.text)]
    RefusedUnverified(Reject),
    #[error("no handshake in time")]
    TimedOut,
    #[error("closed the connection during the handshake")]
    Closed,
    #[error("{0}")]
    System(io::Error),
    #[error("cancelled")]
    Cancelled,
}

/// Returns the SHA-256 of bytes, for the digests in a hello.
pub(crate) fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

impl Identity {
    /// Returns the hello on a connection of a lane.
    fn hello(&self, lane: u16) -> Result<Hello, HandshakeError> {
        let mut nonce = [0; NONCE_BYTES];
        // The kernel gives up to 256 bytes at once.
        retry_on_intr(|| getrandom(&mut nonce, GetRandomFlags::empty()))
            .map_err(|error| HandshakeError::System(error.into()))?;
        Ok(Hello {
            version: WIRE_VERSION,
            rank: self.rank,
            world_size: self.world_size,
            generation: self.generation,
            lane,
            lanes: self.lanes,
            job_digest: self.job_digest,
            table_digest: self.table_digest,
            nonce,
        })
    }

    /// Returns the keyed hash of a direction over both hellos.
    fn proof(&self, label: &[u8], caller: &[u8], accepter: &[u8]) -> Hmac<Sha256> {
        let mut mac = match Hmac::<Sha256>::new_from_slice(&self.secret) {
            Ok(mac) => mac,
            Err(_) => unreachable!("an HMAC takes keys of every length"),
        };
        for part in [label, caller, accepter] {
            mac.update(part);
        }
        mac
    }

    /// Returns the keyed hash of a refusal of a caller.
    fn refusal_proof(&self, caller: &[u8], reject: &[u8; REJECT_BYTES]) -> Hmac<Sha256> {
        let mut mac = self.proof(REJECT_LABEL, caller, &reject[..REJECT_SIGNED_BYTES]);
        mac.update(&self.job_digest);
        mac
    }

    fn pre_shared_key(&self) -> PreSharedKey {
        PreSharedKey::new(&self.secret, &self.job_digest)
    }

    /// Returns the hello of a sealed handshake between two ranks.
    fn sealed_hello(&self, preamble: &Preamble, lane: u16) -> Result<SealedHello, HandshakeError> {
        Ok(SealedHello {
            hello: self.hello(lane)?,
            caller_address: self.address_digest(preamble.caller),
            called_address: self.address_digest(preamble.called),
        })
    }

    /// Returns the address that a rank has published, as far as this rank knows.
    fn address(&self, rank: Rank) -> &str {
        self.published.get(rank.index()).map_or("", String::as_str)
    }

    fn address_digest(&self, rank: Rank) -> [u8; 32] {
        digest(self.address(rank).as_bytes())
    }

    /// Returns why a sealed hello does not fit this rank's own.
    fn sealed_mismatch(&self, preamble: &Preamble, other: &SealedHello) -> Option<Reject> {
        let mismatch = self.mismatch(&other.hello);
        if mismatch.is_some() {
            return mismatch;
        }
        let (own, peer) = (self.rank, other.hello.rank);
        let known =
            [(preamble.caller, other.caller_address), (preamble.called, other.called_address)];
        let (rank, _) = known.into_iter().find(|(it, found)| *found != self.address_digest(*it))?;
        let address = escaped(self.address(rank).as_bytes(), ADDRESS_BYTES_MAX);
        let text = if rank == own {
            format!(
                "{peer} was given another address of {own} than {address}, which {own} has \
                 published: something between them changes addresses"
            )
        } else {
            format!(
                "{own} was given {address} as the address of {rank}, which has published another \
                 one: something between them changes addresses"
            )
        };
        Some(Reject { reason: RejectReason::Address, text })
    }

    fn version_mismatch(&self, version: u8) -> Option<Reject> {
        (version != WIRE_VERSION).then(|| {
            let text = format!(
                "wire version {version} does not fit version {WIRE_VERSION} of {}: install the same \
                 gradlane on every rank",
                self.rank
            );
            Reject { reason: RejectReason::Version, text }
        })
    }

    /// Returns why a hello does not fit this rank's own.
    fn mismatch(&self, other: &Hello) -> Option<Reject> {
        let own = self.rank;
        let reject = |reason, text| Some(Reject { reason, text });
        let version = self.version_mismatch(other.version);
        if version.is_some() {
            return version;
        }
        if other.job_digest != self.job_digest {
            let text = format!("another job id than that of {own}: check the job option");
            return reject(RejectReason::Job, text);
        }
        if other.world_size != self.world_size || other.rank.0 >= self.world_size {
            let text = format!(
                "{} of world size {} does not fit world size {} of {own}",
                other.rank, other.world_size, self.world_size
            );
            return reject(RejectReason::WorldSize, text);
        }
        if other.generation != self.generation {
            let text = format!(
                "membership generation {} does not fit generation {} of {own}",
                other.generation, self.generation
            );
            return reject(RejectReason::Generation, text);
        }
        if other.lanes != self.lanes || other.lane >= self.lanes {
            let (found, lanes) = (other.lanes, self.lanes);
            let text = format!(
                "{found} lanes do not fit the {lanes} of {own}: give lanes= alike on every rank"
            );
            return reject(RejectReason::Lanes, text);
        }
        if other.table_digest != self.table_digest {
            let text = format!(
                "another tensor table or plan than that of {own}: every rank must prepare the \
                 same model with the same options"
            );
            return reject(RejectReason::Table, text);
        }
        None
    }
}

impl Link {
    /// Returns why a hello is not of this end.
    fn mismatch(self, hello: &Hello) -> Option<Reject> {
        let Link { rank, lane } = self;
        let text = if hello.rank != rank {
            format!("{} answers where {rank} was expected", hello.rank)
        } else if hello.lane != lane {
            format!("{rank} answers for lane {} where {lane} was called", hello.lane)
        } else {
            return None;
        };
        Some(Reject { reason: RejectReason::RankTaken, text })
    }
}

/// A blocking stream with one deadline for everything.
struct TimedStream<'a> {
    identity: &'a Identity,
    stream: &'a TcpStream,
    deadline: Instant,
    cancelled: &'a AtomicBool,
}

impl TimedStream<'_> {
    /// Returns the time for one system call.
    fn call_timeout(&self) -> Result<Duration, HandshakeError> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(HandshakeError::Cancelled);
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(HandshakeError::TimedOut);
        }
        Ok(left.min(POLL_INTERVAL))
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), HandshakeError> {
        let mut filled = 0;
        while filled < bytes.len() {
            let timeout = self.call_timeout()?;
            self.stream.set_read_timeout(Some(timeout)).map_err(HandshakeError::System)?;
            match self.stream.read(&mut bytes[filled..]) {
                Ok(0) => return Err(HandshakeError::Closed),
                Ok(count) => filled += count,
                Err(error) => retry_or_fail(error)?,
            }
        }
        Ok(())
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), HandshakeError> {
        while !bytes.is_empty() {
            let timeout = self.call_timeout()?;
            self.stream.set_write_timeout(Some(timeout)).map_err(HandshakeError::System)?;
            match self.stream.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) => retry_or_fail(error)?,
            }
        }
        Ok(())
    }

    /// Reads the refusal that begins with `start`; `caller` is the hello of the side that called.
    fn read_reject(&mut self, start: &[u8], caller: &[u8]) -> HandshakeError {
        if !Reject::begins(start) {
            return HandshakeError::NotGradlane;
        }
        let mut reject = [0; REJECT_BYTES];
        reject[..4].copy_from_slice(start);
        if let Err(error) = self.read(&mut reject[4..]) {
            return error;
        }
        let proof = self.identity.refusal_proof(caller, &reject);
        let is_proven = proof.verify_slice(&reject[REJECT_SIGNED_BYTES..]).is_ok();
        match Reject::decode(&reject) {
            None => HandshakeError::NotGradlane,
            Some(reject) if is_proven => HandshakeError::RefusedByPeer(reject),
            Some(reject) => HandshakeError::RefusedUnverified(reject),
        }
    }

    /// Reads `bytes`, or a refusal in their place. `is_expected` tells whether the first four bytes
    /// are those of the expected message; `caller` is the hello of the side that called.
    fn read_or_reject(
        &mut self,
        bytes: &mut [u8],
        caller: &[u8],
        is_expected: impl FnOnce(&[u8]) -> bool,
    ) -> Result<(), HandshakeError> {
        let (start, rest) = bytes.split_at_mut(4);
        self.read(start)?;
        if is_expected(start) {
            return self.read(rest);
        }
        Err(self.read_reject(start, caller))
    }

    /// Sends a refusal, if the other side still listens.
    fn refuse(&mut self, caller: &[u8], reject: Reject) -> HandshakeError {
        let mut bytes = reject.encode();
        let proof = self.identity.refusal_proof(caller, &bytes).finalize().into_bytes();
        bytes[REJECT_SIGNED_BYTES..].copy_from_slice(&proof);
        // The refusal stands, also when its text does not arrive.
        let _ = self.write(&bytes);
        HandshakeError::Refused(reject)
    }

    /// Sends a refusal that the other side does not believe.
    fn refuse_unproven(&mut self, reject: Reject) -> HandshakeError {
        let _ = self.write(&reject.encode());
        HandshakeError::Refused(reject)
    }
}

fn retry_or_fail(error: io::Error) -> Result<(), HandshakeError> {
    use io::ErrorKind;
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => Ok(()),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
            Err(HandshakeError::Closed)
        }
        _ => Err(HandshakeError::System(error)),
    }
}

fn secret_refusal(text: String) -> Reject {
    Reject { reason: RejectReason::Secret, text }
}

/// Runs the caller's side, on a stream to `expected`, for its lane. Returns what frames are sealed with, where they
/// are.
pub(crate) fn call(
    stream: &TcpStream,
    identity: &Identity,
    expected: Link,
    deadline: Instant,
    cancelled: &AtomicBool,
) -> Result<Option<FrameSeals>, HandshakeError> {
    let timed = TimedStream { identity, stream, deadline, cancelled };
    if identity.seals {
        call_sealed(timed, expected).map(Some)
    } else {
        call_plain(timed, expected).map(|()| None)
    }
}

fn call_plain(mut timed: TimedStream<'_>, expected: Link) -> Result<(), HandshakeError> {
    let identity = timed.identity;
    let own = identity.hello(expected.lane)?.encode();
    timed.write(&own)?;
    let mut theirs = [0; HELLO_BYTES];
    timed.read_or_reject(&mut theirs, &own, |start| *start == own[..4])?;
    let hello = Hello::decode(&theirs).ok_or(HandshakeError::NotGradlane)?;
    if let Some(reject) = identity.mismatch(&hello) {
        return Err(timed.refuse(&own, reject));
    }
    if let Some(reject) = expected.mismatch(&hello) {
        return Err(timed.refuse(&own, reject));
    }
    let proof = identity.proof(CALLER_LABEL, &own, &theirs).finalize().into_bytes();
    timed.write(&proof)?;
    let answer = identity.proof(ACCEPTER_LABEL, &own, &theirs).finalize().into_bytes();
    let mut answered = [0; MAC_BYTES];
    // The first bytes tell a proof from a refusal; the proof itself is compared whole and in
    // constant time.
    timed.read_or_reject(&mut answered, &own, |start| {
        *start == answer[..4] || !Reject::begins(start)
    })?;
    identity.proof(ACCEPTER_LABEL, &own, &theirs).verify_slice(&answered).map_err(|_| {
        let text = format!("{} does not know the secret of {}", expected.rank, identity.rank);
        timed.refuse(&own, secret_refusal(text))
    })
}

fn call_sealed(mut timed: TimedStream<'_>, expected: Link) -> Result<FrameSeals, HandshakeError> {
    let identity = timed.identity;
    let preamble = Preamble { version: WIRE_VERSION, caller: identity.rank, called: expected.rank };
    let hello = identity.sealed_hello(&preamble, expected.lane)?;
    let (caller, own) = Caller::new(&identity.pre_shared_key(), preamble, &hello)?;
    timed.write(&own)?;
    let mut theirs = [0; SEALED_HELLO_BYTES];
    timed.read_or_reject(&mut theirs, &own, Preamble::begins)?;
    let altered = |timed: &mut TimedStream<'_>| {
        let text = format!(
            "the answer of {} does not open on {}: it was altered on the way, or made \
             without the secret",
            expected.rank, identity.rank
        );
        timed.refuse(&own, secret_refusal(text))
    };
    let SealedPeer { hello, mut sealer, mut opener } = match caller.read(&theirs) {
        Ok(peer) => peer,
        Err(_) => return Err(altered(&mut timed)),
    };
    if let Some(reject) = identity.sealed_mismatch(&preamble, &hello) {
        return Err(timed.refuse(&own, reject));
    }
    if let Some(reject) = expected.mismatch(&hello.hello) {
        return Err(timed.refuse(&own, reject));
    }
    timed.write(&sealer.prove(&preamble))?;
    let mut proof = [0; SEALED_PROOF_BYTES];
    timed.read_or_reject(&mut proof, &own, Preamble::begins)?;
    if !opener.verify_proof(&preamble, &mut proof) {
        return Err(altered(&mut timed));
    }
    Ok(FrameSeals { sealer, opener })
}

/// Runs the accepting side. `reserve` is called after the caller has proved the secret: it holds
/// the caller's place, or refuses it. Returns also what frames are sealed with, where they are.
pub(crate) fn accept<R>(
    stream: &TcpStream,
    identity: &Identity,
    deadline: Instant,
    cancelled: &AtomicBool,
    reserve: impl FnOnce(Link) -> Result<R, Reject>,
) -> Result<(Link, R, Option<FrameSeals>), HandshakeError> {
    let mut timed = TimedStream { identity, stream, deadline, cancelled };
    let mut start = [0; 4];
    timed.read(&mut start)?;
    let is_sealed = Preamble::begins(&start);
    if !is_sealed && !Hello::begins(&start) {
        return Err(timed.read_reject(&start, &[]));
    }
    let mut message = [0; SEALED_HELLO_BYTES];
    let length = if is_sealed { SEALED_HELLO_BYTES } else { HELLO_BYTES };
    message[..4].copy_from_slice(&start);
    timed.read(&mut message[4..length])?;
    if is_sealed != identity.seals {
        let (caller, own) =
            if is_sealed { ("seals", "does not") } else { ("does not seal", "does") };
        let text = format!(
            "the caller {caller} its connections and {} {own}: give the secret and seal= alike on \
             every rank",
            identity.rank
        );
        let reject = Reject { reason: RejectReason::Sealing, text };
        return Err(timed.refuse(&message[..length], reject));
    }
    if is_sealed {
        let (link, reservation, seals) = accept_sealed(timed, &message, reserve)?;
        return Ok((link, reservation, Some(seals)));
    }
    let hello = message.first_chunk().expect("a hello is shorter than a sealed one");
    let (link, reservation) = accept_plain(timed, hello, reserve)?;
    Ok((link, reservation, None))
}

fn accept_plain<R>(
    mut timed: TimedStream<'_>,
    theirs: &[u8; HELLO_BYTES],
    reserve: impl FnOnce(Link) -> Result<R, Reject>,
) -> Result<(Link, R), HandshakeError> {
    let identity = timed.identity;
    let hello = Hello::decode(theirs).ok_or(HandshakeError::NotGradlane)?;
    let own = identity.hello(hello.lane)?.encode();
    if let Some(reject) = identity.mismatch(&hello) {
        return Err(timed.refuse(theirs, reject));
    }
    timed.write(&own)?;
    let mut proof = [0; MAC_BYTES];
    let expected = identity.proof(CALLER_LABEL, theirs, &own);
    let start = expected.clone().finalize().into_bytes();
    timed.read_or_reject(&mut proof, theirs, |found| {
        *found == start[..4] || !Reject::begins(found)
    })?;
    if expected.verify_slice(&proof).is_err() {
        let text = format!("another secret than that of {}", identity.rank);
        return Err(timed.refuse(theirs, secret_refusal(text)));
    }
    let link = Link { rank: hello.rank, lane: hello.lane };
    let reservation = reserve(link).map_err(|reject| timed.refuse(theirs, reject))?;
    let proof = identity.proof(ACCEPTER_LABEL, theirs, &own).finalize().into_bytes();
    timed.write(&proof)?;
    Ok((link, reservation))
}

fn accept_sealed<R>(
    mut timed: TimedStream<'_>,
    theirs: &[u8; SEALED_HELLO_BYTES],
    reserve: impl FnOnce(Link) -> Result<R, Reject>,
) -> Result<(Link, R, FrameSeals), HandshakeError> {
    let identity = timed.identity;
    let preamble = theirs.first_chunk().and_then(Preamble::decode);
    let preamble = preamble.ok_or(HandshakeError::NotGradlane)?;
    if let Some(reject) = identity.version_mismatch(preamble.version) {
        return Err(timed.refuse(theirs, reject));
    }
    if preamble.called != identity.rank {
        let text =
            format!("the caller wants {}, and {} listens here", preamble.called, identity.rank);
        // Without a proof: whoever leads a caller to another rank must not end its start.
        return Err(timed.refuse_unproven(Reject { reason: RejectReason::RankTaken, text }));
    }
    let accepter = match Accepter::read(&identity.pre_shared_key(), theirs) {
        Ok(accepter) => accepter,
        Err(HandshakeSealError::NotAuthentic) => {
            let text = format!(
                "another secret or another job id than that of {}, or altered on the way",
                identity.rank
            );
            return Err(timed.refuse(theirs, secret_refusal(text)));
        }
        Err(error) => return Err(error.into()),
    };
    let hello = *accepter.hello();
    if hello.hello.rank != preamble.caller {
        return Err(HandshakeError::NotGradlane);
    }
    if let Some(reject) = identity.sealed_mismatch(&preamble, &hello) {
        timed.refuse(theirs, reject.clone());
        return Err(HandshakeError::RefusedRank { rank: preamble.caller, reject });
    }
    let (SealedPeer { mut sealer, mut opener, .. }, reply) =
        accepter.reply(&identity.sealed_hello(&preamble, hello.hello.lane)?)?;
    timed.write(&reply)?;
    let mut proof = [0; SEALED_PROOF_BYTES];
    timed.read_or_reject(&mut proof, theirs, Preamble::begins)?;
    if !opener.verify_proof(&preamble, &mut proof) {
        let text = format!(
            "{} does not hold the keys that it agreed on with {}: its call was altered or repeated",
            preamble.caller, identity.rank
        );
        // Without a proof: nor must whoever alters or repeats calls.
        return Err(timed.refuse_unproven(secret_refusal(text)));
    }
    let link = Link { rank: hello.hello.rank, lane: hello.hello.lane };
    let reservation = reserve(link).map_err(|reject| timed.refuse(theirs, reject))?;
    timed.write(&sealer.prove(&preamble))?;
    Ok((link, reservation, FrameSeals { sealer, opener }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proofs_have_the_bytes_of_the_protocol() {
        let identity = Identity {
            rank: Rank(0),
            world_size: 1,
            generation: 0,
            lanes: 1,
            job_digest: [0; 32],
            table_digest: [0; 32],
            secret: b"a secret".to_vec(),
            published: Vec::new(),
            seals: false,
        };
        let proof = |label| {
            let proof = identity.proof(label, b"callercallercaller", b"accepteraccepter");
            let bytes = proof.finalize().into_bytes();
            bytes[..4].iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        // By Python's `hmac`, over "gradlane caller v1" and "gradlane answerer v1".
        assert_eq!(proof(CALLER_LABEL), "542a8b37");
        assert_eq!(proof(ACCEPTER_LABEL), "023b7566");
    }
}
