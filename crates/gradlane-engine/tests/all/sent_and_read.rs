//! A frame is sent once the kernel has it, and its memory is free once nobody reads it: two things, one after
//! the other.

use crate::common::{frame, plan};
use gradlane_engine::{
    Engine, EngineOptions, Event, Input, Job, JobResult, Memory, PayloadDest, Region, Transmit,
};
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind};

/// Rank 0 of two in step 1, with its gradient submitted. Each rank owns a slice of 16 bytes, which two frames
/// carry, and there is credit for one of them at a time.
fn engine() -> Engine {
    let mut options = EngineOptions::new(Rank(0));
    (options.frame_bytes, options.credit_bytes) = (8, 8);
    let mut engine = Engine::after_initial(options, plan(&[8], "p3", 4, 2), vec![Priority(0); 1]);
    engine.tell(Input::Writable(Rank(1), true));
    engine.handle(Input::StepBegin(Step(1))).expect("it begins");
    engine.handle(Input::GradientReady(TensorId(0), Step(1))).expect("a gradient");
    engine
}

fn owned_by(engine: &Engine, owner: u32) -> SliceId {
    let slices = (0..2).map(SliceId);
    slices.into_iter().find(|&it| engine.plan().slice(it).owner == Rank(owner)).expect("a slice")
}

fn sent(engine: &mut Engine, frame: &Transmit) {
    engine.tell(Input::Sent(frame.peer, frame.header));
}

fn read(engine: &mut Engine, frame: &Transmit) {
    engine.tell(Input::Read(frame.peer, frame.header));
}

/// Where the result of the slice that rank 1 owns lands.
fn result(engine: &mut Engine) -> Memory {
    let slice = owned_by(engine, 1);
    let header = FrameHeader { slice, length: 8, ..frame(FrameKind::Broadcast, Rank(1)) };
    match engine.handle(Input::Header(Rank(1), header)) {
        Ok(PayloadDest::Region(Region { memory, .. })) => memory,
        other => panic!("{other:?}"),
    }
}

#[test]
fn credit_comes_back_before_the_memory_is_free() {
    let mut engine = engine();
    let first = engine.poll_transmit().expect("the first half of a push");
    assert_eq!(engine.poll_transmit(), None, "no credit is left");
    sent(&mut engine, &first);
    let second = engine.poll_transmit().expect("the second half");
    assert!(second.header.flags.contains(FrameFlags::LAST));
    sent(&mut engine, &second);
    read(&mut engine, &first);
    assert!(matches!(result(&mut engine), Memory::Buffer(_)), "the gradient is still read");
}

#[test]
fn a_result_lands_in_a_gradient_that_nobody_reads() {
    let mut engine = engine();
    while let Some(frame) = engine.poll_transmit() {
        sent(&mut engine, &frame);
        read(&mut engine, &frame);
    }
    assert_eq!(result(&mut engine), Memory::Gradient(TensorId(0)));
}

#[test]
fn a_buffer_is_free_once_its_broadcast_is_read() {
    let mut engine = engine();
    let slice = owned_by(&engine, 0);
    for (offset, flags) in [(0, FrameFlags::NONE), (8, FrameFlags::LAST)] {
        let push = frame(FrameKind::Push, Rank(1));
        let header = FrameHeader { slice, offset, flags, length: 8, ..push };
        engine.handle(Input::Header(Rank(1), header)).expect("a push");
        engine.handle(Input::Frame(Rank(1), header)).expect("a push");
    }
    while let Some(Job { id, .. }) = engine.poll_job() {
        engine.tell(Input::JobDone(id, JobResult::Written));
    }
    let mut frames = Vec::new();
    while let Some(frame) = engine.poll_transmit() {
        sent(&mut engine, &frame);
        frames.push(frame);
    }
    let frees = |engine: &mut Engine| {
        let events = std::iter::from_fn(|| engine.poll_event());
        events.filter(|it| matches!(it, Event::BufferFree(_))).count()
    };
    let before = frees(&mut engine);
    let in_use = engine.buffers_in_use();
    assert!(in_use > 0, "the mean is on its way");
    frames.iter().for_each(|frame| read(&mut engine, frame));
    assert_eq!(frees(&mut engine), in_use, "{before} were free before");
    assert_eq!(engine.buffers_in_use(), 0);
}

/// Both halves were on their way when this rank gave up. A peer that is said to have broken the protocol would
/// not be told why this rank has.
#[test]
fn frames_that_arrive_after_the_end_are_nobodys_fault() {
    let mut engine = engine();
    let slice = owned_by(&engine, 0);
    engine.tell(Input::Abort("enough".into()));
    for (offset, flags) in [(0, FrameFlags::NONE), (8, FrameFlags::LAST)] {
        let push = frame(FrameKind::Push, Rank(1));
        let header = FrameHeader { slice, offset, flags, length: 8, ..push };
        let dest = engine.handle(Input::Header(Rank(1), header));
        assert!(matches!(dest, Ok(PayloadDest::Nothing)), "{dest:?}");
        engine.handle(Input::Frame(Rank(1), header)).expect("a push");
    }
}
