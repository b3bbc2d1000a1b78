//! Frames of a peer that sends what it likes: no panic, and nothing of this rank grows without bound.

use super::call::{Call, Operation};
use super::element::{Element, Reduction};
use super::frame::{plain, FramePurpose};
use super::limits::Limits;
use super::memory::test_memory;
use super::schedule::{schedule, Memory};
use super::state::GroupState;
use super::work::{Begun, Work};
use crate::io::{FrameSink, PayloadTarget};
use crate::memory::UserMemory;
use gradlane_units::{Priority, Rng, SliceId, Step, TensorId};
use gradlane_wire::{FrameHeader, FrameKind};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn draw(rng: &mut Rng, end: u64) -> u64 {
    rng.next_u64() % end
}

/// A frame like those of groups: most fields are near what this rank expects.
fn drawn_header(rng: &mut Rng, next_message: u64) -> FrameHeader {
    let kinds = [FrameKind::Heartbeat, FrameKind::Abort, FrameKind::Goodbye, FrameKind::Push];
    let kind = match draw(rng, 400) {
        it if it < 4 => kinds[it as usize],
        _ => FrameKind::Collective,
    };
    let number = match draw(rng, 40) {
        0 => u64::MAX,
        1 => draw(rng, 1 << 40),
        2..=5 => draw(rng, 6),
        _ => next_message,
    };
    // Messages and calls of the kinds that this rank begins; seldom any.
    let usual = [1, 11, 12];
    let purpose = if draw(rng, 10) == 0 { draw(rng, 4) as u32 } else { FramePurpose::Data as u32 };
    let any = 1 + draw(rng, 13) as u32;
    let operation = if draw(rng, 30) == 0 { any } else { usual[draw(rng, 3) as usize] };
    let lengths = [4, 8, 40, 48, 0, 64, u64::from(u32::MAX)];
    let known = if draw(rng, 30) == 0 { 7 } else { 4 };
    let length = lengths[draw(rng, known) as usize];
    let total = if draw(rng, 30) == 0 { lengths[draw(rng, 7) as usize] } else { length };
    let start = if draw(rng, 30) == 0 { lengths[draw(rng, 7) as usize] } else { 0 };
    let is_data = purpose == FramePurpose::Data as u32 && kind == FrameKind::Collective;
    FrameHeader {
        generation: u32::from(draw(rng, 200) == 0),
        step: Step(number),
        tensor: TensorId(if draw(rng, 30) == 0 {
            draw(rng, 1 << 32) as u32
        } else {
            draw(rng, 2) as u32
        }),
        slice: SliceId(operation << 27 | 8 << 22 | purpose << 15 | draw(rng, 3) as u32),
        plan_version: if draw(rng, 30) == 0 { draw(rng, 12) as u32 } else { (total / 4) as u32 },
        priority: Priority(if draw(rng, 9) == 0 { -1 } else { 0 }),
        offset: total << 32 | start,
        length: if is_data || draw(rng, 50) == 0 { length as u32 } else { 0 },
        ..plain(kind, 1)
    }
}

#[test]
fn frames_of_a_hostile_peer_are_bounded() {
    let now = Instant::now();
    let limits = Limits { eager: 48, frame: 48, credit: 4_000, ..Limits::USUAL };
    let (mut violations, mut taken) = (0, 0);
    for first in 0..400_u64 {
        let mut rng = Rng::new(first);
        let silence = Duration::from_secs(60);
        let mut state = GroupState::new("hostile".to_owned(), 0, 2, 0, silence, limits, now);
        // The memory of all calls, as long as the group may use it.
        let mut tensors: Vec<Vec<i32>> = Vec::new();
        let mut messages = 0;
        for _ in 0..200 {
            if draw(&mut rng, 6) == 0 {
                tensors.push(vec![0; [0, 1, 12, 40][draw(&mut rng, 4) as usize]]);
                let memory = test_memory(tensors.last_mut().expect("a tensor"));
                let begun = Begun::new(&Arc::new(Work::default()), None, now);
                let (element, reduction) = (Element::I32, Reduction::Sum);
                // The failure of a group that has ended is looked at below.
                let _ = match draw(&mut rng, 3) {
                    0 => {
                        let (operation, outputs) = (Operation::AllReduce, vec![memory]);
                        let (root, inputs) = (0, Vec::new());
                        let call = Call { operation, element, reduction, root, inputs, outputs };
                        state.begin(&call, begun)
                    }
                    1 => state.begin_message(Operation::Send, Some(1), 0, memory, begun),
                    _ => state.begin_message(Operation::Receive, None, 1, memory, begun),
                };
            }
            let header = drawn_header(&mut rng, messages);
            let mut sink = state.sink(1);
            let Ok(target) = sink.on_header(&header) else {
                violations += 1;
                break;
            };
            let bytes = match target {
                PayloadTarget::Memory(span) => {
                    assert_eq!(span.len(), header.length as usize);
                    None
                }
                PayloadTarget::Control if state.failure().is_some() => {
                    violations += 1;
                    break;
                }
                PayloadTarget::Control => {
                    assert!(header.length <= 64 << 10, "{header:?}");
                    Some(vec![0; header.length as usize])
                }
            };
            let outcome = state.sink(1).on_frame(&header, bytes.as_deref());
            assert!(outcome.is_ok());
            if state.failure().is_some() {
                violations += 1;
                break;
            }
            taken += 1;
            messages += u64::from(header.step.0 == messages && header.slice.0 >> 27 >= 11);
            assert!(state.peers.unasked_of(1) <= limits.credit);
        }
        state.release();
    }
    assert!(violations > 100 && taken > 1_000, "{violations} refused, {taken} taken");
}

#[test]
fn what_one_rank_sends_in_a_round_another_one_receives() {
    let operations = [
        Operation::AllReduce,
        Operation::Broadcast,
        Operation::Reduce,
        Operation::AllGather,
        Operation::Barrier,
        Operation::MonitoredBarrier,
    ];
    let limits =
        Limits { piece: 64, piece_least: 16, exchange: 64, whole_broadcast: 64, ..Limits::USUAL };
    for size in 1..=6_u32 {
        for (operation, elements) in operations.iter().flat_map(|it| [(*it, 3), (*it, 301)]) {
            let mut tensor = vec![0; elements];
            let memory = test_memory(&mut tensor);
            let of = |count: usize| -> Vec<UserMemory> { vec![memory; count] };
            let (inputs, outputs) = match operation {
                Operation::AllGather => (of(1), of(size as usize)),
                Operation::Barrier | Operation::MonitoredBarrier => (of(0), of(0)),
                _ => (of(0), of(1)),
            };
            let (element, reduction, root) = (Element::I32, Reduction::Sum, size / 2);
            let call = Call { operation, element, reduction, root, inputs, outputs };
            // By strand, round, sender and receiver: bytes that are sent, and bytes that are expected.
            let mut messages: BTreeMap<_, [Option<usize>; 2]> = BTreeMap::new();
            for rank in 0..size {
                for (strand, it) in schedule(&call, rank, size, limits).iter().enumerate() {
                    for (number, round) in it.rounds.iter().enumerate() {
                        for (to, place) in &round.sends {
                            let key = (strand, number, rank, *to);
                            let old = messages.entry(key).or_default()[0].replace(place.length);
                            assert!(old.is_none() && *to != rank, "{operation:?} {key:?}");
                        }
                        for (from, place) in &round.receives {
                            let key = (strand, number, *from, rank);
                            let old = messages.entry(key).or_default()[1].replace(place.length);
                            assert!(old.is_none() && *from != rank, "{operation:?} {key:?}");
                            if let Memory::Scratch(index) = place.memory {
                                assert!(place.start + place.length <= it.scratch[index]);
                            }
                        }
                    }
                }
            }
            for (key, [sent, expected]) in &messages {
                assert_eq!(sent, expected, "{operation:?} of {elements} on {size}: {key:?}");
            }
        }
    }
}
