//! `topk`: the largest magnitudes of values and residual, as they are or as codes of a few levels.

use super::coded::CodedLayout;
use super::options::{TopkOptions, F32_BITS};
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

    /// The layout of a slice whose values are codes; None: values are sent as they are.
    fn coded(&self, elements: usize) -> Option<CodedLayout> {
        let TopkOptions { bits, .. } = self.options;
        (bits != F32_BITS).then(|| CodedLayout::new(bits, self.bucket(elements), elements))
    }

    /// Values of a bucket in a slice; at least 1.
    fn bucket(&self, elements: usize) -> usize {
        self.options.bucket.map_or(elements.max(1), |bucket| bucket as usize)
    }

    /// Values that are sent where this share of each bucket is.
    fn count_of_share(&self, ratio: f64, elements: usize) -> usize {
        let (bucket, rest) = (self.bucket(elements), elements % self.bucket(elements));
        elements / bucket * count_of(ratio, bucket) + count_of(ratio, rest)
    }

    fn bytes_of_share(&self, ratio: f64, elements: usize) -> usize {
        let count = self.count_of_share(ratio, elements);
        match self.coded(elements) {
            None => wire::bytes_max(count, elements),
            Some(layout) => layout.bytes_max(count),
        }
    }

    /// The positions of the largest values of each bucket, in increasing order.
    fn select(&self, values: &[f32], ratio: f64) -> Vec<u32> {
        let bucket = self.bucket(values.len());
        let mut chosen = Vec::with_capacity(count_of(ratio, values.len()));
        for (start, values) in values.chunks(bucket).enumerate() {
            let count = count_of(ratio, values.len());
            let found = select(self.instruction_set, values.as_chunks::<1>().0, count);
            chosen.extend(found.into_iter().map(|at| (start * bucket) as u32 + at));
        }
        chosen
    }

    /// Writes codes of the largest of what is kept, and keeps what they leave; gives the bytes that
    /// it takes.
    fn send_codes(
        &self,
        layout: CodedLayout,
        kept: &mut [f32],
        ratio: f64,
        out: &mut [u8],
    ) -> usize {
        let chosen = layout.without_zeros(kept, self.select(kept, ratio));
        let (used, sent) = layout.write(kept, &chosen, out);
        for (&at, sent) in chosen.iter().zip(sent) {
            // Codes of a bucket that is not finite say nothing of its numbers: these stay.
            if sent.is_finite() {
                kept[at as usize] -= sent;
            }
        }
        kept.iter_mut().filter(|kept| !kept.is_finite()).for_each(|kept| *kept = 0.0);
        used
    }
}

impl Codec for Topk {
    fn spec(&self) -> &CodecSpec {
        &self.spec
    }

    fn granule(&self) -> u64 {
        self.options.bucket.map_or(1, u64::from)
    }

    fn is_fixed_size(&self) -> bool {
        false
    }

    fn is_unbiased(&self) -> bool {
        false
    }

    fn max_wire_bytes(&self, elements: usize) -> usize {
        self.bytes_of_share(self.options.shares.max(), elements)
    }

    fn expected_wire_bytes(&self, elements: usize, is_mean: bool) -> usize {
        let count = self.count_of_share(self.options.shares.of(is_mean), elements);
        match self.coded(elements) {
            None => wire::expected_bytes(count, elements),
            Some(layout) => layout.expected_bytes(count),
        }
    }

    fn max_wire_bytes_at(&self, key: &DrawKey, elements: usize) -> usize {
        self.bytes_of_share(self.options.shares.at(key), elements)
    }

    fn encode(
        &self,
        key: &DrawKey,
        values: &[f32],
        residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) -> usize {
        check_arguments(self, key, values, residual.as_deref(), out);
        let ratio = self.options.shares.at(key);
        let layout = self.coded(values.len());
        let Some(residual) = residual else {
            let chosen = self.select(values, ratio);
            return match layout {
                None => wire::write(values.as_chunks::<1>().0, &chosen, out),
                Some(layout) => layout.write(values, &layout.without_zeros(values, chosen), out).0,
            };
        };
        accumulate(self.instruction_set, self.options.decay_at(key), residual, values);
        match layout {
            None => {
                let chosen = self.select(residual, ratio);
                send_chosen(residual.as_chunks_mut::<1>().0, &chosen, out)
            }
            Some(layout) => self.send_codes(layout, residual, ratio, out),
        }
    }

    fn decode(&self, encoded: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
        match self.coded(out.len()) {
            None => decode(encoded, out),
            Some(layout) => {
                out.fill(0.0);
                Ok(layout.read(encoded, |at, value| out[at] = value)?)
            }
        }
    }

    fn decode_add(&self, encoded: &[u8], sum: &mut [f32]) -> Result<(), DecodeError> {
        match self.coded(sum.len()) {
            None => decode_add(encoded, sum),
            Some(layout) => Ok(layout.read(encoded, |at, value| sum[at] += value)?),
        }
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
    send_chosen(kept, &chosen, out)
}

/// Writes what is kept at these positions, and forgets it; gives the bytes that it takes.
fn send_chosen<const WIDTH: usize>(
    kept: &mut [[f32; WIDTH]],
    chosen: &[u32],
    out: &mut [u8],
) -> usize {
    let used = wire::write(kept, chosen, out);
    // What is not finite was chosen first; if there is more of it, the rest is dropped.
    if chosen.iter().any(|&at| !kept[at as usize][0].is_finite()) {
        let spoiled = kept.iter_mut().filter(|kept| !kept[0].is_finite());
        spoiled.for_each(|kept| *kept = [0.0; WIDTH]);
    }
    for &at in chosen {
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

/// `kept = decay * kept + values`, each operation rounded on its own.
fn accumulate(instruction_set: InstructionSet, decay: f32, kept: &mut [f32], values: &[f32]) {
    match instruction_set.instructions() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `InstructionSet` exists only where the machine has its instructions.
        Instructions::Avx2 => unsafe { accumulate_avx2(decay, kept, values) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `InstructionSet` exists only where the machine has its instructions.
        Instructions::Avx512 => unsafe { accumulate_avx512(decay, kept, values) },
        _ => accumulate_in_lanes(decay, kept, values),
    }
}

#[inline(always)]
fn accumulate_in_lanes(decay: f32, kept: &mut [f32], values: &[f32]) {
    for (kept, value) in kept.iter_mut().zip(values) {
        *kept = decay * *kept + value;
    }
}

/// # Safety
///
/// The machine has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn accumulate_avx2(decay: f32, kept: &mut [f32], values: &[f32]) {
    accumulate_in_lanes(decay, kept, values);
}

/// # Safety
///
/// The machine has AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn accumulate_avx512(decay: f32, kept: &mut [f32], values: &[f32]) {
    accumulate_in_lanes(decay, kept, values);
}
