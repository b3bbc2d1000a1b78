//! The oracle of min-max: one value after another, as the definition says.

use super::{CODE_MAX, FRONT_BYTES};
use crate::encode::bucketed::wanted;
use crate::encode::qsgd::SCALE_MIN;

/// Encodes a bucket of at least one value.
pub(super) fn encode(values: &[f32], mut residual: Option<&mut [f32]>, out: &mut [u8]) {
    let all = (0..values.len()).map(|index| wanted(values, residual.as_deref(), index));
    let (mut least, greatest) = ends(all);
    let range = greatest - least;
    if !range.is_finite() {
        least = f32::NAN;
    }
    let is_flat = !range.is_finite() || range < SCALE_MIN;
    let step = if is_flat { 0.0 } else { range / CODE_MAX };
    let steps_per_value = if is_flat { 0.0 } else { CODE_MAX / range };
    let (front, codes) = out.split_at_mut(FRONT_BYTES);
    front[..4].copy_from_slice(&least.to_le_bytes());
    front[4..].copy_from_slice(&step.to_le_bytes());
    for index in 0..values.len() {
        let value = wanted(values, residual.as_deref(), index);
        let steps = (value - least) * steps_per_value;
        let code = steps.round_ties_even().clamp(0.0, CODE_MAX);
        // A NaN becomes 0 here.
        codes[index] = code as u8;
        if let Some(residual) = residual.as_deref_mut() {
            if !least.is_nan() {
                residual[index] = value - (least + code * step);
            }
        }
    }
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
