//! A peer that sends what it likes, as draws: no panic, and nothing of this rank grows without bound.
//!
//! Tests draw from seeds; `gradlane-fuzz` draws from any bytes.

use super::call::{Call, Operation};
use super::element::{Element, Reduction};
use super::frame::{plain, FramePurpose};
use super::limits::Limits;
use super::memory::lent_memory;
use super::state::GroupState;
use super::work::{Begun, Work};
use crate::io::{FrameSink, PayloadTarget};
use gradlane_units::{Priority, SliceId, Step, TensorId};
use gradlane_wire::{FrameHeader, FrameKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Calls and frames at most.
const EVENTS: u64 = 200;
/// Bytes of a payload that are drawn; the others are zeros.
const DRAWN_BYTES: usize = 32;

/// What a history came to.
#[derive(Debug)]
pub struct Outcome {
    /// Frames that were taken.
    pub taken: u64,
    /// Whether the peer was refused.
    pub is_refused: bool,
}

/// Where choices come from: a number below the given one.
type Draw<'a> = dyn FnMut(u64) -> u64 + 'a;

/// A frame like those of groups: most fields are near what this rank expects.
fn drawn_header(draw: &mut Draw<'_>, next_message: u64) -> FrameHeader {
    let kinds = [FrameKind::Heartbeat, FrameKind::Abort, FrameKind::Goodbye, FrameKind::Push];
    let kind = match draw(256) {
        it if it < 4 => kinds[it as usize],
        _ => FrameKind::Collective,
    };
    let number = match draw(40) {
        0 => u64::MAX,
        1 => draw(1 << 40),
        2..=5 => draw(6),
        _ => next_message,
    };
    // Messages and calls of the kinds that this rank begins; seldom any.
    let usual = [1, 11, 12];
    let purpose = if draw(10) == 0 { draw(4) as u32 } else { FramePurpose::Data as u32 };
    let any = 1 + draw(13) as u32;
    let operation = if draw(30) == 0 { any } else { usual[draw(3) as usize] };
    let lengths = [4, 8, 40, 48, 0, 64, u64::from(u32::MAX)];
    let known = if draw(30) == 0 { 7 } else { 4 };
    let length = lengths[draw(known) as usize];
    let total = if draw(30) == 0 { lengths[draw(7) as usize] } else { length };
    let start = if draw(30) == 0 { lengths[draw(7) as usize] } else { 0 };
    let is_data = purpose == FramePurpose::Data as u32 && kind == FrameKind::Collective;
    FrameHeader {
        generation: u32::from(draw(200) == 0),
        step: Step(number),
        tensor: TensorId(if draw(30) == 0 { draw(1 << 32) as u32 } else { draw(2) as u32 }),
        slice: SliceId(operation << 27 | 8 << 22 | purpose << 15 | draw(3) as u32),
        plan_version: if draw(30) == 0 { draw(12) as u32 } else { (total / 4) as u32 },
        priority: Priority(if draw(9) == 0 { -1 } else { 0 }),
        offset: total << 32 | start,
        length: if is_data || draw(50) == 0 { length as u32 } else { 0 },
        ..plain(kind, 1)
    }
}

/// Lets a peer of a group of two send drawn frames, while this rank makes drawn calls.
///
/// # Panics
/// Where memory of another length is written, a payload is too large, or more is kept of the peer than
/// its credit.
pub fn hostile_peer(draw: &mut Draw<'_>) -> Outcome {
    let now = Instant::now();
    let limits = Limits { eager: 48, frame: 48, credit: 4_000, ..Limits::USUAL };
    let silence = Duration::from_secs(60);
    // The memory of all calls, as long as the group may use it.
    let mut tensors: Vec<Vec<i32>> = Vec::new();
    let mut state = GroupState::new("hostile".to_owned(), 0, 2, 0, silence, limits, now);
    let (mut messages, mut taken) = (0, 0);
    let events = draw(EVENTS + 1);
    for _ in 0..events {
        if draw(6) == 0 {
            tensors.push(vec![0; [0, 1, 12, 40][draw(4) as usize]]);
            let memory = lent_memory(tensors.last_mut().expect("a tensor"));
            let begun = Begun::new(&Arc::new(Work::default()), None, now);
            let (element, reduction) = (Element::I32, Reduction::Sum);
            // The failure of a group that has ended is looked at below.
            let _ = match draw(3) {
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
        let header = drawn_header(draw, messages);
        let mut sink = state.sink(1);
        let Ok(target) = sink.on_header(&header) else {
            state.release();
            return Outcome { taken, is_refused: true };
        };
        let bytes = match target {
            PayloadTarget::Memory(span) => {
                assert_eq!(span.len(), header.length as usize);
                None
            }
            PayloadTarget::Control if state.failure().is_some() => break,
            PayloadTarget::Control => {
                assert!(header.length <= 64 << 10, "{header:?}");
                let mut bytes = vec![0; header.length as usize];
                bytes.iter_mut().take(DRAWN_BYTES).for_each(|it| *it = draw(256) as u8);
                Some(bytes)
            }
        };
        let outcome = state.sink(1).on_frame(&header, bytes.as_deref());
        assert!(outcome.is_ok());
        if state.failure().is_some() {
            break;
        }
        taken += 1;
        messages += u64::from(header.step.0 == messages && header.slice.0 >> 27 >= 11);
        assert!(state.peers.unasked_of(1) <= limits.credit);
    }
    let is_refused = state.failure().is_some();
    state.release();
    Outcome { taken, is_refused }
}
