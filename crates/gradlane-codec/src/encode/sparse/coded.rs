//! The bytes of a sparse slice whose values are codes: signs and a few levels of magnitude.
//!
//! | bytes | what |
//! | --- | --- |
//! | 4 | number of values, `count` (u32) |
//! | 8 × buckets | of each bucket of the slice: least magnitude and step (f32 each), 0 where it sends nothing |
//! | ceil(`count` × bits / 8) | codes by increasing position, the first in the lowest bits |
//! | the rest | positions, as with values that are sent as they are |
//!
//! A code's highest bit says that the value is negative; the others, `k`, stand for the magnitude
//! least + (k + 1/2) × step. The range of a bucket is cut into `2^(bits - 1)` equal steps. It begins at
//! its least magnitude, and ends at its greatest, or `2 × bits` times as far from the least as their
//! mean is: single large values do not make the steps of all others coarse.
//! Zeros are left out: no level is zero.

use super::wire::{self, SparseError, COUNT_BYTES};

/// Bytes of a bucket's levels.
const LEVEL_BYTES: usize = 8;
/// Steps below this are none: magnitudes are equal, or as good as that.
const STEP_MIN: f32 = f32::from_bits((127 - 100) << 23);

/// The layout of a slice of so many elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CodedLayout {
    bits: u32,
    bucket: usize,
    elements: usize,
}

impl CodedLayout {
    /// Codes of 2, 4 or 8 bits for buckets of at least one value.
    pub(crate) fn new(bits: u32, bucket: usize, elements: usize) -> CodedLayout {
        CodedLayout { bits, bucket, elements }
    }

    /// The most bytes that `count` values take.
    pub(crate) fn bytes_max(self, count: usize) -> usize {
        let codes = self.code_bytes(count).expect("a slice fits into memory");
        COUNT_BYTES + codes + wire::position_bytes_max(count, self.elements)
    }

    /// The bytes that `count` values take on average.
    pub(crate) fn expected_bytes(self, count: usize) -> usize {
        let codes = self.code_bytes(count).expect("a slice fits into memory");
        COUNT_BYTES + codes + wire::expected_position_bytes(count, self.elements)
    }

    /// Bytes of levels and codes of so many values.
    fn code_bytes(self, count: usize) -> Option<usize> {
        let codes = count.checked_mul(self.bits as usize)?.div_ceil(8);
        codes.checked_add(self.elements.div_ceil(self.bucket) * LEVEL_BYTES)
    }

    /// The positions whose values are not zero.
    pub(crate) fn without_zeros(self, values: &[f32], mut positions: Vec<u32>) -> Vec<u32> {
        positions.retain(|&at| values[at as usize] != 0.0);
        positions
    }

    /// Writes codes of the values at these increasing positions, and gives the bytes that it takes
    /// and what each value is sent as.
    ///
    /// # Panics
    ///
    /// If `out` is shorter than [`CodedLayout::bytes_max`], or a position is not within the values.
    pub(crate) fn write(
        self,
        values: &[f32],
        positions: &[u32],
        out: &mut [u8],
    ) -> (usize, Vec<f32>) {
        out[..COUNT_BYTES].copy_from_slice(&(positions.len() as u32).to_le_bytes());
        let value_bytes = self.code_bytes(positions.len()).expect("as many as were asked for");
        let (coded, rest) = out[COUNT_BYTES..].split_at_mut(value_bytes);
        coded.fill(0);
        let (levels, codes) = coded.split_at_mut(self.elements.div_ceil(self.bucket) * LEVEL_BYTES);
        let mut sent = Vec::with_capacity(positions.len());
        for chosen in positions.chunk_by(|&one, &next| self.bucket_of(one) == self.bucket_of(next))
        {
            let of_bucket = MagnitudeLevels::of(values, chosen, self.bits);
            let place = self.bucket_of(chosen[0]) * LEVEL_BYTES;
            levels[place..][..LEVEL_BYTES].copy_from_slice(&of_bucket.to_bytes());
            for &at in chosen {
                let code = of_bucket.code(values[at as usize], self.bits);
                let bit = sent.len() * self.bits as usize;
                codes[bit / 8] |= code << (bit % 8);
                sent.push(of_bucket.value(code, self.bits));
            }
        }
        (COUNT_BYTES + value_bytes + wire::write_positions(positions, rest), sent)
    }

    /// Calls `take` with each position and value; positions increase and lie within the elements.
    ///
    /// # Errors
    ///
    /// [`SparseError`] if the bytes are no such slice of this many elements; some may be taken by then.
    pub(crate) fn read(
        self,
        bytes: &[u8],
        mut take: impl FnMut(usize, f32),
    ) -> Result<(), SparseError> {
        let (count, coded, positions) =
            wire::parts(bytes, self.elements, |count| self.code_bytes(count))?;
        let (levels, codes) = coded.split_at(self.elements.div_ceil(self.bucket) * LEVEL_BYTES);
        let levels = levels.as_chunks::<LEVEL_BYTES>().0;
        let mask = u8::MAX >> (8 - self.bits);
        wire::walk(count, positions, self.elements, |value, at| {
            let bit = value * self.bits as usize;
            let code = codes[bit / 8] >> (bit % 8) & mask;
            let of_bucket = MagnitudeLevels::from_bytes(levels[at / self.bucket]);
            take(at, of_bucket.value(code, self.bits));
        })
    }

    fn bucket_of(self, position: u32) -> usize {
        position as usize / self.bucket
    }
}

/// The levels of a bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
struct MagnitudeLevels {
    /// The least magnitude; NaN where a value is not finite.
    least: f32,
    step: f32,
}

impl MagnitudeLevels {
    /// The levels of a bucket's values at these positions, at least one.
    fn of(values: &[f32], positions: &[u32], bits: u32) -> MagnitudeLevels {
        let (mut least, mut greatest, mut sum) = (f32::INFINITY, 0.0_f32, 0.0_f64);
        for &at in positions {
            let magnitude = values[at as usize].abs();
            if !magnitude.is_finite() {
                return MagnitudeLevels { least: f32::NAN, step: 0.0 };
            }
            (least, greatest) = (least.min(magnitude), greatest.max(magnitude));
            sum += f64::from(magnitude);
        }
        let above_least = sum / positions.len() as f64 - f64::from(least);
        let range = f64::from(2 * bits) * above_least;
        let range = range.min(f64::from(greatest) - f64::from(least));
        let step = (range / f64::from(Self::count(bits))) as f32;
        MagnitudeLevels { least, step: if step < STEP_MIN { 0.0 } else { step } }
    }

    /// Levels of codes of so many bits.
    fn count(bits: u32) -> u32 {
        1 << (bits - 1)
    }

    fn code(self, value: f32, bits: u32) -> u8 {
        let sign = if value < 0.0 { Self::count(bits) } else { 0 };
        // Negative numbers and NaN become 0.
        let level =
            if self.step > 0.0 { ((value.abs() - self.least) / self.step) as u32 } else { 0 };
        (sign + level.min(Self::count(bits) - 1)) as u8
    }

    fn value(self, code: u8, bits: u32) -> f32 {
        let code = u32::from(code);
        let level = code % Self::count(bits);
        let magnitude = self.least + (level as f32 + 0.5) * self.step;
        if code < Self::count(bits) {
            magnitude
        } else {
            -magnitude
        }
    }

    fn to_bytes(self) -> [u8; LEVEL_BYTES] {
        let mut bytes = [0; LEVEL_BYTES];
        bytes[..4].copy_from_slice(&self.least.to_le_bytes());
        bytes[4..].copy_from_slice(&self.step.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: [u8; LEVEL_BYTES]) -> MagnitudeLevels {
        let [a, b, c, d, e, f, g, h] = bytes;
        MagnitudeLevels {
            least: f32::from_le_bytes([a, b, c, d]),
            step: f32::from_le_bytes([e, f, g, h]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spelled(layout: CodedLayout, values: &[f32], positions: &[u32]) -> (Vec<u8>, Vec<f32>) {
        let mut bytes = vec![0xaa; layout.bytes_max(positions.len())];
        let (used, sent) = layout.write(values, positions, &mut bytes);
        bytes.truncate(used);
        (bytes, sent)
    }

    fn taken(layout: CodedLayout, bytes: &[u8]) -> Result<Vec<(usize, f32)>, SparseError> {
        let mut found = Vec::new();
        layout.read(bytes, |at, value| found.push((at, value)))?;
        Ok(found)
    }

    #[test]
    fn the_layout_is_as_documented() {
        let mut values = vec![0.0; 80];
        // Levels 1 + {1/2, 3/2} and, in the second bucket, one magnitude for all.
        (values[3], values[4], values[5]) = (1.0, -3.0, 2.5);
        (values[40], values[70]) = (-0.5, 0.5);
        let layout = CodedLayout::new(2, 32, 80);
        let (bytes, sent) = spelled(layout, &values, &[3, 4, 5, 40, 70]);
        let mut expected = vec![5, 0, 0, 0];
        let levels = [1.0_f32, 1.0, 0.5, 0.0, 0.5, 0.0];
        expected.extend(levels.iter().flat_map(|number| number.to_le_bytes()));
        // +0, -1, +1, -0 from the lowest bits, then +0.
        expected.extend([0b10_01_11_00, 0b00, 3, 0, 0, 34, 29]);
        assert_eq!(bytes, expected);
        assert_eq!(sent, [1.5, -2.5, 2.5, -0.5, 0.5]);
        let found = taken(layout, &bytes).unwrap();
        assert_eq!(found, [(3, 1.5), (4, -2.5), (5, 2.5), (40, -0.5), (70, 0.5)]);
    }

    #[test]
    fn one_large_value_does_not_make_all_others_coarse() {
        let mut values: Vec<f32> = (0..100).map(|at| 1.0 + at as f32 / 100.0).collect();
        values[50] = 1e6;
        let positions: Vec<u32> = (0..100).collect();
        let (_, sent) = spelled(CodedLayout::new(8, 100, 100), &values, &positions);
        // The mean lies 10,000 above the least; 16 times that are the range, in 128 steps.
        assert!(sent[50] > 100_000.0 && sent[50] < 200_000.0, "{}", sent[50]);
        let equal = values.iter().zip(&sent).filter(|(one, sent)| (*one - *sent).abs() < 800.0);
        assert_eq!(equal.count(), 99);
    }

    #[test]
    fn hostile_bytes_are_refused_or_numbers() {
        let layout = CodedLayout::new(4, 64, 300);
        let (good, _) = spelled(layout, &[1.0; 300], &[7, 299]);
        assert!(taken(layout, &good).is_ok());
        let shorter = CodedLayout::new(4, 64, 299);
        assert!(matches!(taken(shorter, &good), Err(SparseError::PastTheEnd { value: 1, .. })));
        for length in 0..good.len() {
            assert!(matches!(taken(layout, &good[..length]), Err(SparseError::TooShort { .. })));
        }
        let mut longer = good.clone();
        longer.push(0);
        assert_eq!(taken(layout, &longer), Err(SparseError::LeftOver { bytes: 1 }));
        let mut strange = good;
        strange[4..12].fill(0xff);
        assert!(taken(layout, &strange).unwrap()[0].1.is_nan());
        let many = CodedLayout::new(8, 64, 5);
        let bytes = u32::MAX.to_le_bytes();
        assert!(matches!(taken(many, &bytes), Err(SparseError::TooMany { elements: 5, .. })));
    }

    proptest! {
        #[test]
        fn values_are_sent_to_half_a_step_with_their_signs(
            numbers in proptest::collection::vec(any::<f32>(), 1..300),
            bits in proptest::sample::select(vec![2_u32, 4, 8]),
            bucket in proptest::sample::select(vec![32_usize, 96, 1_000]),
        ) {
            let values: Vec<f32> = numbers
                .into_iter()
                .map(|it| if it.is_finite() && it != 0.0 { it } else { 1.0 })
                .collect();
            let layout = CodedLayout::new(bits, bucket, values.len());
            let positions: Vec<u32> = (0..values.len() as u32).collect();
            let (bytes, sent) = spelled(layout, &values, &positions);
            let found = taken(layout, &bytes).unwrap();
            let expected: Vec<_> = sent.iter().copied().enumerate().collect();
            prop_assert_eq!(found, expected);
            for (start, values) in values.chunks(bucket).enumerate() {
                let all: Vec<u32> = (0..values.len() as u32).collect();
                let MagnitudeLevels { least, step } = MagnitudeLevels::of(values, &all, bits);
                let levels = f64::from(MagnitudeLevels::count(bits));
                let end = f64::from(least) + levels * f64::from(step);
                for (value, sent) in values.iter().zip(&sent[start * bucket..]) {
                    prop_assert_eq!(value.signum(), sent.signum());
                    let (magnitude, sent) = (f64::from(value.abs()), f64::from(sent.abs()));
                    let error = (magnitude.min(end) - sent).abs();
                    let rounding = (magnitude + end) * 1e-6 + f64::from(STEP_MIN) * levels;
                    prop_assert!(error <= f64::from(step) / 2.0 + rounding, "{} {}", value, sent);
                }
            }
        }
    }
}
