//! Frames of every kind through a sealed writer, somebody on the path, and a sealed reader.

use super::adversary::{cases, Adversary, Change};
use super::frame_reader::{Fault, FrameReader, FrameSink, PayloadTarget};
use super::frame_writer::{Flushed, FrameWriter, OutgoingFrame, OutgoingPayload};
use super::tests::{seals, MemorySocket};
use gradlane_units::{Priority, Rank, Rng, SliceId, Step, TensorId};
use gradlane_wire::{
    sealed_bytes, FrameFlags, FrameHeader, FrameKind, PayloadForm, CHUNK_BYTES, HEADER_BYTES,
    SEALED_HEADER_BYTES, TAG_BYTES,
};
use std::collections::VecDeque;

type Frame = (FrameHeader, Vec<u8>);

/// Takes frames of every kind as they come.
#[derive(Default)]
struct Taken(Vec<Frame>);

impl FrameSink for Taken {
    fn on_header(&mut self, _: &FrameHeader) -> Result<PayloadTarget, Fault> {
        Ok(PayloadTarget::Control)
    }

    fn on_frame(&mut self, header: &FrameHeader, control: Option<&[u8]>) -> Result<(), Fault> {
        self.0.push((*header, control.expect("a control frame's payload").to_vec()));
        Ok(())
    }

    fn describe(&self, header: &FrameHeader) -> String {
        format!("{:?}", header.kind)
    }
}

fn frame(kind: FrameKind, generation: u32, length: usize, rng: &mut Rng) -> Frame {
    let payload: Vec<u8> = (0..length).map(|_| rng.below(256) as u8).collect();
    let header = FrameHeader {
        kind,
        form: PayloadForm::Raw,
        flags: FrameFlags::LAST,
        step: Step(rng.next_u64() >> 8),
        generation,
        plan_version: 1,
        tensor: TensorId(2),
        slice: SliceId(3),
        priority: Priority(-4),
        sender: Rank(0),
        offset: 8,
        block_bytes: if kind == FrameKind::Block { 9 } else { 0 },
        length: length as u32,
        hop: u16::from(kind.is_ring()),
        payload_checksum: 0,
    };
    (header, payload)
}

/// Writes frames through a sealed writer whose kernel takes `capacity` bytes at a time.
fn written(frames: &[Frame], writer: &mut FrameWriter, capacity: usize) -> Vec<u8> {
    let outgoing = |(header, payload): &Frame| {
        OutgoingFrame::new(*header, OutgoingPayload::Owned(payload.clone()), None)
    };
    let mut queue: VecDeque<OutgoingFrame> = frames.iter().map(outgoing).collect();
    writer.append(&mut queue);
    let (socket, _) = MemorySocket::pair(capacity);
    let (mut bytes, mut sent, mut total) = (Vec::new(), 0, 0);
    while writer.flush(&socket, &mut total, |_, _| sent += 1).expect("sent") == Flushed::Blocked {
        bytes.extend(socket.drain_sent());
    }
    bytes.extend(socket.drain_sent());
    assert_eq!((sent, total), (frames.len(), bytes.len()));
    bytes
}

/// Reads bytes that come in pieces. Returns the frames and the fault, if there was one.
fn read(bytes: &[u8], reader: &mut FrameReader, rng: &mut Rng) -> (Vec<Frame>, Option<Fault>) {
    let (mut taken, mut rest) = (Taken::default(), bytes);
    let (socket, _) = MemorySocket::pair(1);
    while !rest.is_empty() {
        let piece;
        (piece, rest) = rest.split_at(rest.len().min(1 + rng.below(40_000) as usize));
        socket.feed(piece);
        loop {
            let (count, result) = reader.receive(&socket, usize::MAX, &mut taken);
            if let Err(fault) = result {
                // After a fault nothing is read that was good.
                let count = taken.0.len();
                socket.feed(rest);
                let (_, again) = reader.receive(&socket, usize::MAX, &mut taken);
                assert!(again.is_err() || rest.is_empty() || count == taken.0.len());
                assert_eq!(taken.0.len(), count);
                return (taken.0, Some(fault));
            }
            if count == 0 {
                break;
            }
        }
    }
    (taken.0, None)
}

/// Where the pieces of sealed frames begin.
fn boundaries(frames: &[Frame]) -> Vec<usize> {
    let (mut found, mut at) = (Vec::new(), 0);
    for (_, payload) in frames {
        found.push(at);
        let chunks = (0..payload.len()).step_by(CHUNK_BYTES);
        found.extend(
            chunks.map(|start| at + SEALED_HEADER_BYTES + start + start / CHUNK_BYTES * TAG_BYTES),
        );
        at += sealed_bytes(payload.len());
    }
    found
}

/// All kinds of frames: without a payload, with a short one, and with one of several chunks.
fn all_kinds(generation: u32, rng: &mut Rng) -> Vec<Frame> {
    let long = FrameKind::ALL[rng.below(FrameKind::ALL.len() as u32) as usize];
    let length = |kind, rng: &mut Rng| match rng.below(3) {
        _ if kind == long => CHUNK_BYTES + rng.below(2 * CHUNK_BYTES as u32) as usize,
        0 => 0,
        _ => rng.below(300) as usize,
    };
    let mut frames: Vec<Frame> = FrameKind::ALL
        .iter()
        .map(|&kind| {
            let length = length(kind, rng);
            frame(kind, generation, length, rng)
        })
        .collect();
    for index in (1..frames.len()).rev() {
        frames.swap(index, rng.below(index as u32 + 1) as usize);
    }
    frames
}

#[test]
fn frames_of_every_kind_arrive_and_nothing_of_them_is_readable_on_the_way() {
    let rng = &mut Rng::new(1);
    for capacity in [1, 79, 5_000, 1 << 20] {
        let frames = all_kinds(0, rng);
        let [caller, accepter] = seals();
        let bytes = written(&frames, &mut FrameWriter::new(Some(caller.sealer)), capacity);
        assert_eq!(bytes.len(), frames.iter().map(|it| sealed_bytes(it.1.len())).sum::<usize>());
        assert!(!bytes.windows(4).any(|it| it == b"GLN1"));
        for (_, payload) in frames.iter().filter(|it| it.1.len() >= HEADER_BYTES) {
            assert!(!bytes.windows(16).any(|it| it == &payload[..16]));
        }
        let mut reader = FrameReader::new(Some(accepter.opener));
        assert_eq!(read(&bytes, &mut reader, rng), (frames, None));
    }
}

/// Whatever is done to the bytes of one direction, a reader takes the frames before it, as they were
/// sent, and none after.
#[test]
fn no_changed_frame_of_any_kind_is_taken() {
    let mut made = 0;
    for case in 0..cases(600) {
        let rng = &mut Rng::new(case);
        let [caller, accepter] = seals();
        let frames = all_kinds(1, rng);
        let [of_another, _] = seals();
        let back = written(&frames, &mut FrameWriter::new(Some(accepter.sealer)), 1 << 20);
        // The same frames on another connection, as of another job or generation.
        let elsewhere = written(&frames, &mut FrameWriter::new(Some(of_another.sealer)), 1 << 20);
        let bytes = written(&frames, &mut FrameWriter::new(Some(caller.sealer)), 1 << 20);
        let starts = boundaries(&frames);
        let pick = |rng: &mut Rng| starts[rng.below(starts.len() as u32) as usize];
        let at = match rng.below(2) {
            0 => pick(rng),
            _ => rng.below(bytes.len() as u32) as usize,
        };
        // Whole pieces, or any number of bytes.
        let next = starts.iter().copied().find(|&it| it > at).unwrap_or(bytes.len());
        let sizes = [next - at, SEALED_HEADER_BYTES, 1 + rng.below(400) as usize];
        let change = Change::draw(rng, &[&back, &elsewhere], &sizes);
        let mut adversary = Adversary::new(at, change.clone());
        let passed = adversary.pass(&bytes);
        let mut reader = FrameReader::new(Some(accepter.opener));
        let (taken, fault) = read(&passed, &mut reader, rng);
        let whole = |end: usize| {
            let mut ends = frames.iter().scan(0, |sum, it| {
                *sum += sealed_bytes(it.1.len());
                Some(*sum)
            });
            ends.position(|it| it > end).unwrap_or(frames.len())
        };
        let before = if passed == bytes { frames.len() } else { whole(at) };
        assert_eq!(taken, frames[..before], "case {case}: {change:?} at {at}");
        if bytes.starts_with(&passed) {
            // The end alone is missing.
            assert_eq!(fault, None, "case {case}: {change:?}");
            continue;
        }
        made += 1;
        match fault {
            Some(Fault::ProtocolViolation(text)) => {
                let is_named = text.contains("does not open") && text.contains("released");
                assert!(is_named, "case {case}: {text}");
            }
            // The reader waits for the rest of a piece, which cannot come.
            other => assert!(other.is_none(), "case {case}: {other:?}"),
        }
    }
    assert!(made > 0);
}
