//! The oracle of QSGD: one value after another, as the definition says.

use super::{code_of_nothing, Draws, Grid, Levels, Norm, QsgdOptions, SCALE_BYTES, SCALE_MIN};

/// Encodes a bucket of at least one value.
pub(super) fn encode(
    options: QsgdOptions,
    draws: Draws,
    values: &[f32],
    mut residual: Option<&mut [f32]>,
    out: &mut [u8],
) {
    let wanted = |index: usize, residual: Option<&[f32]>| {
        residual.map_or(values[index], |residual| values[index] + residual[index])
    };
    let scale = scale_of(options.norm, (0..values.len()).map(|i| wanted(i, residual.as_deref())));
    let (scale_bytes, codes) = out.split_at_mut(SCALE_BYTES);
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
    codes.fill(0);
    let grid = Grid::new(options, scale);
    for index in 0..values.len() {
        let value = wanted(index, residual.as_deref());
        let code = if scale > 0.0 {
            code_of(options, grid, value, draws.uniform(index))
        } else {
            code_of_nothing(options)
        };
        pack(options.bits, values.len(), index, code, codes);
        if let Some(residual) = residual.as_deref_mut() {
            if !scale.is_nan() {
                residual[index] = value - (code as f32 - grid.half) * grid.level;
            }
        }
    }
}

/// The scale of a bucket: NaN where it is no number, zero where it is too small.
fn scale_of(norm: Norm, values: impl Iterator<Item = f32>) -> f32 {
    let scale = match norm {
        // Magnitudes are ordered as their bits are, infinity and NaN at the end.
        Norm::Max => f32::from_bits(values.map(|it| it.abs().to_bits()).max().unwrap_or(0)),
        Norm::L2 => norm2(values),
    };
    match scale {
        _ if !scale.is_finite() => f32::NAN,
        _ if scale < SCALE_MIN => 0.0,
        _ => scale,
    }
}

/// The 2-norm in f64: sixteen sums of every sixteenth square, which are then added in pairs.
fn norm2(values: impl Iterator<Item = f32>) -> f32 {
    let mut sums = [0.0_f64; 16];
    for (index, value) in values.enumerate() {
        sums[index % 16] += f64::from(value) * f64::from(value);
    }
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    #[allow(clippy::cast_possible_truncation)]
    return sums[0].sqrt() as f32;
}

/// The code of a value, by a number strictly between 0 and 1.
fn code_of(options: QsgdOptions, grid: Grid, value: f32, uniform: f32) -> u32 {
    let scaled = value * grid.levels_per_value;
    let (code, largest) = match options.levels {
        Levels::Sign => {
            let signed = (scaled + uniform.copysign(scaled)).trunc();
            (signed + grid.half, 2.0 * grid.half)
        }
        Levels::Uniform => (((scaled + grid.half) + uniform).trunc(), 2.0 * grid.half),
    };
    code.clamp(0.0, largest) as u32
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
fn pack(bits: u32, elements: usize, index: usize, code: u32, codes: &mut [u8]) {
    if bits == 16 {
        codes[2 * index..][..2].copy_from_slice(&(code as u16).to_le_bytes());
    } else {
        let (byte, shift) = position(bits, elements, index);
        codes[byte] |= (code << shift) as u8;
    }
}

/// Reads a code.
fn unpack(bits: u32, elements: usize, index: usize, codes: &[u8]) -> u32 {
    if bits == 16 {
        u32::from(u16::from_le_bytes([codes[2 * index], codes[2 * index + 1]]))
    } else {
        let (byte, shift) = position(bits, elements, index);
        (u32::from(codes[byte]) >> shift) & ((1 << bits) - 1)
    }
}

/// Decodes a bucket and gives every value to `place`.
pub(super) fn decode(
    options: QsgdOptions,
    bytes: &[u8],
    out: &mut [f32],
    place: impl Fn(&mut f32, f32),
) {
    let (scale, codes) = bytes.split_first_chunk::<SCALE_BYTES>().expect("the length was checked");
    let grid = Grid::new(options, f32::from_le_bytes(*scale));
    let elements = out.len();
    for (index, slot) in out.iter_mut().enumerate() {
        let code = unpack(options.bits, elements, index, codes);
        place(slot, (code as f32 - grid.half) * grid.level);
    }
}
