//! Which elements are the largest: exactly, with ties going to the smaller index.
//!
//! Few elements are found in one pass over the values. The maximum of every block of a few
//! elements is kept; the `count`-th largest of these maxima bounds the `count`-th largest element
//! from below, for the largest maxima are as many different elements. Only the blocks that reach
//! the bound, about `count` of them, are looked into. Many elements are found by a histogram of
//! exponents. Both are integer arithmetic on magnitudes: all variants choose the same elements, and
//! infinities and NaN, whose magnitudes are above all finite ones, are chosen first.

use crate::instruction_set::Instructions;
use crate::InstructionSet;

/// Bits of a value's magnitude; they sort as magnitudes do, then infinity, then NaN.
const MAGNITUDE: u32 = 0x7fff_ffff;
/// Elements of a block where less than one in `WIDE_RARITY` is chosen.
const WIDE_BLOCK: usize = 64;
const WIDE_RARITY: usize = 256;
/// Elements of a block where less than one in `NARROW_RARITY` is chosen.
const NARROW_BLOCK: usize = 16;
const NARROW_RARITY: usize = 64;
/// Exponent and four bits of the mantissa: what the histogram tells apart.
const BIN_SHIFT: u32 = 19;
const BINS: usize = (MAGNITUDE >> BIN_SHIFT) as usize + 1;

/// How many of `elements` a ratio selects: rounded up, at least one and never more than there are.
pub(crate) fn count_of(ratio: f64, elements: usize) -> usize {
    let count = (ratio * elements as f64).ceil();
    // A float becomes the nearest integer that there is: no wrapping around.
    (count as usize).max(1).min(elements)
}

/// The magnitude of a value as a number that sorts.
fn magnitude(value: f32) -> u32 {
    value.to_bits() & MAGNITUDE
}

/// The positions of the `count` values of largest magnitude, in increasing order.
///
/// A value is the first of `WIDTH` numbers; the others do not count.
///
/// Of values with the same magnitude those at smaller positions are chosen.
///
/// # Panics
///
/// If there are fewer than `count` values, or more than positions have bits.
pub(crate) fn select<const WIDTH: usize>(
    instruction_set: InstructionSet,
    values: &[[f32; WIDTH]],
    count: usize,
) -> Vec<u32> {
    assert!(count <= values.len(), "{count} of {} values were asked for", values.len());
    assert!(u32::try_from(values.len()).is_ok(), "a slice has fewer than 2^32 elements");
    if count == 0 {
        return Vec::new();
    }
    let candidates = if count.saturating_mul(WIDE_RARITY) <= values.len() {
        reaching_block_bound::<WIDE_BLOCK, WIDTH>(instruction_set, values, count)
    } else if count.saturating_mul(NARROW_RARITY) <= values.len() {
        reaching_block_bound::<NARROW_BLOCK, WIDTH>(instruction_set, values, count)
    } else {
        let least = histogram_bound(values, count);
        let mut found = Vec::with_capacity(count.saturating_add(count / 8));
        keep_reaching(values, 0, least, &mut found);
        found
    };
    largest_of(values, candidates, count)
}

/// Of candidates in increasing order, which hold the `count` largest values, exactly these.
fn largest_of<const WIDTH: usize>(
    values: &[[f32; WIDTH]],
    mut candidates: Vec<u32>,
    count: usize,
) -> Vec<u32> {
    debug_assert!(candidates.len() >= count, "a bound is one from below");
    if candidates.len() == count {
        return candidates;
    }
    let mut magnitudes: Vec<u32> =
        candidates.iter().map(|&at| magnitude(values[at as usize][0])).collect();
    let (larger, &mut least, _) =
        magnitudes.select_nth_unstable_by(count - 1, |one, other| other.cmp(one));
    // As many of those that are equal to the least as there is room for.
    let mut equal_left = count - larger.iter().filter(|&&one| one > least).count();
    candidates.retain(|&at| {
        let own = magnitude(values[at as usize][0]);
        let chosen = own > least || own == least && equal_left > 0;
        if own == least && chosen {
            equal_left -= 1;
        }
        chosen
    });
    candidates
}

/// Positions of values in blocks that reach the `count`-th largest maximum of a block, and that
/// reach it themselves.
fn reaching_block_bound<const BLOCK: usize, const WIDTH: usize>(
    instruction_set: InstructionSet,
    values: &[[f32; WIDTH]],
    count: usize,
) -> Vec<u32> {
    let mut maxima = vec![0; values.len().div_ceil(BLOCK)];
    block_maxima::<BLOCK, WIDTH>(instruction_set, values, &mut maxima);
    let mut ranked = maxima.clone();
    let (_, &mut least, _) = ranked.select_nth_unstable_by(count - 1, |one, other| other.cmp(one));
    let mut found = Vec::with_capacity(2 * count);
    for (block, _) in maxima.iter().enumerate().filter(|(_, &largest)| largest >= least) {
        let start = block * BLOCK;
        let end = values.len().min(start + BLOCK);
        keep_reaching(&values[start..end], start, least, &mut found);
    }
    found
}

/// Appends the positions of values whose magnitude is at least `least`; the first is at `start`.
fn keep_reaching<const WIDTH: usize>(
    values: &[[f32; WIDTH]],
    start: usize,
    least: u32,
    found: &mut Vec<u32>,
) {
    for (at, value) in values.iter().enumerate() {
        if magnitude(value[0]) >= least {
            found.push((start + at) as u32);
        }
    }
}

/// A magnitude that at least `count` values reach, and few more than that.
fn histogram_bound<const WIDTH: usize>(values: &[[f32; WIDTH]], count: usize) -> u32 {
    // Two histograms, since neighbours often fall into one bin and would wait for each other.
    let mut bins = [[0_u32; BINS]; 2];
    let mut pairs = values.chunks_exact(2);
    for pair in &mut pairs {
        bins[0][(magnitude(pair[0][0]) >> BIN_SHIFT) as usize] += 1;
        bins[1][(magnitude(pair[1][0]) >> BIN_SHIFT) as usize] += 1;
    }
    for value in pairs.remainder() {
        bins[0][(magnitude(value[0]) >> BIN_SHIFT) as usize] += 1;
    }
    let mut above = 0;
    for bin in (1..BINS).rev() {
        above += (bins[0][bin] + bins[1][bin]) as usize;
        if above >= count {
            return (bin as u32) << BIN_SHIFT;
        }
    }
    0
}

/// Writes the largest magnitude of each block; the last block may be shorter.
fn block_maxima<const BLOCK: usize, const WIDTH: usize>(
    instruction_set: InstructionSet,
    values: &[[f32; WIDTH]],
    maxima: &mut [u32],
) {
    match instruction_set.instructions() {
        Instructions::Scalar => {
            for (block, largest) in values.chunks(BLOCK).zip(maxima) {
                *largest = block.iter().map(|value| magnitude(value[0])).max().unwrap_or(0);
            }
        }
        #[cfg(target_arch = "x86_64")]
        Instructions::Sse2 => block_maxima_in_lanes::<BLOCK, WIDTH>(values, maxima),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `InstructionSet` exists only where the machine has its instructions.
        Instructions::Avx2 => unsafe { block_maxima_avx2::<BLOCK, WIDTH>(values, maxima) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `InstructionSet` exists only where the machine has its instructions.
        Instructions::Avx512 => unsafe { block_maxima_avx512::<BLOCK, WIDTH>(values, maxima) },
        #[cfg(target_arch = "aarch64")]
        Instructions::Neon => block_maxima_in_lanes::<BLOCK, WIDTH>(values, maxima),
    }
}

/// The loop that the compiler turns into instructions for as many lanes as the caller allows.
#[inline(always)]
fn block_maxima_in_lanes<const BLOCK: usize, const WIDTH: usize>(
    values: &[[f32; WIDTH]],
    maxima: &mut [u32],
) {
    const LANES: usize = 16;
    let mut blocks = values.chunks_exact(BLOCK);
    let mut targets = maxima.iter_mut();
    for (block, target) in (&mut blocks).zip(&mut targets) {
        let mut largest = [0_i32; LANES];
        for lanes in block.chunks_exact(LANES) {
            for (one, value) in largest.iter_mut().zip(lanes) {
                // Magnitudes are positive as signed numbers, whose maximum more machines have.
                *one = (*one).max(magnitude(value[0]) as i32);
            }
        }
        *target = largest.into_iter().fold(0, i32::max) as u32;
    }
    if let Some(target) = targets.next() {
        *target = blocks.remainder().iter().map(|value| magnitude(value[0])).max().unwrap_or(0);
    }
}

/// # Safety
///
/// The machine has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn block_maxima_avx2<const BLOCK: usize, const WIDTH: usize>(
    values: &[[f32; WIDTH]],
    maxima: &mut [u32],
) {
    block_maxima_in_lanes::<BLOCK, WIDTH>(values, maxima);
}

/// # Safety
///
/// The machine has AVX-512F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn block_maxima_avx512<const BLOCK: usize, const WIDTH: usize>(
    values: &[[f32; WIDTH]],
    maxima: &mut [u32],
) {
    block_maxima_in_lanes::<BLOCK, WIDTH>(values, maxima);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// By the definition: sort by magnitude, then by position.
    fn oracle(values: &[f32], count: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..values.len() as u32).collect();
        order.sort_by_key(|&at| (std::cmp::Reverse(magnitude(values[at as usize])), at));
        let mut chosen = order[..count].to_vec();
        chosen.sort_unstable();
        chosen
    }

    fn check(values: &[f32], count: usize) {
        let expected = oracle(values, count);
        for instruction_set in InstructionSet::available() {
            let found = select(instruction_set, values.as_chunks::<1>().0, count);
            assert_eq!(found, expected, "{}", instruction_set.name());
        }
    }

    #[test]
    fn ratios_round_up_and_select_something() {
        assert_eq!(count_of(0.001, 50_000), 50);
        assert_eq!(count_of(0.001, 1), 1);
        assert_eq!(count_of(0.001, 1_001), 2);
        assert_eq!(count_of(1.0, 7), 7);
        assert_eq!(count_of(0.5, 0), 0);
    }

    #[test]
    fn what_is_not_finite_comes_first() {
        let mut values = vec![1.0; 1_000];
        values[999] = f32::NAN;
        values[500] = f32::NEG_INFINITY;
        for instruction_set in InstructionSet::available() {
            assert_eq!(select(instruction_set, values.as_chunks::<1>().0, 2), [500, 999]);
        }
        check(&values, 3);
    }

    #[test]
    fn equal_magnitudes_are_chosen_from_the_front() {
        for count in [1, 2, 63, 64, 65, 999, 1_000] {
            check(&[-2.5; 1_000], count);
            check(&[0.0; 1_000], count);
        }
    }

    #[test]
    fn every_way_of_searching_finds_the_same_as_sorting() {
        let mut rng = 1_u32;
        let values: Vec<f32> = (0..20_011)
            .map(|_| {
                rng = rng.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (rng >> 8) as f32 / 1e6 - 8.0
            })
            .collect();
        for count in [1, 20, 78, 79, 200, 312, 313, 5_000, 20_010, 20_011] {
            check(&values, count);
        }
    }

    proptest! {
        #[test]
        fn any_bits_are_selected_as_by_sorting(
            bits in proptest::collection::vec(any::<u32>(), 1..2_000),
            coarse in any::<bool>(),
            share in 0.0..=1.0_f64,
        ) {
            // Coarse values are often equal.
            let mask = if coarse { 0xc300_0000 } else { u32::MAX };
            let values: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(bits & mask)).collect();
            check(&values, (share * values.len() as f64) as usize);
        }
    }
}
