//! `dgc`: deep gradient compression (Lin et al. 2018, algorithm 4) on top of `topk`.
//!
//! A worker keeps two numbers for each element, one after the other: what was not sent yet, `v`, and
//! the momentum, `u`. With the gradient `g` of a step, `u = momentum * u + g`, `v = v + u`, the largest
//! `v` are sent, and `u` and `v` are zero there. An owner, whose values are means and have their
//! momentum already, keeps `v` alone. The gradient is clipped by the norm of all of a rank's
//! gradients, of which a codec sees a part: the caller clips.

use super::options::DgcOptions;
use super::selection::count_of;
use super::{topk, wire};
use crate::encode::{check_arguments, Codec, CodecSpec, DecodeError, DrawKey};
#[cfg(target_arch = "x86_64")]
use crate::instruction_set::Instructions;
use crate::InstructionSet;

/// Numbers that are kept for an element.
const KEPT: usize = 2;

/// The codec `dgc`.
#[derive(Debug)]
pub(crate) struct Dgc {
    spec: CodecSpec,
    instruction_set: InstructionSet,
    options: DgcOptions,
}

impl Dgc {
    pub(crate) fn new(
        instruction_set: InstructionSet,
        spec: &CodecSpec,
        options: DgcOptions,
    ) -> Dgc {
        Dgc { spec: spec.clone(), instruction_set, options }
    }
}

impl Codec for Dgc {
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

    fn residual_width(&self) -> usize {
        KEPT
    }

    fn max_wire_bytes(&self, elements: usize) -> usize {
        wire::bytes_max(count_of(self.options.ratio_max(), elements), elements)
    }

    fn expected_wire_bytes(&self, elements: usize, is_mean: bool) -> usize {
        wire::expected_bytes(count_of(self.options.shares.of(is_mean), elements), elements)
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
            return topk::write_largest(self.instruction_set, values, count, out);
        };
        let kept = residual.as_chunks_mut::<KEPT>().0;
        if key.leg == DrawKey::BROADCAST {
            for (kept, value) in kept.iter_mut().zip(values) {
                kept[0] += value;
            }
        } else {
            accumulate(self.instruction_set, self.options.momentum, values, kept);
        }
        topk::send_kept(self.instruction_set, kept, count, out)
    }

    fn decode(&self, encoded: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
        topk::decode(encoded, out)
    }

    fn decode_add(&self, encoded: &[u8], sum: &mut [f32]) -> Result<(), DecodeError> {
        topk::decode_add(encoded, sum)
    }
}

/// Takes a step's gradient into momentum and what was not sent; each operation is rounded on its own.
fn accumulate(
    instruction_set: InstructionSet,
    momentum: f32,
    values: &[f32],
    kept: &mut [[f32; KEPT]],
) {
    match instruction_set.instructions() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `InstructionSet` exists only where the machine has its instructions.
        Instructions::Avx2 => unsafe { accumulate_avx2(momentum, values, kept) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `InstructionSet` exists only where the machine has its instructions.
        Instructions::Avx512 => unsafe { accumulate_avx512(momentum, values, kept) },
        _ => accumulate_in_lanes(momentum, values, kept),
    }
}

#[inline(always)]
fn accumulate_in_lanes(momentum: f32, values: &[f32], kept: &mut [[f32; KEPT]]) {
    for (&value, kept) in values.iter().zip(kept) {
        let velocity = momentum * kept[1] + value;
        *kept = [kept[0] + velocity, velocity];
    }
}

/// # Safety
///
/// The machine has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn accumulate_avx2(momentum: f32, values: &[f32], kept: &mut [[f32; KEPT]]) {
    accumulate_in_lanes(momentum, values, kept);
}

/// # Safety
///
/// The machine has AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn accumulate_avx512(momentum: f32, values: &[f32], kept: &mut [[f32; KEPT]]) {
    accumulate_in_lanes(momentum, values, kept);
}
