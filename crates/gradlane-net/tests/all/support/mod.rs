//! Worlds of several ranks in one process, for tests: one thread a rank, loopback sockets.
//!
//! Values follow from (rank, step, tensor, element), and the expected mean is computed here, naively
//! and in rank order, so that no kernel judges itself.
#![allow(dead_code, reason = "the binary of `lanes.rs` uses a part")]

pub mod adversary;
pub mod encoded;
pub mod ring_quantized;

use gradlane_engine::{Plan, Strategy, TensorKind, TensorSpec, Update};
use gradlane_net::{Channel, ChannelError, ChannelOptions, Listener, UserMemory};
use gradlane_units::{Dtype, Step, TensorId};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longer than any test takes, shorter than patience.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Never interrupts.
pub fn never() -> bool {
    false
}

/// A trained tensor.
pub fn tensor(name: &str, numel: u64, dtype: Dtype) -> TensorSpec {
    TensorSpec { name: name.to_owned(), numel, dtype, kind: TensorKind::Parameter }
}

/// A plan as JSON.
pub fn plan(tensors: Vec<TensorSpec>, strategy: &str, slice_elems: u64, world_size: u32) -> String {
    plan_for(tensors, strategy, slice_elems, world_size, Update::Worker)
}

/// A plan as JSON, with the update anywhere.
pub fn plan_for(
    tensors: Vec<TensorSpec>,
    strategy: &str,
    slice_elems: u64,
    world_size: u32,
    update: Update,
) -> String {
    let strategy = Strategy::named(strategy, Some(slice_elems), 7).expect("a strategy");
    let plan = Plan::build(tensors, strategy, update, world_size).expect("a plan");
    serde_json::to_string(&plan).expect("JSON")
}

/// Options that make tests quick. Worlds differ in their number of lanes.
pub fn options(rank: u32, world_size: u32) -> ChannelOptions {
    ChannelOptions {
        job: "a test".to_owned(),
        connect_timeout_s: 30.0,
        lanes: 1 + world_size as u16 % 3,
        ..ChannelOptions::new(rank, world_size)
    }
}

/// Memory of one tensor, kept alive by the test.
#[derive(Debug)]
pub struct Tensor {
    pub bytes: Vec<u8>,
}

impl Tensor {
    pub fn memory(&mut self) -> UserMemory {
        let length = self.bytes.len();
        // SAFETY: tests keep tensors alive and untouched while their step runs.
        unsafe { UserMemory::new(self.bytes.as_mut_ptr().expose_provenance(), length) }
    }
}

/// A value that differs in all its arguments and is exact in no short format.
pub fn value(rank: u32, step: u64, tensor: usize, element: u64) -> f32 {
    let mut mixed = (u64::from(rank) << 48) ^ (step << 40) ^ ((tensor as u64) << 32) ^ element;
    mixed = mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed ^= mixed >> 29;
    mixed = mixed.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    ((mixed >> 40) as f32 / 16_777_216.0 - 0.5) * 3.0
}

/// Bytes of a value in a dtype.
pub fn encode(value: f32, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => value.to_le_bytes().to_vec(),
        Dtype::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::Bf16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(value).to_le_bytes().to_vec(),
        Dtype::U8 => vec![(value * 50.0) as i8 as u8],
    }
}

/// The value as it is after it was stored.
fn stored(value: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::from_f32(value).to_f32(),
        Dtype::Bf16 => half::bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// A rank's gradient.
pub fn gradient(rank: u32, step: u64, index: usize, spec: &TensorSpec) -> Tensor {
    let elements = 0..spec.numel;
    let bytes = elements.flat_map(|it| encode(value(rank, step, index, it), spec.dtype)).collect();
    Tensor { bytes }
}

/// The mean over ranks in rank order; of rank 0 alone in step 0.
pub fn mean(world_size: u32, step: u64, index: usize, spec: &TensorSpec) -> Vec<u8> {
    let element = |it: u64| {
        if step == 0 {
            return encode(value(0, 0, index, it), spec.dtype);
        }
        if spec.dtype == Dtype::F64 {
            let sum = (0..world_size).map(|rank| f64::from(value(rank, step, index, it)));
            let sum = sum.reduce(|sum, next| sum + next).unwrap_or(0.0);
            return (sum / f64::from(world_size)).to_le_bytes().to_vec();
        }
        let sum = (0..world_size).map(|rank| stored(value(rank, step, index, it), spec.dtype));
        let sum = sum.reduce(|sum, next| sum + next).unwrap_or(0.0);
        encode(sum / world_size as f32, spec.dtype)
    };
    (0..spec.numel).flat_map(element).collect()
}

/// The mean over ranks as a ring adds it up: from the rank after the slice's owner on, rounded to
/// the dtype at each hop; of rank 0 alone in step 0.
pub fn ring_mean(plan: &Plan, step: u64, index: usize) -> Vec<u8> {
    let (world_size, spec) = (plan.world_size, &plan.tensors[index].spec);
    if step == 0 {
        return gradient(0, 0, index, spec).bytes;
    }
    let mut bytes = Vec::new();
    for slice in plan.slices_of(TensorId(index as u32)).map(|id| plan.slice(id)) {
        for element in slice.start..slice.start + slice.length {
            let rank = |turn: u32| (slice.owner.0 + 1 + turn) % world_size;
            if spec.dtype == Dtype::F64 {
                let value = |turn| f64::from(value(rank(turn), step, index, element));
                let sum = (0..world_size).map(value).reduce(|sum, next| sum + next).unwrap_or(0.0);
                bytes.extend((sum / f64::from(world_size)).to_le_bytes());
                continue;
            }
            let value = |turn| stored(value(rank(turn), step, index, element), spec.dtype);
            let mut sum = value(0);
            for turn in 1..world_size {
                sum += value(turn);
                if turn + 1 < world_size {
                    sum = stored(sum, spec.dtype);
                }
            }
            bytes.extend(encode(sum / world_size as f32, spec.dtype));
        }
    }
    bytes
}

/// Checks every tensor of a step against the naive mean of a ring, bit by bit.
pub fn check_ring_means(plan: &Plan, step: u64, tensors: &[Tensor]) {
    for (index, (tensor, found)) in plan.tensors.iter().zip(tensors).enumerate() {
        if tensor.spec.kind == TensorKind::Parameter || step == 0 {
            let same = found.bytes == ring_mean(plan, step, index);
            assert!(same, "step {step}, tensor {:?} is not the mean", tensor.spec.name);
        }
    }
}

/// Listeners for all ranks and their addresses.
pub fn listeners(host: &str, world_size: u32) -> (Vec<Listener>, Vec<String>) {
    let bind = |_| Listener::bind(host, 0..=0).expect("a port");
    let listeners: Vec<Listener> = (0..world_size).map(bind).collect();
    let addresses = listeners.iter().map(|it| it.address().to_string()).collect();
    (listeners, addresses)
}

/// Runs a closure for each rank on a thread of its own and returns what they return.
pub fn each_rank<T: Send + 'static>(
    channels: Vec<Channel>,
    run: impl Fn(Channel) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let run = Arc::new(run);
    let threads: Vec<JoinHandle<T>> = channels
        .into_iter()
        .map(|channel| {
            let run = Arc::clone(&run);
            std::thread::spawn(move || run(channel))
        })
        .collect();
    let mut threads: Vec<_> = threads.into_iter().map(Some).collect();
    let mut results: Vec<Option<T>> = threads.iter().map(|_| None).collect();
    // In the order of their ends: the others may wait for one that has panicked.
    while results.iter().any(Option::is_none) {
        for (thread, result) in threads.iter_mut().zip(&mut results) {
            if thread.as_ref().is_some_and(JoinHandle::is_finished) {
                *result = thread.take().map(|it| it.join().expect("a rank's thread"));
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    results.into_iter().flatten().collect()
}

/// How one rank joins.
pub struct Joining {
    pub options: ChannelOptions,
    pub plan: String,
    pub secret: Vec<u8>,
}

/// Connects ranks, each as it likes.
pub fn join(
    listeners: Vec<Listener>,
    addresses: &[String],
    joining: Vec<Joining>,
) -> Vec<Result<Channel, ChannelError>> {
    let threads: Vec<_> = listeners
        .into_iter()
        .zip(joining)
        .map(|(listener, Joining { options, plan, secret })| {
            let addresses = addresses.to_vec();
            std::thread::spawn(move || {
                Channel::connect(listener, &options, &plan, &addresses, &secret, &mut never)
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("a joining thread")).collect()
}

/// A connected world on loopback; options may be changed for each rank.
pub fn world_with(
    host: &str,
    world_size: u32,
    plan: &str,
    change: impl Fn(&mut ChannelOptions),
) -> Vec<Channel> {
    let (listeners, addresses) = listeners(host, world_size);
    world_at(listeners, &addresses, plan, change)
}

/// A connected world at given addresses.
pub fn world_at(
    listeners: Vec<Listener>,
    addresses: &[String],
    plan: &str,
    change: impl Fn(&mut ChannelOptions),
) -> Vec<Channel> {
    let world_size = addresses.len() as u32;
    let joining = (0..world_size).map(|rank| {
        let mut options = options(rank, world_size);
        change(&mut options);
        Joining { options, plan: plan.to_owned(), secret: b"secret".to_vec() }
    });
    let channels = join(listeners, addresses, joining.collect());
    channels.into_iter().map(|channel| channel.expect("a channel")).collect()
}

/// A connected world with default options.
pub fn world(world_size: u32, plan: &str) -> Vec<Channel> {
    world_with("127.0.0.1", world_size, plan, |_| {})
}

/// The tensors of a channel's plan.
pub fn specs(channel: &Channel) -> Vec<TensorSpec> {
    channel.plan().tensors.iter().map(|tensor| tensor.spec.clone()).collect()
}

/// Gives all gradients of a step, last tensor first as in backward.
pub fn contribute(channel: &Channel, step: u64) -> Result<Vec<Tensor>, ChannelError> {
    let rank = channel.rank().0;
    let specs = specs(channel);
    channel.step_begin(Step(step))?;
    let tensors = specs.iter().enumerate();
    let mut tensors: Vec<Tensor> =
        tensors.map(|(index, spec)| gradient(rank, step, index, spec)).collect();
    for index in (0..specs.len()).rev() {
        if specs[index].kind == TensorKind::Parameter || step == 0 {
            let memory = tensors[index].memory();
            channel.gradient_ready(TensorId(index as u32), Step(step), memory)?;
        }
    }
    channel.step_end(Step(step))?;
    Ok(tensors)
}

/// One whole step; the memory afterwards.
pub fn run_step(channel: &Channel, step: u64) -> Result<Vec<Tensor>, ChannelError> {
    let tensors = contribute(channel, step)?;
    match channel.wait_step(Step(step), &mut deadline()) {
        Ok(()) => Ok(tensors),
        Err(error) => {
            if error == ChannelError::Interrupted {
                // Nothing may touch the tensors when they are dropped.
                channel.abort("a test ran out of patience");
            }
            Err(error)
        }
    }
}

/// An interrupt function that ends a wait which should have ended long ago.
pub fn deadline() -> impl FnMut() -> bool {
    let end = Instant::now() + TEST_TIMEOUT;
    move || Instant::now() > end
}

/// Checks every tensor of a step against the naive mean, bit by bit.
pub fn check_means(world_size: u32, step: u64, specs: &[TensorSpec], tensors: &[Tensor]) {
    for (index, (spec, tensor)) in specs.iter().zip(tensors).enumerate() {
        if spec.kind == TensorKind::Parameter || step == 0 {
            let expected = mean(world_size, step, index, spec);
            let same = tensor.bytes == expected;
            assert!(same, "step {step}, tensor {:?} is not the mean in rank order", spec.name);
        }
    }
}

/// Forwards connections to an address and can meddle with what passes.
pub struct Proxy {
    pub address: String,
    /// Position, counted over the bytes of one direction, of a byte to be flipped; 0: none.
    pub flip_at: Arc<AtomicU64>,
    /// Forwards nothing any more while set, and keeps connections open.
    pub stalled: Arc<AtomicBool>,
}

impl Proxy {
    /// A proxy in front of an address.
    pub fn start(target: &str) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let flip_at = Arc::new(AtomicU64::new(0));
        let stalled = Arc::new(AtomicBool::new(false));
        let proxy = Proxy { address, flip_at: Arc::clone(&flip_at), stalled: Arc::clone(&stalled) };
        let target = target.to_owned();
        std::thread::spawn(move || {
            for caller in listener.incoming().flatten() {
                let Ok(called) = TcpStream::connect(&target) else { continue };
                let none = Arc::new(AtomicU64::new(0));
                forward(&caller, &called, &flip_at, &stalled);
                forward(&called, &caller, &none, &stalled);
            }
        });
        proxy
    }
}

fn forward(from: &TcpStream, to: &TcpStream, flip_at: &Arc<AtomicU64>, stalled: &Arc<AtomicBool>) {
    let mut from = from.try_clone().expect("a socket");
    let mut to = to.try_clone().expect("a socket");
    let (flip_at, stalled) = (Arc::clone(flip_at), Arc::clone(stalled));
    std::thread::spawn(move || {
        let mut room = vec![0; 16 << 10];
        let mut position = 0_u64;
        while let Ok(count) = from.read(&mut room) {
            if count == 0 {
                break;
            }
            while stalled.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(20));
            }
            let flip = flip_at.load(Ordering::SeqCst);
            if flip > 0 && (position..position + count as u64).contains(&flip) {
                room[(flip - position) as usize] ^= 0x10;
            }
            position += count as u64;
            if to.write_all(&room[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}
