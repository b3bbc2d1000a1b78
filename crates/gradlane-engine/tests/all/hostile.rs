//! A hostile peer: headers that are well formed but wrong in any field. The engine answers with a typed
//! error or a landing inside the memory of the slice; it never panics and stays usable.

use crate::common::{frame, plan, tensors, Cluster};
use gradlane_engine::{
    Cutoff, Engine, EngineOptions, Event, GoingOn, Input, JobResult, Memory, PayloadDest, Plan,
    Refusal, StragglerPolicy, Strategy as Setting, Synchrony, Update,
};
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId, Time};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

#[derive(Clone, Debug)]
struct Hostile {
    from: u32,
    header: FrameHeader,
    payload: Vec<u8>,
}

fn hostile() -> impl Strategy<Value = Hostile> {
    let kind = proptest::sample::select(FrameKind::ALL);
    let ids = (0..4_u32, 0..9_u32, 0..3_u64, 0..2_u32, 0..2_u32);
    let rest = (0..4_u8, 1..3_u32, any::<bool>(), 0..500_u64, any::<u32>(), 0..300_usize, 1..4_u16);
    let form = proptest::sample::select(PayloadForm::ALL);
    (kind, ids, rest, form).prop_map(|(kind, ids, rest, form)| {
        let (tensor, slice, step, generation, plan_version) = ids;
        let (flags, from, honest, offset, priority, length, hop) = rest;
        let header = FrameHeader {
            kind,
            form,
            flags: FrameFlags(flags),
            step: Step(step),
            generation: generation / 2,
            plan_version,
            tensor: TensorId(tensor),
            slice: SliceId(slice),
            priority: Priority(priority as i32),
            sender: Rank(if honest { from } else { from - 1 }),
            offset: if offset < 250 { 0 } else { offset },
            length: length as u32,
            block_bytes: 0,
            hop: if kind.is_ring() { hop } else { 0 },
            payload_checksum: 0,
        };
        Hostile { from, header, payload: vec![0xA5; length] }
    })
}

/// A plan in which stragglers are left out.
fn choosing_plan() -> Arc<Plan> {
    let rule = StragglerPolicy { cutoff: Cutoff::Backup { ranks: 1 }, ahead_steps: 1 };
    let strategy = Setting::named("p3", Some(40), 0).expect("p3");
    let strategy = Setting { synchrony: Synchrony::BackupWorkers(rule), ..strategy };
    let plan = Plan::build(tensors(&[100, 30, 1]), strategy, Update::Worker, 3);
    Arc::new(plan.expect("a plan"))
}

proptest! {
    #[test]
    fn nothing_a_peer_sends_makes_the_engine_panic_or_write_elsewhere(
        frames in proptest::collection::vec(hostile(), 1..60),
        name in proptest::sample::select(&Setting::NAMES[..]),
        chooses in any::<bool>(),
        begun in any::<bool>(),
        contributed in any::<bool>(),
    ) {
        let plan = if chooses { choosing_plan() } else { plan(&[100, 30, 1], name, 40, 3) };
        let mut cluster = Cluster::new(&plan, 64, 64, 1);
        cluster.step_zero();
        let engine = &mut cluster.nodes[0].engine;
        if begun {
            engine.handle(Input::StepBegin(Step(1))).expect("begins");
        }
        for tensor in (0..3).filter(|_| begun && contributed) {
            engine.handle(Input::GradientReady(TensorId(tensor), Step(1))).expect("a gradient");
        }
        for frame in frames {
            let from = Rank(frame.from);
            match engine.handle(Input::Header(from, frame.header)) {
                Ok(PayloadDest::Region(region)) => {
                    let slice = frame.header.slice;
                    let bytes = match region.memory {
                        Memory::Buffer(buffer) => buffer.bytes,
                        Memory::Gradient(tensor) | Memory::Parameter(tensor) => {
                            prop_assert_eq!(tensor, plan.slice(slice).tensor);
                            plan.slice_start_bytes(slice) + plan.slice_bytes(slice)
                        }
                    };
                    prop_assert!(region.offset + region.length <= bytes);
                    prop_assert_eq!(region.length, u64::from(frame.header.length));
                    let _ = engine.handle(Input::Frame(from, frame.header));
                }
                Ok(PayloadDest::Nothing) => {
                    let _ = engine.handle(Input::Frame(from, frame.header));
                }
                Ok(PayloadDest::Control) => {
                    let _ = engine.handle(Input::Control(from, frame.header, frame.payload.to_vec()));
                }
                Err(Refusal::Protocol(error)) => prop_assert_eq!(error.peer, from),
                        Err(Refusal::Usage(error)) => panic!("{error}"),
            }
            while engine.poll_job().is_some() {}
            while engine.poll_transmit().is_some() {}
            while engine.poll_event().is_some() {}
        }
    }
}

/// What happens to a rank whose training goes on when others are lost.
#[derive(Clone, Debug)]
enum Happening {
    Frame(u32, FrameKind, u64, Vec<u8>),
    Lost(u32),
    Seconds(u64),
}

fn happening() -> impl Strategy<Value = Happening> {
    use FrameKind::{
        Abort, Broadcast, Goodbye, Holdings, Membership, PlanSwitchAck, Push, Resumed,
    };
    let kinds = vec![Abort, Broadcast, Goodbye, PlanSwitchAck, Push, Holdings, Membership, Resumed];
    let kind = proptest::sample::select(kinds);
    // Lengths of right ones among them: a resumption, the holdings of six slices.
    let length = prop_oneof![Just(4_usize), Just(6_usize), 0..90_usize];
    let payload = length.prop_flat_map(|length| {
        proptest::collection::vec(prop_oneof![0..4_u8, any::<u8>()], length)
    });
    let frame = (1..3_u32, kind, 0..4_u64, payload);
    prop_oneof![
        6 => frame.prop_map(|(from, kind, step, payload)| {
            Happening::Frame(from, kind, step, payload)
        }),
        1 => (1..3_u32).prop_map(Happening::Lost),
        1 => (0..40_u64).prop_map(Happening::Seconds),
    ]
}

proptest! {
    #[test]
    fn nothing_a_peer_says_of_memberships_makes_the_engine_panic(
        happenings in proptest::collection::vec(happening(), 1..60),
    ) {
        let plan = plan(&[100, 30, 1], "p3", 40, 3);
        let going_on = GoingOn {
            min_ranks: 1,
            collect: Duration::from_secs(1),
            answer: Duration::from_secs(2),
        };
        let options = EngineOptions { going_on: Some(going_on), ..EngineOptions::new(Rank(0)) };
        let mut engine = Engine::after_initial(options, plan, vec![Priority(0); 3]);
        engine.handle(Input::StepBegin(Step(1))).expect("begins");
        engine.handle(Input::GradientReady(TensorId(0), Step(1))).expect("a gradient");
        let mut now = Time::ZERO;
        for happening in happenings {
            match happening {
                Happening::Frame(from, kind, step, payload) => {
                    let (step, length) = (Step(step), payload.len() as u32);
                    let header = FrameHeader { step, length, ..frame(kind, Rank(from)) };
                    let from = Rank(from);
                    match engine.handle(Input::Header(from, header)) {
                        Ok(PayloadDest::Control) => {
                            let _ = engine.handle(Input::Control(from, header, payload.to_vec()));
                        }
                        Ok(_) => {
                            let _ = engine.handle(Input::Frame(from, header));
                        }
                        Err(Refusal::Protocol(error)) => prop_assert_eq!(error.peer, from),
                        Err(Refusal::Usage(error)) => panic!("{error}"),
                    }
                }
                Happening::Lost(peer) => engine.tell(Input::PeerLost(Rank(peer), "closed".to_owned())),
                Happening::Seconds(seconds) => now = now + Duration::from_secs(seconds),
            }
            engine.tell(Input::Time(now));
            while let Some(job) = engine.poll_job() {
                engine.tell(Input::JobDone(job.id, JobResult::Written));
            }
            while let Some(transmit) = engine.poll_transmit() {
                engine.tell(Input::Sent(transmit.peer, transmit.header));
                engine.tell(Input::Read(transmit.peer, transmit.header));
            }
            while let Some(event) = engine.poll_event() {
                if let Event::Disconnect(peer) = event {
                    engine.tell(Input::PeerLost(peer, "left out".to_owned()));
                }
            }
        }
    }
}

#[test]
fn errors_name_peer_tensor_step_and_bytes() {
    let plan = plan(&[100], "p3", 50, 2);
    let mut cluster = Cluster::new(&plan, 64, 64, 1);
    cluster.step_zero();
    let header = FrameHeader { offset: 199, length: 64, ..frame(FrameKind::Push, Rank(1)) };
    let error =
        cluster.nodes[0].engine.handle(Input::Header(Rank(1), header)).unwrap_err().to_string();
    for part in ["rank 1", "layer0.weight", "step 1", "64 bytes at offset 199 of 200"] {
        assert!(error.contains(part), "{error:?} does not name {part:?}");
    }
}
