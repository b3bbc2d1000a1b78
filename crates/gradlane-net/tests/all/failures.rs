//! What goes wrong: strangers, mismatches, lost and silent peers, corrupted bytes. Every rank gets
//! an error that names the culprit, in bounded time, and nothing wrong is released.

use crate::support::{
    check_means, contribute, deadline, each_rank, join, listeners, never, options, plan, run_step,
    specs, tensor, world, world_at, world_with, Joining, Proxy, TEST_TIMEOUT,
};
use gradlane_net::{Channel, ChannelError, ChannelFailure, ChannelOptions, Listener};
use gradlane_units::{Dtype, Rank, Step, TensorId};
use gradlane_wire::{
    Hello, Reject, RejectReason, HELLO_BYTES, REJECT_BYTES, REJECT_SIGNED_BYTES, WIRE_VERSION,
};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::{mpsc, Barrier};
use std::time::{Duration, Instant};

fn model() -> Vec<gradlane_engine::TensorSpec> {
    vec![tensor("weight", 40_000, Dtype::F32), tensor("bias", 10, Dtype::F32)]
}

fn failure_of<T: std::fmt::Debug>(result: Result<T, ChannelError>) -> ChannelFailure {
    match result {
        Err(ChannelError::Failed(failure)) => failure,
        other => panic!("expected a failure, got {other:?}"),
    }
}

/// Joins a world of two in which rank 1 does something differently.
fn join_with(change: impl Fn(&mut Joining)) -> Vec<Result<Channel, ChannelError>> {
    let (listeners, addresses) = listeners("127.0.0.1", 2);
    let mut joining: Vec<Joining> = (0..2)
        .map(|rank| Joining {
            options: ChannelOptions { connect_timeout_s: 3.0, ..options(rank, 2) },
            plan: plan(model(), "p3", 1_000, 2),
            secret: b"secret".to_vec(),
        })
        .collect();
    change(&mut joining[1]);
    join(listeners, &addresses, joining)
}

fn refused_for(change: impl Fn(&mut Joining), reason: &str) {
    let results = join_with(change);
    match &results[1] {
        Err(ChannelError::Refused { message, peer }) => {
            assert!(message.contains(reason), "{message}");
            assert!(message.contains("rank 0") && *peer == Rank(0), "{message}");
        }
        other => panic!("expected a refusal for {reason}, got {:?}", other.as_ref().err()),
    }
    let first = results[0].as_ref().err().map(ToString::to_string).unwrap_or_default();
    assert!(first.contains("rank 1"), "rank 0 misses rank 1 by name: {first}");
}

/// Without the secret of the job, or with another job's, a refusal is anybody's: each rank calls
/// again until its time is up, and says then what it was told.
fn never_joined_for(change: impl Fn(&mut Joining), reason: &str) {
    let results = join_with(|joining| {
        joining.options.connect_timeout_s = 1.0;
        change(joining);
    });
    match &results[1] {
        Err(ChannelError::TimedOut { message, peer, .. }) => {
            assert!(message.contains(reason) && message.contains("without proof"), "{message}");
            assert!(message.contains("rank 0 at") && *peer == Some(Rank(0)), "{message}");
        }
        other => panic!("expected a timeout for {reason}, got {:?}", other.as_ref().err()),
    }
    assert!(matches!(&results[0], Err(ChannelError::TimedOut { peer: Some(Rank(1)), .. })));
}

#[test]
fn another_secret_is_refused() {
    never_joined_for(|joining| joining.secret = b"guess".to_vec(), "secret");
}

#[test]
fn another_job_is_refused() {
    never_joined_for(|joining| joining.options.job = "another".to_owned(), "job id");
}

#[test]
fn another_generation_is_refused() {
    refused_for(|joining| joining.options.generation = 3, "generation 3");
}

#[test]
fn another_tensor_table_is_refused() {
    refused_for(|joining| joining.plan = plan(model(), "p3", 2_000, 2), "tensor table");
}

#[test]
fn another_world_size_is_refused() {
    let (mut listeners, mut addresses) = listeners("127.0.0.1", 2);
    let extra = Listener::bind("127.0.0.1", 0..=0).expect("a port");
    addresses.push(extra.address().to_string());
    listeners.truncate(1);
    listeners.push(extra);
    let of = |rank, world_size| Joining {
        options: ChannelOptions { connect_timeout_s: 3.0, ..options(rank, world_size) },
        plan: plan(model(), "p3", 1_000, world_size),
        secret: b"secret".to_vec(),
    };
    let two = addresses[..2].to_vec();
    let first = listeners.remove(0);
    let waiting = std::thread::spawn(move || join(vec![first], &two, vec![of(0, 2)]));
    let results = join(listeners, &addresses, vec![of(2, 3)]);
    let Err(ChannelError::Refused { message, .. }) = &results[0] else {
        panic!("expected a refusal, got {:?}", results[0].as_ref().err());
    };
    assert!(message.contains("world size 3") && message.contains("world size 2"), "{message}");
    let waited = waiting.join().expect("a thread");
    assert!(matches!(&waited[0], Err(ChannelError::TimedOut { .. })));
}

#[test]
fn a_missing_rank_is_named_when_the_time_is_up() {
    let (mut listeners, addresses) = listeners("127.0.0.1", 3);
    listeners.truncate(2);
    let joining = (0..2).map(|rank| Joining {
        options: ChannelOptions { connect_timeout_s: 0.7, ..options(rank, 3) },
        plan: plan(model(), "p3", 1_000, 3),
        secret: Vec::new(),
    });
    for result in join(listeners, &addresses, joining.collect()) {
        let Err(ChannelError::TimedOut { message, peer, .. }) = result else {
            panic!("expected a timeout");
        };
        assert!(message.contains("rank 2") && peer == Some(Rank(2)), "{message}");
        assert!(!message.contains("rank 1 at"), "{message}");
    }
}

#[test]
fn connecting_can_be_interrupted() {
    let (mut listeners, addresses) = listeners("127.0.0.1", 2);
    let mut asked = 0;
    let mut interrupt = || {
        asked += 1;
        asked > 2
    };
    let plan = plan(model(), "p3", 1_000, 2);
    let result = Channel::connect(
        listeners.remove(1),
        &options(1, 2),
        &plan,
        &addresses,
        b"",
        &mut interrupt,
    );
    assert!(matches!(result, Err(ChannelError::Interrupted)));
}

/// Waits until the acceptor has noted a refusal that contains `text`.
fn wait_for_refusal(channel: &Channel, text: &str) {
    let mut late = deadline();
    loop {
        let metrics = channel.metrics();
        if metrics.refusals.iter().any(|refusal| refusal.reason.contains(text)) {
            assert!(metrics.refused_connections > 0);
            return;
        }
        assert!(!late(), "no refusal with {text:?} in {:?}", metrics.refusals);
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn strangers_are_refused_while_training_goes_on() {
    let (listeners, addresses) = listeners("127.0.0.1", 2);
    let plan = plan(model(), "p3", 1_000, 2);
    let channels = world_at(listeners, &addresses, &plan, |_| {});
    let address = addresses[0].clone();
    each_rank(channels, move |channel| {
        let specs = specs(&channel);
        for step in 0..20 {
            if channel.rank().0 == 0 && step == 3 {
                let mut browser = TcpStream::connect(&address).expect("a connection");
                browser.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("a request");
                let mut noise = TcpStream::connect(&address).expect("a connection");
                noise.write_all(&[0xA5; 4096]).expect("noise");
                let mut older = TcpStream::connect(&address).expect("a connection");
                older.write_all(&hello(9, 1, 2)).expect("a hello");
                let reject = read_reject(&mut older);
                assert_eq!(reject.reason, RejectReason::Version);
                assert!(reject.text.contains("wire version 9"), "{}", reject.text);
                // Says nothing at all, for as long as the test runs.
                std::mem::forget(TcpStream::connect(&address).expect("a connection"));
            }
            let tensors = run_step(&channel, step).expect("a step");
            check_means(2, step, &specs, &tensors);
        }
        if channel.rank().0 == 0 {
            wait_for_refusal(&channel, "not a gradlane peer");
            wait_for_refusal(&channel, "wire version 9");
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn another_number_of_lanes_is_refused() {
    refused_for(|joining| joining.options.lanes = 5, "give lanes= alike on every rank");
}

fn hello(version: u8, rank: u32, world_size: u32) -> [u8; HELLO_BYTES] {
    Hello {
        version,
        rank: Rank(rank),
        world_size,
        generation: 0,
        lane: 0,
        lanes: 1,
        job_digest: [0; 32],
        table_digest: [0; 32],
        nonce: [0; 32],
    }
    .encode()
}

/// Stands at an address and gives its first callers these bytes, once their hellos have come; later
/// ones are put through to `target`.
fn stranger_before(target: &str, answers: Vec<Vec<u8>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let target = target.to_owned();
    std::thread::spawn(move || {
        for answer in answers {
            let (mut caller, _) = listener.accept().expect("a caller");
            let mut hello = [0; HELLO_BYTES];
            caller.read_exact(&mut hello).expect("a hello");
            // A caller may have heard enough.
            let _ = caller.write_all(&answer);
        }
        let (caller, _) = listener.accept().expect("a caller");
        let called = TcpStream::connect(&target).expect("a connection");
        for (from, to) in [(&caller, &called), (&called, &caller)] {
            let mut from = from.try_clone().expect("a socket");
            let mut to = to.try_clone().expect("a socket");
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        }
    });
    address
}

/// Two ranks connect and train although a stranger answers first at rank 0's address.
fn connects_behind(answers: Vec<Vec<u8>>) {
    let (listeners, mut addresses) = listeners("127.0.0.1", 2);
    addresses[0] = stranger_before(&addresses[0], answers);
    let plan = plan(model(), "p3", 1_000, 2);
    // The stranger puts one connection through.
    let channels = world_at(listeners, &addresses, &plan, |options| options.lanes = 1);
    each_rank(channels, |channel| {
        run_step(&channel, 0).expect("a step");
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

fn forged(reason: RejectReason, fill: u8) -> Vec<u8> {
    let text = "\x1b[2J\x1b[31mrank 0: all is well\ngradlane: done".to_owned();
    let mut bytes = Reject { reason, text }.encode();
    bytes[REJECT_SIGNED_BYTES..].fill(fill);
    bytes.to_vec()
}

#[test]
fn a_strangers_refusal_ends_no_start() {
    connects_behind(vec![
        forged(RejectReason::Table, 0),
        forged(RejectReason::RankTaken, 0xA5),
        // A hello of ours, and a refusal after it.
        [&hello(WIRE_VERSION, 0, 2)[..], &forged(RejectReason::Secret, 1)].concat(),
    ]);
}

#[test]
fn a_foreign_hello_ends_no_start() {
    connects_behind(vec![
        hello(WIRE_VERSION, 0, 2).to_vec(),
        hello(9, 0, 2).to_vec(),
        hello(WIRE_VERSION, 7, 9).to_vec(),
    ]);
}

#[test]
fn noise_of_a_stranger_ends_no_start() {
    // A stranger that says nothing for as long as it likes is called until the time is up.
    let mut state = 16_u64;
    let mut draw = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    let answers = (0..8).map(|turn| {
        let mut bytes = match turn % 3 {
            0 => hello(WIRE_VERSION, 0, 2).to_vec(),
            1 => forged(RejectReason::Table, turn as u8),
            _ => vec![0; 300],
        };
        for _ in 0..1 + draw() % 12 {
            let at = draw() as usize % bytes.len();
            bytes[at] = draw() as u8;
        }
        bytes.truncate(draw() as usize % (bytes.len() + 1));
        bytes
    });
    connects_behind(answers.collect());
}

#[test]
fn a_strangers_words_are_escaped_in_the_error() {
    let (mut listeners, mut addresses) = listeners("127.0.0.1", 2);
    addresses[0] = stranger_before("127.0.0.1:1", vec![forged(RejectReason::Table, 0); 1_000]);
    let joining = Joining {
        options: ChannelOptions { connect_timeout_s: 0.7, ..options(1, 2) },
        plan: plan(model(), "p3", 1_000, 2),
        secret: b"secret".to_vec(),
    };
    let result = join(vec![listeners.remove(1)], &addresses, vec![joining]).remove(0);
    let Err(ChannelError::TimedOut { message, .. }) = result else {
        panic!("expected a timeout, got {:?}", result.err());
    };
    let shown = r"\u{1b}[2J\u{1b}[31mrank 0: all is well\ngradlane: done";
    assert!(message.contains(shown) && !message.contains(char::is_control), "{message:?}");
    assert!(message.contains("rank 0 at") && message.contains("without proof"), "{message:?}");
}

/// A connection from an address of the loopback network.
fn call_from(source: [u8; 4], target: &str) -> Option<TcpStream> {
    use rustix::net::{bind, connect, socket, AddressFamily, SocketType};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).ok()?;
    bind(&socket, &std::net::SocketAddr::from((source, 0))).ok()?;
    connect(&socket, &target.parse::<std::net::SocketAddr>().ok()?).ok()?;
    Some(socket.into())
}

#[test]
fn callers_of_one_address_keep_no_rank_out() {
    let (listeners, addresses) = listeners("127.0.0.1", 2);
    let target = addresses[0].clone();
    let (stop, stopped) = mpsc::channel::<()>();
    let (told, is_there) = mpsc::channel();
    // Takes every place that becomes free, and says nothing.
    let crowd = std::thread::spawn(move || {
        let mut held = std::collections::VecDeque::new();
        while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
            held.extend(call_from([127, 0, 0, 9], &target));
            if held.len() == 200 {
                // The test may have gone on long ago.
                let _ = told.send(());
            }
            if held.len() > 400 {
                held.pop_front();
            }
        }
    });
    let plan = plan(model(), "p3", 1_000, 2);
    let mut joining: Vec<Joining> = (0..2)
        .map(|rank| Joining {
            options: options(rank, 2),
            plan: plan.clone(),
            secret: b"secret".to_vec(),
        })
        .collect();
    let mut listeners = listeners;
    let (last, first) = (listeners.pop().expect("two"), listeners.pop().expect("two"));
    let (own, seen) = (joining.remove(0), addresses.clone());
    let begun = std::thread::spawn(move || join(vec![first], &seen, vec![own]).remove(0));
    // The crowd is there first, three times as many as there are places.
    is_there.recv_timeout(TEST_TIMEOUT).expect("the crowd");
    let late = join(vec![last], &addresses, joining).remove(0);
    let channels = vec![begun.join().expect("a thread"), late];
    let channels: Vec<Channel> = channels.into_iter().map(|it| it.expect("a channel")).collect();
    assert!(channels[0].metrics().refused_connections > 0);
    each_rank(channels, |channel| {
        run_step(&channel, 0).expect("a step");
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
    stop.send(()).expect("the crowd");
    crowd.join().expect("the crowd");
}

fn read_reject(stream: &mut TcpStream) -> Reject {
    let mut bytes = [0; REJECT_BYTES];
    stream.read_exact(&mut bytes).expect("a refusal");
    Reject::decode(&bytes).expect("a refusal")
}

#[test]
fn a_second_joiner_with_a_taken_rank_is_refused() {
    let (listeners, addresses) = listeners("127.0.0.1", 2);
    let plan = plan(model(), "p3", 1_000, 2);
    let channels = world_at(listeners, &addresses, &plan, |_| {});
    let second = Listener::bind("127.0.0.1", 0..=0).expect("a port");
    let joining = Joining { options: options(1, 2), plan, secret: b"secret".to_vec() };
    let results = join(vec![second], &addresses, vec![joining]);
    let Err(ChannelError::Refused { message, .. }) = &results[0] else {
        panic!("expected a refusal, got {:?}", results[0].as_ref().err());
    };
    assert!(message.contains("rank 1 is connected to rank 0 already"), "{message}");
    each_rank(channels, |channel| {
        for step in 0..3 {
            run_step(&channel, step).expect("training goes on");
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}

#[test]
fn a_rank_that_is_dropped_in_a_step_is_named_by_all_others() {
    let channels = world(4, &plan(model(), "p3", 1_000, 4));
    let barrier = Barrier::new(4);
    each_rank(channels, move |channel| {
        for step in 0..3 {
            run_step(&channel, step).expect("a step");
        }
        if channel.rank().0 == 2 {
            channel.step_begin(Step(3)).expect("a step");
            barrier.wait();
            drop(channel);
            return;
        }
        let _gradients = contribute(&channel, 3).expect("gradients");
        barrier.wait();
        let failure = failure_of(channel.wait_step(Step(3), &mut deadline()));
        assert_eq!(failure.peer, Some(Rank(2)), "{failure}");
        assert_eq!(failure.last_complete, Some(Step(2)), "{failure}");
        assert!(failure.message.contains("rank 2"), "{failure}");
        assert!(
            failure.message.contains("weight") && failure.message.contains("bytes"),
            "{failure}"
        );
        let again = channel.step_begin(Step(4));
        assert_eq!(failure_of(again), failure);
        assert_eq!(channel.failure(), Some(failure));
        channel.abort("it is over anyway");
    });
}

#[test]
fn a_connection_that_is_cut_is_an_error_at_once() {
    for lanes in 1..=3 {
        for cut in 0..lanes {
            cut_one_of(lanes, cut);
        }
    }
}

/// Cuts the connection of a lane; the others stay.
fn cut_one_of(lanes: u16, cut: u16) {
    let (listeners, addresses) = listeners("127.0.0.1", 2);
    let (caught, caller) = mpsc::channel();
    let front = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut seen = addresses.clone();
    seen[0] = front.local_addr().expect("an address").to_string();
    let target = addresses[0].clone();
    std::thread::spawn(move || {
        for lane in 0..lanes {
            let (from, _) = front.accept().expect("a caller");
            let to = TcpStream::connect(&target).expect("a connection");
            for (mut from, mut to) in [
                (from.try_clone().expect("a socket"), to.try_clone().expect("a socket")),
                (to.try_clone().expect("a socket"), from.try_clone().expect("a socket")),
            ] {
                std::thread::spawn(move || {
                    // What one end closes the other one hears of.
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
            if lane == cut {
                caught.send((from, to)).expect("the test waits");
            }
        }
    });
    let plan = plan(model(), "p3", 1_000, 2);
    let channels = world_at(listeners, &seen, &plan, |options| options.lanes = lanes);
    let (from, to) = caller.recv().expect("a connection");
    let cutter = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        for socket in [from, to] {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    });
    each_rank(channels, move |channel| {
        let failure = failure_of((0..).try_for_each(|step| {
            std::thread::sleep(Duration::from_millis(10));
            run_step(&channel, step).map(drop)
        }));
        // Who notices first tells the other one in the lanes that are left.
        let other = Some(Rank(1 - channel.rank().0));
        let is_told = lanes > 1 && failure.message.contains("reported by");
        assert!(failure.peer == other || is_told, "{failure}");
        assert!(failure.message.contains("lost"), "{failure}");
    });
    cutter.join().expect("the cutter");
}

#[test]
fn a_corrupted_payload_fails_the_session_and_is_not_released() {
    // The first byte of a large tensor's payload that comes after step 0 is well below this.
    for flip_at in [100_000, 250_007] {
        let (listeners, addresses) = listeners("127.0.0.1", 2);
        let proxy = Proxy::start(&addresses[0]);
        let mut seen = addresses.clone();
        seen[0] = proxy.address.clone();
        let channels = world_at(listeners, &seen, &plan(model(), "p3", 1_000, 2), |_| {});
        proxy.flip_at.store(flip_at, Ordering::SeqCst);
        each_rank(channels, |channel| {
            let specs = specs(&channel);
            let failure = failure_of((0..50).try_for_each(|step| {
                run_step(&channel, step).map(|tensors| check_means(2, step, &specs, &tensors))
            }));
            // Rank 0 has received what rank 1 has sent through the proxy, and tells it so: both name
            // rank 1.
            assert_eq!(failure.peer, Some(Rank(1)), "{failure}");
            assert!(failure.message.contains("rank 1 sent"), "{failure}");
            let known = failure.message.contains("corrupted payload")
                || failure.message.contains("header checksum");
            assert!(known, "{failure}");
        });
    }
}

#[test]
fn a_silent_peer_is_lost_after_the_timeout() {
    let (listeners, addresses) = listeners("127.0.0.1", 2);
    let proxy = Proxy::start(&addresses[0]);
    let mut seen = addresses;
    seen[0] = proxy.address;
    let channels = world_at(listeners, &seen, &plan(model(), "p3", 1_000, 2), |options| {
        options.silence_timeout_s = 0.6;
    });
    let stalled = proxy.stalled;
    let barrier = Barrier::new(2);
    each_rank(channels, move |channel| {
        for step in 0..3 {
            run_step(&channel, step).expect("a step");
        }
        barrier.wait();
        stalled.store(true, Ordering::SeqCst);
        let start = std::time::Instant::now();
        let failure = failure_of((3..).try_for_each(|step| run_step(&channel, step).map(drop)));
        assert_eq!(failure.peer, Some(Rank(1 - channel.rank().0)), "{failure}");
        assert!(failure.message.contains("silent for"), "{failure}");
        assert!(start.elapsed() >= Duration::from_millis(500), "{:?}", start.elapsed());
    });
}

/// Neither end of a cut link may be taken for dead: somebody hears both.
#[test]
fn a_cut_link_is_named_alike_on_every_rank() {
    const RANKS: u32 = 4;
    let (listeners, mut seen) = listeners("127.0.0.1", RANKS);
    // Of all ranks, only the next one calls this one through the proxy.
    let cut = RANKS - 2;
    let proxy = Proxy::start(&seen[cut as usize]);
    seen[cut as usize] = proxy.address;
    let channels = world_at(listeners, &seen, &plan(model(), "p3", 1_000, RANKS), |options| {
        options.silence_timeout_s = 1.0;
    });
    let stalled = proxy.stalled;
    let barrier = Barrier::new(RANKS as usize);
    each_rank(channels, move |channel| {
        for step in 0..3 {
            run_step(&channel, step).expect("a step");
        }
        barrier.wait();
        stalled.store(true, Ordering::SeqCst);
        let failure = failure_of((3..).try_for_each(|step| run_step(&channel, step).map(drop)));
        assert!(
            failure.message.starts_with("the link between rank 2 and rank 3 is cut"),
            "{failure}"
        );
        assert_eq!(failure.peer, None, "{failure}");
    });
}

#[test]
fn an_abort_tells_its_reason_to_everybody() {
    let channels = world(3, &plan(model(), "p3", 1_000, 3));
    let barrier = Barrier::new(3);
    each_rank(channels, move |channel| {
        run_step(&channel, 0).expect("step 0");
        barrier.wait();
        if channel.rank().0 == 1 {
            channel.abort("ValueError: loss is not finite\n\x1b[2Jrank 2: all is well");
            assert!(channel.failure().is_some_and(|it| it.message.contains("loss is not finite")));
            return;
        }
        let failure = failure_of(run_step(&channel, 1));
        let shown = r"rank 1 gave up: ValueError: loss is not finite\n\u{1b}[2Jrank 2: all is well";
        assert!(failure.message.contains(shown), "{failure}");
        assert!(!failure.message.contains(char::is_control), "{failure}");
        assert_eq!(failure.peer, Some(Rank(1)), "{failure}");
    });
}

/// A signal handler ends its process after `abort`, which another thread may have called already: the reason
/// would be lost.
#[test]
fn each_of_two_aborts_returns_once_the_reason_was_told() {
    let (listeners, addresses) = listeners("127.0.0.1", 2);
    let proxy = Proxy::start(&addresses[0]);
    let mut seen = addresses;
    seen[0] = proxy.address;
    let channels = world_at(listeners, &seen, &plan(model(), "p3", 1_000, 2), |_| {});
    let stalled = proxy.stalled;
    let barrier = Barrier::new(2);
    each_rank(channels, move |channel| {
        run_step(&channel, 0).expect("step 0");
        barrier.wait();
        if channel.rank().0 == 1 {
            failure_of(run_step(&channel, 1));
            return;
        }
        // Nothing gets through, so the reason is told for the whole second.
        stalled.store(true, Ordering::SeqCst);
        let took = std::thread::scope(|scope| {
            let abort = || {
                let start = Instant::now();
                channel.abort("enough");
                start.elapsed()
            };
            let other = scope.spawn(abort);
            abort().min(other.join().expect("a thread"))
        });
        stalled.store(false, Ordering::SeqCst);
        assert!(took > Duration::from_millis(500), "{took:?}");
    });
}

#[test]
fn a_rank_that_does_not_take_part_is_named_after_the_progress_timeout() {
    let channels = world_with("127.0.0.1", 3, &plan(model(), "p3", 1_000, 3), |options| {
        options.progress_timeout_s = 0.5;
    });
    let (done, wait) = mpsc::channel::<()>();
    let (done, wait) = (std::sync::Mutex::new(Some(done)), std::sync::Mutex::new(wait));
    each_rank(channels, move |channel| {
        run_step(&channel, 0).expect("step 0");
        if channel.rank().0 == 2 {
            // Alive and idle: it begins no step until the others have failed.
            let _ = wait.lock().expect("a lock").recv_timeout(TEST_TIMEOUT);
            let failure = failure_of(run_step(&channel, 1));
            assert!(failure.message.contains("no progress"), "{failure}");
            return;
        }
        let failure = failure_of(run_step(&channel, 1));
        assert!(failure.message.contains("rank 2"), "{failure}");
        assert!(failure.message.contains("no progress"), "{failure}");
        assert_eq!(failure.peer, Some(Rank(2)), "{failure}");
        drop(done.lock().expect("a lock").take());
    });
}

#[test]
fn finish_without_the_others_ends_in_time() {
    let channels = world(2, &plan(model(), "p3", 1_000, 2));
    let (done, wait) = mpsc::channel::<()>();
    let (done, wait) = (std::sync::Mutex::new(Some(done)), std::sync::Mutex::new(wait));
    each_rank(channels, move |channel| {
        run_step(&channel, 0).expect("step 0");
        if channel.rank().0 == 1 {
            let _ = wait.lock().expect("a lock").recv_timeout(TEST_TIMEOUT);
            return;
        }
        let result = channel.finish(Duration::from_millis(300), &mut never);
        let Err(ChannelError::TimedOut { message, last_complete, .. }) = result else {
            panic!("expected a timeout, got {result:?}");
        };
        assert!(message.contains("0.3 s"), "{message}");
        assert_eq!(last_complete, Some(Step(0)));
        drop(done.lock().expect("a lock").take());
    });
}

#[test]
fn memory_is_let_go_of_before_the_failure_is_told() {
    // Rank 1 stops reading in the middle of a step, so that rank 0 has frames half sent; then rank
    // 0 aborts. Its gradient may be overwritten right after, and what rank 1 then reads is whole.
    let plan = plan(vec![tensor("weight", 3_000_000, Dtype::F32)], "p3", 50_000, 2);
    let (listeners, addresses) = listeners("127.0.0.1", 2);
    let proxy = Proxy::start(&addresses[0]);
    let mut seen = addresses;
    seen[0] = proxy.address;
    let channels = world_at(listeners, &seen, &plan, |_| {});
    let stalled = proxy.stalled;
    let barrier = Barrier::new(2);
    each_rank(channels, move |channel| {
        run_step(&channel, 0).expect("step 0");
        // Rank 1 has step 0.
        barrier.wait();
        if channel.rank().0 == 0 {
            // Before the step: on a busy machine it may end before this thread goes on.
            stalled.store(true, Ordering::SeqCst);
        }
        barrier.wait();
        let mut tensors = contribute(&channel, 1).expect("gradients");
        barrier.wait();
        if channel.rank().0 == 0 {
            std::thread::sleep(Duration::from_millis(200));
            let releasing = std::sync::Arc::clone(&stalled);
            let release = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                releasing.store(false, Ordering::SeqCst);
            });
            channel.abort("enough");
            tensors[0].bytes.fill(0xEE);
            release.join().expect("a thread");
            return;
        }
        let result = channel.wait(&[TensorId(0)], Step(1), &mut deadline());
        let failure = failure_of(result);
        // Where the machine is slow the reason may not get through in time; torn frames never do.
        let expected = ["enough", "rank 0 was lost"];
        assert!(expected.iter().any(|it| failure.message.contains(it)), "{failure}");
    });
}

/// The acceptor sees the end also while callers never stop coming.
#[test]
fn closing_takes_no_longer_under_a_flood() {
    let (listeners, addresses) = listeners("127.0.0.1", 2);
    let channels = world_at(listeners, &addresses, &plan(model(), "p3", 1_000, 2), |_| {});
    let flooding = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let floods: Vec<_> = (0..4)
        .map(|index| {
            let (flooding, address) =
                (std::sync::Arc::clone(&flooding), addresses[index % 2].clone());
            std::thread::spawn(move || {
                let mut held = std::collections::VecDeque::new();
                while flooding.load(Ordering::SeqCst) {
                    held.extend(TcpStream::connect(&address));
                    if held.len() > 100 {
                        held.pop_front();
                    }
                }
            })
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));
    let closed = each_rank(channels, |channel| {
        run_step(&channel, 0).expect("training goes on");
        let began = std::time::Instant::now();
        channel.finish(TEST_TIMEOUT, &mut never).expect("a goodbye");
        drop(channel);
        began.elapsed()
    });
    flooding.store(false, Ordering::SeqCst);
    floods.into_iter().for_each(|it| it.join().expect("a flood"));
    // Alone it takes milliseconds; the flood shares two processors with it.
    assert!(closed.iter().all(|&it| it < Duration::from_secs(20)), "{closed:?}");
}
