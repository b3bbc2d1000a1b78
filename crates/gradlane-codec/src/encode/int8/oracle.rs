//! The oracle of min-max: one value after another, as the definition says.

use super::{CODE_MAX, FRONT_BYTES};
use crate::encode::bucket_quantizer::wanted;
use crate::encode::qsgd::SCALE_MIN;

/// Encodes a bucket of at least one value.
pub(super) fn encode(values: &[f32], mut residual: Option<&mut [f32]>, out: &mut [u8]) {
    let all = (0..values.len()).map(|index| wanted(values, residual.as_deref(), index));
    let (least, greatest) = ends(all);
    let grid = grid_of(least, greatest);
    let (front, codes) = out.split_at_mut(FRONT_BYTES);
    front.copy_from_slice(&grid.to_bytes());
    if grid.least.is_nan() {
        codes.fill(0);
        return;
    }
    for index in 0..values.len() {
        let value = wanted(values, residual.as_deref(), index);
        let code = code_of(grid, value);
        codes[index] = code as u8;
        if let Some(residual) = residual.as_deref_mut() {
            residual[index] = value - (grid.least + code * grid.step);
        }
    }
}

/// How values become codes and codes values.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    /// The value of code 0; NaN where the ends are not finite, or too far apart.
    pub(super) least: f32,
    /// The distance of two codes; zero where all values are the same, nearly.
    pub(super) step: f32,
    /// Factor of distances from the least value.
    pub(super) steps_per_value: f32,
}

impl Grid {
    /// The bytes that are sent of it.
    pub(super) fn to_bytes(self) -> [u8; FRONT_BYTES] {
        let ([a, b, c, d], [e, f, g, h]) = (self.least.to_le_bytes(), self.step.to_le_bytes());
        [a, b, c, d, e, f, g, h]
    }
}

/// The grid between two ends.
pub(super) fn grid_of(least: f32, greatest: f32) -> Grid {
    let range = greatest - least;
    if !range.is_finite() {
        Grid { least: f32::NAN, step: 0.0, steps_per_value: 0.0 }
    } else if range < SCALE_MIN {
        Grid { least, step: 0.0, steps_per_value: 0.0 }
    } else {
        Grid { least, step: range / CODE_MAX, steps_per_value: CODE_MAX / range }
    }
}

/// The code of a value between the ends.
pub(super) fn code_of(grid: Grid, value: f32) -> f32 {
    let steps = (value - grid.least) * grid.steps_per_value;
    steps.round_ties_even().clamp(0.0, CODE_MAX)
}

/// The least and the greatest value, with minus zero below zero and infinity beyond all; both NaN
/// where there is one.
fn ends(values: impl Iterator<Item = f32>) -> (f32, f32) {
    let (mut least, mut greatest) = (f32::INFINITY, f32::NEG_INFINITY);
    for value in values {
        if value.is_nan() {
            return (f32::NAN, f32::NAN);
        }
        if value.total_cmp(&least).is_lt() {
            least = value;
        }
        if value.total_cmp(&greatest).is_gt() {
            greatest = value;
        }
    }
    (least, greatest)
}

/// Decodes a bucket and gives every value with its slot to `set`.
pub(super) fn decode(bytes: &[u8], out: &mut [f32], set: fn(&mut f32, f32)) {
    let (front, codes) = bytes.split_at(FRONT_BYTES);
    let [a, b, c, d, e, f, g, h] = *front else { unreachable!("the length was checked") };
    let (least, step) = (f32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h]));
    for (slot, code) in out.iter_mut().zip(codes) {
        set(slot, least + f32::from(*code) * step);
    }
}
