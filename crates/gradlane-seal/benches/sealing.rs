//! Speed of sealing and opening frames, beside the speed of a plain copy of the same bytes in turn with
//! them.
//!
//! Sealing goes from memory that no cache holds to a buffer of one frame, opening from that buffer to such
//! memory, as in the transport; both include that copy. A figure counts the payload's bytes, in units
//! of 10^9 bytes a second: the median of rounds. `--json PATH` writes the rows as well; a relative
//! path starts at the crate's folder, where cargo runs benchmarks.

use gradlane_seal::{Accepter, Caller, Opened, PreSharedKey, SealedHello, SealedPeer};
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::{
    sealed_bytes, FrameFlags, FrameHeader, FrameKind, Hello, PayloadForm, Preamble, CHUNK_BYTES,
    WIRE_VERSION,
};
use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Instant;

/// Memory that a pass walks through: far more than the caches of one core.
const COLD_BYTES: usize = 64_000_000;
const ROUNDS: usize = 9;
/// Payloads of frames: small ones, the transport's on slow and on fast connections.
const FRAMES: [usize; 3] = [4_096, 66_672, 200_016];

/// What both ends have after a handshake.
fn connect() -> [SealedPeer; 2] {
    let key = PreSharedKey::new(b"a secret of the benchmark", &[1; 32]);
    let preamble = Preamble { version: WIRE_VERSION, caller: Rank(1), called: Rank(0) };
    let hello = Hello {
        version: WIRE_VERSION,
        rank: Rank(1),
        world_size: 2,
        generation: 0,
        lane: 0,
        lanes: 1,
        job_digest: [1; 32],
        table_digest: [2; 32],
        nonce: [3; 32],
    };
    let hello = SealedHello { hello, caller_address: [4; 32], called_address: [5; 32] };
    let (caller, message) = Caller::new(&key, preamble, &hello).expect("a call");
    let accepter = Accepter::read(&key, &message).expect("a caller");
    let (accepter, reply) = accepter.reply(&hello).expect("a reply");
    [caller.read(&reply).expect("a reply"), accepter]
}

fn header(length: usize) -> FrameHeader {
    FrameHeader {
        kind: FrameKind::Push,
        form: PayloadForm::Raw,
        flags: FrameFlags::NONE,
        step: Step(1),
        generation: 0,
        plan_version: 0,
        tensor: TensorId(0),
        slice: SliceId(0),
        priority: Priority(0),
        sender: Rank(1),
        offset: 0,
        block_bytes: 0,
        length: length as u32,
        hop: 0,
        payload_checksum: 0,
    }
}

/// Seconds of copying, sealing and opening `COLD_BYTES` in frames of `length` bytes.
fn pass(ends: &mut [SealedPeer; 2], source: &[u8], dest: &mut [u8], length: usize) -> [f64; 3] {
    let [caller, accepter] = ends;
    let mut buffer = Vec::with_capacity(sealed_bytes(length));
    let mut seconds = [0.0; 3];
    for (source, dest) in source.chunks_exact(length).zip(dest.chunks_exact_mut(length)) {
        let start = Instant::now();
        black_box(&mut *dest).copy_from_slice(source);
        seconds[0] += start.elapsed().as_secs_f64();
        let start = Instant::now();
        buffer.clear();
        caller.sealer.seal_header(&header(length), &mut buffer);
        for chunk in source.chunks(CHUNK_BYTES) {
            caller.sealer.seal_chunk(chunk, &mut buffer);
        }
        seconds[1] += start.elapsed().as_secs_f64();
        let start = Instant::now();
        let (mut at, mut filled) = (0, 0);
        while at < buffer.len() {
            let end = at + accepter.opener.piece_bytes();
            if let Opened::Chunk { bytes, .. } =
                accepter.opener.open(&mut buffer[at..end]).expect("ours")
            {
                dest[filled..filled + bytes.len()].copy_from_slice(bytes);
                filled += bytes.len();
            }
            at = end;
        }
        seconds[2] += start.elapsed().as_secs_f64();
    }
    seconds
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let json = arguments.iter().position(|it| it == "--json").and_then(|it| arguments.get(it + 1));
    let source: Vec<u8> = (0..COLD_BYTES).map(|it| it as u8).collect();
    let mut dest = vec![0; COLD_BYTES];
    let mut rows = String::new();
    println!("{:<8} {:>12} {:>10} {:>10} {:>8}", "", "frame bytes", "GB/s", "copy GB/s", "share");
    for length in FRAMES {
        let mut ends = connect();
        let rounds: Vec<[f64; 3]> =
            (0..ROUNDS).map(|_| pass(&mut ends, &source, &mut dest, length)).collect();
        let bytes = (COLD_BYTES / length * length) as f64;
        let speed = |of: usize| bytes / median(rounds.iter().map(|it| it[of]).collect()) / 1e9;
        for (name, of) in [("seal", 1), ("open", 2)] {
            let (own, copy) = (speed(of), speed(0));
            println!("{name:<8} {length:>12} {own:>10.2} {copy:>10.2} {:>8.2}", own / copy);
            let comma = if rows.is_empty() { "" } else { "," };
            write!(
                rows,
                "{comma}\n  {{\"kernel\": \"{name}\", \"frame_bytes\": {length}, \"gb_per_s\": {own:.3}, \
                 \"copy_gb_per_s\": {copy:.3}}}"
            )
            .expect("a string takes all");
        }
    }
    if let Some(path) = json {
        std::fs::write(path, format!("[{rows}\n]\n")).expect("a file that can be written");
    }
}
