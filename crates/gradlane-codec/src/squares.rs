//! Exact sums of squares, for the norm of all gradients.
//!
//! The square of an f32 has 48 bits at most, and is exact as an f64. A block's squares are split at one place
//! for all of them, by adding and subtracting a number so large that it leaves the higher bits (Rump,
//! Ogita and Oishi, "Accurate floating-point summation", SIAM J. Sci. Comput. 31, 2008): sums of
//! the higher and of the lower parts are exact f64 numbers, and go into the wide [`SquareSum`].

#[cfg(target_arch = "x86_64")]
use crate::instruction_set::Instructions;
use crate::{FloatDtype, InstructionSet};
use gradlane_units::SquareSum;
use half::{bf16, f16};

/// Values whose squares are added up as f64 numbers.
const BLOCK: usize = 256;
/// Higher parts of squares are multiples of two to the power of twice the largest exponent minus this:
/// 256 of them, each below four, stay below 2^53 such units.
const HIGH_BITS: i32 = 42;
/// Lower parts are such multiples: 256 of them, each below half a unit of the higher ones, stay below
/// 2^53 units as well.
const LOW_BITS: i32 = 88;
/// Squares of values with exponents within so many of the largest one end above the lowest unit:
/// the last bit of a square is at twice the exponent minus 46.
const EXPONENTS: i32 = (LOW_BITS - 46) / 2;
const SIGN: u32 = 1 << 31;

/// Returns the exact sum of the squares of elements. Infinities and NaN are noted in it.
///
/// `bytes` are whole elements, in the machine's order, at any alignment; bytes beyond the last whole
/// element are left out.
#[must_use]
pub fn square_sum(dtype: FloatDtype, bytes: &[u8]) -> SquareSum {
    square_sum_with(InstructionSet::active(), dtype, bytes)
}

fn square_sum_with(instruction_set: InstructionSet, dtype: FloatDtype, bytes: &[u8]) -> SquareSum {
    match instruction_set.instructions() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `InstructionSet` exists only where the machine has its instructions.
        Instructions::Avx2 => unsafe { square_sum_avx2(dtype, bytes) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `InstructionSet` exists only where the machine has its instructions.
        Instructions::Avx512 => unsafe { square_sum_avx512(dtype, bytes) },
        _ => square_sum_in_lanes(dtype, bytes),
    }
}

/// # Safety
///
/// The machine has AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn square_sum_avx2(dtype: FloatDtype, bytes: &[u8]) -> SquareSum {
    square_sum_in_lanes(dtype, bytes)
}

/// # Safety
///
/// The machine has AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn square_sum_avx512(dtype: FloatDtype, bytes: &[u8]) -> SquareSum {
    square_sum_in_lanes(dtype, bytes)
}

#[inline(always)]
fn square_sum_in_lanes(dtype: FloatDtype, bytes: &[u8]) -> SquareSum {
    let mut sum = SquareSum::default();
    match dtype {
        FloatDtype::F32 => add_singles(&mut sum, bytes.as_chunks().0, f32::from_ne_bytes),
        FloatDtype::Bf16 => {
            let widen = |element| bf16::from_ne_bytes(element).to_f32();
            add_singles(&mut sum, bytes.as_chunks().0, widen);
        }
        FloatDtype::F16 => {
            let widen = |element| f16::from_ne_bytes(element).to_f32();
            add_singles(&mut sum, bytes.as_chunks().0, widen);
        }
        FloatDtype::F64 => {
            for &element in bytes.as_chunks().0 {
                sum.add_square_of(f64::from_ne_bytes(element));
            }
        }
    }
    sum
}

/// Adds the squares of elements that are f32 numbers.
#[inline(always)]
fn add_singles<const N: usize>(
    sum: &mut SquareSum,
    elements: &[[u8; N]],
    value: impl Fn([u8; N]) -> f32,
) {
    let (blocks, rest) = elements.as_chunks::<BLOCK>();
    let mut values = [0.0; BLOCK];
    for block in blocks {
        for (to, &element) in values.iter_mut().zip(block) {
            *to = value(element);
        }
        add_block(sum, &values);
    }
    values = [0.0; BLOCK];
    for (to, &element) in values.iter_mut().zip(rest) {
        *to = value(element);
    }
    add_block(sum, &values);
}

/// Adds the squares of a block.
#[inline(always)]
fn add_block(sum: &mut SquareSum, values: &[f32; BLOCK]) {
    let magnitudes = || values.iter().map(|value| value.to_bits() & !SIGN);
    let largest = magnitudes().fold(0, u32::max);
    // A zero has no last bit: it becomes the largest number.
    let smallest = magnitudes().fold(u32::MAX, |least, bits| least.min(bits.wrapping_sub(1)));
    if largest == 0 {
        return;
    }
    let top = exponent(largest);
    if top > f32::MAX_EXP - 1 {
        values.iter().for_each(|&value| sum.add_square_of(f64::from(value)));
    } else if exponent(smallest.saturating_add(1)) < top - EXPONENTS {
        add_apart(sum, values, top);
    } else {
        add_alike(sum, values, top);
    }
}

/// Adds the squares of a block whose values are too unlike: the small ones make a block of their own.
#[cold]
fn add_apart(sum: &mut SquareSum, values: &[f32; BLOCK], top: i32) {
    let is_small = |value: f32| exponent(value.to_bits() & !SIGN) < top - EXPONENTS;
    add_alike(sum, &values.map(|value| if is_small(value) { 0.0 } else { value }), top);
    let small = values.map(|value| if is_small(value) { value } else { 0.0 });
    add_block(sum, &small);
}

/// The exponent of a number's first bit; of the smallest normal one, where there is none.
fn exponent(bits: u32) -> i32 {
    (bits >> 23).max(1) as i32 - 127
}

/// Adds the squares of values whose exponents are `top` or little less.
#[inline(always)]
fn add_alike(sum: &mut SquareSum, values: &[f32; BLOCK], top: i32) {
    let (high_unit, low_unit) = (2 * top - HIGH_BITS, 2 * top - LOW_BITS);
    let splitter = 1.5 * power_of_two(high_unit + 52);
    let (mut high, mut low) = ([0.0; BLOCK], [0.0; BLOCK]);
    for ((high, low), &value) in high.iter_mut().zip(&mut low).zip(values) {
        let square = f64::from(value) * f64::from(value);
        let multiple = (square + splitter) - splitter;
        *high = multiple;
        *low = square - multiple;
    }
    let units = |parts: &[f64; BLOCK], unit: i32| (added_up(parts) * power_of_two(-unit)) as i128;
    // Lower parts may be negative; all together they are not.
    let whole = (units(&high, high_unit) << (LOW_BITS - HIGH_BITS)) + units(&low, low_unit);
    sum.add(whole.unsigned_abs(), low_unit);
}

/// The sum of numbers that add up exactly, in any order: row by row, as registers do it.
#[inline(always)]
fn added_up(parts: &[f64; BLOCK]) -> f64 {
    let mut sums = [0.0; 16];
    for row in parts.as_chunks::<16>().0 {
        for (sum, part) in sums.iter_mut().zip(row) {
            *sum += part;
        }
    }
    sums.iter().sum()
}

fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradlane_units::Rng;

    /// The same sum, one number after the other.
    fn oracle(values: impl Iterator<Item = f64>) -> SquareSum {
        let mut sum = SquareSum::default();
        values.for_each(|value| sum.add_square_of(value));
        sum
    }

    #[test]
    fn every_dtype_gives_the_sum_of_its_values() {
        let mut rng = Rng::new(5);
        for count in [0, 1, 3, 4, 5, 1_000, 70 * BLOCK + 7] {
            let bytes: Vec<u8> = (0..8 * count).map(|_| rng.next_u64() as u8).collect();
            let halves = || bytes.chunks_exact(2).map(|it| [it[0], it[1]]);
            let f16s = halves().map(|it| f16::from_ne_bytes(it).to_f64());
            let bf16s = halves().map(|it| half::bf16::from_ne_bytes(it).to_f64());
            let f32s = bytes.as_chunks().0.iter().map(|&it| f64::from(f32::from_ne_bytes(it)));
            let f64s = bytes.as_chunks().0.iter().map(|&it| f64::from_ne_bytes(it));
            let same = |dtype, sum: SquareSum| {
                for instruction_set in InstructionSet::available() {
                    let found = square_sum_with(instruction_set, dtype, &bytes);
                    assert_eq!(
                        found.to_bytes(),
                        sum.to_bytes(),
                        "{dtype:?}, {}",
                        instruction_set.name()
                    );
                }
            };
            same(FloatDtype::F16, oracle(f16s));
            same(FloatDtype::Bf16, oracle(bf16s));
            same(FloatDtype::F32, oracle(f32s));
            same(FloatDtype::F64, oracle(f64s));
        }
    }

    fn same_as_one_by_one(values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|it| it.to_ne_bytes()).collect();
        let expected = oracle(values.iter().map(|&it| f64::from(it)));
        for instruction_set in InstructionSet::available() {
            let found = square_sum_with(instruction_set, FloatDtype::F32, &bytes);
            let (name, first) = (instruction_set.name(), &values[..values.len().min(4)]);
            assert_eq!(found.to_bytes(), expected.to_bytes(), "{name}: {first:?}");
        }
    }

    #[test]
    fn extremes_fit() {
        let smallest = f32::from_bits(1);
        let almost = f32::from_bits((1 << 23) - 1);
        for value in [f32::MAX, smallest, almost, f32::MIN_POSITIVE, -f32::MAX, 1.0, f32::EPSILON] {
            same_as_one_by_one(&[value; 3 * BLOCK + 1]);
            for other in [f32::MAX, smallest, almost, f32::MIN_POSITIVE, 1.0, 0.0, -0.0] {
                let mixed: Vec<f32> = (0..700).map(|n| [value, other][n % 2]).collect();
                same_as_one_by_one(&mixed);
            }
        }
    }

    #[test]
    fn values_around_the_bounds_of_a_block_are_exact() {
        let mut rng = Rng::new(11);
        for spread in [1, 20, 21, 22, 23, 43, 60, 120] {
            for top in [-120, -100, 0, 100, 127] {
                let value = |_| {
                    let exponent = (top - rng.below(spread) as i32).max(-127);
                    let bits = rng.next_u64() as u32 & (SIGN | 0x7f_ffff);
                    bits | ((exponent + 127) as u32) << 23
                };
                let values: Vec<f32> = (0..600).map(value).map(f32::from_bits).collect();
                same_as_one_by_one(&values);
            }
        }
    }

    #[test]
    fn infinities_and_nan_are_noted() {
        for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let bytes: Vec<u8> = [1.0, value].iter().flat_map(|it| it.to_ne_bytes()).collect();
            let sum = square_sum(FloatDtype::F32, &bytes);
            assert_eq!((sum.is_nan(), sum.is_infinite()), (value.is_nan(), !value.is_nan()));
        }
    }
}
