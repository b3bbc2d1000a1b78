//! `int8`: eight bits between the least and the greatest value of a bucket, rounded to nearest: what
//! is common practice for weights and activations, to compare with.
//!
//! A code `k` in `0..=255` stands for `least + k * step`, with `step` = (greatest - least) / 255. It
//! is biased by up to half a step.

mod kernel;
mod oracle;

use super::bucket_quantizer::Quantizer;
use super::lanes::Lanes;
use super::source::Source;
use super::DrawKey;

/// Bytes of the least value and the step, each an f32, before the codes.
const FRONT_BYTES: usize = 8;
/// The largest code.
const CODE_MAX: f32 = 255.0;

/// Eight bits between the least and the greatest value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Int8;

impl Quantizer for Int8 {
    const IS_UNBIASED: bool = false;

    fn bucket_bytes(self, elements: usize) -> usize {
        FRONT_BYTES + elements
    }

    fn encode_plainly(
        self,
        _place: &DrawKey,
        values: &[f32],
        residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) {
        oracle::encode(values, residual, out);
    }

    fn decode_plainly(self, bytes: &[u8], out: &mut [f32], set: fn(&mut f32, f32)) {
        oracle::decode(bytes, out, set);
    }

    #[inline(always)]
    unsafe fn encode<R: Lanes, const N: usize, const KEEP: bool>(
        self,
        _place: &DrawKey,
        source: Source<KEEP>,
        elements: usize,
        out: &mut [u8],
    ) {
        // SAFETY: forwarded, the caller's promise covers it.
        unsafe { kernel::encode::<R, N, KEEP>(source, elements, out) }
    }

    #[inline(always)]
    unsafe fn decode<R: Lanes, const N: usize, const ADD: bool>(
        self,
        bytes: &[u8],
        out: &mut [f32],
    ) {
        // SAFETY: forwarded, the caller's promise covers it.
        unsafe { kernel::decode::<R, N, ADD>(bytes, out) }
    }
}
