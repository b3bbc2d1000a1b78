//! Speed of the codecs, in bytes of the f32 side, beside a streaming copy of as many bytes.
//!
//! Kernel and copy take turns over the same buffers of 256 MB, far more than the caches of one core.
//! The copy is the faster one of a single call and of one call a slice.

use std::time::{Duration, Instant};

use gradlane_codec::{build_with, Codec, CodecSpec, DrawKey, InstructionSet, TensorShape};
use serde_json::json;

use super::median;

/// Codecs that are measured, at their default buckets.
const SPECS: [&str; 16] = [
    "f32",
    "bf16",
    "f16",
    "qsgd:bits=16",
    "qsgd:bits=8",
    "qsgd:bits=4",
    "qsgd:bits=2",
    "onebit:bucket=64",
    "onebit:bucket=512",
    "int8",
    "fp8",
    "fp8:format=e5m2",
    "topk:ratio=0.001",
    "topk:ratio=0.01",
    "topk:ratio=0.02,bits=2,bucket=4096,decay=0.95",
    "dgc:ratio=0.001",
];
/// Elements of the f32 side: 256 MB; the oracle gets fewer.
const ELEMENTS: usize = 64_000_000;
const ELEMENTS_PLAINLY: usize = 2_000_000;
/// Elements of a slice: whole buckets of every codec.
const SLICE: usize = 49_152;
/// Time for the rounds of one row, and their least and greatest number.
const ROW_TIME: Duration = Duration::from_millis(200);
const ROUNDS_MIN: usize = 3;
const ROUNDS_MAX: usize = 9;

/// One line of the table.
pub struct Row {
    kernel: &'static str,
    codec: String,
    instruction_set: &'static str,
    elements: usize,
    gb_per_s: f64,
    copy_gb_per_s: f64,
}

impl Row {
    fn share_of_copy(&self) -> f64 {
        self.gb_per_s / self.copy_gb_per_s
    }

    fn print(&self) {
        println!(
            "{:<16} {:<18} {:<8} {:>10.2} {:>10.2} {:>8.2}",
            self.kernel,
            self.codec,
            self.instruction_set,
            self.gb_per_s,
            self.copy_gb_per_s,
            self.share_of_copy(),
        );
    }

    /// The row for `bench.json`; rates count the bytes of the f32 side once.
    pub fn to_json(&self) -> serde_json::Value {
        json!({
            "kernel": self.kernel,
            "codec": self.codec,
            "variant": self.instruction_set,
            "elements": self.elements,
            "bytes_counted": "f32 side",
            "gb_per_s": self.gb_per_s,
            "copy_gb_per_s": self.copy_gb_per_s,
            "share_of_copy": self.share_of_copy(),
        })
    }
}

/// Memory that the kernels walk through.
struct Buffers {
    values: Vec<f32>,
    /// Residual, sum, and where copies go.
    others: Vec<f32>,
    encoded: Vec<u8>,
    /// Bytes of each slice's encoding.
    lengths: Vec<usize>,
}

impl Buffers {
    fn new() -> Buffers {
        // Values of the size of gradients: a sum of four numbers between -1/2 and 1/2.
        let mut state = 1_u32;
        let mut unit = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let values: Vec<f32> =
            (0..ELEMENTS).map(|_| (unit() + unit() + unit() + unit()) * 0.01).collect();
        // Some codecs keep two numbers for a value.
        let others = [&values[..], &values[..]].concat();
        let lengths = vec![0; ELEMENTS.div_ceil(SLICE)];
        Buffers { others, values, encoded: vec![0; 4 * ELEMENTS], lengths }
    }

    /// Seconds of a copy of the first elements.
    fn copy(&mut self, elements: usize) -> f64 {
        let start = Instant::now();
        self.others[..elements].copy_from_slice(&self.values[..elements]);
        let middle = Instant::now();
        let slices = self.values[..elements].chunks(SLICE);
        for (from, to) in slices.zip(self.others[..elements].chunks_mut(SLICE)) {
            to.copy_from_slice(from);
        }
        (middle - start).min(middle.elapsed()).as_secs_f64()
    }
}

#[derive(Clone, Copy)]
enum Kernel {
    Encode,
    EncodeResidual,
    DecodeAdd,
}

impl Kernel {
    const ALL: [Kernel; 3] = [Kernel::Encode, Kernel::EncodeResidual, Kernel::DecodeAdd];

    fn name(self) -> &'static str {
        match self {
            Kernel::Encode => "encode",
            Kernel::EncodeResidual => "encode_residual",
            Kernel::DecodeAdd => "decode_add",
        }
    }

    /// Seconds of a pass over the first elements.
    fn pass(self, codec: &dyn Codec, buffers: &mut Buffers, elements: usize) -> f64 {
        let slice_bytes = codec.max_wire_bytes(SLICE);
        let width = if let Kernel::EncodeResidual = self { codec.residual_width() } else { 1 };
        let slices = buffers.values[..elements].chunks(SLICE);
        let others = buffers.others[..elements * width].chunks_mut(SLICE * width);
        let encoded = buffers.encoded.chunks_mut(slice_bytes).zip(&mut buffers.lengths);
        let mut key = DrawKey { seed: 1, step: 2, tensor: 3, leg: 4, first_element: 0 };
        let start = Instant::now();
        for ((values, others), (encoded, length)) in slices.zip(others).zip(encoded) {
            match self {
                Kernel::Encode => *length = codec.encode(&key, values, None, encoded),
                Kernel::EncodeResidual => {
                    *length = codec.encode(&key, values, Some(others), encoded);
                }
                Kernel::DecodeAdd => {
                    codec.decode_add(&encoded[..*length], others).expect("what was encoded");
                }
            }
            key.first_element += SLICE as u64;
        }
        start.elapsed().as_secs_f64()
    }
}

fn race(kernel: Kernel, codec: &dyn Codec, buffers: &mut Buffers, elements: usize) -> (f64, f64) {
    let (mut kernel_s, mut copy_s) = (Vec::new(), Vec::new());
    let began = Instant::now();
    // The first round warms caches and pages and is not counted.
    for round in 0..=ROUNDS_MAX {
        let seconds = [buffers.copy(elements), kernel.pass(codec, buffers, elements)];
        if round > 0 {
            copy_s.push(seconds[0]);
            kernel_s.push(seconds[1]);
        }
        if kernel_s.len() >= ROUNDS_MIN && began.elapsed() > ROW_TIME {
            break;
        }
    }
    let bytes = 4.0 * elements as f64;
    (bytes / median(kernel_s) / 1e9, bytes / median(copy_s) / 1e9)
}

/// Every row whose codec and variant begin as asked for, printed as it is measured.
pub fn bench_all(only_codec: &str, only_instruction_set: &str) -> Vec<Row> {
    println!("codecs: GB/s counts the bytes of the f32 side, and of a streaming copy, once");
    println!(
        "{:<16} {:<18} {:<8} {:>10} {:>10} {:>8}",
        "kernel", "codec", "variant", "GB/s", "copy GB/s", "share"
    );
    let mut buffers = Buffers::new();
    let mut rows = Vec::new();
    for text in SPECS.into_iter().filter(|text| text.starts_with(only_codec)) {
        let spec: CodecSpec = text.parse().expect("a spec");
        for instruction_set in
            InstructionSet::available().filter(|it| it.name().starts_with(only_instruction_set))
        {
            let codec = build_with(instruction_set, &spec, &TensorShape::new(&[ELEMENTS as u64]));
            let elements =
                if instruction_set == InstructionSet::SCALAR { ELEMENTS_PLAINLY } else { ELEMENTS };
            for kernel in Kernel::ALL {
                let (gb_per_s, copy_gb_per_s) = race(kernel, &*codec, &mut buffers, elements);
                let (kernel, codec) = (kernel.name(), text.to_owned());
                let instruction_set = instruction_set.name();
                let row = Row { kernel, codec, instruction_set, elements, gb_per_s, copy_gb_per_s };
                row.print();
                rows.push(row);
            }
        }
    }
    rows
}
