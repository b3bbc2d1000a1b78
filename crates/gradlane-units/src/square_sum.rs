//! Sums of squares without rounding, for the norm of all gradients.

use alloc::boxed::Box;
use alloc::vec::Vec;

/// Binary digits of a digit.
const DIGIT_BITS: u32 = 32;
/// The sum is an integer times two to the power of this: below the square of the smallest f64.
const LOWEST_EXPONENT: i32 = -2176;
/// Up to 2^2048, the square of the largest f64, with room for 2^96 such summands.
const DIGITS: usize = 135;
/// Additions after which carries have to be passed on: each adds less than 2^32 to a digit.
const CARRY_EVERY: u32 = 1 << 30;
const HEADER_BYTES: usize = 4;
/// A summand was infinite.
const INFINITE: u8 = 1;
/// A summand was not a number.
const NAN: u8 = 2;

/// An exact sum of squares of floating-point numbers: no order of additions changes a bit of it.
///
/// A fixed-point number that is wide enough for every f64 (a superaccumulator: Kulisch, "Very fast and
/// exact accumulation of products", Computing 91, 2011), as digits of 32 bits in 64, so that carries
/// can wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SquareSum {
    digits: Box<[u64; DIGITS]>,
    /// Additions since the last carry.
    additions: u32,
    /// Whether summands were infinite or not numbers: [`INFINITE`], [`NAN`].
    flags: u8,
}

impl Default for SquareSum {
    fn default() -> SquareSum {
        SquareSum { digits: Box::new([0; DIGITS]), additions: 0, flags: 0 }
    }
}

impl SquareSum {
    /// Longest serialized form, in bytes.
    pub const BYTES_MAX: usize = HEADER_BYTES + 4 * DIGITS;
    /// Shortest serialized form, in bytes.
    pub const BYTES_MIN: usize = HEADER_BYTES;

    /// Adds `integer` times two to the power of `exponent`.
    ///
    /// # Panics
    /// When that is no sum of at most 2^22 squares of f64 numbers.
    pub fn add(&mut self, integer: u128, exponent: i32) {
        if integer == 0 {
            return;
        }
        let position = u32::try_from(exponent - LOWEST_EXPONENT).expect("the square of an f64");
        let (mut digit, shift) = ((position / DIGIT_BITS) as usize, position % DIGIT_BITS);
        // Digit by digit: shifted as a whole, it might be longer than 128 bits.
        let first = (integer << shift) as u32;
        let mut rest = integer >> (DIGIT_BITS - shift);
        self.digits[digit] += u64::from(first);
        while rest > 0 {
            digit += 1;
            self.digits[digit] += rest as u64 & u64::from(u32::MAX);
            rest >>= DIGIT_BITS;
        }
        self.additions += 1;
        if self.additions >= CARRY_EVERY {
            self.carry();
        }
    }

    /// Adds the square of a number.
    pub fn add_square_of(&mut self, value: f64) {
        const FRACTION_BITS: u32 = 52;
        let bits = value.to_bits();
        let fraction = bits & ((1 << FRACTION_BITS) - 1);
        let biased = (bits >> FRACTION_BITS) as i32 & 0x7ff;
        if biased == 0x7ff {
            self.flags |= if fraction == 0 { INFINITE } else { NAN };
            return;
        }
        let significand = if biased == 0 { fraction } else { fraction | 1 << FRACTION_BITS };
        let square = u128::from(significand) * u128::from(significand);
        self.add(square, 2 * (biased.max(1) - 1075));
    }

    /// Whether some summand was infinite, and none was not a number.
    #[must_use]
    pub fn is_infinite(&self) -> bool {
        self.flags == INFINITE
    }

    /// Whether some summand was not a number.
    #[must_use]
    pub fn is_nan(&self) -> bool {
        self.flags & NAN != 0
    }

    /// Adds another sum.
    pub fn merge(&mut self, other: &SquareSum) {
        let mut other = other.clone();
        other.carry();
        self.carry();
        for (digit, more) in self.digits.iter_mut().zip(other.digits.iter()) {
            *digit += more;
        }
        self.carry();
        self.flags |= other.flags;
    }

    fn carry(&mut self) {
        let mut carried = 0;
        for digit in self.digits.iter_mut() {
            let whole = *digit + carried;
            *digit = whole & u64::from(u32::MAX);
            carried = whole >> DIGIT_BITS;
        }
        self.additions = 0;
    }

    /// The sum rounded to 53 bits, ties to even: an integer below 2^53, and the exponent of two that
    /// it is to be multiplied with.
    #[must_use]
    pub fn rounded(&self) -> (u64, i32) {
        const BITS: u32 = f64::MANTISSA_DIGITS;
        let mut whole = self.clone();
        whole.carry();
        let Some(top) = whole.digits.iter().rposition(|&digit| digit > 0) else {
            return (0, 0);
        };
        // The top three digits have 65 bits at least.
        let lowest = top.saturating_sub(2);
        let digits = whole.digits[lowest..=top].iter().rev();
        let window = digits.fold(0, |sum: u128, &digit| sum << DIGIT_BITS | u128::from(digit));
        let below = whole.digits[..lowest].iter().any(|&digit| digit > 0);
        let exponent = LOWEST_EXPONENT + lowest as i32 * DIGIT_BITS as i32;
        let length = u128::BITS - window.leading_zeros();
        let Some(dropped) = length.checked_sub(BITS).filter(|&bits| bits > 0) else {
            return (window as u64, exponent);
        };
        let kept = (window >> dropped) as u64;
        let (rest, half) = (window & ((1 << dropped) - 1), 1_u128 << (dropped - 1));
        let is_more = rest > half || rest == half && (below || kept & 1 == 1);
        (kept + u64::from(is_more), exponent + dropped as i32)
    }

    /// As bytes: 1 where a summand was infinite, plus 2 where one was not a number; the number of the
    /// first digit; how many digits there are; 0; the digits, 32 bits each, little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut whole = self.clone();
        whole.carry();
        let first = whole.digits.iter().position(|&digit| digit > 0).unwrap_or(0);
        let end = whole.digits.iter().rposition(|&digit| digit > 0).map_or(first, |last| last + 1);
        let mut bytes = Vec::from([self.flags, first as u8, (end - first) as u8, 0]);
        for &digit in &whole.digits[first..end] {
            bytes.extend_from_slice(&(digit as u32).to_le_bytes());
        }
        bytes
    }

    /// Reads what [`SquareSum::to_bytes`] has written; `None` for anything else.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<SquareSum> {
        let (&[flags, first, count, 0], digits) = bytes.split_first_chunk()? else {
            return None;
        };
        let (first, count) = (usize::from(first), usize::from(count));
        if flags > INFINITE | NAN || digits.len() != 4 * count || first + count > DIGITS {
            return None;
        }
        let mut sum = SquareSum { flags, ..SquareSum::default() };
        for (digit, bytes) in sum.digits[first..].iter_mut().zip(digits.chunks_exact(4)) {
            *digit = u64::from(u32::from_le_bytes(bytes.try_into().ok()?));
        }
        Some(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rng;

    /// Numbers of every size, with long and short significands.
    fn numbers(count: usize, seed: u64) -> Vec<f64> {
        let mut rng = Rng::new(seed);
        let number =
            |bits: u64| f64::from_bits(bits & !(0x7ff << 52) | ((bits >> 3) % 0x7ff) << 52);
        (0..count).map(|_| number(rng.next_u64())).collect()
    }

    fn sum_of(values: impl IntoIterator<Item = f64>) -> SquareSum {
        let mut sum = SquareSum::default();
        values.into_iter().for_each(|value| sum.add_square_of(value));
        sum
    }

    #[test]
    fn neither_order_nor_parts_change_a_bit() {
        for seed in 0..20 {
            let values = numbers(300, seed);
            let whole = sum_of(values.iter().copied()).to_bytes();
            assert_eq!(sum_of(values.iter().rev().copied()).to_bytes(), whole);
            let mut merged = SquareSum::default();
            values.chunks(7).for_each(|part| merged.merge(&sum_of(part.iter().copied())));
            assert_eq!(merged.to_bytes(), whole);
        }
    }

    #[test]
    fn a_single_square_is_rounded_like_the_machine_does() {
        for value in numbers(2_000, 7) {
            // Neither too small nor too large for a square that is a normal number.
            if !(1e-150..1e150).contains(&value.abs()) {
                continue;
            }
            let (integer, exponent) = sum_of([value]).rounded();
            // In two steps: two to the power of the exponent alone may be no f64.
            let half = exponent / 2;
            let scaled = integer as f64 * power_of_two(half) * power_of_two(exponent - half);
            assert_eq!(scaled, value * value, "{value:e}");
        }
    }

    fn power_of_two(exponent: i32) -> f64 {
        f64::from_bits(((exponent + 1023) as u64) << 52)
    }

    #[test]
    fn integers_are_added_exactly() {
        let sum = sum_of((1..=100_000).map(f64::from));
        let exact: u128 = (1..=100_000_u128).map(|it| it * it).sum();
        let (integer, exponent) = sum.rounded();
        assert_eq!(u128::from(integer), exact >> exponent.max(0) << (-exponent).max(0));
    }

    #[test]
    fn ties_go_to_the_even_number() {
        let with = |extra: u128| {
            let mut sum = SquareSum::default();
            sum.add((1 << 54) + extra, 0);
            sum.rounded()
        };
        assert_eq!(with(0), (1 << 52, 2));
        assert_eq!(with(2), (1 << 52, 2), "a tie, the even one below");
        assert_eq!(with(3), ((1 << 52) + 1, 2));
        assert_eq!(with(6), ((1 << 52) + 2, 2), "a tie, the even one above");
        let mut above = SquareSum::default();
        above.add((1 << 54) + 2, 0);
        above.add(1, -2000);
        assert_eq!(above.rounded(), ((1 << 52) + 1, 2), "more than a tie by the smallest part");
    }

    #[test]
    fn what_is_not_finite_stays_so() {
        for (value, is_nan) in
            [(f64::NAN, true), (f64::INFINITY, false), (f64::NEG_INFINITY, false)]
        {
            let sum = sum_of([1.0, value, 2.0]);
            let mut merged = sum_of([3.0]);
            merged.merge(&SquareSum::from_bytes(&sum.to_bytes()).expect("its own bytes"));
            for sum in [sum, merged] {
                assert_eq!((sum.is_nan(), sum.is_infinite()), (is_nan, !is_nan));
            }
        }
        let both = sum_of([f64::INFINITY, f64::NAN]);
        assert!(both.is_nan() && !both.is_infinite());
    }

    #[test]
    fn bytes_are_read_back_and_others_are_refused() {
        for values in [vec![], vec![0.0], vec![5e-324], vec![f64::MAX; 9], numbers(50, 3)] {
            let sum = sum_of(values);
            let bytes = sum.to_bytes();
            assert!((SquareSum::BYTES_MIN..=SquareSum::BYTES_MAX).contains(&bytes.len()));
            assert_eq!(SquareSum::from_bytes(&bytes).map(|it| it.to_bytes()), Some(bytes.clone()));
            assert_eq!(SquareSum::from_bytes(&bytes[..bytes.len() - 1]), None);
        }
        for wrong in
            [&[4, 0, 0, 0][..], &[1, 0, 0, 1], &[1, 135, 1, 0, 0, 0, 0, 0], &[1, 0, 0, 0, 9]]
        {
            assert_eq!(SquareSum::from_bytes(wrong), None, "{wrong:?}");
        }
    }

    use alloc::vec;
}
