//! 1-bit SGD in wide registers: the same operations as the oracle's, sixteen at a time.
//!
//! Bits are written while the averages are summed up; only a residual asks for a second pass.

use super::{average, AVERAGES_BYTES, RUN};
use crate::encode::bucket_quantizer::in_pairs;
use crate::encode::lanes::{Lanes, Mask, Wide, WIDTH};
use crate::encode::source::{Source, AHEAD};

/// Bytes of the bits of sixteen values.
const BITS_BYTES: usize = WIDTH / 8;

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
    let (front, bits) = out.split_at_mut(AVERAGES_BYTES);
    assert_eq!(bits.len(), elements.div_ceil(8), "room for the bucket");
    // SAFETY: as the caller promises; the bits have the room that was checked.
    unsafe {
        let (plus, minus) = signs_and_averages::<R, N, KEEP>(source, elements, bits);
        front[..4].copy_from_slice(&plus.to_le_bytes());
        front[4..].copy_from_slice(&minus.to_le_bytes());
        if plus.is_nan() {
            bits.fill(0);
        } else if KEEP {
            keep::<R, N, KEEP>(source, elements, bits, plus, minus);
        }
    }
}

/// Writes the bits and gives both averages, or NaN twice.
#[inline(always)]
unsafe fn signs_and_averages<R: Lanes, const N: usize, const KEEP: bool>(
    source: Source<KEEP>,
    elements: usize,
    bits: &mut [u8],
) -> (f32, f32) {
    let (mut plus, mut minus) = (0.0_f64, 0.0_f64);
    let mut count = 0;
    let mut start = 0;
    // SAFETY: as the caller promises.
    unsafe {
        let zero = Wide::<R, N>::splat(0.0);
        while start < elements {
            let end = elements.min(start + RUN);
            let (mut plus_lanes, mut minus_lanes) = (zero, zero);
            let mut at = start;
            while end - at >= WIDTH {
                source.fetch(at + AHEAD);
                let wanted = source.wanted::<R, N>(at);
                let mask = Wide::not_negative(wanted);
                plus_lanes = Wide::add(plus_lanes, Wide::select(mask, wanted, zero));
                minus_lanes = Wide::add(minus_lanes, Wide::select(mask, zero, wanted));
                let sixteen = mask.bits();
                count += sixteen.count_ones() as usize;
                let to = bits.as_mut_ptr().add(at / 8);
                to.cast::<[u8; BITS_BYTES]>().write(sixteen.to_le_bytes());
                at += WIDTH;
            }
            if at == end {
                plus += f64::from(plus_lanes.in_pairs());
                minus += f64::from(minus_lanes.in_pairs());
            } else {
                let (mut plus_lanes, mut minus_lanes) = (plus_lanes.lanes(), minus_lanes.lanes());
                // Only the last run has fewer than sixteen values left.
                bits[at / 8..].fill(0);
                for (lane, at) in (at..end).enumerate() {
                    let wanted = source.wanted_one(at);
                    if wanted >= 0.0 {
                        plus_lanes[lane] += wanted;
                        bits[at / 8] |= 1 << (at % 8);
                        count += 1;
                    } else {
                        minus_lanes[lane] += wanted;
                    }
                }
                plus += f64::from(in_pairs(plus_lanes));
                minus += f64::from(in_pairs(minus_lanes));
            }
            start = end;
        }
    }
    if plus.is_finite() && minus.is_finite() {
        (average(plus, count), average(minus, elements - count))
    } else {
        (f32::NAN, f32::NAN)
    }
}

/// Sixteen bits of the value at `at` and those after it.
#[inline(always)]
unsafe fn sixteen_bits(bits: &[u8], at: usize) -> u16 {
    // SAFETY: the caller promises that they are there.
    unsafe { u16::from_le_bytes(bits.as_ptr().add(at / 8).cast::<[u8; BITS_BYTES]>().read()) }
}

/// Keeps what the averages leave of every value.
#[inline(always)]
unsafe fn keep<R: Lanes, const N: usize, const KEEP: bool>(
    source: Source<KEEP>,
    elements: usize,
    bits: &[u8],
    plus: f32,
    minus: f32,
) {
    let mut at = 0;
    // SAFETY: as the caller promises; there is a bit for every element.
    unsafe {
        let (wide_plus, wide_minus) = (Wide::<R, N>::splat(plus), Wide::splat(minus));
        while elements - at >= WIDTH {
            let mask = Mask::of_bits(sixteen_bits(bits, at));
            source.keep(at, source.wanted(at), Wide::select(mask, wide_plus, wide_minus));
            at += WIDTH;
        }
        while at < elements {
            let wanted = source.wanted_one(at);
            source.keep_one(at, wanted, if wanted >= 0.0 { plus } else { minus });
            at += 1;
        }
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
    let (front, bits) = bytes.split_first_chunk::<AVERAGES_BYTES>().expect("it was checked");
    assert_eq!(bits.len(), out.len().div_ceil(8), "the length was checked");
    let [a, b, c, d, e, f, g, h] = *front;
    let (plus, minus) = (f32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h]));
    let elements = out.len();
    let mut at = 0;
    // SAFETY: as the caller promises; there is a bit for every element.
    unsafe {
        let (wide_plus, wide_minus) = (Wide::<R, N>::splat(plus), Wide::splat(minus));
        while elements - at >= WIDTH {
            let mask = Mask::of_bits(sixteen_bits(bits, at));
            let value = Wide::select(mask, wide_plus, wide_minus);
            let to = out.as_mut_ptr().add(at);
            let value = if ADD { Wide::add(Wide::load(to), value) } else { value };
            value.store(to);
            at += WIDTH;
        }
    }
    for (at, slot) in out.iter_mut().enumerate().skip(at) {
        let value = if bits[at / 8] >> (at % 8) & 1 == 1 { plus } else { minus };
        *slot = if ADD { *slot + value } else { value };
    }
}
