//! The oracle of QSGD: one value after another, as the definition says.

use super::{Draws, Levels, Norm, Qsgd, SCALE_BYTES, SCALE_MIN};
use crate::encode::bucket_quantizer::{in_pairs, wanted};

/// Encodes a bucket of at least one value.
pub(super) fn encode(
    qsgd: Qsgd,
    draws: Draws,
    values: &[f32],
    residual: Option<&mut [f32]>,
    out: &mut [u8],
) {
    let all = (0..values.len()).map(|index| wanted(values, residual.as_deref(), index));
    let scale = scale_of(qsgd, all);
    let (scale_bytes, codes) = out.split_at_mut(SCALE_BYTES);
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    quantize(qsgd, draws, scale, values, residual, codes);
}

/// The scale of a bucket, as it is sent.
pub(super) fn scale_of(qsgd: Qsgd, values: impl Iterator<Item = f32>) -> f32 {
    scale_or_nothing(match qsgd.options.norm {
        // Magnitudes are ordered as their bits are, infinity and NaN at the end.
        Norm::Max => f32::from_bits(values.map(|it| it.abs().to_bits()).max().unwrap_or(0)),
        Norm::L2 => norm2(values),
    })
}

/// Writes the codes of a bucket's values to a scale.
pub(super) fn quantize(
    qsgd: Qsgd,
    draws: Draws,
    scale: f32,
    values: &[f32],
    mut residual: Option<&mut [f32]>,
    codes: &mut [u8],
) {
    let grid = grid_of(qsgd, scale);
    codes.fill(0);
    for index in 0..values.len() {
        let value = wanted(values, residual.as_deref(), index);
        let code = if scale > 0.0 {
            code_of(qsgd, grid, value, draws.uniform(index))
        } else {
            qsgd.code_of_nothing
        };
        pack(qsgd.options.bits, values.len(), index, code, codes);
        if let Some(residual) = residual.as_deref_mut() {
            if !scale.is_nan() {
                residual[index] = value - value_of(qsgd, scale, code);
            }
        }
    }
}

/// The scale that is sent: NaN where it is no finite number, zero where it is too small.
pub(super) fn scale_or_nothing(scale: f32) -> f32 {
    match scale {
        _ if !scale.is_finite() => f32::NAN,
        _ if scale < SCALE_MIN => 0.0,
        _ => scale,
    }
}

/// How values become levels and codes values.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    /// Factor of values.
    pub(super) levels_per_value: f32,
    /// The distance of two levels.
    pub(super) level: f32,
}

/// The grid of a scale.
pub(super) fn grid_of(qsgd: Qsgd, scale: f32) -> Grid {
    Grid { levels_per_value: qsgd.half / scale, level: scale / qsgd.half }
}

/// The 2-norm, in f64: sixteen sums of every sixteenth square, added in pairs at the end.
#[allow(clippy::cast_possible_truncation)]
pub(super) fn norm2(values: impl Iterator<Item = f32>) -> f32 {
    let mut sums = [0.0_f64; 16];
    for (index, value) in values.enumerate() {
        sums[index % 16] += f64::from(value) * f64::from(value);
    }
    in_pairs(sums).sqrt() as f32
}

/// The code of a value, by a number strictly between 0 and 1.
pub(super) fn code_of(qsgd: Qsgd, grid: Grid, value: f32, uniform: f32) -> u32 {
    let half = qsgd.half;
    let levels = value * grid.levels_per_value;
    let code = match qsgd.options.levels {
        Levels::Sign => (levels + uniform.copysign(levels)).trunc() + half,
        Levels::Uniform | Levels::Optimal => ((levels + half) + uniform).trunc(),
    };
    code.clamp(0.0, 2.0 * half) as u32
}

/// The value of a code.
pub(super) fn value_of(qsgd: Qsgd, scale: f32, code: u32) -> f32 {
    (code as f32 - qsgd.half) * (scale / qsgd.half)
}

/// Where a code lies: with 8 / bits = `m` codes a byte, the codes of a block of up to `16 * m` values
/// lie in `width` = ceil(values / m) bytes, and byte `j` holds the values `j`, `j + width`, `j + 2 *
/// width` and so on, the first in its lowest bits.
fn position(bits: u32, elements: usize, index: usize) -> (usize, u32) {
    let per_byte = 8 / bits as usize;
    let block = 16 * per_byte;
    let start = index / block * block;
    let width = (elements - start).min(block).div_ceil(per_byte);
    let within = index - start;
    (start / per_byte + within % width, (within / width) as u32 * bits)
}

/// Writes a code among others that are zero.
pub(super) fn pack(bits: u32, elements: usize, index: usize, code: u32, codes: &mut [u8]) {
    if bits == 16 {
        codes[2 * index..][..2].copy_from_slice(&(code as u16).to_le_bytes());
    } else {
        let (byte, shift) = position(bits, elements, index);
        codes[byte] |= (code << shift) as u8;
    }
}

/// Reads a code.
pub(super) fn unpack(bits: u32, elements: usize, index: usize, codes: &[u8]) -> u32 {
    if bits == 16 {
        u32::from(u16::from_le_bytes([codes[2 * index], codes[2 * index + 1]]))
    } else {
        let (byte, shift) = position(bits, elements, index);
        (u32::from(codes[byte]) >> shift) & ((1 << bits) - 1)
    }
}

/// Decodes a bucket and gives every value with its slot to `set`.
pub(super) fn decode(qsgd: Qsgd, bytes: &[u8], out: &mut [f32], set: fn(&mut f32, f32)) {
    let (scale, codes) = bytes.split_first_chunk::<SCALE_BYTES>().expect("the length was checked");
    let scale = f32::from_le_bytes(*scale);
    let elements = out.len();
    for (index, slot) in out.iter_mut().enumerate() {
        let code = unpack(qsgd.options.bits, elements, index, codes);
        set(slot, value_of(qsgd, scale, code));
    }
}
