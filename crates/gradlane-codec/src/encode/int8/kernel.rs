//! Min-max in wide registers: the same operations as the oracle's, sixteen at a time.

use super::oracle::{code_of, grid_of, Grid};
use super::{CODE_MAX, FRONT_BYTES};
use crate::encode::lanes::{Lanes, Wide, Words, WIDTH};
use crate::encode::source::{Source, AHEAD};

/// Encodes a bucket of at least one value.
///
/// # Safety
///
/// Runs where the instructions of `R` are enabled; the source has `elements` elements.
#[inline(always)]
pub(super) unsafe fn encode<R: Lanes, const N: usize, const KEEP: bool>(
    source: Source<KEEP>,
    elements: usize,
    out: &mut [u8],
) {
    let (front, codes) = out.split_at_mut(FRONT_BYTES);
    assert_eq!(codes.len(), elements, "room for the bucket");
    let mut at = 0;
    // SAFETY: as the caller promises; there is a code for every element.
    unsafe {
        let (least, greatest) = ends::<R, N, KEEP>(source, elements);
        let grid = grid_of(least, greatest);
        front.copy_from_slice(&grid.to_bytes());
        let Grid { least, step, steps_per_value } = grid;
        if least.is_nan() {
            codes.fill(0);
            return;
        }
        let wide_least = Wide::<R, N>::splat(least);
        let wide_step = Wide::splat(step);
        let wide_steps = Wide::splat(steps_per_value);
        // The next bucket, for the search of its ends, which begins at once.
        let ahead = elements + AHEAD;
        while elements - at >= WIDTH {
            source.fetch(at + ahead);
            let wanted = source.wanted(at);
            let steps = Wide::multiply(Wide::subtract(wanted, wide_least), wide_steps);
            // Values lie between the ends, so that codes are in range up to rounding.
            let code = Words::smaller(Wide::rounded(steps), Words::same(CODE_MAX as u32));
            let code = Words::larger(code, Words::same(0));
            let above = Wide::multiply(Wide::of_integers(code), wide_step);
            source.keep(at, wanted, Wide::add(wide_least, above));
            code.store_bytes(codes.as_mut_ptr().add(at));
            at += WIDTH;
        }
        while at < elements {
            let wanted = source.wanted_one(at);
            let code = code_of(grid, wanted);
            codes[at] = code as u8;
            source.keep_one(at, wanted, least + code * step);
            at += 1;
        }
    }
}

/// The key by which bits are ordered as their numbers are, minus zero below zero and NaN at the ends;
/// the key of a key is the number's bits.
#[inline(always)]
fn key_of(bits: i32) -> i32 {
    bits ^ ((bits >> 31) & 0x7fff_ffff)
}

/// The least and the greatest value; both NaN where one is not finite.
#[inline(always)]
unsafe fn ends<R: Lanes, const N: usize, const KEEP: bool>(
    source: Source<KEEP>,
    elements: usize,
) -> (f32, f32) {
    let (mut least, mut greatest) = (i32::MAX, i32::MIN);
    let mut at = 0;
    // SAFETY: as the caller promises.
    unsafe {
        let magnitude = Words::<R, N>::same(0x7fff_ffff);
        let mut lows = Words::same(i32::MAX as u32);
        let mut highs = Words::same(i32::MIN as u32);
        while elements - at >= WIDTH {
            let bits = Wide::words(source.wanted(at));
            let key = Words::xor(bits, Words::and(Words::signs(bits), magnitude));
            lows = Words::smaller(lows, key);
            highs = Words::larger(highs, key);
            at += WIDTH;
        }
        least = least.min(lows.smallest());
        greatest = greatest.max(highs.largest());
        while at < elements {
            let key = key_of(source.wanted_one(at).to_bits() as i32);
            least = least.min(key);
            greatest = greatest.max(key);
            at += 1;
        }
    }
    let number = |key: i32| f32::from_bits(key_of(key) as u32);
    let (least, greatest) = (number(least), number(greatest));
    if least.is_finite() && greatest.is_finite() {
        (least, greatest)
    } else {
        (f32::NAN, f32::NAN)
    }
}

/// Decodes a bucket into `out`, or adds it where `ADD`.
///
/// # Safety
///
/// Runs where the instructions of `R` are enabled.
#[inline(always)]
pub(super) unsafe fn decode<R: Lanes, const N: usize, const ADD: bool>(
    bytes: &[u8],
    out: &mut [f32],
) {
    let (front, codes) = bytes.split_first_chunk::<FRONT_BYTES>().expect("it was checked");
    assert_eq!(codes.len(), out.len(), "the length was checked");
    let [a, b, c, d, e, f, g, h] = *front;
    let (least, step) = (f32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h]));
    let elements = out.len();
    let mut at = 0;
    // SAFETY: as the caller promises; there is a code for every element.
    unsafe {
        let (wide_least, wide_step) = (Wide::<R, N>::splat(least), Wide::splat(step));
        while elements - at >= WIDTH {
            let code = Words::load_bytes(codes.as_ptr().add(at));
            let value = Wide::add(wide_least, Wide::multiply(Wide::of_integers(code), wide_step));
            let to = out.as_mut_ptr().add(at);
            let value = if ADD { Wide::add(Wide::load(to), value) } else { value };
            value.store(to);
            at += WIDTH;
        }
    }
    for (slot, code) in out.iter_mut().zip(codes).skip(at) {
        let value = least + f32::from(*code) * step;
        *slot = if ADD { *slot + value } else { value };
    }
}
