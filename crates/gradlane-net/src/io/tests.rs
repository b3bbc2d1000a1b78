//! Lanes over sockets in memory and a clock of the test's own: no threads, no sleeps.

use super::driver::{Driver, PeerLink};
use super::lane::Lane;
use super::samples::{Job, JOB};
use crate::channel::completion::WaitTarget;
use crate::channel::shared::{Command, Shared, StopCause};
use crate::connect::FrameSeals;
use crate::memory::UserMemory;
use crate::metrics::Metrics;
use crate::options::ChannelOptions;
use crate::sys::lock;
use crate::sys::poller::{Interest, Poller, Report};
use crate::sys::socket::Socket;
use crate::sys::syscall::PathEstimate;
use gradlane_engine::{Input, Plan, Strategy, TensorKind, TensorSpec, Update};
use gradlane_units::{Dtype, Rank, Step, TensorId};
use gradlane_wire::{FrameHeader, FrameKind, HEADER_BYTES};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A socket of a rank that is driven turn by turn.
pub(super) trait TestSocket: Socket + 'static {
    /// Returns what a poller would report of it under `key`.
    fn report(&self, key: u64) -> Option<Report>;
}

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
pub(super) fn seals(job: Job) -> [FrameSeals; 2] {
    job.connect().map(|it| FrameSeals { sealer: it.sealer, opener: it.opener })
}

impl TestSocket for MemorySocket {
    fn report(&self, key: u64) -> Option<Report> {
        let interest = *lock(&self.interest);
        let (incoming, outgoing) = (lock(&self.incoming), lock(&self.outgoing));
        let readable = !incoming.bytes.is_empty() || incoming.ended;
        let room = outgoing.bytes.len() < outgoing.capacity;
        let writable = interest == Interest::Writable && room;
        (interest != Interest::End).then_some(Report { key, readable, writable })
    }
}

impl Socket for MemorySocket {
    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut pipe = lock(&self.outgoing);
        let room = pipe.capacity - pipe.bytes.len();
        if room == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut taken = 0;
        for piece in pieces {
            let piece = &piece[..piece.len().min(room - taken)];
            pipe.history.extend_from_slice(piece);
            pipe.bytes.extend(piece);
            taken += piece.len();
        }
        Ok(taken)
    }

    fn receive(&self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut pipe = lock(&self.incoming);
        if pipe.bytes.is_empty() && !pipe.ended {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut count = 0;
        for piece in pieces {
            let filled = piece.len().min(pipe.bytes.len());
            pipe.bytes.read_exact(&mut piece[..filled])?;
            count += filled;
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
type TestPeer<S> = (Arc<S>, Option<FrameSeals>);

/// One rank, driven turn by turn.
pub(super) struct TestRank<S = MemorySocket> {
    lane: Lane,
    shared: Arc<Shared>,
    pub(super) sockets: Vec<Option<Arc<S>>>,
    pub(super) tensors: Vec<Vec<f32>>,
    now: Instant,
}

impl<S: TestSocket> TestRank<S> {
    fn new(plan: &Arc<Plan>, rank: u32, peers: Vec<Option<TestPeer<S>>>) -> TestRank<S> {
        let options = ChannelOptions {
            frame_bytes: 1_024,
            credit_bytes: 1_024,
            work_threads: 0,
            ..ChannelOptions::new(rank, plan.world_size)
        };
        let pollers = vec![Poller::new().expect("a poller")];
        let metrics = Arc::new(Metrics::new(Rank(rank), plan, 1));
        let shared = Arc::new(Shared::new(pollers, plan, &options, metrics));
        let socket = |it: &Option<TestPeer<S>>| it.as_ref().map(|(socket, _)| Arc::clone(socket));
        let sockets = peers.iter().map(socket).collect();
        let link = |(socket, seals): TestPeer<S>| PeerLink { socket, seals };
        let links = peers.into_iter().map(|peer| peer.map(link)).collect();
        let driver = Driver::new(&options, plan, vec![links], true, &shared);
        let lane = driver.expect("a driver").lanes.remove(0);
        let tensors = plan.tensors.iter().map(|it| vec![0.0; it.spec.numel as usize]).collect();
        let now = Instant::now();
        TestRank { lane, shared, sockets, tensors, now }
    }

    pub(super) fn call(&self, input: Input) {
        self.shared.tell_first(Command::Engine(input));
    }

    /// Contributes `value` in every element.
    fn contribute(&mut self, tensor: u32, step: u64, value: f32) {
        self.contribute_values(tensor, step, |_| value);
    }

    /// Contributes the values of a tensor's elements.
    pub(super) fn contribute_values(
        &mut self,
        tensor: u32,
        step: u64,
        value: impl Fn(usize) -> f32,
    ) {
        let elements = &mut self.tensors[tensor as usize];
        for (index, element) in elements.iter_mut().enumerate() {
            *element = value(index);
        }
        let address = elements.as_mut_ptr().expose_provenance();
        // SAFETY: the rank keeps the tensor, and leaves it alone until it is complete.
        let memory = unsafe { UserMemory::new(address, elements.len() * 4) };
        let input = Input::GradientReady(TensorId(tensor), Step(step));
        self.shared.tell_first(Command::Contribute(memory, input));
    }

    pub(super) fn has(&self, target: WaitTarget) -> bool {
        self.shared.completion.has(target)
    }

    /// One turn, after a sleep of `elapsed` or as long as the thread asks for. Returns `false` when the
    /// session has ended.
    pub(super) fn turn(&mut self, elapsed: Option<Duration>) -> bool {
        let Some(sleep) = self.lane.send() else {
            return false;
        };
        self.now += elapsed.unwrap_or(sleep.at_most);
        let sockets = self.sockets.iter().enumerate();
        let reports = sockets.filter_map(|(rank, it)| it.as_ref()?.report(rank as u64));
        let reports: Vec<_> = reports.collect();
        self.lane.handle_reports(self.now, sleep, &reports);
        true
    }

    fn failure(&self) -> String {
        self.ending().expect("the session has failed")
    }

    /// Returns why the session has failed; `None` where it has ended in good order.
    pub(super) fn ending(&self) -> Option<String> {
        match self.shared.stop.get() {
            None => None,
            Some(StopCause::Failed(failure)) => Some(failure.to_string()),
            Some(StopCause::Panicked(text)) => panic!("{text}"),
        }
    }
}

/// Two ranks whose connection holds `capacity` bytes each way, with tensors of these sizes.
fn two_ranks(capacity: usize, sizes: &[u64]) -> [TestRank; 2] {
    let (one, other) = MemorySocket::pair(capacity);
    connected(sizes, [one, other], None)
}

/// Two ranks with these tensors and these sockets.
pub(super) fn connected<S: TestSocket>(
    sizes: &[u64],
    [one, other]: [S; 2],
    seals: Option<[FrameSeals; 2]>,
) -> [TestRank<S>; 2] {
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
        rank.shared.tell_first(Command::AllConnected);
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
        let mut ranks = connected(&[300, 1, 40], [one, other], is_sealed.then(|| seals(JOB)));
        for (step, mean) in MEANS.into_iter().enumerate() {
            contribute_all(&mut ranks, step);
            complete(&mut ranks, step as u64);
            for rank in &ranks {
                assert!(rank.tensors.iter().flatten().all(|&it| it == mean), "{capacity}");
            }
        }
    }
}

/// What ranks without a secret send each other, to the byte.
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
        [(4_860, "21c677a3".to_owned()), (3_532, "1c528ca3".to_owned())]
    );
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
    assert_eq!(rank.lane.core.engine.rank(), Rank(0));
}

#[test]
fn a_rank_that_stood_still_names_itself() {
    let [mut rank, peer] = two_ranks(100, &[8]);
    assert!(rank.turn(Some(Duration::ZERO)));
    // The other one has given it up meanwhile, and has closed the connection.
    assert!(rank.turn(Some(Duration::from_secs(90))));
    peer.sockets[0].as_ref().expect("a peer").end_stream().expect("ended");
    while rank.turn(Some(Duration::ZERO)) {}
    let failure = rank.failure();
    assert!(failure.starts_with("rank 0 stood still for "), "{failure}");
    assert!(
        failure.contains("silence_timeout_s") && failure.contains("rank 1 was lost"),
        "{failure}"
    );
}

#[test]
fn a_rank_that_stood_still_long_ago_names_the_lost_one() {
    let [mut rank, peer] = two_ranks(100, &[8]);
    assert!(rank.turn(Some(Duration::ZERO)));
    assert!(rank.turn(Some(Duration::from_secs(90))));
    assert!(rank.turn(Some(Duration::from_secs(5))));
    peer.sockets[0].as_ref().expect("a peer").end_stream().expect("ended");
    while rank.turn(Some(Duration::ZERO)) {}
    assert!(rank.failure().starts_with("rank 1 was lost"));
}

#[test]
fn a_call_that_is_refused_leaves_memory_where_it_was() {
    let mut ranks = two_ranks(100_000, &[100]);
    for rank in &ranks {
        rank.call(Input::StepBegin(Step(0)));
    }
    let mut other = vec![9.0_f32; 100];
    let address = other.as_mut_ptr().expose_provenance();
    ranks[0].contribute(0, 0, 1.0);
    // SAFETY: it stays until the end of the test.
    let memory = unsafe { UserMemory::new(address, other.len() * 4) };
    let twice = Input::GradientReady(TensorId(0), Step(0));
    ranks[0].shared.tell_first(Command::Contribute(memory, twice));
    ranks[1].contribute(0, 0, 2.0);
    let target = WaitTarget::Tensor(TensorId(0), Step(0));
    for _ in 0..100 {
        ranks.iter_mut().for_each(|rank| assert!(rank.turn(Some(Duration::ZERO))));
    }
    assert!(ranks[1].has(target));
    assert_eq!(ranks[1].tensors[0], vec![1.0; 100]);
}

#[test]
fn a_thread_does_not_sleep_while_a_connection_is_to_be_closed() {
    let [mut rank, _peer] = two_ranks(100, &[8]);
    assert!(rank.turn(Some(Duration::ZERO)));
    assert!(rank.lane.core.is_idle());
    for _again in 0..2 {
        rank.lane.core.to_disconnect.push(Rank(1));
        assert!(!rank.lane.core.is_idle());
        rank.lane.disconnect();
        // The second time it is closed already.
        assert_eq!(rank.lane.core.to_disconnect, []);
    }
}

/// Ends a session of one rank with three lanes by a panic in one of them.
fn panic_in_a_lane(panicking: usize, begun: bool) {
    let spec = TensorSpec {
        name: "tensor".to_owned(),
        numel: 8,
        dtype: Dtype::F32,
        kind: TensorKind::Parameter,
    };
    let strategy = Strategy::named("p3", Some(2), 0).expect("a strategy");
    let plan = Plan::build(vec![spec], strategy, Update::Worker, 1).expect("a plan");
    let options = ChannelOptions { work_threads: 0, ..ChannelOptions::new(0, 1) };
    let pollers = (0..3).map(|_| Poller::new().expect("a poller")).collect();
    let metrics = Arc::new(Metrics::new(Rank(0), &plan, 3));
    let shared = Arc::new(Shared::new(pollers, &plan, &options, metrics));
    let links = (0..3).map(|_| vec![None]).collect();
    let driver = Driver::new(&options, &plan, links, true, &shared).expect("a driver");
    if begun {
        shared.tell_all(|| Command::Engine(Input::StepBegin(Step(0))));
    }
    let (reply, _replies) = std::sync::mpsc::channel();
    shared.lanes[panicking].command(Command::WorkerResidual(TensorId(7), reply));
    driver.run();
    assert!(matches!(shared.stop.get(), Some(StopCause::Panicked(_))));
    let Some(ended) = shared.outcome_error() else { panic!("a session that has ended") };
    assert!(ended.to_string().contains("the I/O thread panicked"), "{ended}");
}

#[test]
fn a_panic_of_a_lane_ends_all_lanes_and_the_session() {
    panic_in_a_lane(1, false);
}

#[test]
fn a_panic_of_the_first_lane_ends_all_lanes_and_the_session() {
    panic_in_a_lane(0, true);
}

#[test]
fn a_panic_of_the_last_lane_in_a_step_ends_all_lanes_and_the_session() {
    panic_in_a_lane(2, true);
}
