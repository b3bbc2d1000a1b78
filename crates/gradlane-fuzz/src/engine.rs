//! Any sequence of inputs, the application's and a hostile peer's: the engine never panics, and what
//! it lets land stays inside the slice's memory.

use arbitrary::{Arbitrary, Result, Unstructured};
use gradlane_engine::{
    Cutoff, Engine, EngineOptions, GoingOn, Input, JobId, JobResult, Memory, Payload, PayloadDest,
    Plan, Scheme, StragglerPolicy, Strategy, Synchrony, TensorKind, TensorSpec, Transmit, Update,
};
use gradlane_units::{Dtype, Priority, Rank, SliceId, Step, TensorId, Time};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};
use std::sync::Arc;
use std::time::Duration;

#[derive(Arbitrary, Debug)]
enum Action {
    Begin(u8),
    Pass(u8),
    Barrier(u8),
    /// The oldest frames of the engine and of a peer reach each other.
    Exchange(bool),
    Updates(bool),
    Claim(u8, Option<Vec<u8>>),
    Raw(u8),
    Squares(u8, u8),
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
    /// In every byte of a control frame's payload.
    fill: u8,
    kind: u8,
    flags: u8,
    step: u8,
    ids: [u8; 2],
    /// A raw one of a whole slice, in a step near the first.
    fits: bool,
    offset: u16,
    length: u8,
}

/// Whom a step waits for.
#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    All,
    Nobody,
    InTime,
    /// All, and when some are lost, those that are left.
    Left,
}

#[derive(Debug)]
struct Case {
    strategy: u8,
    synchrony: Pace,
    server_update: bool,
    /// The number of lanes, and of the one that the engines are of.
    lanes: u8,
    /// With step 0 done and step 1 begun, which drawn inputs hardly come to.
    begun: bool,
    inputs: Vec<Action>,
}

impl Case {
    /// Takes actions until bytes end: a derived list would end after two on average.
    fn read(mut bytes: Unstructured<'_>) -> Result<Case> {
        let (strategy, synchrony, server_update, lanes, begun) = bytes.arbitrary()?;
        let mut inputs = Vec::new();
        while !bytes.is_empty() {
            inputs.push(bytes.arbitrary()?);
        }
        Ok(Case { strategy, synchrony, server_update, lanes, begun, inputs })
    }
}

fn plan(case: &Case) -> Arc<Plan> {
    let names: &[&str] = match case.synchrony {
        Pace::All => &Strategy::SYNCHRONOUS,
        Pace::Nobody => &["asgd"],
        // Where results come unasked.
        Pace::InTime | Pace::Left => &["p3", "slicing", "wfbp"],
    };
    let name = names[case.strategy as usize % names.len()];
    let mut strategy = Strategy::named(name, Some(20), 3).expect("a known strategy");
    if case.synchrony == Pace::InTime {
        let cutoff = match case.server_update {
            true => Cutoff::Backup { ranks: 1 },
            false => Cutoff::Deadline { percent: 130 },
        };
        strategy.synchrony = Synchrony::BackupWorkers(StragglerPolicy { cutoff, ahead_steps: 2 });
    }
    let update = match case.synchrony {
        Pace::Nobody => Update::Server,
        // A ring has no servers to update on.
        Pace::All if case.server_update && strategy.scheme == Scheme::Ps => Update::Server,
        _ => Update::Worker,
    };
    let spec = |(name, numel): (&str, u64)| TensorSpec {
        name: name.into(),
        numel,
        dtype: Dtype::F32,
        kind: TensorKind::Parameter,
    };
    let tensors = [("a", 50), ("b", 7), ("c", 0)].map(spec).to_vec();
    let plan = Plan::build(tensors, strategy, update, 3).expect("a plan");
    let lanes = 1 + u32::from(case.lanes % 3);
    Arc::new(plan.lane(u32::from(case.lanes / 3) % lanes, lanes))
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
    let goes_on = case.synchrony == Pace::Left;
    let mut engines = [0, 1, 2].map(|rank| new_engine(&plan, Rank(rank), goes_on));
    if case.begun {
        begin_training(&plan, &mut engines);
    }
    let [mut engine, mut peers @ ..] = engines;
    let mut transmits: Vec<Transmit> = Vec::new();
    let mut jobs: Vec<JobId> = Vec::new();
    let mut landed = false;
    for input in &case.inputs {
        if let Action::Exchange(which) = input {
            exchange(&mut engine, &mut peers[usize::from(*which)], &mut transmits);
        } else {
            landed |= apply(&mut engine, input, &mut transmits, &mut jobs);
        }
        jobs.extend(std::iter::from_fn(|| engine.poll_job()).map(|work| work.id));
        transmits.extend(std::iter::from_fn(|| engine.poll_transmit()));
        while engine.poll_event().is_some() {}
        let _ = (engine.poll_timeout(), engine.outstanding());
    }
    landed
}

/// Returns a rank whose peers take frames.
fn new_engine(plan: &Arc<Plan>, rank: Rank, goes_on: bool) -> Engine {
    let going_on = GoingOn {
        min_ranks: 1,
        collect: Duration::from_millis(200),
        answer: Duration::from_secs(2),
    };
    let options =
        EngineOptions { going_on: goes_on.then_some(going_on), ..EngineOptions::new(rank) };
    let mut engine = Engine::new(options, plan.clone());
    for peer in (0..plan.world_size).map(Rank).filter(|&peer| peer != rank) {
        engine.tell(Input::Writable(peer, true));
    }
    engine
}

/// Has a cluster do step 0, and begins step 1 on its first rank.
fn begin_training(plan: &Arc<Plan>, engines: &mut [Engine; 3]) {
    for engine in engines.iter_mut() {
        engine.handle(Input::StepBegin(Step(0))).expect("step 0 begins");
        let tensors = (0..plan.tensors.len() as u32).map(TensorId);
        for tensor in tensors.filter(|&tensor| plan.has_slices_of(tensor)) {
            engine.handle(Input::GradientReady(tensor, Step(0))).expect("values");
        }
    }
    let mut moves = true;
    while moves {
        moves = false;
        for from in 0..engines.len() {
            moves |= do_jobs(&mut engines[from]);
            while let Some(transmit) = engines[from].poll_transmit() {
                sent_and_read(&mut engines[from], &transmit);
                let peer = &mut engines[transmit.peer.0 as usize];
                deliver(peer, Rank(from as u32), &transmit);
                moves = true;
            }
        }
    }
    engines[0].handle(Input::StepBegin(Step(1))).expect("step 1 begins");
}

fn do_jobs(engine: &mut Engine) -> bool {
    let mut moves = false;
    while let Some(job) = engine.poll_job() {
        engine.tell(Input::JobDone(job.id, JobResult::Written));
        moves = true;
    }
    moves
}

/// The oldest frame that the engine has for a peer reaches it, and one of the peer's the engine. The peer does
/// all that its own program and its jobs can.
fn exchange(engine: &mut Engine, peer: &mut Engine, transmits: &mut Vec<Transmit>) {
    if let Some(index) = transmits.iter().position(|it| it.peer == peer.rank()) {
        let transmit = transmits.remove(index);
        deliver(peer, engine.rank(), &transmit);
        sent_and_read(engine, &transmit);
    }
    for step in 0..5 {
        // What does not fit is refused.
        let _ = peer.handle(Input::StepBegin(Step(step)));
        for tensor in 0..3 {
            let _ = peer.handle(Input::GradientReady(TensorId(tensor), Step(step)));
        }
    }
    do_jobs(peer);
    while peer.poll_event().is_some() {}
    while let Some(transmit) = peer.poll_transmit() {
        sent_and_read(peer, &transmit);
        if transmit.peer == engine.rank() {
            return deliver(engine, peer.rank(), &transmit);
        }
    }
}

/// Tells an engine that a driver has copied a frame.
fn sent_and_read(engine: &mut Engine, transmit: &Transmit) {
    engine.tell(Input::Sent(transmit.peer, transmit.header));
    engine.tell(Input::Read(transmit.peer, transmit.header));
}

/// Gives an engine a frame of another one.
fn deliver(to: &mut Engine, from: Rank, transmit: &Transmit) {
    let payload = match &transmit.payload {
        Payload::Inline(bytes) => bytes.clone(),
        _ => vec![0; transmit.header.length as usize],
    };
    receive(to, from, &transmit.header, &payload);
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
        Action::Pass(it) => drop(engine.handle(Input::StepPass(step(*it)))),
        Action::Barrier(it) => drop(engine.handle(Input::StepBarrier(step(*it)))),
        Action::Updates(true) => drop(engine.handle(Input::UpdatesReady)),
        Action::Updates(false) => drop(engine.handle(Input::UpdatesPaused)),
        Action::Claim(generation, value) => {
            let answer = Input::ClaimAnswered(u32::from(generation % 4), value.clone());
            drop(engine.handle(answer));
        }
        Action::Raw(it) => drop(engine.handle(Input::SendRaw(step(*it)))),
        Action::Squares(it, at) => {
            drop(engine.handle(Input::MeasureSquares(tensor(*it), step(*at))));
        }
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
            let payload = vec![frame.fill; header.length as usize];
            return receive(engine, peer(frame.from), &header, &payload);
        }
        Action::Writable(which, writable) => engine.tell(Input::Writable(peer(*which), *writable)),
        Action::Sent(index) if !transmits.is_empty() => {
            let transmit = transmits.remove(*index as usize % transmits.len());
            sent_and_read(engine, &transmit);
        }
        Action::Done(index) if !jobs.is_empty() => {
            engine.tell(Input::JobDone(
                jobs.remove(*index as usize % jobs.len()),
                JobResult::Written,
            ));
        }
        // Up to five hours.
        Action::Time(now) => engine.tell(Input::Time(Time(u64::from(*now) << 12))),
        Action::Ending(0, _) => drop(engine.handle(Input::Finish)),
        Action::Ending(1, _) => engine.tell(Input::Abort("enough".to_owned())),
        Action::Ending(2, which) => engine.tell(Input::PeerLost(peer(*which), "gone".to_owned())),
        Action::Sent(_) | Action::Done(_) | Action::Ending(..) | Action::Exchange(_) => {}
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
fn receive(engine: &mut Engine, from: Rank, header: &FrameHeader, payload: &[u8]) -> bool {
    match engine.handle(Input::Header(from, *header)) {
        Ok(PayloadDest::Region(region)) => {
            let limit = match region.memory {
                Memory::Buffer(buffer) => buffer.bytes,
                _ => {
                    let plan = engine.plan();
                    plan.slice_start_bytes(header.slice) + plan.slice_bytes(header.slice)
                }
            };
            assert!(region.offset + region.length <= limit);
            let _ = engine.handle(Input::Frame(from, *header));
            return true;
        }
        Ok(PayloadDest::Nothing) => drop(engine.handle(Input::Frame(from, *header))),
        Ok(PayloadDest::Control) => {
            let _ = engine.handle(Input::Control(from, *header, payload.to_vec()));
        }
        Err(_) => {}
    }
    false
}
