//! QSGD with the levels of a bucket where they make its variance smallest (Zhang et al. 2017, ZipML;
//! Grubic et al. 2018, section 2.3).
//!
//! A bucket of codes of `b` bits has `m` = `2^(b-1)` magnitudes with both signs, the largest of them
//! its scale; zero is none of them. Magnitudes are on a grid of [`GRID`] equal intervals of the scale.
//! Values are counted by interval, each as if it lay in the middle, and of all ways to choose the
//! other magnitudes on the grid that with the smallest variance is taken, by dynamic programming in
//! integers: exact, so that it is the same for every instruction set.
//!
//! Choosing takes longer than everything else, and is one value after another as the definition says.

use super::oracle::{norm2, pack, scale_or_nothing, unpack};
use super::SCALE_BYTES;
use crate::encode::bucket_quantizer::{wanted, Quantizer};
use crate::encode::draw::Draws;
use crate::encode::lanes::Lanes;
use crate::encode::source::Source;
use crate::encode::{DrawKey, Norm, QsgdOptions};

/// Intervals of a scale.
pub(super) const GRID: usize = 64;
/// The most magnitudes: those of four bits.
const MAGNITUDES_MAX: usize = 8;

/// Stochastic quantization of a bucket to levels of its own.
#[derive(Clone, Copy, Debug)]
pub(in crate::encode) struct OptimalQsgd {
    bits: u32,
    norm: Norm,
}

impl OptimalQsgd {
    pub(in crate::encode) fn new(options: QsgdOptions) -> OptimalQsgd {
        OptimalQsgd { bits: options.bits, norm: options.norm }
    }

    /// Magnitudes of a bucket.
    fn magnitudes(self) -> usize {
        1 << (self.bits - 1)
    }

    /// Bytes before the codes: the scale, and all magnitudes but the largest.
    fn head_bytes(self) -> usize {
        SCALE_BYTES + self.magnitudes() - 1
    }

    /// Encodes the values that a function tells, each of which is then told what it is sent as.
    #[inline(always)]
    fn encode_each(
        self,
        draws: Draws,
        elements: usize,
        value_of: impl Fn(usize) -> f32,
        mut sent: impl FnMut(usize, f32, f32),
        out: &mut [u8],
    ) {
        let (head, codes) = out.split_at_mut(self.head_bytes());
        let values = (0..elements).map(&value_of);
        let scale = scale_or_nothing(match self.norm {
            Norm::Max => f32::from_bits(values.map(|it| it.abs().to_bits()).max().unwrap_or(0)),
            Norm::L2 => norm2(values),
        });
        head.fill(0);
        head[..SCALE_BYTES].copy_from_slice(&scale.to_le_bytes());
        codes.fill(0);
        let m = self.magnitudes();
        if scale.is_nan() || scale == 0.0 {
            for at in 0..elements {
                pack(self.bits, elements, at, m as u32, codes);
                if scale == 0.0 {
                    sent(at, value_of(at), 0.0);
                }
            }
            return;
        }
        let intervals_per_value = GRID as f32 / scale;
        let mut counts = [0; GRID];
        for at in 0..elements {
            counts[interval_of(value_of(at) * intervals_per_value)] += 1;
        }
        let magnitudes = best_magnitudes(&counts, m);
        for (byte, &magnitude) in head[SCALE_BYTES..].iter_mut().zip(&magnitudes) {
            *byte = magnitude as u8;
        }
        let levels = levels_of(&magnitudes[..m]);
        let steps: [Step; GRID] = steps_of(&magnitudes[..m]);
        let interval = scale / GRID as f32;
        for at in 0..elements {
            let value = value_of(at);
            let place = value * intervals_per_value;
            let step = steps[interval_of(place)];
            // Both signs of a value are between levels of the same distance.
            let (low, first) = if place.is_sign_negative() && !step.holds_zero {
                (-step.high, 2 * m - 2 - step.first)
            } else {
                (step.low, step.first)
            };
            let above = (place - low) * step.per_distance + draws.uniform(at);
            let code = first + usize::from(above >= 1.0);
            pack(self.bits, elements, at, code as u32, codes);
            sent(at, value, levels[code] * interval);
        }
    }

    fn decode_each(self, bytes: &[u8], out: &mut [f32], mut set: impl FnMut(&mut f32, f32)) {
        let (head, codes) = bytes.split_at(self.head_bytes());
        let (scale, inner) = head.split_first_chunk::<SCALE_BYTES>().expect("the head has a scale");
        let m = self.magnitudes();
        let mut magnitudes = [GRID as u32; MAGNITUDES_MAX];
        for (magnitude, byte) in magnitudes.iter_mut().zip(inner) {
            *magnitude = u32::from(*byte);
        }
        let interval = f32::from_le_bytes(*scale) / GRID as f32;
        let levels = levels_of(&magnitudes[..m]).map(|level| level * interval);
        let elements = out.len();
        for (at, slot) in out.iter_mut().enumerate() {
            set(slot, levels[unpack(self.bits, elements, at, codes) as usize]);
        }
    }
}

/// The levels around an interval of magnitudes, in intervals.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    low: f32,
    high: f32,
    /// One over their distance.
    per_distance: f32,
    /// The code of the lower one.
    first: usize,
    /// Whether they are the least magnitude with both signs.
    holds_zero: bool,
}

/// The interval of a place on the grid, by its magnitude.
#[inline(always)]
fn interval_of(place: f32) -> usize {
    (place.abs() as usize).min(GRID - 1)
}

/// All levels in the order of their codes, in intervals.
fn levels_of(magnitudes: &[u32]) -> [f32; 2 * MAGNITUDES_MAX] {
    let mut levels = [0.0; 2 * MAGNITUDES_MAX];
    let m = magnitudes.len();
    for (index, &magnitude) in magnitudes.iter().enumerate() {
        levels[m + index] = magnitude as f32;
        levels[m - 1 - index] = -(magnitude as f32);
    }
    levels
}

fn steps_of(magnitudes: &[u32]) -> [Step; GRID] {
    let mut steps = [Step::default(); GRID];
    let m = magnitudes.len();
    for (index, &high) in magnitudes.iter().enumerate() {
        let before = if index == 0 { 0 } else { magnitudes[index - 1] };
        let low = if index == 0 { -(high as f32) } else { before as f32 };
        let high_place = high as f32;
        let step = Step {
            low,
            high: high_place,
            per_distance: 1.0 / (high_place - low),
            first: m + index - 1,
            holds_zero: index == 0,
        };
        steps[before as usize..high as usize].fill(step);
    }
    steps
}

/// The `m` ascending magnitudes on the grid, the last one [`GRID`], with the smallest variance.
///
/// A value in the middle of interval `i` is at `x` = 2i + 1 in halves of an interval. Between levels
/// at `l` and `u` its variance is (u - x)(x - l).
fn best_magnitudes(counts: &[u32; GRID], m: usize) -> [u32; MAGNITUDES_MAX] {
    // Sums over all intervals before each: of counts, places and their squares.
    let mut before = [[0_i64; 3]; GRID + 1];
    for (index, &count) in counts.iter().enumerate() {
        let (count, place) = (i64::from(count), 2 * index as i64 + 1);
        let [counts, places, squares] = before[index];
        before[index + 1] =
            [counts + count, places + count * place, squares + count * place * place];
    }
    // Of the intervals from `begin` up to `end`, between levels at `low` and `end`.
    let variance = |begin: usize, end: usize, low: i64| {
        let of = |sum: usize| before[end][sum] - before[begin][sum];
        let high = 2 * end as i64;
        (low + high) * of(1) - of(2) - low * high * of(0)
    };
    let mut best = [[i64::MAX; GRID + 1]; MAGNITUDES_MAX];
    let mut chosen = [[0; GRID + 1]; MAGNITUDES_MAX];
    for (end, sum) in best[0].iter_mut().enumerate().skip(1) {
        *sum = variance(0, end, -2 * end as i64);
    }
    for index in 1..m {
        for end in index + 1..=GRID {
            for begin in index..end {
                let sum = best[index - 1][begin] + variance(begin, end, 2 * begin as i64);
                if sum < best[index][end] {
                    best[index][end] = sum;
                    chosen[index][end] = begin;
                }
            }
        }
    }
    let mut magnitudes = [0; MAGNITUDES_MAX];
    let mut end = GRID;
    for index in (0..m).rev() {
        magnitudes[index] = end as u32;
        end = chosen[index][end];
    }
    magnitudes
}

impl Quantizer for OptimalQsgd {
    const IS_UNBIASED: bool = true;

    fn bucket_bytes(self, elements: usize) -> usize {
        self.head_bytes() + (elements * self.bits as usize).div_ceil(8)
    }

    fn encode_plainly(
        self,
        key: &DrawKey,
        values: &[f32],
        mut residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) {
        let all: Vec<f32> =
            (0..values.len()).map(|at| wanted(values, residual.as_deref(), at)).collect();
        let sent = |at: usize, value: f32, sent: f32| {
            if let Some(residual) = residual.as_deref_mut() {
                residual[at] = value - sent;
            }
        };
        self.encode_each(Draws::of_bucket(key), all.len(), |at| all[at], sent, out);
    }

    fn decode_plainly(self, bytes: &[u8], out: &mut [f32], set: fn(&mut f32, f32)) {
        self.decode_each(bytes, out, set);
    }

    #[inline(always)]
    unsafe fn encode<R: Lanes, const N: usize, const KEEP: bool>(
        self,
        key: &DrawKey,
        source: Source<KEEP>,
        elements: usize,
        out: &mut [u8],
    ) {
        // SAFETY: the caller promises the elements of the source; each is kept after its last look.
        let (value_of, sent) = unsafe {
            (
                |at: usize| source.wanted_one(at),
                |at: usize, value: f32, sent: f32| source.keep_one(at, value, sent),
            )
        };
        self.encode_each(Draws::of_bucket(key), elements, value_of, sent, out);
    }

    #[inline(always)]
    unsafe fn decode<R: Lanes, const N: usize, const ADD: bool>(
        self,
        bytes: &[u8],
        out: &mut [f32],
    ) {
        self.decode_each(bytes, out, |slot, value| *slot = if ADD { *slot + value } else { value });
    }
}

#[cfg(test)]
mod tests {
    use super::{best_magnitudes, GRID};

    /// Twice the variance of all counts under some magnitudes, from the definition.
    fn variance(counts: &[u32; GRID], magnitudes: &[u32]) -> i64 {
        let mut sum = 0;
        for (index, &count) in counts.iter().enumerate() {
            let place = 2 * index as i64 + 1;
            let high = magnitudes.iter().find(|&&it| it as usize > index).expect("the scale");
            let low = magnitudes.iter().rev().find(|&&it| it as usize <= index);
            let high = 2 * i64::from(*high);
            let low = low.map_or(-2 * i64::from(magnitudes[0]), |&low| 2 * i64::from(low));
            sum += i64::from(count) * (high - place) * (place - low);
        }
        sum
    }

    fn drawn(seed: u32) -> [u32; GRID] {
        let mut state = seed;
        let mut counts = [0; GRID];
        for (index, count) in counts.iter_mut().enumerate() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *count = (state >> 20) / (1 + index as u32) * u32::from(state & 0x3000 != 0);
        }
        counts
    }

    #[test]
    fn the_inner_level_of_two_bits_is_that_which_exhaustion_finds() {
        for seed in 0..20 {
            let counts = drawn(seed);
            let found = best_magnitudes(&counts, 2);
            let least = (1..GRID as u32).map(|it| variance(&counts, &[it, GRID as u32])).min();
            assert_eq!(Some(variance(&counts, &found[..2])), least);
        }
    }

    #[test]
    fn no_level_of_four_bits_can_be_moved_to_better() {
        for seed in 0..20 {
            let counts = drawn(seed);
            let found = best_magnitudes(&counts, 8);
            let best = variance(&counts, &found);
            assert_eq!(found[7], GRID as u32);
            for index in 0..7 {
                for place in 1..GRID as u32 {
                    let mut moved = found;
                    moved[index] = place;
                    if moved.windows(2).all(|it| it[0] < it[1]) {
                        assert!(variance(&counts, &moved) >= best, "{moved:?} and {found:?}");
                    }
                }
            }
        }
    }
}
