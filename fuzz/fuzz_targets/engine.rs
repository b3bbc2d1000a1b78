//! Any sequence of inputs, the application's and a hostile peer's: the engine never panics, and what
//! it lets land stays inside the slice's memory.
#![no_main]

use arbitrary::Arbitrary;
use gradlane_engine::{
    Engine, EngineOptions, Input, JobId, PayloadDest, Plan, Scheme, Strategy, TensorKind,
    TensorSpec, Transmit, Update,
};
use gradlane_units::{Dtype, Priority, Rank, SliceId, Step, TensorId, Time};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;

#[derive(Arbitrary, Debug)]
enum Action {
    Begin(u8),
    Ready(u8, u8),
    Absent(u8, u8),
    Needed(u8, u8),
    End(u8),
    Switch(Vec<i32>),
    Frame { from: bool, kind: u8, flags: u8, step: u8, ids: [u8; 2], offset: u16, length: u8 },
    Writable(bool, bool),
    Sent(u8),
    Done(u8),
    Lost(bool),
    Finish,
    Abort,
    Time(u64),
}

#[derive(Arbitrary, Debug)]
struct Case {
    strategy: u8,
    server_update: bool,
    inputs: Vec<Action>,
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

fuzz_target!(|case: Case| {
    let plan = plan(&case);
    let mut engine = Engine::new(EngineOptions::new(Rank(0)), plan.clone());
    let mut transmits: Vec<Transmit> = Vec::new();
    let mut jobs: Vec<JobId> = Vec::new();
    for input in &case.inputs {
        apply(&mut engine, input, &mut transmits, &mut jobs);
        jobs.extend(std::iter::from_fn(|| engine.poll_job()).map(|work| work.id));
        transmits.extend(std::iter::from_fn(|| engine.poll_transmit()));
        while engine.poll_event().is_some() {}
        let _ = (engine.poll_timeout(), engine.outstanding());
    }
});

fn apply(
    engine: &mut Engine,
    input: &Action,
    transmits: &mut Vec<Transmit>,
    jobs: &mut Vec<JobId>,
) {
    let peer = |which: bool| Rank(1 + u32::from(which));
    match input {
        Action::Begin(step) => drop(engine.handle(Input::StepBegin(Step(u64::from(*step))))),
        Action::Ready(tensor, step) => drop(
            engine
                .handle(Input::GradientReady(TensorId(u32::from(*tensor)), Step(u64::from(*step)))),
        ),
        Action::Absent(tensor, step) => {
            drop(
                engine.handle(Input::TensorAbsent(
                    TensorId(u32::from(*tensor)),
                    Step(u64::from(*step)),
                )),
            );
        }
        Action::Needed(tensor, step) => {
            drop(
                engine.handle(Input::TensorNeeded(
                    TensorId(u32::from(*tensor)),
                    Step(u64::from(*step)),
                )),
            );
        }
        Action::End(step) => drop(engine.handle(Input::StepEnd(Step(u64::from(*step))))),
        Action::Switch(values) => {
            drop(
                engine.handle(Input::SwitchPriorities(
                    values.iter().copied().map(Priority).collect(),
                )),
            );
        }
        Action::Frame { from, kind, flags, step, ids, offset, length } => {
            let kinds = FrameKind::ALL;
            let header = FrameHeader {
                kind: kinds[*kind as usize % kinds.len()],
                form: if flags & 4 == 0 { PayloadForm::Raw } else { PayloadForm::Encoded },
                flags: FrameFlags(flags & 3),
                step: Step(u64::from(*step % 4)),
                generation: 0,
                plan_version: u32::from(flags >> 7),
                tensor: TensorId(u32::from(ids[0])),
                slice: SliceId(u32::from(ids[1])),
                priority: Priority(i32::from(*offset)),
                sender: peer(*from),
                offset: u64::from(*offset),
                length: u32::from(*length),
                block_bytes: 0,
                hop: u16::from(flags >> 2 & 3),
                payload_checksum: 0,
            };
            receive(engine, peer(*from), &header);
        }
        Action::Writable(which, writable) => engine.handle_writable(peer(*which), *writable),
        Action::Sent(index) if !transmits.is_empty() => {
            let transmit = transmits.remove(*index as usize % transmits.len());
            engine.handle_sent(&transmit);
        }
        Action::Done(index) if !jobs.is_empty() => {
            engine.handle_job_done(jobs.remove(*index as usize % jobs.len()));
        }
        Action::Lost(which) => engine.handle_peer_lost(peer(*which), "gone"),
        Action::Finish => drop(engine.handle(Input::Finish)),
        Action::Abort => engine.abort("enough"),
        Action::Time(now) => engine.handle_time(Time(*now)),
        Action::Sent(_) | Action::Done(_) => {}
    }
}

fn receive(engine: &mut Engine, from: Rank, header: &FrameHeader) {
    match engine.handle_header(from, header) {
        Ok(PayloadDest::Region(region)) => {
            let limit = match region.memory {
                gradlane_engine::Memory::Buffer(buffer) => buffer.bytes,
                _ => {
                    let plan = engine.plan();
                    plan.slice_start_bytes(header.slice) + plan.slice_bytes(header.slice)
                }
            };
            assert!(region.offset + region.length <= limit);
            let _ = engine.handle_frame(from, header);
        }
        Ok(PayloadDest::Nothing) => drop(engine.handle_frame(from, header)),
        Ok(PayloadDest::Control) => {
            let payload = vec![0x5A; header.length as usize];
            let _ = engine.handle_control(from, header, &payload);
        }
        Err(_) => {}
    }
}
