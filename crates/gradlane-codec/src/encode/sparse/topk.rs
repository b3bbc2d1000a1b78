//! `topk`: the largest magnitudes of values and residual.

use super::options::TopkOptions;
use super::selection::{count_of, select};
use super::wire;
use crate::encode::{check_arguments, Codec, CodecSpec, DecodeError, DrawKey};
#[cfg(target_arch = "x86_64")]
use crate::instruction_set::Instructions;
use crate::InstructionSet;

/// The codec `topk`.
#[derive(Debug)]
pub(crate) struct Topk {
    spec: CodecSpec,
    instruction_set: InstructionSet,
    options: TopkOptions,
}

impl Topk {
    pub(crate) fn new(
        instruction_set: InstructionSet,
        spec: &CodecSpec,
        options: TopkOptions,
    ) -> Topk {
        Topk { spec: spec.clone(), instruction_set, options }
    }
}

impl Codec for Topk {
    fn spec(&self) -> &CodecSpec {
        &self.spec
    }

    fn granule(&self) -> u64 {
        1
    }

    fn is_fixed_size(&self) -> bool {
        false
    }

    fn is_unbiased(&self) -> bool {
        false
    }

    fn max_wire_bytes(&self, elements: usize) -> usize {
        wire::bytes_max(count_of(self.options.ratio_max(), elements), elements)
    }

    fn max_wire_bytes_at(&self, key: &DrawKey, elements: usize) -> usize {
        wire::bytes_max(count_of(self.options.ratio_at(key), elements), elements)
    }

    fn encode(
        &self,
        key: &DrawKey,
        values: &[f32],
        residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) -> usize {
        check_arguments(self, key, values, residual.as_deref(), out);
        let count = count_of(self.options.ratio_at(key), values.len());
        let Some(residual) = residual else {
            return write_largest(self.instruction_set, values, count, out);
        };
        add(self.instruction_set, residual, values);
        send_kept(self.instruction_set, residual.as_chunks_mut::<1>().0, count, out)
    }

    fn decode(&self, encoded: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
        decode(encoded, out)
    }

    fn decode_add(&self, encoded: &[u8], sum: &mut [f32]) -> Result<(), DecodeError> {
        decode_add(encoded, sum)
    }
}

/// Writes the largest values, of which nothing is kept; gives the bytes that they take.
pub(super) fn write_largest(
    instruction_set: InstructionSet,
    values: &[f32],
    count: usize,
    out: &mut [u8],
) -> usize {
    let values = values.as_chunks::<1>().0;
    wire::write(values, &select(instruction_set, values, count), out)
}

/// Writes the largest of what is kept, by the first number of each element, and forgets what was
/// written; gives the bytes that it takes.
pub(super) fn send_kept<const WIDTH: usize>(
    instruction_set: InstructionSet,
    kept: &mut [[f32; WIDTH]],
    count: usize,
    out: &mut [u8],
) -> usize {
    let chosen = select(instruction_set, kept, count);
    let used = wire::write(kept, &chosen, out);
    // What is not finite was chosen first; if there is more of it, the rest is dropped.
    if chosen.iter().any(|&at| !kept[at as usize][0].is_finite()) {
        let spoiled = kept.iter_mut().filter(|kept| !kept[0].is_finite());
        spoiled.for_each(|kept| *kept = [0.0; WIDTH]);
    }
    for &at in &chosen {
        kept[at as usize] = [0.0; WIDTH];
    }
    used
}

/// Decodes sparse values; zero is where none is.
pub(super) fn decode(encoded: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
    out.fill(0.0);
    Ok(wire::read(encoded, out.len(), |at, value| out[at] = value)?)
}

/// Adds sparse values where they are.
pub(super) fn decode_add(encoded: &[u8], sum: &mut [f32]) -> Result<(), DecodeError> {
    Ok(wire::read(encoded, sum.len(), |at, value| sum[at] += value)?)
}

/// `sum += values`, each addition rounded on its own.
fn add(instruction_set: InstructionSet, sum: &mut [f32], values: &[f32]) {
    match instruction_set.instructions() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `InstructionSet` exists only where the machine has its instructions.
        Instructions::Avx2 => unsafe { add_avx2(sum, values) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `InstructionSet` exists only where the machine has its instructions.
        Instructions::Avx512 => unsafe { add_avx512(sum, values) },
        _ => add_in_lanes(sum, values),
    }
}

#[inline(always)]
fn add_in_lanes(sum: &mut [f32], values: &[f32]) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum += value;
    }
}

/// # Safety
///
/// The machine has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn add_avx2(sum: &mut [f32], values: &[f32]) {
    add_in_lanes(sum, values);
}

/// # Safety
///
/// The machine has AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn add_avx512(sum: &mut [f32], values: &[f32]) {
    add_in_lanes(sum, values);
}
