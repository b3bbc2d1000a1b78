//! The oracle of 1-bit SGD: one value after another, as the definition says.

use super::{average, AVERAGES_BYTES, RUN};
use crate::encode::bucket_quantizer::{in_pairs, wanted};

/// Encodes a bucket of at least one value.
pub(super) fn encode(values: &[f32], mut residual: Option<&mut [f32]>, out: &mut [u8]) {
    let (plus, minus) = averages(values, residual.as_deref());
    let (front, bits) = out.split_at_mut(AVERAGES_BYTES);
    front[..4].copy_from_slice(&plus.to_le_bytes());
    front[4..].copy_from_slice(&minus.to_le_bytes());
    bits.fill(0);
    if plus.is_nan() {
        return;
    }
    for index in 0..values.len() {
        let value = wanted(values, residual.as_deref(), index);
        let sent = if value >= 0.0 { plus } else { minus };
        if value >= 0.0 {
            bits[index / 8] |= 1 << (index % 8);
        }
        if let Some(residual) = residual.as_deref_mut() {
            residual[index] = value - sent;
        }
    }
}

/// The averages of the values that are at least zero and of the others; both NaN where a sum is no
/// finite number.
///
/// Values are summed in runs: in a run sixteen sums in f32 of every sixteenth value, added in pairs,
/// and the runs in f64.
fn averages(values: &[f32], residual: Option<&[f32]>) -> (f32, f32) {
    let (mut plus, mut minus) = (0.0_f64, 0.0_f64);
    let mut count = 0;
    for start in (0..values.len()).step_by(RUN) {
        let (mut plus_lanes, mut minus_lanes) = ([0.0_f32; 16], [0.0_f32; 16]);
        for index in start..values.len().min(start + RUN) {
            let value = wanted(values, residual, index);
            if value >= 0.0 {
                plus_lanes[index % 16] += value;
                count += 1;
            } else {
                minus_lanes[index % 16] += value;
            }
        }
        plus += f64::from(in_pairs(plus_lanes));
        minus += f64::from(in_pairs(minus_lanes));
    }
    if plus.is_finite() && minus.is_finite() {
        (average(plus, count), average(minus, values.len() - count))
    } else {
        (f32::NAN, f32::NAN)
    }
}

/// Decodes a bucket and gives every value with its slot to `set`.
pub(super) fn decode(bytes: &[u8], out: &mut [f32], set: fn(&mut f32, f32)) {
    let (front, bits) = bytes.split_at(AVERAGES_BYTES);
    let [a, b, c, d, e, f, g, h] = *front else { unreachable!("the length was checked") };
    let (plus, minus) = (f32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h]));
    for (index, slot) in out.iter_mut().enumerate() {
        let is_plus = bits[index / 8] >> (index % 8) & 1 == 1;
        set(slot, if is_plus { plus } else { minus });
    }
}
