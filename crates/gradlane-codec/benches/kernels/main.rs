//! Speed of every kernel, beside the speed of a plain copy on the same machine at the same time.
//!
//! Each figure is the median of rounds in which the kernel and the copy take turns over the same
//! memory, so that another program on the machine disturbs both. A figure counts bytes read and
//! written, in units of 10^9 bytes a second. A share over 1 is no mistake: a copy writes as much as
//! it reads, a reduction far less, and writes cost more. Codecs have their own table and count
//! otherwise, see `codecs.rs`; `--codecs [CODEC [VARIANT]]` measures them alone. `--json PATH` writes
//! the rows as well; a relative path starts at the crate's folder, where cargo runs benchmarks.

mod codecs;

use std::hint::black_box;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use gradlane_codec::{
    reduce_adam_with, reduce_mean_with, reduce_sgd_with, AdamMemory, AdamOptions, AdamStep,
    FloatDtype, InstructionSet, Mean, SgdMemory, SgdOptions, SgdStep,
};
use serde_json::json;

/// Elements of a slice: the default size of the strategies.
const SLICE_ELEMENTS: usize = 50_000;
/// Contributions to each slice.
const INPUTS: usize = 4;
/// Bytes of a checksummed frame.
const FRAME_BYTES: usize = 65_536;
/// Memory that the cold runs walk through: far more than the caches of one core.
const COLD_BYTES: usize = 64_000_000;
/// Bytes that a pass moves at least, so that the clock's resolution does not matter.
const PASS_BYTES: usize = 32_000_000;
/// Time for the rounds of one row, and their least and greatest number.
const ROW_TIME: Duration = Duration::from_millis(160);
const ROUNDS_MIN: usize = 3;
const ROUNDS_MAX: usize = 15;

/// One line of the table.
struct Row {
    kernel: &'static str,
    codec: &'static str,
    instruction_set: &'static str,
    elements: usize,
    working_set_bytes: usize,
    speed: Speed,
}

/// Speeds of a kernel and of the copy that ran in turn with it.
struct Speed {
    gb_per_s: f64,
    copy_gb_per_s: f64,
}

impl Row {
    fn share_of_copy(&self) -> f64 {
        self.speed.gb_per_s / self.speed.copy_gb_per_s
    }

    fn print(&self) {
        println!(
            "{:<12} {:<6} {:<10} {:>10.1} {:>10.2} {:>10.2} {:>8.2}",
            self.kernel,
            self.codec,
            self.instruction_set,
            self.working_set_bytes as f64 / 1e6,
            self.speed.gb_per_s,
            self.speed.copy_gb_per_s,
            self.share_of_copy(),
        );
    }

    fn to_json(&self) -> serde_json::Value {
        json!({
            "kernel": self.kernel,
            "codec": self.codec,
            "variant": self.instruction_set,
            "elements": self.elements,
            "bytes_counted": "read and written",
            "inputs": if self.codec == "bytes" { 1 } else { INPUTS },
            "working_set_bytes": self.working_set_bytes,
            "gb_per_s": self.speed.gb_per_s,
            "copy_gb_per_s": self.speed.copy_gb_per_s,
            "share_of_copy": self.share_of_copy(),
        })
    }
}

/// Memory cut into places, each of which holds the buffers of one call of a kernel.
struct Places {
    memory: Vec<u64>,
    place_bytes: usize,
    count: usize,
}

impl Places {
    /// As many places as fit into `working_set_bytes`, at least one, filled with ones of a dtype.
    fn new(place_bytes: usize, working_set_bytes: usize, dtype: Option<FloatDtype>) -> Places {
        let place_bytes = place_bytes.next_multiple_of(64);
        let count = (working_set_bytes / place_bytes).max(1);
        // Ones of the dtype, repeated up to the width of a word.
        let word = match dtype {
            Some(FloatDtype::F32) => 0x3f80_0000_3f80_0000,
            Some(FloatDtype::F16) => 0x3c00_3c00_3c00_3c00,
            Some(FloatDtype::Bf16) => 0x3f80_3f80_3f80_3f80,
            Some(FloatDtype::F64) => 1.0_f64.to_bits(),
            None => 0x0123_4567_89ab_cdef,
        };
        Places { memory: vec![word; place_bytes * count / 8], place_bytes, count }
    }

    fn bytes(&self) -> usize {
        self.place_bytes * self.count
    }

    /// Start of a place; places are walked round and round.
    fn place(&mut self, turn: usize) -> *mut u8 {
        let words = self.place_bytes / 8;
        self.memory[turn % self.count * words..][..words].as_mut_ptr().cast()
    }

    /// How many calls make a pass long enough to be timed, and walk over all places.
    fn calls_per_pass(&self) -> usize {
        PASS_BYTES.div_ceil(self.place_bytes).max(self.count)
    }

    /// Runs a kernel and a copy in turns over the places.
    ///
    /// The kernel is told the start of a place; `kernel_bytes` is what it reads and writes there.
    fn race(&mut self, kernel_bytes: usize, mut kernel: impl FnMut(*mut u8)) -> Speed {
        let calls = self.calls_per_pass();
        let half = self.place_bytes / 2;
        let mut kernel_s = Vec::new();
        let mut copy_s = Vec::new();
        let began = Instant::now();
        // The first round warms caches and pages and is not counted.
        for round in 0..=ROUNDS_MAX {
            let start = Instant::now();
            for turn in 0..calls {
                kernel(self.place(turn));
            }
            let middle = Instant::now();
            for turn in 0..calls {
                let place = self.place(turn);
                // The kernel's values stay in its inputs, which lie first.
                // SAFETY: both halves lie within the place and do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(place, place.add(half), half) };
                black_box(place);
            }
            if round > 0 {
                kernel_s.push((middle - start).as_secs_f64());
                copy_s.push(middle.elapsed().as_secs_f64());
            }
            if kernel_s.len() >= ROUNDS_MIN && began.elapsed() > ROW_TIME {
                break;
            }
        }
        let calls = calls as f64;
        Speed {
            gb_per_s: kernel_bytes as f64 * calls / median(kernel_s) / 1e9,
            copy_gb_per_s: 2.0 * half as f64 * calls / median(copy_s) / 1e9,
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The gradients of a slice at the start of a place.
fn inputs_at(place: *mut u8, slice_bytes: usize) -> [*const u8; INPUTS] {
    std::array::from_fn(|index| place.wrapping_add(index * slice_bytes).cast_const())
}

fn bench_mean(
    kernel: &'static str,
    instruction_set: InstructionSet,
    mean: Mean,
    working_set_bytes: usize,
) -> Row {
    let slice_bytes = SLICE_ELEMENTS * mean.dtype.element_bytes();
    let place_bytes = (INPUTS + 1) * slice_bytes;
    let mut places = Places::new(place_bytes, working_set_bytes, Some(mean.dtype));
    let speed = places.race(place_bytes, |place| {
        let inputs = inputs_at(place, slice_bytes);
        let output = place.wrapping_add(INPUTS * slice_bytes);
        // SAFETY: inputs and output are parts of the place that do not overlap.
        unsafe { reduce_mean_with(instruction_set, mean, &inputs, output, None, SLICE_ELEMENTS) };
    });
    row(kernel, mean.dtype, instruction_set, &places, speed)
}

fn bench_sgd(instruction_set: InstructionSet, mean: Mean, working_set_bytes: usize) -> Row {
    let slice_bytes = SLICE_ELEMENTS * mean.dtype.element_bytes();
    let state_bytes = SLICE_ELEMENTS * mean.dtype.accumulator().element_bytes();
    // Gradients, parameters, new parameters and momentum; the momentum is read and written.
    let place_bytes = (INPUTS + 2) * slice_bytes + state_bytes;
    let kernel_bytes = place_bytes + state_bytes;
    let mut places = Places::new(place_bytes, working_set_bytes, Some(mean.dtype));
    let options = SgdOptions { momentum: 0.9, weight_decay: 1e-4, ..SgdOptions::with_lr(0.1) };
    // A momentum of zeros first: what else lies there need not be a number of moderate size.
    for turn in 0..places.count {
        let state = places.place(turn).wrapping_add((INPUTS + 2) * slice_bytes);
        // SAFETY: the momentum is the last part of the place.
        unsafe { std::ptr::write_bytes(state, 0, state_bytes) };
    }
    let speed = places.race(kernel_bytes, |place| {
        let inputs = inputs_at(place, slice_bytes);
        let memory = SgdMemory {
            parameters: place.wrapping_add(INPUTS * slice_bytes),
            output: place.wrapping_add((INPUTS + 1) * slice_bytes),
            momentum_buffer: Some(place.wrapping_add((INPUTS + 2) * slice_bytes)),
            copy_to: None,
        };
        let step = SgdStep { options, first: false };
        // SAFETY: all buffers are parts of the place that do not overlap.
        let done = unsafe {
            reduce_sgd_with(instruction_set, mean, step, &inputs, memory, SLICE_ELEMENTS)
        };
        done.expect("there is a momentum buffer");
    });
    row("sgd", mean.dtype, instruction_set, &places, speed)
}

fn bench_adam(instruction_set: InstructionSet, mean: Mean, working_set_bytes: usize) -> Row {
    let slice_bytes = SLICE_ELEMENTS * mean.dtype.element_bytes();
    let state_bytes = SLICE_ELEMENTS * mean.dtype.accumulator().element_bytes();
    // Gradients, parameters, new parameters and the two means, which are read and written.
    let place_bytes = (INPUTS + 2) * slice_bytes + 2 * state_bytes;
    let kernel_bytes = place_bytes + 2 * state_bytes;
    let mut places = Places::new(place_bytes, working_set_bytes, Some(mean.dtype));
    let options = AdamOptions {
        weight_decay: 1e-2,
        decoupled_weight_decay: true,
        ..AdamOptions::with_lr(1e-3)
    };
    for turn in 0..places.count {
        let state = places.place(turn).wrapping_add((INPUTS + 2) * slice_bytes);
        // SAFETY: the two means are the last part of the place.
        unsafe { std::ptr::write_bytes(state, 0, 2 * state_bytes) };
    }
    let speed = places.race(kernel_bytes, |place| {
        let inputs = inputs_at(place, slice_bytes);
        let memory = AdamMemory {
            parameters: place.wrapping_add(INPUTS * slice_bytes),
            output: place.wrapping_add((INPUTS + 1) * slice_bytes),
            exp_avg: place.wrapping_add((INPUTS + 2) * slice_bytes),
            exp_avg_sq: place.wrapping_add((INPUTS + 2) * slice_bytes + state_bytes),
            copy_to: None,
        };
        let step = AdamStep { options, number: 100 };
        // SAFETY: all buffers are parts of the place that do not overlap.
        let done = unsafe {
            reduce_adam_with(instruction_set, mean, step, &inputs, memory, SLICE_ELEMENTS)
        };
        done.expect("steps count from 1");
    });
    row("adam", mean.dtype, instruction_set, &places, speed)
}

fn row(
    kernel: &'static str,
    dtype: FloatDtype,
    instruction_set: InstructionSet,
    places: &Places,
    speed: Speed,
) -> Row {
    Row {
        kernel,
        codec: dtype.name(),
        instruction_set: instruction_set.name(),
        elements: SLICE_ELEMENTS,
        working_set_bytes: places.bytes(),
        speed,
    }
}

fn bench_checksum(
    kernel: &'static str,
    crate_name: &'static str,
    checksum: fn(&[u8]) -> u32,
    working_set_bytes: usize,
) -> Row {
    let mut places = Places::new(FRAME_BYTES, working_set_bytes, None);
    let speed = places.race(FRAME_BYTES, |place| {
        // SAFETY: a place has that many bytes, and nothing writes to them meanwhile.
        let frame = unsafe { std::slice::from_raw_parts(place, FRAME_BYTES) };
        black_box(checksum(frame));
    });
    Row {
        kernel,
        codec: "bytes",
        instruction_set: crate_name,
        elements: FRAME_BYTES,
        working_set_bytes: places.bytes(),
        speed,
    }
}

/// Every row, printed as it is measured.
fn bench_all() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut keep = |row: Row| {
        row.print();
        rows.push(row);
    };
    let all = NonZeroU32::new(INPUTS as u32).expect("there are inputs");
    let one_absent = all.saturating_add(1);
    // A working set of one place stays in the caches.
    for working_set_bytes in [COLD_BYTES, 0] {
        for dtype in FloatDtype::ALL {
            let mean = Mean::of_all(dtype, all);
            let absent = Mean { dtype, divisor: one_absent, add_zero: true };
            for instruction_set in InstructionSet::available() {
                keep(bench_mean("mean", instruction_set, mean, working_set_bytes));
                keep(bench_mean("mean_absent", instruction_set, absent, working_set_bytes));
                keep(bench_sgd(instruction_set, mean, working_set_bytes));
                keep(bench_adam(instruction_set, mean, working_set_bytes));
            }
        }
        // The wire's checksum, and the one beside which it was chosen.
        let xxh3 = |bytes: &[u8]| twox_hash::XxHash3_64::oneshot(bytes) as u32;
        keep(bench_checksum("crc32", "crc32fast", crc32fast::hash, working_set_bytes));
        keep(bench_checksum("xxh3", "twox_hash", xxh3, working_set_bytes));
    }
    rows
}

fn main() -> std::io::Result<()> {
    let mut json_path = None;
    let mut asked_for = false;
    let mut only_codecs = None;
    let mut arguments = std::env::args_os().skip(1).peekable();
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--bench") => asked_for = true,
            Some("--codecs") => {
                let mut name = || {
                    let name = arguments.next_if(|it| !it.to_string_lossy().starts_with("--"));
                    name.map(|it| it.to_string_lossy().into_owned()).unwrap_or_default()
                };
                only_codecs = Some((name(), name()));
            }
            Some("--json") => json_path = arguments.next().map(PathBuf::from),
            _ => {}
        }
    }
    if !asked_for {
        // `cargo test --all-targets` starts benchmarks too, without this argument.
        println!("not measuring: start me with cargo bench");
        return Ok(());
    }
    let mut values = Vec::new();
    if only_codecs.is_none() {
        println!(
            "{SLICE_ELEMENTS} elements a slice, {INPUTS} inputs; GB/s counts bytes read and written"
        );
        println!(
            "{:<12} {:<6} {:<10} {:>10} {:>10} {:>10} {:>8}",
            "kernel", "codec", "variant", "set MB", "GB/s", "copy GB/s", "share"
        );
        values.extend(bench_all().iter().map(Row::to_json));
    }
    let (codec, instruction_set) = only_codecs.unwrap_or_default();
    values.extend(codecs::bench_all(&codec, &instruction_set).iter().map(codecs::Row::to_json));
    if let Some(path) = json_path {
        std::fs::write(&path, serde_json::to_string_pretty(&values)? + "\n")?;
        println!("wrote {}", path.display());
    }
    Ok(())
}
