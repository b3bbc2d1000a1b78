//! Any sequence of inputs, the application's and a hostile peer's: the engine never panics, and what
//! it lets land stays inside the slice's memory.

use arbitrary::{Arbitrary, Result, Unstructured};
use gradlane_engine::{
    Engine, EngineOptions, Input, JobId, Memory, PayloadDest, Plan, Scheme, Strategy, TensorKind,
    TensorSpec, Transmit, Update,
};
use gradlane_units::{Dtype, Priority, Rank, SliceId, Step, TensorId, Time};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};
use std::sync::Arc;

#[derive(Arbitrary, Debug)]
enum Action {
    Begin(u8),
    Ready(u8, u8),
    Absent(u8, u8),
    Needed(u8, u8),
    End(u8),
    Switch(Vec<i32>),
    Frame(Frame),
    Writable(bool, bool),
    Sent(u8),
    Done(u8),
    Time(u32),
    /// Most of its values do nothing, so that engines live for longer.
    Ending(u8, bool),
}

#[derive(Arbitrary, Debug)]
struct Frame {
    from: bool,
    kind: u8,
    flags: u8,
    step: u8,
    ids: [u8; 2],
    /// A raw one of a whole slice, in a step near the first.
    fits: bool,
    offset: u16,
    length: u8,
}

#[derive(Debug)]
struct Case {
    strategy: u8,
    server_update: bool,
    /// With step 0 done and step 1 begun, which drawn inputs hardly come to.
    begun: bool,
    inputs: Vec<Action>,
}

impl Case {
    /// Takes actions until bytes end: a derived list would end after two on average.
    fn read(mut bytes: Unstructured<'_>) -> Result<Case> {
        let (strategy, server_update, begun) = bytes.arbitrary()?;
        let mut inputs = Vec::new();
        while !bytes.is_empty() {
            inputs.push(bytes.arbitrary()?);
        }
        Ok(Case { strategy, server_update, begun, inputs })
    }
}

fn plan(case: &Case) -> Arc<Plan> {
    let name = Strategy::SYNCHRONOUS[case.strategy as usize % Strategy::SYNCHRONOUS.len()];
    let strategy = Strategy::named(name, Some(20), 3).expect("a known strategy");
    // A ring has no servers to update on.
    let update = match case.server_update && strategy.scheme == Scheme::Ps {
        true => Update::Server,
        false => Update::Worker,
    };
    let spec = |(name, numel): (&str, u64)| TensorSpec {
        name: name.into(),
        numel,
        dtype: Dtype::F32,
        kind: TensorKind::Parameter,
    };
    let tensors = [("a", 50), ("b", 7), ("c", 0)].map(spec).to_vec();
    Arc::new(Plan::build(tensors, strategy, update, 3).expect("a plan"))
}

/// Checks a sequence of inputs. Returns whether a payload landed.
///
/// # Panics
/// Where the engine does, or a payload would land outside its slice's memory.
pub fn check(bytes: &[u8]) -> bool {
    Case::read(Unstructured::new(bytes)).is_ok_and(|case| run(&case))
}

fn run(case: &Case) -> bool {
    let plan = plan(case);
    let mut engine = match case.begun {
        true => begun(&plan),
        false => new_engine(&plan, Rank(0)),
    };
    let mut transmits: Vec<Transmit> = Vec::new();
    let mut jobs: Vec<JobId> = Vec::new();
    let mut landed = false;
    for input in &case.inputs {
        landed |= apply(&mut engine, input, &mut transmits, &mut jobs);
        jobs.extend(std::iter::from_fn(|| engine.poll_job()).map(|work| work.id));
        transmits.extend(std::iter::from_fn(|| engine.poll_transmit()));
        while engine.poll_event().is_some() {}
        let _ = (engine.poll_timeout(), engine.outstanding());
    }
    landed
}

/// Returns a rank whose peers take frames.
fn new_engine(plan: &Arc<Plan>, rank: Rank) -> Engine {
    let mut engine = Engine::new(EngineOptions::new(rank), plan.clone());
    for peer in (0..plan.world_size).map(Rank).filter(|&peer| peer != rank) {
        engine.handle_writable(peer, true);
    }
    engine
}

/// Returns rank 0 of a cluster that has done step 0, with step 1 begun.
fn begun(plan: &Arc<Plan>) -> Engine {
    let mut engines = [0, 1, 2].map(|rank| new_engine(plan, Rank(rank)));
    for engine in &mut engines {
        engine.handle(Input::StepBegin(Step(0))).expect("step 0 begins");
        for tensor in 0..plan.tensors.len() as u32 {
            engine.handle(Input::GradientReady(TensorId(tensor), Step(0))).expect("values");
        }
    }
    let mut moves = true;
    while moves {
        moves = false;
        for from in 0..engines.len() {
            while let Some(job) = engines[from].poll_job() {
                engines[from].handle_job_done(job.id);
                moves = true;
            }
            while let Some(transmit) = engines[from].poll_transmit() {
                engines[from].handle_sent(&transmit);
                let peer = &mut engines[transmit.peer.0 as usize];
                receive(peer, Rank(from as u32), &transmit.header);
                moves = true;
            }
        }
    }
    let [mut engine, ..] = engines;
    engine.handle(Input::StepBegin(Step(1))).expect("step 1 begins");
    engine
}

/// Gives the engine an input. Returns whether it is a frame whose payload landed.
fn apply(
    engine: &mut Engine,
    input: &Action,
    transmits: &mut Vec<Transmit>,
    jobs: &mut Vec<JobId>,
) -> bool {
    let step = |step: u8| Step(u64::from(step % 5));
    match input {
        Action::Begin(it) => drop(engine.handle(Input::StepBegin(step(*it)))),
        Action::Ready(it, at) => drop(engine.handle(Input::GradientReady(tensor(*it), step(*at)))),
        Action::Absent(it, at) => drop(engine.handle(Input::TensorAbsent(tensor(*it), step(*at)))),
        Action::Needed(it, at) => drop(engine.handle(Input::TensorNeeded(tensor(*it), step(*at)))),
        Action::End(it) => drop(engine.handle(Input::StepEnd(step(*it)))),
        Action::Switch(values) => {
            let priorities = values.iter().copied().map(Priority).collect();
            drop(engine.handle(Input::SwitchPriorities(priorities)));
        }
        Action::Frame(frame) => {
            let header = header(engine, frame);
            return receive(engine, peer(frame.from), &header);
        }
        Action::Writable(which, writable) => engine.handle_writable(peer(*which), *writable),
        Action::Sent(index) if !transmits.is_empty() => {
            let transmit = transmits.remove(*index as usize % transmits.len());
            engine.handle_sent(&transmit);
        }
        Action::Done(index) if !jobs.is_empty() => {
            engine.handle_job_done(jobs.remove(*index as usize % jobs.len()));
        }
        // Up to five hours.
        Action::Time(now) => engine.handle_time(Time(u64::from(*now) << 12)),
        Action::Ending(0, _) => drop(engine.handle(Input::Finish)),
        Action::Ending(1, _) => engine.abort("enough"),
        Action::Ending(2, which) => engine.handle_peer_lost(peer(*which), "gone"),
        Action::Sent(_) | Action::Done(_) | Action::Ending(..) => {}
    }
    false
}

fn tensor(number: u8) -> TensorId {
    TensorId(u32::from(number % 5))
}

fn peer(which: bool) -> Rank {
    Rank(1 + u32::from(which))
}

/// Kinds that carry a slice, or ask for one.
const SLICE_KINDS: &[FrameKind] = &[
    FrameKind::Push,
    FrameKind::Broadcast,
    FrameKind::Notify,
    FrameKind::Pull,
    FrameKind::RingReduce,
    FrameKind::RingBroadcast,
];

fn header(engine: &Engine, frame: &Frame) -> FrameHeader {
    let slices = engine.plan().slices.len() as u32;
    let slice = SliceId(u32::from(frame.ids[1]) % (slices + 1));
    let fits = frame.fits && slice.0 < slices;
    let (offset, length) = match fits {
        true => (0, engine.plan().slice_bytes(slice) as u32),
        false => (u64::from(frame.offset), u32::from(frame.length)),
    };
    let kinds = if fits { SLICE_KINDS } else { FrameKind::ALL };
    let kind = kinds[usize::from(frame.kind) % kinds.len()];
    let is_raw = fits || frame.flags & 4 == 0;
    FrameHeader {
        kind,
        form: if is_raw { PayloadForm::Raw } else { PayloadForm::Encoded },
        flags: if fits { FrameFlags::LAST } else { FrameFlags(frame.flags & 3) },
        step: Step(u64::from(if fits { 1 + frame.step % 2 } else { frame.step % 5 })),
        generation: 0,
        plan_version: if fits { 0 } else { u32::from(frame.flags >> 7) },
        tensor: if fits { engine.plan().slice(slice).tensor } else { tensor(frame.ids[0]) },
        slice,
        priority: Priority(i32::from(frame.offset)),
        sender: peer(frame.from),
        offset,
        length,
        block_bytes: 0,
        hop: u16::from(frame.flags >> 3 & 3),
        payload_checksum: 0,
    }
}

/// Gives the engine a frame. Returns whether its payload landed.
fn receive(engine: &mut Engine, from: Rank, header: &FrameHeader) -> bool {
    match engine.handle_header(from, header) {
        Ok(PayloadDest::Region(region)) => {
            let limit = match region.memory {
                Memory::Buffer(buffer) => buffer.bytes,
                _ => {
                    let plan = engine.plan();
                    plan.slice_start_bytes(header.slice) + plan.slice_bytes(header.slice)
                }
            };
            assert!(region.offset + region.length <= limit);
            let _ = engine.handle_frame(from, header);
            return true;
        }
        Ok(PayloadDest::Nothing) => drop(engine.handle_frame(from, header)),
        Ok(PayloadDest::Control) => {
            let payload = vec![0x5A; header.length as usize];
            let _ = engine.handle_control(from, header, &payload);
        }
        Err(_) => {}
    }
    false
}
