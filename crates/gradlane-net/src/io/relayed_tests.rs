//! Sealed connections of two ranks over loopback TCP, with somebody between them: the handshake, sockets and
//! I/O threads of the transport. Sessions run turn by turn on a clock of the test's own, and wait only for
//! bytes that are on their way.

use super::adversary::{cases, each_case, Adversary, Change, Foreign};
use super::samples::{piece_bytes, HANDSHAKE_BYTES, PREAMBLE, SECRET};
use super::tests::{connected, TestRank, TestSocket};
use crate::channel::completion::WaitTarget;
use crate::connect::{accept, call, digest, FrameSeals, HandshakeError, Identity, Link};
use crate::sys::descriptors::ForkTracked;
use crate::sys::lock;
use crate::sys::poller::{Interest, Poller, Report};
use crate::sys::socket::Socket;
use crate::sys::syscall::PathEstimate;
use gradlane_engine::Input;
use gradlane_units::{Rank, Rng, Step, TensorId};
use gradlane_wire::{
    FrameHeader, FrameKind, Reject, HEADER_BYTES, SEALED_HELLO_BYTES, SEALED_PROOF_BYTES,
};
use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longer than any handshake takes.
const AMPLE: Duration = Duration::from_secs(20);
/// Time of a handshake that waits for bytes that do not come. It may also be too short for the others.
const BRIEF: Duration = Duration::from_millis(40);

/// A connection over loopback: the rank's end, and the relay's. Closing it leaves no port waiting.
pub(super) fn loopback() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let one = TcpStream::connect(listener.local_addr().expect("an address")).expect("a call");
    let (other, _) = listener.accept().expect("a caller");
    for stream in [&one, &other] {
        stream.set_nodelay(true).expect("an option");
        let linger = Some(Duration::ZERO);
        rustix::net::sockopt::set_socket_linger(stream, linger).expect("an option");
    }
    [one, other]
}

/// A rank's TCP socket, whose other end is the relay's.
#[derive(Debug)]
pub(super) struct RelayedSocket {
    stream: ForkTracked<TcpStream>,
    interest: Mutex<Interest>,
    /// Bytes that the rank has sent and the relay has not taken.
    sent: AtomicUsize,
    /// Bytes that the relay has sent and the rank has not received.
    due: AtomicUsize,
    /// Whether the relay has ended the stream.
    ended: AtomicBool,
}

impl RelayedSocket {
    pub(super) fn new(stream: TcpStream) -> RelayedSocket {
        stream.set_nonblocking(true).expect("an option");
        RelayedSocket {
            stream: ForkTracked::new(stream),
            interest: Mutex::new(Interest::Begin),
            sent: AtomicUsize::new(0),
            due: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
        }
    }

    /// Notes bytes that were sent to it, or the end of the stream.
    pub(super) fn expect(&self, bytes: usize, end: bool) {
        self.due.fetch_add(bytes, Ordering::SeqCst);
        self.ended.fetch_or(end, Ordering::SeqCst);
    }

    /// Whether something can be received.
    pub(super) fn is_readable(&self) -> bool {
        self.due.load(Ordering::SeqCst) > 0 || self.ended.load(Ordering::SeqCst)
    }
}

impl TestSocket for RelayedSocket {
    fn report(&self, key: u64) -> Option<Report> {
        let interest = *lock(&self.interest);
        let (readable, writable) = (self.is_readable(), interest == Interest::Writable);
        (interest != Interest::End).then_some(Report { key, readable, writable })
    }
}

impl Socket for RelayedSocket {
    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let count = Socket::send(&self.stream, pieces)?;
        self.sent.fetch_add(count, Ordering::SeqCst);
        Ok(count)
    }

    fn receive(&self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        loop {
            match self.stream.receive(pieces) {
                // The bytes are between the two ends.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && self.is_readable() => {
                    std::thread::yield_now();
                }
                Ok(count) => {
                    self.due.fetch_sub(count, Ordering::SeqCst);
                    return Ok(count);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn end_stream(&self) -> io::Result<()> {
        self.stream.end_stream()
    }

    fn watch(&self, _: &Poller, _: u64, interest: Interest) -> io::Result<()> {
        *lock(&self.interest) = interest;
        Ok(())
    }

    fn unsent_bytes(&self) -> io::Result<u64> {
        self.stream.unsent_bytes()
    }

    fn path_estimate(&self) -> io::Result<PathEstimate> {
        self.stream.path_estimate()
    }

    fn set_send_buffer(&self, bytes: u64) -> io::Result<()> {
        self.stream.set_send_buffer(bytes)
    }

    fn set_unsent_low_water(&self, bytes: u64) -> io::Result<()> {
        self.stream.set_unsent_low_water(bytes)
    }

    fn set_pacing(&self, bytes_per_s: Option<u64>) -> io::Result<()> {
        self.stream.set_pacing(bytes_per_s)
    }
}

/// Between two ranks. What rank 0 sends is its first way, what rank 1 sends the second.
struct Relay {
    /// Towards rank 0, towards rank 1.
    ends: [TcpStream; 2],
    ways: [Adversary; 2],
    /// Bytes that were sent towards each rank.
    fed: [usize; 2],
    ended: [bool; 2],
}

impl Relay {
    /// Connects two ranks through a relay. Returns their sockets too.
    fn new(ways: [Adversary; 2]) -> ([TcpStream; 2], Relay) {
        let [[zero, to_zero], [one, to_one]] = [loopback(), loopback()];
        let relay = Relay { ends: [to_zero, to_one], ways, fed: [0; 2], ended: [false; 2] };
        ([zero, one], relay)
    }

    /// Passes bytes of a rank on to the other one.
    fn pass(&mut self, from: usize, bytes: &[u8]) {
        let [zero, one] = &mut self.ways;
        let (way, back) = if from == 0 { (zero, one) } else { (one, zero) };
        let out = way.pass(bytes, &back.seen);
        let ends = way.ended;
        // A rank that has given up takes nothing.
        let _ = (&self.ends[1 - from]).write_all(&out);
        self.fed[1 - from] += out.len();
        if ends {
            self.end(1 - from);
        }
    }

    /// Ends the stream towards a rank.
    fn end(&mut self, towards: usize) {
        if !std::mem::replace(&mut self.ended[towards], true) {
            let _ = self.ends[towards].shutdown(Shutdown::Write);
        }
    }

    /// Passes on all that comes until `is_over`.
    fn run_until(&mut self, is_over: impl Fn() -> bool) {
        let mut room = [0; 2_048];
        for end in &self.ends {
            end.set_nonblocking(true).expect("an option");
        }
        loop {
            let (was_over, mut moved) = (is_over(), false);
            for from in 0..2 {
                match (&self.ends[from]).read(&mut room) {
                    Ok(count @ 1..) => {
                        self.pass(from, &room[..count]);
                        moved = true;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    // It has closed, or given up with bytes unread.
                    Ok(_) | Err(_) => self.end(1 - from),
                }
            }
            if was_over && !moved {
                break;
            }
            if !moved {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        for end in &self.ends {
            end.set_nonblocking(false).expect("an option");
            end.set_read_timeout(Some(AMPLE)).expect("an option");
        }
    }
}

/// A rank of a job in one of its generations.
fn identity(rank: u32, job: &str, generation: u32) -> Identity {
    Identity {
        rank: Rank(rank),
        world_size: 2,
        generation,
        lanes: 1,
        job_digest: digest(job.as_bytes()),
        table_digest: [2; 32],
        secret: SECRET.to_vec(),
        published: vec!["10.0.0.1:1".to_owned(), "10.0.0.2:2".to_owned()],
        seals: true,
    }
}

/// What each rank has after a handshake.
type Handshakes = [Result<FrameSeals, HandshakeError>; 2];

/// Lets rank 1 call rank 0 through a relay.
fn shake_hands(
    sockets: &[TcpStream; 2],
    identities: &[Identity; 2],
    relay: &mut Relay,
    time: Duration,
) -> Handshakes {
    let ([called, caller], [to_accept, to_call]) = (sockets, identities);
    let (deadline, never) = (Instant::now() + time, AtomicBool::new(false));
    let left = AtomicUsize::new(2);
    let end = |socket: &TcpStream, result| {
        if Result::is_err(&result) {
            let _ = socket.shutdown(Shutdown::Both);
        }
        left.fetch_sub(1, Ordering::SeqCst);
        result
    };
    std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            let accepted = accept(called, to_accept, deadline, &never, |_| Ok(()));
            end(called, accepted.map(|(_, (), seals)| seals.expect("it seals")))
        });
        let connected = scope.spawn(|| {
            let connected =
                call(caller, to_call, Link { rank: Rank(0), lane: 0 }, deadline, &never);
            end(caller, connected.map(|seals| seals.expect("it seals")))
        });
        relay.run_until(|| left.load(Ordering::SeqCst) == 0);
        [accepted, connected].map(|it| it.join().expect("a rank"))
    })
}

/// Connects two ranks of a job whose bytes somebody may change.
fn connect(ways: [Adversary; 2], time: Duration) -> ([TcpStream; 2], Relay, Handshakes) {
    let (sockets, mut relay) = Relay::new(ways);
    let identities = [0, 1].map(|rank| identity(rank, "a job", 0));
    let handshakes = shake_hands(&sockets, &identities, &mut relay, time);
    (sockets, relay, handshakes)
}

/// Elements of each tensor, and the steps of a session.
const SIZES: [u64; 3] = [300, 1, 40];
const STEPS: usize = 3;
/// The step before which nothing happens for so long that ranks send heartbeats.
const STEP_AFTER_PAUSE: usize = 2;
const PAUSE_TURNS: u64 = 24;

/// A rank's contribution, exact in f32 as all means are.
fn contribution(rank: usize, step: usize, tensor: u32, element: usize) -> f32 {
    ((rank + 1) * (element + 1) + 1_000 * tensor as usize + 5_000 * step) as f32
}

/// What all ranks have after a step.
fn mean(step: usize, tensor: u32, element: usize) -> f32 {
    let [zero, one] = [0, 1].map(|rank| contribution(rank, step, tensor, element));
    if step == 0 {
        zero
    } else {
        (zero + one) / 2.0
    }
}

/// Digests of tensors as they were released, by step and tensor.
type Released = BTreeMap<(usize, u32), [u8; 32]>;

/// What became of a rank.
#[derive(Debug, PartialEq, Eq)]
struct Ending {
    /// Why the session failed; `None` where it ended in good order.
    failure: Option<String>,
    released: Released,
}

/// One rank that trains through a relay.
struct Trainee {
    rank: TestRank<RelayedSocket>,
    /// The step that runs; `STEPS` at the end.
    step: usize,
    /// The turn in which it begins, if it has not.
    begins_at: Option<u64>,
    running: bool,
    released: Released,
}

impl Trainee {
    /// Takes a turn: begins and completes steps, and records what is released.
    fn turn(&mut self, index: usize, turn: u64, elapsed: Duration) {
        if !self.running {
            return;
        }
        if self.begins_at.is_some_and(|at| turn >= at) {
            self.begins_at = None;
            let step = Step(self.step as u64);
            if self.step == STEPS {
                self.rank.call(Input::Finish);
            } else {
                self.rank.call(Input::StepBegin(step));
                for tensor in 0..SIZES.len() as u32 {
                    let value = |element| contribution(index, self.step, tensor, element);
                    self.rank.contribute_values(tensor, step.0, value);
                }
                self.rank.call(Input::StepEnd(step));
            }
        }
        self.running = self.rank.turn(Some(elapsed));
        let step = Step(self.step as u64);
        for tensor in 0..SIZES.len() as u32 {
            let is_new = !self.released.contains_key(&(self.step, tensor));
            if is_new && self.rank.has(WaitTarget::Tensor(TensorId(tensor), step)) {
                let elements = self.rank.tensors[tensor as usize].iter();
                let bytes: Vec<u8> = elements.flat_map(|it| it.to_le_bytes()).collect();
                self.released.insert((self.step, tensor), digest(&bytes));
            }
        }
        if self.step < STEPS && self.rank.has(WaitTarget::Step(step)) {
            self.step += 1;
            let pause = if self.step == STEP_AFTER_PAUSE { PAUSE_TURNS } else { 0 };
            self.begins_at = Some(turn + pause);
        }
    }

    /// Checks that memory holds the rank's own gradients and means, and nothing else.
    fn check_memory(&self, index: usize) {
        let step = self.step.min(STEPS - 1);
        for (tensor, elements) in self.rank.tensors.iter().enumerate() {
            let tensor = tensor as u32;
            for (element, &found) in elements.iter().enumerate() {
                let own = [step, step.saturating_sub(1)]
                    .map(|step| contribution(index, step, tensor, element));
                let means = [step, step.saturating_sub(1)].map(|it| mean(it, tensor, element));
                assert!(
                    own.contains(&found) || means.contains(&found),
                    "rank {index}, step {step}: {found} in tensor {tensor} at {element}"
                );
            }
        }
    }
}

/// Trains for some steps through a relay and says goodbye.
fn train(
    sockets: [TcpStream; 2],
    relay: &mut Relay,
    seals: Option<[FrameSeals; 2]>,
) -> [Ending; 2] {
    let sockets = sockets.map(RelayedSocket::new);
    let handshake = if seals.is_some() { HANDSHAKE_BYTES } else { 0 };
    for (socket, fed) in sockets.iter().zip(relay.fed) {
        // Bytes that somebody has added behind a handshake.
        socket.expect(fed - handshake, false);
    }
    // `connected` takes the caller's first.
    let seals = seals.map(|[accepter, caller]| [caller, accepter]);
    let mut ranks = connected(&SIZES, sockets, seals).map(|rank| Trainee {
        rank,
        step: 0,
        begins_at: Some(0),
        running: true,
        released: Released::new(),
    });
    let mut elapsed = Duration::from_millis(1);
    let mut bytes = Vec::new();
    for turn in 0.. {
        assert!(turn < 5_000, "the ranks neither end nor fail");
        for (index, rank) in ranks.iter_mut().enumerate() {
            rank.turn(index, turn, elapsed);
        }
        let mut moved = false;
        for from in 0..2 {
            let socket = |rank: usize| ranks[rank].rank.sockets[1 - rank].clone().expect("a peer");
            bytes.resize(socket(from).sent.swap(0, Ordering::SeqCst), 0);
            (&relay.ends[from]).read_exact(&mut bytes).expect("what was sent");
            moved |= !bytes.is_empty();
            let before = relay.fed[1 - from];
            relay.pass(from, &bytes);
            if !ranks[from].running {
                relay.end(1 - from);
            }
            socket(1 - from).expect(relay.fed[1 - from] - before, relay.ended[1 - from]);
        }
        if ranks.iter().all(|it| !it.running) {
            break;
        }
        // Where nothing moves, something is due by the clock.
        elapsed = if moved { Duration::from_millis(1) } else { Duration::from_secs(1) };
    }
    let mut index = 0;
    ranks.map(|rank| {
        rank.check_memory(index);
        index += 1;
        Ending { failure: rank.rank.ending(), released: rank.released }
    })
}

/// Sessions that nobody disturbs.
struct Undisturbed {
    endings: [Ending; 2],
    /// Positions and lengths of the pieces of each way.
    pieces: [Vec<(usize, usize)>; 2],
    /// What other connections send that way: of this job, of another generation, of another job.
    foreign: [Vec<Foreign>; 2],
}

impl Undisturbed {
    fn new() -> Undisturbed {
        let session = |job, generation| {
            let (sockets, mut relay) = Relay::new(<[Adversary; 2]>::default());
            let identities = [0, 1].map(|rank| identity(rank, job, generation));
            let handshakes = shake_hands(&sockets, &identities, &mut relay, AMPLE);
            let seals = handshakes.map(|it| it.expect("a handshake"));
            let endings = train(sockets, &mut relay, Some(seals));
            (endings, relay.ways.map(|way| way.seen))
        };
        let (endings, here) = session("a job", 0);
        let others = [here, session("a job", 1).1, session("another job", 0).1];
        // Frames have the same lengths where they are not sealed, and can be read there.
        let (sockets, mut plain) = Relay::new(<[Adversary; 2]>::default());
        assert_eq!(train(sockets, &mut plain, None), endings);
        let pieces = [0, 1].map(|way| {
            let headers = headers(&plain.ways[way].seen);
            for kind in [FrameKind::Broadcast, FrameKind::Heartbeat, FrameKind::Goodbye] {
                assert!(headers.iter().any(|it| it.kind == kind), "no {kind:?} of rank {way}");
            }
            let frames = piece_bytes(headers.iter().map(|it| it.length as usize));
            let pieces = [SEALED_HELLO_BYTES, SEALED_PROOF_BYTES].into_iter().chain(frames);
            let pieces: Vec<_> = pieces
                .scan(0, |at, length| {
                    *at += length;
                    Some((*at - length, length))
                })
                .collect();
            let (at, length) = pieces[pieces.len() - 1];
            assert_eq!(at + length, others[0][way].len(), "sealed and plain frames differ");
            pieces
        });
        let foreign = [0, 1].map(|way| others.iter().map(|it| Arc::new(it[way].clone())).collect());
        Undisturbed { endings, pieces, foreign }
    }
}

/// Returns the headers of frames that are not sealed.
fn headers(mut frames: &[u8]) -> Vec<FrameHeader> {
    let mut headers = Vec::new();
    while let Some((header, rest)) = frames.split_first_chunk::<HEADER_BYTES>() {
        let header = FrameHeader::decode(header).expect("a frame");
        headers.push(header);
        frames = &rest[header.length as usize..];
    }
    headers
}

/// Whether the error says what was wrong with what came, or that nothing came.
fn is_named(error: &HandshakeError) -> bool {
    !matches!(error, HandshakeError::System(_) | HandshakeError::Cancelled)
}

/// What became of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    WentOn,
    HandshakeRefused,
    SessionRefused,
}

fn run_case(case: u64, undisturbed: &Undisturbed) -> Verdict {
    let rng = &mut Rng::new(case);
    let way = rng.below(2) as usize;
    let pieces = &undisturbed.pieces[way];
    // One in four is about the handshake.
    let count = if rng.below(4) == 0 { 2 } else { pieces.len() as u32 };
    let (start, length) = pieces[rng.below(count) as usize];
    let at = start + if rng.below(2) == 0 { 0 } else { rng.below(length as u32) as usize };
    // The rest of a piece, that and the next one, or any number of bytes.
    let next = pieces.iter().find(|it| it.0 > at).map_or(0, |it| it.1);
    let rest = start + length - at;
    let size = [rest, rest + next, 1 + rng.below(1_500) as usize][rng.below(3) as usize];
    let change = Change::draw(rng, at, size, &undisturbed.foreign[way]);
    let is_flip = matches!(change, Change::Flip(_));
    let waits = matches!(change, Change::Drop(_) | Change::Swap(_) | Change::Substitute(_));
    let is_early = at < HANDSHAKE_BYTES;
    let time = if is_early && waits { BRIEF } else { AMPLE };
    let mut ways = <[Adversary; 2]>::default();
    ways[way] = Adversary::new(at, change.clone());
    let what = format!("case {case}: {change:?} at {at} of way {way}");
    let (sockets, mut relay, handshakes) = connect(ways, time);
    let [accepter, caller] = handshakes;
    let seals = match (accepter, caller) {
        (Ok(accepter), Ok(caller)) => [accepter, caller],
        (accepter, caller) => {
            assert!(is_early, "{what}: {accepter:?}, {caller:?}");
            for error in [accepter.as_ref().err(), caller.as_ref().err()].into_iter().flatten() {
                assert!(is_named(error), "{what}: {error}");
            }
            // The accepter cannot know that its last message was lost; the caller always knows.
            let is_last = way == 0 && at + size > SEALED_HELLO_BYTES;
            assert!(caller.is_err() && (accepter.is_err() || is_last), "{what}");
            // The mesh calls again.
            let (sockets, mut relay, handshakes) = connect(<[Adversary; 2]>::default(), AMPLE);
            let seals = handshakes.map(|it| it.expect("a handshake"));
            assert_eq!(train(sockets, &mut relay, Some(seals)), undisturbed.endings, "{what}");
            return Verdict::HandshakeRefused;
        }
    };
    assert!(relay.ways[way].is_whole(HANDSHAKE_BYTES), "{what}: a changed handshake is taken");
    let endings = train(sockets, &mut relay, Some(seals));
    for (ending, expected) in endings.iter().zip(&undisturbed.endings) {
        for (key, digest) in &ending.released {
            assert_eq!(expected.released.get(key), Some(digest), "{what}: {key:?}");
        }
    }
    let way_back = &endings[way];
    let receiver = &endings[1 - way];
    let Some(failure) = &receiver.failure else {
        let end = undisturbed.foreign[way][0].len();
        assert!(relay.ways[way].is_whole(end), "{what}: a change is taken");
        assert_eq!(endings, undisturbed.endings, "{what}");
        return Verdict::WentOn;
    };
    let [sender, name] = [way, 1 - way].map(|rank| format!("rank {rank}"));
    assert!(failure.contains(&sender), "{what}: {failure}");
    let reasons: &[&str] =
        if is_flip { &["does not open"] } else { &["does not open", "closed the", "silent for"] };
    assert!(reasons.iter().any(|it| failure.contains(it)), "{what}: {failure}");
    match &way_back.failure {
        Some(failure) => assert!(failure.contains(&name), "{what}: {failure}"),
        // It has heard the goodbye of the other one and can know nothing.
        None => assert_eq!(*way_back, undisturbed.endings[way], "{what}"),
    }
    Verdict::SessionRefused
}

/// Whatever somebody on the path does to one direction, what ranks release is what they release where
/// nobody does anything, their memory holds their own gradients or the means, and where a session does not
/// end in good order both ranks name the other one.
#[test]
fn somebody_on_the_path_changes_no_value_of_a_sealed_connection() {
    let undisturbed = Undisturbed::new();
    let all = (0..STEPS).flat_map(|step| (0..SIZES.len() as u32).map(move |it| (step, it)));
    for ending in &undisturbed.endings {
        assert_eq!(ending.failure, None);
        assert!(ending.released.keys().copied().eq(all.clone()));
    }
    let verdicts = Mutex::new(Vec::new());
    each_case(cases(5_000), |case| {
        let verdict = run_case(case, &undisturbed);
        lock(&verdicts).push(verdict);
    });
    let verdicts = verdicts.into_inner().expect("no case has failed");
    let count = |verdict| verdicts.iter().filter(|it| **it == verdict).count();
    let [sessions, handshakes] = [Verdict::SessionRefused, Verdict::HandshakeRefused].map(count);
    println!(
        "{handshakes} handshakes and {sessions} sessions were refused, {} went on",
        count(Verdict::WentOn)
    );
    assert!(sessions > 0 && handshakes > 0);
}

/// Each bit of the four messages of a handshake: the side that hears a changed message refuses it, and the
/// other one is told, or finds the connection closed. A proof that begins like a refusal, which is longer, is
/// refused when the rest of one has not come in time.
#[test]
fn every_flipped_bit_of_a_handshake_is_refused_by_name_on_both_sides() {
    each_case(2 * 8 * HANDSHAKE_BYTES as u64, |bit| {
        let (way, bit) = ((bit % 2) as usize, bit / 2);
        let (at, bit) = ((bit / 8) as usize, (bit % 8) as u8);
        let mut ways = <[Adversary; 2]>::default();
        ways[way] = Adversary::new(at, Change::Flip(bit));
        let mut start = PREAMBLE.encode();
        if let Some(byte) = at.checked_sub(SEALED_HELLO_BYTES).and_then(|it| start.get_mut(it)) {
            *byte ^= 1 << bit;
        }
        let waits = Reject::begins(&start);
        let time = if waits { Duration::from_secs(2) } else { AMPLE };
        let (_, relay, [accepter, caller]) = connect(ways, time);
        let what = format!("bit {bit} of byte {at} of way {way}: {accepter:?}, {caller:?}");
        assert!(relay.ways[way].changed, "{what}");
        let is_last = way == 0 && at >= SEALED_HELLO_BYTES;
        assert!(caller.is_err() && accepter.is_err() != is_last, "{what}");
        for error in [accepter.err(), caller.err()].into_iter().flatten() {
            let is_late = matches!(error, HandshakeError::TimedOut);
            assert!(is_named(&error) && (waits || !is_late), "{what}");
        }
    });
}

/// Whoever has recorded a whole connection can neither call with it nor answer a call.
#[test]
fn a_recorded_connection_is_refused_by_name() {
    let undisturbed = Undisturbed::new();
    for way in 0..2 {
        let [rank, stranger] = loopback();
        let recorded = &undisturbed.foreign[way][0];
        (&stranger).write_all(recorded).expect("it was sent");
        let (deadline, never) = (Instant::now() + AMPLE, AtomicBool::new(false));
        let error = if way == 1 {
            let accepted = accept(&rank, &identity(0, "a job", 0), deadline, &never, |_| Ok(()));
            accepted.map(|_| ()).expect_err("a recorded call is taken")
        } else {
            let connected = call(
                &rank,
                &identity(1, "a job", 0),
                Link { rank: Rank(0), lane: 0 },
                deadline,
                &never,
            );
            connected.map(|_| ()).expect_err("a recorded answer is taken")
        };
        let expected = ["does not open on rank 1", "does not hold the keys"][way];
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// Ranks that have the secret and are of other generations or jobs.
#[test]
fn another_generation_and_another_job_are_refused_by_name_on_both_sides() {
    for (job, generation, expected) in
        [("a job", 1, "generation"), ("another job", 0, "another job id")]
    {
        let (sockets, mut relay) = Relay::new(<[Adversary; 2]>::default());
        let identities = [identity(0, "a job", 0), identity(1, job, generation)];
        for error in shake_hands(&sockets, &identities, &mut relay, AMPLE).map(Result::err) {
            let text = error.expect("a refusal").to_string();
            assert!(text.contains(expected) && text.contains("rank 0"), "{text}");
        }
    }
}
