//! QSGD: stochastic rounding of buckets to a few levels (Alistarh et al. 2017; Grubic et al. 2018).
//!
//! A bucket has one scale, the largest magnitude or the 2-norm of its values. With `h` =
//! `2^(bits-1) - 1` (`levels=sign`) or `2^(bits-1) - 1/2` (`levels=uniform`), a code `k` in `0..=2h`
//! stands for the value `(k - h) * (scale / h)`: the paper's sign and magnitude in the first case,
//! its equal intervals over `[-scale, scale]` in the second. Levels that differ by bucket
//! (`levels=optimal`) are in `optimal`.

mod decoding;
mod fields;
mod kernel;
mod optimal;
mod oracle;
mod sums;

pub(super) use optimal::OptimalQsgd;
pub use sums::IntegerSums;

use super::bucket_quantizer::Quantizer;
use super::lanes::Lanes;
use super::source::Source;
use super::{draw::Draws, DrawKey, Levels, Norm, QsgdOptions};

/// Bytes of a bucket's scale, an f32, before its codes.
const SCALE_BYTES: usize = 4;
/// A bucket with a smaller scale is sent as zeros: 2^-100. Then `h / scale` is a finite number.
pub(super) const SCALE_MIN: f32 = f32::from_bits(27 << 23);

/// Stochastic quantization of a bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Qsgd {
    options: QsgdOptions,
    /// Half of the largest code: the code of zero, where zero is a level.
    half: f32,
    /// The code of the smallest value that is not negative: that of every value of a bucket whose
    /// scale is zero or NaN.
    code_of_nothing: u32,
}

impl Qsgd {
    pub(super) fn new(options: QsgdOptions) -> Qsgd {
        let power = 1_u32 << (options.bits - 1);
        let (half, code_of_nothing) = match options.levels {
            Levels::Sign => (power as f32 - 1.0, power - 1),
            // Optimal levels are those of `OptimalQsgd`.
            Levels::Uniform | Levels::Optimal => (power as f32 - 0.5, power),
        };
        Qsgd { options, half, code_of_nothing }
    }

    /// Bytes of a bucket of this many elements.
    #[inline(always)]
    fn bytes(self, elements: usize) -> usize {
        SCALE_BYTES + (elements * self.options.bits as usize).div_ceil(8)
    }
}

impl Quantizer for Qsgd {
    const IS_UNBIASED: bool = true;

    fn bucket_bytes(self, elements: usize) -> usize {
        self.bytes(elements)
    }

    fn encode_plainly(
        self,
        key: &DrawKey,
        values: &[f32],
        residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) {
        oracle::encode(self, Draws::of_bucket(key), values, residual, out);
    }

    fn decode_plainly(self, bytes: &[u8], out: &mut [f32], set: fn(&mut f32, f32)) {
        oracle::decode(self, bytes, out, set);
    }

    #[inline(always)]
    unsafe fn encode<R: Lanes, const N: usize, const KEEP: bool>(
        self,
        key: &DrawKey,
        source: Source<KEEP>,
        elements: usize,
        out: &mut [u8],
    ) {
        // SAFETY: forwarded, the caller's promise covers it.
        unsafe {
            kernel::encode::<R, N, KEEP>(self, Draws::of_bucket(key), source, elements, out);
        }
    }

    #[inline(always)]
    unsafe fn decode<R: Lanes, const N: usize, const ADD: bool>(
        self,
        bytes: &[u8],
        out: &mut [f32],
    ) {
        // SAFETY: forwarded, the caller's promise covers it.
        unsafe { decoding::decode::<R, N, ADD>(self, bytes, out) }
    }
}
