//! Codecs, places and values that the tests of the codecs share.

use std::sync::Arc;

use gradlane_codec::{build_with, Codec, CodecSpec, DrawKey, InstructionSet, TensorShape};

use super::{Numbers, Placed};

/// A spec of every method, with every option in some value.
pub const SPECS: &[&str] = &[
    "f32",
    "bf16",
    "f16",
    "onebit:bucket=64",
    "onebit:bucket=column",
    "onebit:bucket=tensor",
    "onebit:packing=cntk",
    "onebit:bucket=64,packing=cntk",
    "qsgd:bits=1",
    "qsgd:bits=1,bucket=96,norm=l2",
    "qsgd:bits=1,bucket=512",
    "qsgd:bits=2,levels=optimal",
    "qsgd:bits=4,bucket=96,levels=optimal,norm=l2",
    "qsgd:bits=4,levels=optimal",
    "qsgd:bits=2",
    "qsgd:bits=4",
    "qsgd:bits=8",
    "qsgd:bits=16",
    "qsgd:bits=2,bucket=32,norm=l2",
    "qsgd:bits=4,bucket=96,levels=uniform",
    "qsgd:bits=8,bucket=64,norm=l2,levels=uniform",
    "qsgd:bits=2,bucket=64,levels=uniform",
    "qsgd:bits=16,bucket=160,norm=l2,levels=uniform",
    "int8",
    "int8:bucket=32",
    "int8:bucket=tensor",
    "fp8",
    "fp8:format=e5m2,bucket=64",
    "fp8:format=e4m3,bucket=tensor",
];

/// A key in the middle of a job.
pub fn key(first_element: u64) -> DrawKey {
    DrawKey { seed: 7, step: 3, tensor: 1, leg: 2, first_element }
}

/// The codec of a text for a tensor of a shape.
pub fn codec(instruction_set: InstructionSet, text: &str, sizes: &[u64]) -> Arc<dyn Codec> {
    let spec: CodecSpec = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
    build_with(instruction_set, &spec, &TensorShape::new(sizes))
}

/// The encoding of values without a residual.
pub fn encoded(codec: &dyn Codec, key: DrawKey, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; codec.max_wire_bytes(values.len())];
    let length = codec.encode(&key, values, None, &mut out);
    out.truncate(length);
    out
}

/// What comes out of an encoding.
pub fn decoded(codec: &dyn Codec, encoded: &[u8], elements: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; elements];
    codec.decode(encoded, &mut out).expect("what was encoded");
    out
}

/// Values of the size of gradients: normally distributed, nearly, at scales that change slowly.
pub fn gradients(seed: u64, count: usize) -> Vec<f32> {
    let mut numbers = Numbers(seed);
    let mut unit = move || (numbers.next() >> 40) as f32 / (1 << 24) as f32 - 0.5;
    (0..count)
        .map(|index| {
            let normal = unit() + unit() + unit() + unit();
            normal * 0.01 * 2.0_f32.powi((index / 1000 % 5) as i32 - 2)
        })
        .collect()
}

/// A few elements of a buffer of f32 at an odd place, between guards.
pub struct Floats(Placed, usize);

impl Floats {
    /// A copy of values that starts `offset` elements after a multiple of 8 bytes.
    pub fn holding(values: &[f32], offset: usize) -> Floats {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        Floats(Placed::holding(&bytes, 4 * offset), values.len())
    }

    pub fn as_mut(&mut self) -> &mut [f32] {
        let bytes = self.0.as_mut();
        // SAFETY: the bytes start at a multiple of four and are those of as many f32.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), self.1) }
    }

    pub fn assert_guards(&self) {
        self.0.assert_guards();
    }
}

/// Fails unless both hold the same bits, where any NaN equals any other.
pub fn assert_same_floats(found: &[f32], expected: &[f32], what: &dyn Fn() -> String) {
    assert_eq!(found.len(), expected.len(), "{}", what());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
        assert!(same, "element {index} is {found:e}, not {expected:e}: {}", what());
    }
}
