//! `fp8` in wide registers: the oracle's codes and values, sixteen at a time.

use super::oracle::{code_of, inverse_of, scale_byte, scale_of, value_of};
use super::{Fp8, NOT_FINITE, SCALE_BYTES};
use crate::encode::lanes::{Lanes, Mask, Wide, Words, WIDTH};
use crate::encode::source::{Source, AHEAD};

/// Bits of an f32 but the sign's.
const MAGNITUDE: u32 = 0x7fff_ffff;
/// Bits of an f32's exponent.
const EXPONENT: u32 = 0x7f80_0000;
/// Bits of an f32's mantissa.
const MANTISSA: u32 = 0x007f_ffff;

/// Encodes a bucket of at least one value.
///
/// # Safety
///
/// Runs where the instructions of `R` are enabled; the source has `elements` elements.
#[inline(always)]
pub(super) unsafe fn encode<R: Lanes, const N: usize, const KEEP: bool>(
    fp8: Fp8,
    source: Source<KEEP>,
    elements: usize,
    out: &mut [u8],
) {
    let (front, codes) = out.split_at_mut(SCALE_BYTES);
    assert_eq!(codes.len(), elements, "room for the bucket");
    // SAFETY: as the caller promises; there is a code for every element.
    unsafe {
        let byte = scale_byte(fp8, largest::<R, N, KEEP>(source, elements));
        front[0] = byte;
        if byte == NOT_FINITE {
            codes.fill(0);
            return;
        }
        let (scale, inverse) = (scale_of(byte), inverse_of(byte));
        let (wide_scale, wide_inverse) = (Wide::<R, N>::splat(scale), Wide::splat(inverse));
        let least = Words::same(fp8.least_exponent() << 23);
        // The sum of a number and so many times its power of two has the count of the number's
        // distances in the lowest bits, rounded to nearest even.
        let shift = 23 - fp8.mantissa_bits;
        let by = Words::same(shift << 23);
        let offset = Words::same((fp8.least_exponent() << fp8.mantissa_bits).wrapping_neg());
        let mut at = 0;
        let ahead = elements + AHEAD;
        while elements - at >= WIDTH {
            source.fetch(at + ahead);
            let wanted = source.wanted(at);
            let bits = Wide::words(wanted);
            let sign = Words::and(bits, Words::same(!MAGNITUDE));
            let magnitude = Wide::of_words(Words::and(bits, Words::same(MAGNITUDE)));
            let number = Wide::multiply(magnitude, wide_inverse);
            let exponent = Words::and(Wide::words(number), Words::same(EXPONENT));
            let exponent = Words::larger(exponent, least);
            let power = Wide::of_words(Words::plus(exponent, by));
            let sum = Wide::add(number, power);
            let count = Words::and(Wide::words(sum), Words::same(MANTISSA));
            let code = Words::plus(Words::plus(count, exponent.right_by(shift)), offset);
            let code = Words::or(code, sign.right::<24>());
            if KEEP {
                let sent = Wide::multiply(Wide::subtract(sum, power), wide_scale);
                let sent = Wide::of_words(Words::or(Wide::words(sent), sign));
                source.keep(at, wanted, sent);
            }
            code.store_bytes(codes.as_mut_ptr().add(at));
            at += WIDTH;
        }
        while at < elements {
            let wanted = source.wanted_one(at);
            let code = code_of(fp8, byte, wanted);
            codes[at] = code;
            source.keep_one(at, wanted, value_of(fp8, scale, code));
            at += 1;
        }
    }
}

/// The bits of the largest magnitude; those of NaN are above infinity's.
#[inline(always)]
unsafe fn largest<R: Lanes, const N: usize, const KEEP: bool>(
    source: Source<KEEP>,
    elements: usize,
) -> u32 {
    let mut at = 0;
    // SAFETY: as the caller promises.
    unsafe {
        let mask = Words::<R, N>::same(MAGNITUDE);
        let mut wide = Words::same(0);
        while elements - at >= WIDTH {
            wide = Words::larger(wide, Words::and(Wide::words(source.wanted(at)), mask));
            at += WIDTH;
        }
        let mut largest = wide.largest() as u32;
        while at < elements {
            largest = largest.max(source.wanted_one(at).to_bits() & MAGNITUDE);
            at += 1;
        }
        largest
    }
}

/// Decodes a bucket into `out`, or adds it where `ADD`.
///
/// # Safety
///
/// Runs where the instructions of `R` are enabled.
#[inline(always)]
pub(super) unsafe fn decode<R: Lanes, const N: usize, const ADD: bool>(
    fp8: Fp8,
    bytes: &[u8],
    out: &mut [f32],
) {
    let (&[byte], codes) = bytes.split_first_chunk::<SCALE_BYTES>().expect("it was checked");
    assert_eq!(codes.len(), out.len(), "the length was checked");
    let scale = scale_of(byte);
    let elements = out.len();
    let mut at = 0;
    // SAFETY: as the caller promises; there is a code for every element.
    unsafe {
        let wide_scale = Wide::<R, N>::splat(scale);
        let shift = 23 - fp8.mantissa_bits;
        let normal = Words::same(1 << fp8.mantissa_bits);
        let exponent = Words::same((fp8.least_exponent() - 1) << 23);
        let (none, one) = (Wide::splat(0.0), Wide::of_words(Words::same(1 << 23)));
        let least = Wide::splat(fp8.least_normal());
        while elements - at >= WIDTH {
            let code = Words::load_bytes(codes.as_ptr().add(at));
            let sign = Words::and(code, Words::same(0x80)).left::<24>();
            let magnitude = Words::and(code, Words::same(0x7f));
            // Below the smallest normal number: as if one more power of two were there, which is taken off.
            let is_below: Mask<R, N> = Words::less(magnitude, normal);
            let more = Wide::words(Wide::select(is_below, one, none));
            let bits = Words::plus(Words::plus(magnitude.left_by(shift), exponent), more);
            let number = Wide::subtract(Wide::of_words(bits), Wide::select(is_below, least, none));
            let value = Wide::multiply(number, wide_scale);
            let value = Wide::of_words(Words::or(Wide::words(value), sign));
            let to = out.as_mut_ptr().add(at);
            let value = if ADD { Wide::add(Wide::load(to), value) } else { value };
            value.store(to);
            at += WIDTH;
        }
    }
    for (slot, code) in out.iter_mut().zip(codes).skip(at) {
        let value = value_of(fp8, scale, *code);
        *slot = if ADD { *slot + value } else { value };
    }
}
