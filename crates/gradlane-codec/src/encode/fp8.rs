//! `fp8`: floats of eight bits with a power of two as the scale of a bucket, rounded to nearest even: the
//! formats of Micikevicius et al. 2022, scaled by blocks as in the OCP Microscaling formats.
//!
//! It is biased by up to half a unit in the last place: 1/16 of a value in `e4m3`, 1/8 in `e5m2`.

mod kernel;
mod oracle;

use super::bucket_quantizer::Quantizer;
use super::codec_text::Fp8Format;
use super::lanes::Lanes;
use super::source::Source;
use super::DrawKey;

/// The scale before the codes: 2 to the power of this byte minus 127.
const SCALE_BYTES: usize = 1;
/// The byte of a bucket whose values are all sent as zero.
const ALL_ZERO: u8 = 0;
/// The byte of a bucket that is not finite.
const NOT_FINITE: u8 = 255;
/// The sign's bit of a code.
const SIGN: u8 = 0x80;

/// The numbers of a format.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fp8 {
    mantissa_bits: u32,
    /// The exponent of the largest number, which is 1.75 times this power of two.
    exponent_max: u32,
    /// What is added to an exponent in a code.
    bias: u32,
}

impl Fp8 {
    pub(super) fn new(format: Fp8Format) -> Fp8 {
        match format {
            Fp8Format::E4M3 => Fp8 { mantissa_bits: 3, exponent_max: 8, bias: 7 },
            Fp8Format::E5M2 => Fp8 { mantissa_bits: 2, exponent_max: 15, bias: 15 },
        }
    }

    /// The exponent of an f32's bits that is that of the smallest normal number.
    fn least_exponent(self) -> u32 {
        128 - self.bias
    }

    /// The smallest normal number; below it numbers are equally far from each other.
    fn least_normal(self) -> f32 {
        f32::from_bits(self.least_exponent() << 23)
    }
}

impl Quantizer for Fp8 {
    const IS_UNBIASED: bool = false;

    fn bucket_bytes(self, elements: usize) -> usize {
        SCALE_BYTES + elements
    }

    fn encode_plainly(
        self,
        _place: &DrawKey,
        values: &[f32],
        residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) {
        oracle::encode(self, values, residual, out);
    }

    fn decode_plainly(self, bytes: &[u8], out: &mut [f32], set: fn(&mut f32, f32)) {
        oracle::decode(self, bytes, out, set);
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
        unsafe { kernel::encode::<R, N, KEEP>(self, source, elements, out) }
    }

    #[inline(always)]
    unsafe fn decode<R: Lanes, const N: usize, const ADD: bool>(
        self,
        bytes: &[u8],
        out: &mut [f32],
    ) {
        // SAFETY: forwarded, the caller's promise covers it.
        unsafe { kernel::decode::<R, N, ADD>(self, bytes, out) }
    }
}
