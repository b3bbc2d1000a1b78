//! The oracle of `fp8`: one value after another, as the definition says.

use super::{Fp8, ALL_ZERO, NOT_FINITE, SCALE_BYTES, SIGN};
use crate::encode::bucket_quantizer::wanted;
use crate::encode::qsgd::SCALE_MIN;

/// Encodes a bucket of at least one value.
pub(super) fn encode(fp8: Fp8, values: &[f32], mut residual: Option<&mut [f32]>, out: &mut [u8]) {
    let all = (0..values.len()).map(|index| wanted(values, residual.as_deref(), index));
    let largest = all.map(|value| value.to_bits() & 0x7fff_ffff).max().unwrap_or_default();
    let (front, codes) = out.split_at_mut(SCALE_BYTES);
    let byte = scale_byte(fp8, largest);
    front[0] = byte;
    if byte == NOT_FINITE {
        codes.fill(0);
        return;
    }
    for index in 0..values.len() {
        let value = wanted(values, residual.as_deref(), index);
        let code = code_of(fp8, byte, value);
        codes[index] = code;
        if let Some(residual) = residual.as_deref_mut() {
            residual[index] = value - value_of(fp8, scale_of(byte), code);
        }
    }
}

/// The byte of the smallest scale by which no value is above the format's largest number, by the bits of the
/// largest magnitude.
pub(super) fn scale_byte(fp8: Fp8, largest: u32) -> u8 {
    if largest >= f32::INFINITY.to_bits() {
        NOT_FINITE
    } else if largest < SCALE_MIN.to_bits() {
        ALL_ZERO
    } else {
        // Above 1.75 times its power of two.
        let is_above = u32::from(largest & 0x7f_ffff > 0x60_0000);
        ((largest >> 23) + is_above - fp8.exponent_max) as u8
    }
}

/// The scale that a byte stands for.
pub(super) fn scale_of(byte: u8) -> f32 {
    if byte == NOT_FINITE {
        f32::NAN
    } else {
        f32::from_bits(u32::from(byte) << 23)
    }
}

/// The factor that makes values numbers of the format: one over the scale; 0 where all are sent as zero.
pub(super) fn inverse_of(byte: u8) -> f32 {
    if byte == ALL_ZERO {
        0.0
    } else {
        f32::from_bits((254 - u32::from(byte)) << 23)
    }
}

/// The code of the number that is nearest to a value, of two the one with an even code.
pub(super) fn code_of(fp8: Fp8, byte: u8, value: f32) -> u8 {
    let number = value.abs() * inverse_of(byte);
    let exponent = (number.to_bits() >> 23).max(fp8.least_exponent());
    // The distance of numbers of this exponent, which is a power of two.
    let distance = f32::from_bits((exponent - fp8.mantissa_bits) << 23);
    let count = (number / distance).round_ties_even() as u32;
    let normal = 1 << fp8.mantissa_bits;
    let magnitude = ((exponent - fp8.least_exponent()) << fp8.mantissa_bits) + count;
    debug_assert!(count <= 2 * normal, "a number has its exponent or the next one");
    magnitude as u8 | if value.is_sign_negative() { SIGN } else { 0 }
}

/// The value of a code.
pub(super) fn value_of(fp8: Fp8, scale: f32, code: u8) -> f32 {
    let magnitude = u32::from(code & !SIGN);
    let normal = 1 << fp8.mantissa_bits;
    let (exponent, mantissa) = (magnitude >> fp8.mantissa_bits, magnitude % normal);
    let number = if exponent == 0 {
        mantissa as f32 / normal as f32 * fp8.least_normal()
    } else {
        let power = f32::from_bits((exponent - 1 + fp8.least_exponent()) << 23);
        (normal + mantissa) as f32 / normal as f32 * power
    };
    let value = number * scale;
    if code & SIGN != 0 {
        -value
    } else {
        value
    }
}

/// Decodes a bucket and gives every value with its slot to `set`.
pub(super) fn decode(fp8: Fp8, bytes: &[u8], out: &mut [f32], set: fn(&mut f32, f32)) {
    let (front, codes) = bytes.split_at(SCALE_BYTES);
    let scale = scale_of(front[0]);
    for (slot, code) in out.iter_mut().zip(codes) {
        set(slot, value_of(fp8, scale, *code));
    }
}
