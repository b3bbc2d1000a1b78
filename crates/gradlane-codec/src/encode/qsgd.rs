//! QSGD: stochastic rounding of buckets to a few levels (Alistarh et al. 2017; Grubic et al. 2018).
//!
//! A bucket has one scale, the largest magnitude or the 2-norm of its values. With `h` =
//! `2^(bits-1) - 1` (`levels=sign`) or `2^(bits-1) - 1/2` (`levels=uniform`), a code `k` in `0..=2h`
//! stands for the value `(k - h) * (scale / h)`: the paper's sign and magnitude in the first case,
//! its equal intervals over `[-scale, scale]` in the second.

mod oracle;

use super::{check_arguments, check_length, Codec, CodecSpec, DecodeError, Levels, Norm, Place};
use super::{draw::Draws, QsgdOptions};
use crate::Variant;

/// Bytes of a bucket's scale, an f32, before its codes.
const SCALE_BYTES: usize = 4;
/// A bucket with a smaller scale is sent as zeros, so that `h / scale` is a finite number.
const SCALE_MIN: f32 = f32::from_bits(27 << 23);

/// Stochastic quantization of buckets.
#[derive(Debug)]
pub(super) struct Qsgd {
    spec: CodecSpec,
    options: QsgdOptions,
}

impl Qsgd {
    pub(super) fn new(_variant: Variant, spec: &CodecSpec, options: QsgdOptions) -> Qsgd {
        Qsgd { spec: spec.clone(), options }
    }

    fn bucket_elements(&self) -> usize {
        self.options.bucket as usize
    }

    /// Bytes of a bucket of so many elements.
    fn bucket_bytes(&self, elements: usize) -> usize {
        SCALE_BYTES + (elements * self.options.bits as usize).div_ceil(8)
    }
}

/// What all values of a bucket share.
#[derive(Clone, Copy, Debug)]
struct Grid {
    /// Half of the largest code: the code of zero, where zero is a level.
    half: f32,
    /// The distance of two levels.
    level: f32,
    /// Levels per value: what values are multiplied with.
    levels_per_value: f32,
}

impl Grid {
    fn new(options: QsgdOptions, scale: f32) -> Grid {
        let half = half(options);
        Grid { half, level: scale / half, levels_per_value: half / scale }
    }
}

/// Half of the largest code.
fn half(options: QsgdOptions) -> f32 {
    let power = (1_u32 << (options.bits - 1)) as f32;
    match options.levels {
        Levels::Sign => power - 1.0,
        Levels::Uniform => power - 0.5,
    }
}

/// The code of the smallest value that is not negative: that of every value of a bucket whose scale
/// is zero or NaN.
fn code_of_nothing(options: QsgdOptions) -> u32 {
    match options.levels {
        Levels::Sign => (1 << (options.bits - 1)) - 1,
        Levels::Uniform => 1 << (options.bits - 1),
    }
}

impl Codec for Qsgd {
    fn spec(&self) -> &CodecSpec {
        &self.spec
    }

    fn granule(&self) -> u64 {
        u64::from(self.options.bucket)
    }

    fn is_fixed_size(&self) -> bool {
        true
    }

    fn is_unbiased(&self) -> bool {
        true
    }

    fn max_wire_bytes(&self, elements: usize) -> usize {
        let bucket = self.bucket_elements();
        let rest = elements % bucket;
        let last = if rest == 0 { 0 } else { self.bucket_bytes(rest) };
        elements / bucket * self.bucket_bytes(bucket) + last
    }

    fn encode(
        &self,
        place: &Place,
        values: &[f32],
        mut residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) -> usize {
        check_arguments(self, place, values, residual.as_deref(), out);
        let bucket = self.bucket_elements();
        let chunks = out.chunks_mut(self.bucket_bytes(bucket));
        for (index, (values, bytes)) in values.chunks(bucket).zip(chunks).enumerate() {
            let first = index * bucket;
            let draws = Draws::of_bucket(place, place.first_element + first as u64);
            let residual = residual.as_deref_mut().map(|all| &mut all[first..][..values.len()]);
            oracle::encode(self.options, draws, values, residual, bytes);
        }
        self.max_wire_bytes(values.len())
    }

    fn decode(&self, encoded: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
        check_length(self, encoded, out.len())?;
        let bucket = self.bucket_elements();
        let chunks = encoded.chunks(self.bucket_bytes(bucket));
        for (out, bytes) in out.chunks_mut(bucket).zip(chunks) {
            oracle::decode(self.options, bytes, out, |slot, value| *slot = value);
        }
        Ok(())
    }

    fn decode_add(&self, encoded: &[u8], sum: &mut [f32]) -> Result<(), DecodeError> {
        check_length(self, encoded, sum.len())?;
        let bucket = self.bucket_elements();
        let chunks = encoded.chunks(self.bucket_bytes(bucket));
        for (sum, bytes) in sum.chunks_mut(bucket).zip(chunks) {
            oracle::decode(self.options, bytes, sum, |slot, value| *slot += value);
        }
        Ok(())
    }
}
