//! Frames of every kind through a sealed writer, somebody on the path, and a sealed reader, which records
//! what is released. Pieces of any size come from memory; whole pieces over loopback TCP.

use super::adversary::{cases, Adversary, Change};
use super::frame_reader::{Fault, FrameReader, FrameSink, PayloadTarget};
use super::frame_writer::{Flushed, FrameWriter, OutgoingFrame, OutgoingPayload};
use super::relayed_tests::{loopback, RelayedSocket};
use super::samples::{every_kind, frame, piece_bytes, seal, Frame, Job, JOB};
use super::tests::{seals, MemorySocket};
use gradlane_units::Rng;
use gradlane_wire::{
    sealed_bytes, FrameHeader, FrameKind, CHUNK_BYTES, HEADER_BYTES, SEALED_HEADER_BYTES,
};
use std::collections::VecDeque;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;

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

/// Writes frames through a sealed writer whose kernel takes `capacity` bytes at a time.
fn written(frames: &[Frame], writer: &mut FrameWriter, capacity: usize) -> Vec<u8> {
    let outgoing = |(header, payload): &Frame| {
        OutgoingFrame::new(*header, OutgoingPayload::Owned(payload.clone()), false)
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

/// All kinds of frames in any order: without a payload, with a short one, and with one of several chunks.
fn all_kinds(generation: u32, rng: &mut Rng) -> Vec<Frame> {
    let long = FrameKind::ALL[rng.below(FrameKind::ALL.len() as u32) as usize];
    let mut frames: Vec<Frame> = FrameKind::ALL
        .iter()
        .map(|&kind| {
            let length = match rng.below(3) {
                _ if kind == long => CHUNK_BYTES + rng.below(2 * CHUNK_BYTES as u32) as usize,
                0 => 0,
                _ => rng.below(300) as usize,
            };
            frame(kind, generation, rng.next_u64() >> 8, length)
        })
        .collect();
    for index in (1..frames.len()).rev() {
        frames.swap(index, rng.below(index as u32 + 1) as usize);
    }
    frames
}

/// Returns where the pieces of sealed frames begin.
fn boundaries(frames: &[Frame]) -> Vec<usize> {
    let pieces = piece_bytes(frames.iter().map(|it| it.1.len()));
    (0..pieces.len()).map(|count| pieces[..count].iter().sum()).collect()
}

/// Whether a fault says that a piece does not open.
fn is_refusal(fault: &Fault) -> bool {
    let Fault::ProtocolViolation(text) = fault else {
        return false;
    };
    text.contains("does not open") && text.contains("nothing of it was released")
}

#[test]
fn frames_of_every_kind_arrive_and_nothing_of_them_is_readable_on_the_way() {
    let rng = &mut Rng::new(1);
    for capacity in [1, 79, 5_000, 1 << 20] {
        let frames = all_kinds(0, rng);
        let [caller, accepter] = seals(JOB);
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
        let [caller, accepter] = seals(JOB);
        let frames = all_kinds(1, rng);
        let back = written(&frames, &mut FrameWriter::new(Some(accepter.sealer)), 1 << 20);
        let others = [JOB, Job { generation: 2, ..JOB }, Job { digest: [9; 32], ..JOB }];
        let foreign = others.map(|job| {
            let [caller, _] = seals(job);
            Arc::new(written(&frames, &mut FrameWriter::new(Some(caller.sealer)), 1 << 20))
        });
        let bytes = written(&frames, &mut FrameWriter::new(Some(caller.sealer)), 1 << 20);
        let starts = boundaries(&frames);
        let at = match rng.below(2) {
            0 => starts[rng.below(starts.len() as u32) as usize],
            _ => rng.below(bytes.len() as u32) as usize,
        };
        // Whole pieces, or any number of bytes.
        let next = starts.iter().copied().find(|&it| it > at).unwrap_or(bytes.len());
        let sizes = [next - at, SEALED_HEADER_BYTES, 1 + rng.below(400) as usize];
        let size = sizes[rng.below(3) as usize];
        let change = Change::draw(rng, at, size, &foreign);
        let mut adversary = Adversary::new(at, change.clone());
        let passed = adversary.pass(&bytes, &back);
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
        // Or the reader waits for the rest of a piece, which cannot come.
        let is_named = fault.as_ref().is_none_or(is_refusal);
        assert!(is_named, "case {case}: {fault:?}");
    }
    assert!(made > 0);
}

/// A reader at the end of a TCP connection, which serves one stream of frames after another.
struct Receiver {
    socket: RelayedSocket,
    sender: TcpStream,
}

impl Receiver {
    fn new() -> Receiver {
        let [socket, sender] = loopback();
        Receiver { socket: RelayedSocket::new(socket), sender }
    }

    /// Sends bytes and reads them. Returns the frames that are released, and the fault if there is one.
    fn receive(&self, bytes: &[u8], reader: &mut FrameReader) -> (Vec<Frame>, Option<Fault>) {
        (&self.sender).write_all(bytes).expect("sent");
        self.socket.expect(bytes.len(), false);
        let mut taken = Taken::default();
        let mut fault = None;
        while self.socket.is_readable() {
            // Also after a fault, when nothing more is released.
            let (_, result) = reader.receive(&self.socket, usize::MAX, &mut taken);
            fault = fault.or(result.err());
        }
        (taken.0, fault)
    }

    /// Sends bytes and ends the stream.
    fn receive_last(self, bytes: &[u8], reader: &mut FrameReader) -> (Vec<Frame>, Option<Fault>) {
        let (taken, fault) = self.receive(bytes, reader);
        self.sender.shutdown(Shutdown::Write).expect("ended");
        self.socket.expect(0, true);
        let (_, result) = reader.receive(&self.socket, usize::MAX, &mut Taken::default());
        (taken, fault.or(result.err()))
    }
}

/// Each bit of a frame of each kind, header, payload and tags: the frame before it is released, neither it
/// nor the one behind it is.
#[test]
fn every_flipped_bit_of_a_frame_of_every_kind_is_refused() {
    let receiver = Receiver::new();
    let (mut flips, kinds) = (0, every_kind(0, 2).into_iter().enumerate());
    for (index, subject) in kinds {
        let [before, behind] = [1, 3].map(|number| every_kind(0, number).swap_remove(index));
        let frames = [before, subject, behind];
        let lengths = frames.each_ref().map(|it| sealed_bytes(it.1.len()));
        for bit in 0..lengths[1] * 8 {
            let [mut caller, accepter] = seals(JOB);
            let mut bytes = seal(&frames, &mut caller.sealer);
            bytes[lengths[0] + bit / 8] ^= 1 << (bit % 8);
            let mut reader = FrameReader::new(Some(accepter.opener));
            let (taken, fault) = receiver.receive(&bytes, &mut reader);
            let what = format!("bit {bit} of a frame of kind {:?}", frames[1].0.kind);
            assert_eq!(taken, frames[..1], "{what}");
            assert!(fault.as_ref().is_some_and(is_refusal), "{what}: {fault:?}");
            flips += 1;
        }
    }
    let bytes: usize = every_kind(0, 2).iter().map(|it| sealed_bytes(it.1.len())).sum();
    assert_eq!(flips, bytes * 8);
}

/// What somebody on the path can do with whole frames, or with a part of one.
#[test]
fn moved_frames_of_every_kind_are_refused() {
    for index in 0..FrameKind::ALL.len() {
        let [first, second] = [1, 2].map(|number| every_kind(0, number).swap_remove(index));
        let (frames, kind) = ([first, second], FrameKind::ALL[index]);
        let sealed = |job: Job, frames: &[Frame]| seal(frames, &mut seals(job)[0].sealer);
        let length = sealed_bytes(frames[0].1.len());
        let [another_generation, another_job] =
            [Job { generation: 1, ..JOB }, Job { digest: [9; 32], ..JOB }];
        // What comes, of what was sent and what the reader's own rank has sent, and the frames of it that
        // are released.
        type Moved = Box<dyn Fn(&[u8], &[u8]) -> Vec<u8>>;
        let foreign = |job: Job| -> Moved {
            let bytes = sealed(job, &frames);
            Box::new(move |sent, _| [&sent[..length], &bytes[length..]].concat())
        };
        let moved: [(&str, usize, Moved); 8] = [
            ("replayed", 1, Box::new(move |sent, _| [&sent[..length], sent].concat())),
            ("reordered", 0, Box::new(move |sent, _| [&sent[length..], &sent[..length]].concat())),
            ("left out", 0, Box::new(move |sent, _| sent[length..].to_vec())),
            ("reflected", 1, Box::new(move |sent, back| [&sent[..length], back].concat())),
            ("reflected at once", 0, Box::new(|_, back| back.to_vec())),
            ("of another connection", 1, foreign(JOB)),
            ("of another generation", 1, foreign(another_generation)),
            ("of another job", 1, foreign(another_job)),
        ];
        let connect = || {
            let [mut caller, mut accepter] = seals(JOB);
            let sent = seal(&frames, &mut caller.sealer);
            let back = seal(&frames, &mut accepter.sealer);
            (sent, back, FrameReader::new(Some(accepter.opener)))
        };
        for (how, released, change) in moved {
            let (sent, back, mut reader) = connect();
            let (taken, fault) = Receiver::new().receive(&change(&sent, &back), &mut reader);
            assert_eq!(taken, frames[..released], "{kind:?} {how}");
            assert!(fault.as_ref().is_some_and(is_refusal), "{kind:?} {how}: {fault:?}");
        }
        for cut in 0..2 * length {
            let (sent, _, mut reader) = connect();
            let (taken, fault) = Receiver::new().receive_last(&sent[..cut], &mut reader);
            assert_eq!(taken, frames[..cut / length], "{kind:?} cut at {cut}");
            let expected = Fault::Lost("closed the connection".to_owned());
            assert_eq!(fault, Some(expected), "{kind:?} cut at {cut}");
        }
    }
}
