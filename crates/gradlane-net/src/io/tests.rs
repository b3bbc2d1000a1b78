//! The I/O threads over sockets in memory and a clock of the test's own: no threads, no sleeps.

use super::adversary::{cases, Adversary, Change};
use super::core::Core;
use super::driver::{Driver, PeerLink, ShutdownCause};
use super::io_thread::IoThread;
use crate::channel::completion::WaitTarget;
use crate::channel::shared::{Command, Shared};
use crate::connect::FrameSeals;
use crate::memory::UserMemory;
use crate::metrics::Metrics;
use crate::options::ChannelOptions;
use crate::sys::lock;
use crate::sys::poller::{Interest, Poller};
use crate::sys::socket::Socket;
use crate::sys::syscall::{EpollReport, PathEstimate};
use gradlane_engine::{Input, Plan, Strategy, TensorKind, TensorSpec, Update};
use gradlane_seal::{Accepter, Caller, PreSharedKey, SealedHello};
use gradlane_units::{Dtype, Rank, Rng, Step, TensorId};
use gradlane_wire::{FrameHeader, FrameKind, Hello, Preamble, HEADER_BYTES, WIRE_VERSION};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// One direction of a connection.
#[derive(Debug, Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    /// Bytes that fit at once.
    capacity: usize,
    ended: bool,
    /// Everything that was ever sent.
    history: Vec<u8>,
}

/// A socket in memory, whose kernel takes as many bytes as its pipe has room for.
#[derive(Debug)]
pub(super) struct MemorySocket {
    outgoing: Arc<Mutex<Pipe>>,
    incoming: Arc<Mutex<Pipe>>,
    interest: Mutex<Interest>,
}

impl MemorySocket {
    /// Both ends of a connection that holds `capacity` bytes each way.
    pub(super) fn pair(capacity: usize) -> (MemorySocket, MemorySocket) {
        let pipe = || Arc::new(Mutex::new(Pipe { capacity, ..Pipe::default() }));
        let (there, back) = (pipe(), pipe());
        let socket = |outgoing: &Arc<Mutex<Pipe>>, incoming: &Arc<Mutex<Pipe>>| MemorySocket {
            outgoing: Arc::clone(outgoing),
            incoming: Arc::clone(incoming),
            interest: Mutex::new(Interest::Begin),
        };
        (socket(&there, &back), socket(&back, &there))
    }

    /// Takes the bytes that were sent and that the other end has not received.
    pub(super) fn drain_sent(&self) -> Vec<u8> {
        lock(&self.outgoing).bytes.drain(..).collect()
    }

    /// Lets bytes arrive.
    pub(super) fn feed(&self, bytes: &[u8]) {
        lock(&self.incoming).bytes.extend(bytes);
    }
}

/// What the two ends of a sealed connection have after a handshake: the caller, the accepter.
pub(super) fn seals() -> [FrameSeals; 2] {
    let key = PreSharedKey::new(b"a secret of the tests", &[1; 32]);
    let preamble = Preamble { version: WIRE_VERSION, caller: Rank(1), called: Rank(0) };
    let hello = SealedHello {
        hello: Hello {
            version: WIRE_VERSION,
            rank: Rank(1),
            world_size: 2,
            generation: 0,
            job_digest: [1; 32],
            table_digest: [2; 32],
            nonce: [3; 32],
        },
        caller_address: [4; 32],
        called_address: [5; 32],
    };
    let (caller, message) = Caller::new(&key, preamble, &hello).expect("a call");
    let accepter = Accepter::read(&key, &message).expect("a caller");
    let (accepter, reply) = accepter.reply(&hello).expect("a reply");
    let caller = caller.read(&reply).expect("a reply");
    [caller, accepter].map(|it| FrameSeals { sealer: it.sealer, opener: it.opener })
}

impl Socket for MemorySocket {
    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut pipe = lock(&self.outgoing);
        let room = pipe.capacity - pipe.bytes.len();
        if room == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let bytes: Vec<u8> = pieces.iter().flat_map(|it| it.iter().copied()).take(room).collect();
        pipe.history.extend(&bytes);
        pipe.bytes.extend(&bytes);
        Ok(bytes.len())
    }

    fn receive(&self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut pipe = lock(&self.incoming);
        if pipe.bytes.is_empty() && !pipe.ended {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut count = 0;
        for room in pieces.iter_mut().flat_map(|piece| piece.iter_mut()) {
            let Some(byte) = pipe.bytes.pop_front() else {
                break;
            };
            *room = byte;
            count += 1;
        }
        Ok(count)
    }

    fn end_stream(&self) -> io::Result<()> {
        lock(&self.outgoing).ended = true;
        Ok(())
    }

    fn watch(&self, _: &Poller, _: u64, interest: Interest) -> io::Result<()> {
        *lock(&self.interest) = interest;
        Ok(())
    }

    fn unsent_bytes(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn path_estimate(&self) -> io::Result<PathEstimate> {
        let acknowledged_bytes = lock(&self.outgoing).history.len() as u64;
        Ok(PathEstimate { delivery_bytes_per_s: 1_000_000, min_rtt_us: 100, acknowledged_bytes })
    }

    fn set_send_buffer(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn set_unsent_low_water(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn set_pacing(&self, _: Option<u64>) -> io::Result<()> {
        Ok(())
    }
}

/// A socket to a peer, and what its frames are sealed with.
type TestPeer = (Arc<MemorySocket>, Option<FrameSeals>);

/// One rank, driven turn by turn.
struct TestRank {
    owned: *mut Mutex<Core>,
    core: &'static Mutex<Core>,
    thread: IoThread<'static>,
    shared: Arc<Shared>,
    sockets: Vec<Option<Arc<MemorySocket>>>,
    tensors: Vec<Vec<f32>>,
    now: Instant,
}

impl TestRank {
    fn new(plan: &Arc<Plan>, rank: u32, peers: Vec<Option<TestPeer>>) -> TestRank {
        let options = ChannelOptions {
            frame_bytes: 1_024,
            credit_bytes: 1_024,
            work_threads: 0,
            ..ChannelOptions::new(rank, plan.world_size)
        };
        let pollers = vec![Poller::new().expect("a poller")];
        let metrics = Arc::new(Metrics::new(Rank(rank), plan));
        let shared = Arc::new(Shared::new(pollers, plan, &options, metrics));
        let socket = |it: &Option<TestPeer>| it.as_ref().map(|(socket, _)| Arc::clone(socket));
        let sockets = peers.iter().map(socket).collect();
        let link = |(socket, seals): TestPeer| PeerLink { socket, seals };
        let links = peers.into_iter().map(|peer| peer.map(link)).collect();
        let driver = Driver::new(options, plan, links, true, shared.clone());
        let Driver { core, mut connections } = driver.expect("a driver");
        // A thread borrows its core for longer than this value can: `end` frees it.
        let owned = Box::into_raw(Box::new(core));
        // SAFETY: it stays until `end`, or for good.
        let core: &'static Mutex<Core> = unsafe { &*owned };
        let thread = IoThread::new(0, core, connections.remove(0));
        let tensors = plan.tensors.iter().map(|it| vec![0.0; it.spec.numel as usize]).collect();
        let now = Instant::now();
        TestRank { owned, core, thread, shared, sockets, tensors, now }
    }

    fn call(&self, input: Input) {
        self.shared.command(Command::Engine(input));
    }

    /// Contributes `value` in every element.
    fn contribute(&mut self, tensor: u32, step: u64, value: f32) {
        let elements = &mut self.tensors[tensor as usize];
        elements.fill(value);
        let address = elements.as_mut_ptr().expose_provenance();
        // SAFETY: the rank keeps the tensor, and leaves it alone until it is complete.
        let memory = unsafe { UserMemory::new(address, elements.len() * 4) };
        let input = Input::GradientReady(TensorId(tensor), Step(step));
        self.shared.command(Command::Contribute(memory, input));
    }

    fn has(&self, target: WaitTarget) -> bool {
        self.shared.completion.has(target)
    }

    /// One turn, after a sleep of `elapsed` or as long as the thread asks for. Returns `false` when the
    /// session has ended.
    fn turn(&mut self, elapsed: Option<Duration>) -> bool {
        let Some(sleep) = self.thread.send() else {
            return false;
        };
        self.now += elapsed.unwrap_or(sleep.at_most);
        let report = |(rank, socket): (usize, &Option<Arc<MemorySocket>>)| {
            let socket = socket.as_ref()?;
            let interest = *lock(&socket.interest);
            let (incoming, outgoing) = (lock(&socket.incoming), lock(&socket.outgoing));
            let readable = !incoming.bytes.is_empty() || incoming.ended;
            let room = outgoing.bytes.len() < outgoing.capacity;
            let writable = interest == Interest::Writable && room;
            (interest != Interest::End).then_some(EpollReport {
                key: rank as u64,
                readable,
                writable,
            })
        };
        let reports: Vec<_> = self.sockets.iter().enumerate().filter_map(report).collect();
        self.thread.handle_reports(self.now, sleep, &reports);
        true
    }

    /// Frees everything, for tests with thousands of ranks.
    fn end(self) {
        let TestRank { owned, thread, .. } = self;
        drop(thread);
        // SAFETY: it came from `Box::into_raw`, and the thread was the last that borrowed it.
        drop(unsafe { Box::from_raw(owned) });
    }

    fn failure(&self) -> String {
        match lock(self.core).take_shutdown() {
            ShutdownCause::Failed(failure) => failure.to_string(),
            other => panic!("{other:?}"),
        }
    }
}

/// Two ranks whose connection holds `capacity` bytes each way, with tensors of these sizes.
fn two_ranks(capacity: usize, sizes: &[u64]) -> [TestRank; 2] {
    let (one, other) = MemorySocket::pair(capacity);
    connected(sizes, [one, other], None)
}

/// Two ranks with these tensors and these sockets.
fn connected(
    sizes: &[u64],
    [one, other]: [MemorySocket; 2],
    seals: Option<[FrameSeals; 2]>,
) -> [TestRank; 2] {
    let spec = |(index, &numel): (usize, &u64)| TensorSpec {
        name: format!("tensor{index}"),
        numel,
        dtype: Dtype::F32,
        kind: TensorKind::Parameter,
    };
    let specs = sizes.iter().enumerate().map(spec).collect();
    let strategy = Strategy::named("p3", Some(1_000_000), 0).expect("a strategy");
    let plan = Arc::new(Plan::build(specs, strategy, Update::Worker, 2).expect("a plan"));
    let [caller, accepter] = seals.map_or([None, None], |it| it.map(Some));
    let ranks = [
        TestRank::new(&plan, 0, vec![None, Some((Arc::new(one), accepter))]),
        TestRank::new(&plan, 1, vec![Some((Arc::new(other), caller)), None]),
    ];
    for rank in &ranks {
        rank.shared.command(Command::AllConnected);
    }
    ranks
}

/// Turns of both ranks until a step is complete on both.
fn complete(ranks: &mut [TestRank; 2], step: u64) {
    for _ in 0..100_000 {
        if ranks.iter().all(|rank| rank.has(WaitTarget::Step(Step(step)))) {
            return;
        }
        for rank in ranks.iter_mut() {
            assert!(rank.turn(Some(Duration::from_micros(100))), "{}", rank.failure());
        }
    }
    panic!("{step} is not complete");
}

/// The means of three steps, with the contributions of rank 0 and rank 1.
const MEANS: [f32; 3] = [1.5, 5.5, 8.25];
const CONTRIBUTIONS: [[f32; 3]; 2] = [[1.5, 3.0, 4.5], [4.0, 8.0, 12.0]];

/// Queues all gradients of a step on both ranks.
fn contribute_all(ranks: &mut [TestRank; 2], step: usize) {
    for (rank, values) in ranks.iter_mut().zip(CONTRIBUTIONS) {
        rank.call(Input::StepBegin(Step(step as u64)));
        for tensor in (0..rank.tensors.len() as u32).rev() {
            rank.contribute(tensor, step as u64, values[step]);
        }
        rank.call(Input::StepEnd(Step(step as u64)));
    }
}

#[test]
fn frames_that_are_cut_anywhere_give_the_mean() {
    for (capacity, is_sealed) in
        [1, 7, HEADER_BYTES + 1, 5_000].into_iter().flat_map(|it| [(it, false), (it, true)])
    {
        let (one, other) = MemorySocket::pair(capacity);
        let mut ranks = connected(&[300, 1, 40], [one, other], is_sealed.then(seals));
        for (step, mean) in MEANS.into_iter().enumerate() {
            contribute_all(&mut ranks, step);
            complete(&mut ranks, step as u64);
            for rank in &ranks {
                assert!(rank.tensors.iter().flatten().all(|&it| it == mean), "{capacity}");
            }
        }
    }
}

/// What ranks without a secret send each other, to the byte: the digests are of the code before there
/// were sealed connections.
#[test]
fn frames_that_are_not_sealed_have_the_bytes_of_the_protocol() {
    let mut ranks = two_ranks(5_000, &[300, 1, 40]);
    for step in 0..MEANS.len() {
        contribute_all(&mut ranks, step);
        complete(&mut ranks, step as u64);
    }
    let sent = |rank: usize| {
        let socket = ranks[rank].sockets[1 - rank].as_ref().expect("a peer");
        let history = &lock(&socket.outgoing).history;
        let digest = crate::connect::digest(history);
        (history.len(), digest[..4].iter().map(|it| format!("{it:02x}")).collect::<String>())
    };
    assert_eq!(
        [sent(0), sent(1)],
        [(4_860, "7d62d177".to_owned()), (3_532, "0ca6ad97".to_owned())]
    );
}

/// Whatever somebody on the path does to one direction, a rank's memory holds its own gradients or the
/// means, and where a step is not completed both ranks name the peer.
#[test]
fn somebody_on_the_path_changes_no_value_of_a_sealed_connection() {
    let mut failed = 0;
    for case in 0..cases(200) {
        let rng = &mut Rng::new(case);
        let [one, other] = [(); 2].map(|()| MemorySocket::pair(3_000).0);
        let mut ranks = connected(&[300, 1, 40], [one, other], Some(seals()));
        let at = rng.below(4_500) as usize;
        let sizes = [80, 1_040, 1 + rng.below(2_000) as usize];
        let elsewhere: Vec<u8> = (0..3_000).map(|_| rng.below(256) as u8).collect();
        let change = Change::draw(rng, &[&elsewhere], &sizes);
        let mut adversary = Adversary::new(at, change.clone());
        let forwards = rng.below(2) as usize;
        let (mut step, mut running) = (0, [true; 2]);
        contribute_all(&mut ranks, step);
        for _ in 0..20_000 {
            for (rank, running) in ranks.iter_mut().zip(&mut running) {
                *running = *running && rank.turn(Some(Duration::from_millis(20)));
            }
            for from in 0..2 {
                let to = ranks[1 - from].sockets[from].clone().expect("a peer");
                let from_socket = ranks[from].sockets[1 - from].as_ref().expect("a peer");
                let mut bytes = from_socket.drain_sent();
                if from == forwards {
                    bytes = adversary.pass(&bytes);
                }
                to.feed(&bytes);
                lock(&to.incoming).ended |= !running[from] || from == forwards && adversary.ended;
            }
            if ranks.iter().all(|rank| rank.has(WaitTarget::Step(Step(step as u64)))) {
                for rank in &ranks {
                    let all = rank.tensors.iter().flatten().all(|&it| it == MEANS[step]);
                    assert!(all, "case {case}: {change:?} at {at}, step {step}");
                }
                step += 1;
                if step == MEANS.len() {
                    break;
                }
                contribute_all(&mut ranks, step);
            }
            if running == [false; 2] {
                break;
            }
        }
        if step == MEANS.len() {
            ranks.into_iter().for_each(TestRank::end);
            continue;
        }
        failed += 1;
        assert_eq!(running, [false; 2], "case {case}: {change:?} at {at}, step {step}");
        for (index, rank) in ranks.iter().enumerate() {
            let failure = rank.failure();
            let is_named = failure.contains("rank 0") || failure.contains("rank 1");
            assert!(is_named, "case {case}: {failure}");
            let known = [CONTRIBUTIONS[index][step], MEANS[step]];
            let is_known = rank.tensors.iter().flatten().all(|it| known.contains(it));
            assert!(is_known, "case {case}: {change:?} at {at}: {:?}", rank.tensors);
        }
        ranks.into_iter().for_each(TestRank::end);
    }
    assert!(failed > 0);
}

#[test]
fn an_urgent_tensor_overtakes_a_large_one_at_the_next_frame() {
    let mut ranks = two_ranks(2_000, &[200, 20_000]);
    for rank in &ranks {
        rank.call(Input::StepBegin(Step(0)));
    }
    ranks[0].contribute(1, 0, 1.0);
    // The pipe is full of the large tensor.
    for _ in 0..5 {
        ranks[0].turn(Some(Duration::ZERO));
    }
    let socket = ranks[0].sockets[1].clone().expect("a peer");
    assert_eq!(lock(&socket.outgoing).bytes.len(), 2_000);
    ranks[0].contribute(0, 0, 1.0);
    ranks[1].contribute(0, 0, 2.0);
    ranks[1].contribute(1, 0, 2.0);
    complete(&mut ranks, 0);
    let history = lock(&socket.outgoing).history.clone();
    let (mut at, mut tensors) = (0, Vec::new());
    while let Some(bytes) = history[at..].first_chunk::<HEADER_BYTES>() {
        let header = FrameHeader::decode(bytes).expect("a frame");
        if matches!(header.kind, FrameKind::Push | FrameKind::Broadcast) {
            tensors.push(header.tensor.0);
        }
        at += HEADER_BYTES + header.length as usize;
    }
    // One frame is with the kernel and one more is cut by the full pipe.
    let urgent = tensors.iter().position(|&tensor| tensor == 0).expect("it was sent");
    assert!(urgent <= 3 && tensors.len() > 70, "{urgent} of {}", tensors.len());
}

#[test]
fn a_peer_that_says_nothing_is_lost_after_the_silence_timeout() {
    let [mut rank, silent] = two_ranks(100_000, &[8]);
    // The call wakes the thread.
    assert!(rank.turn(Some(Duration::ZERO)));
    let began = rank.now;
    let mut turns = 0;
    while rank.turn(None) {
        turns += 1;
        assert!(turns < 100, "the thread sleeps until something is due");
    }
    let elapsed = rank.now - began;
    assert!((Duration::from_secs(30)..Duration::from_secs(31)).contains(&elapsed), "{elapsed:?}");
    let failure = rank.failure();
    assert!(failure.contains("rank 1") && failure.contains("silent for 30.0 s"), "{failure}");
    // A heartbeat every quarter of the timeout, as long as the peer may still live.
    let sent = lock(&silent.sockets[0].as_ref().expect("a peer").incoming).history.clone();
    let kinds = sent.chunks(HEADER_BYTES).map(|bytes| {
        let bytes = bytes.first_chunk().expect("whole headers");
        FrameHeader::decode(bytes).expect("a frame").kind
    });
    let beats = kinds.filter(|&kind| kind == FrameKind::Heartbeat).count();
    assert!((3..=5).contains(&beats), "{beats} heartbeats");
}

#[test]
fn a_corrupted_payload_ends_the_session_and_releases_nothing() {
    let mut ranks = two_ranks(100_000, &[100]);
    for rank in &ranks {
        rank.call(Input::StepBegin(Step(0)));
    }
    ranks[0].contribute(0, 0, 1.0);
    ranks[1].contribute(0, 0, 2.0);
    for _ in 0..5 {
        ranks[0].turn(Some(Duration::ZERO));
    }
    let socket = ranks[1].sockets[0].clone().expect("a peer");
    *lock(&socket.incoming).bytes.back_mut().expect("bytes on their way") ^= 1;
    while ranks[1].turn(Some(Duration::ZERO)) {}
    let failure = ranks[1].failure();
    assert!(failure.contains("rank 0 sent a corrupted payload"), "{failure}");
    assert!(failure.contains("tensor0"), "{failure}");
    assert!(!ranks[1].has(WaitTarget::Tensor(TensorId(0), Step(0))));
}

#[test]
fn a_peer_that_closes_is_lost_at_once() {
    let [mut rank, peer] = two_ranks(100, &[8]);
    let socket = peer.sockets[0].as_ref().expect("a peer");
    socket.end_stream().expect("ended");
    while rank.turn(Some(Duration::ZERO)) {}
    let failure = rank.failure();
    assert!(failure.contains("rank 1") && failure.contains("closed the connection"), "{failure}");
    assert_eq!(lock(rank.core).engine.rank(), Rank(0));
}
