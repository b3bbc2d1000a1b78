//! QSGD in wide registers: the same operations as the oracle's, sixteen at a time.
//!
//! Whole blocks of the layout are done here; what is left of a bucket is done by the oracle's steps.

use super::oracle::{code_of, grid_of, norm2, pack, scale_or_nothing, unpack, value_of};
use super::{Draws, Levels, Norm, Qsgd, SCALE_BYTES};
use crate::encode::draw::{BLOCK, DRAWS};
use crate::encode::lanes::{Lanes, Wide, Words, WIDTH};
use crate::encode::source::{Source, AHEAD};

/// Encodes a bucket of at least one value.
///
/// # Safety
///
/// Runs where the instructions of `R` are enabled; the source has `elements` elements.
#[inline(always)]
pub(super) unsafe fn encode<R: Lanes, const N: usize, const KEEP: bool>(
    qsgd: Qsgd,
    draws: Draws,
    source: Source<KEEP>,
    elements: usize,
    out: &mut [u8],
) {
    assert_eq!(out.len(), qsgd.bytes(elements), "room for the bucket");
    let (scale_bytes, codes) = out.split_at_mut(SCALE_BYTES);
    // SAFETY: as the caller promises; the codes have the room that was checked.
    unsafe {
        let scale = match qsgd.options.norm {
            Norm::Max => largest::<R, N, KEEP>(source, elements),
            Norm::L2 => norm2((0..elements).map(|at| source.wanted_one(at))),
        };
        let scale = scale_or_nothing(scale);
        scale_bytes.copy_from_slice(&scale.to_le_bytes());
        let bucket = Bucket { qsgd, scale, draws, source, elements };
        match (qsgd.options.bits, qsgd.options.levels) {
            _ if scale.is_nan() || scale == 0.0 => bucket.send_nothing(codes),
            (2, Levels::Sign) => bucket.quantize::<R, N, 2, true>(codes),
            (4, Levels::Sign) => bucket.quantize::<R, N, 4, true>(codes),
            (8, Levels::Sign) => bucket.quantize::<R, N, 8, true>(codes),
            (_, Levels::Sign) => bucket.quantize::<R, N, 16, true>(codes),
            (2, Levels::Uniform) => bucket.quantize::<R, N, 2, false>(codes),
            (4, Levels::Uniform) => bucket.quantize::<R, N, 4, false>(codes),
            (8, Levels::Uniform) => bucket.quantize::<R, N, 8, false>(codes),
            (_, Levels::Uniform) => bucket.quantize::<R, N, 16, false>(codes),
        }
    }
}

/// The largest magnitude, as the number whose bits are the largest.
#[inline(always)]
unsafe fn largest<R: Lanes, const N: usize, const KEEP: bool>(
    source: Source<KEEP>,
    elements: usize,
) -> f32 {
    // SAFETY: as the caller promises.
    unsafe {
        let magnitude = Words::<R, N>::same(0x7fff_ffff);
        let mut tops = [Words::<R, N>::same(0); 2];
        let mut at = 0;
        while elements - at >= 2 * WIDTH {
            for (index, top) in tops.iter_mut().enumerate() {
                let bits = Wide::words(source.wanted(at + index * WIDTH));
                *top = Words::larger(*top, Words::and(bits, magnitude));
            }
            at += 2 * WIDTH;
        }
        let mut top = Words::larger(tops[0], tops[1]).largest() as u32;
        while at < elements {
            top = top.max(source.wanted_one(at).abs().to_bits());
            at += 1;
        }
        f32::from_bits(top)
    }
}

/// Sixteen draws of a block.
#[inline(always)]
unsafe fn draw<R: Lanes, const N: usize>(draws: Draws, block: usize) -> Words<R, N> {
    // SAFETY: the caller enables the instructions.
    unsafe {
        let [before, second, third] = draws.key;
        let counter = draws.start.wrapping_add((block * DRAWS) as u32);
        let bits = Words::xor(Words::count_from(counter), Words::same(before));
        let bits = Words::times(Words::xor(bits, bits.right::<17>()), Words::same(Draws::FIRST));
        let bits = Words::plus(bits, Words::same(second));
        let bits = Words::times(Words::xor(bits, bits.right::<11>()), Words::same(Draws::SECOND));
        let bits = Words::plus(bits, Words::same(third));
        let bits = Words::times(Words::xor(bits, bits.right::<15>()), Words::same(Draws::THIRD));
        Words::xor(bits, bits.right::<14>())
    }
}

/// Sixteen numbers between 0 and 1, of bits that stand at the upper end of the mantissa.
#[inline(always)]
unsafe fn uniform<R: Lanes, const N: usize>(bits: Words<R, N>) -> Wide<R, N> {
    // SAFETY: the caller enables the instructions.
    unsafe {
        let bits = Words::and(bits, Words::same(0xffff << 7));
        // One and a half of the last bit drawn: exact, and so is the difference.
        let above_one = Words::or(bits, Words::same(0x3f80_0040));
        Wide::subtract(Wide::of_words(above_one), Wide::splat(1.0))
    }
}

/// What quantizing needs in every lane.
#[derive(Clone, Copy)]
struct Constants<R: Lanes, const N: usize> {
    levels_per_value: Wide<R, N>,
    level: Wide<R, N>,
    half: Wide<R, N>,
}

/// Codes of sixteen values from `at` on, by sixteen numbers between 0 and 1.
#[inline(always)]
unsafe fn codes_at<
    R: Lanes,
    const N: usize,
    const KEEP: bool,
    const BITS: u32,
    const SIGN: bool,
>(
    constants: Constants<R, N>,
    source: Source<KEEP>,
    at: usize,
    uniform: Wide<R, N>,
) -> Words<R, N> {
    let Constants { levels_per_value, level, half } = constants;
    // SAFETY: as the caller promises. With a scale that is at least every magnitude, up to rounding,
    // the levels are within the range of i32.
    unsafe {
        let wanted = source.wanted(at);
        let levels = Wide::multiply(wanted, levels_per_value);
        if SIGN {
            let largest = (1 << (BITS - 1)) - 1;
            let sign = Words::and(Wide::words(levels), Words::same(1 << 31));
            let signed = Wide::of_words(Words::or(Wide::words(uniform), sign));
            let code = Wide::truncated(Wide::add(levels, signed));
            let code = Words::smaller(code, Words::same(largest));
            let code = Words::larger(code, Words::same(largest.wrapping_neg()));
            source.keep(at, wanted, Wide::multiply(Wide::of_integers(code), level));
            Words::plus(code, Words::same(largest))
        } else {
            let code = Wide::truncated(Wide::add(Wide::add(levels, half), uniform));
            let code = Words::smaller(code, Words::same((1 << BITS) - 1));
            let code = Words::larger(code, Words::same(0));
            let steps = Wide::subtract(Wide::of_integers(code), half);
            source.keep(at, wanted, Wide::multiply(steps, level));
            code
        }
    }
}

/// A bucket with its scale, as it is sent.
#[derive(Clone, Copy)]
struct Bucket<const KEEP: bool> {
    qsgd: Qsgd,
    scale: f32,
    draws: Draws,
    source: Source<KEEP>,
    elements: usize,
}

impl<const KEEP: bool> Bucket<KEEP> {
    /// Writes the codes of a bucket whose scale is zero or NaN.
    #[cold]
    #[inline(never)]
    unsafe fn send_nothing(self, codes: &mut [u8]) {
        let Bucket { qsgd, scale, source, elements, .. } = self;
        codes.fill(0);
        for at in 0..elements {
            pack(qsgd.options.bits, elements, at, qsgd.code_of_nothing, codes);
            if !scale.is_nan() {
                // SAFETY: as the caller promises.
                unsafe {
                    let sent = value_of(qsgd, scale, qsgd.code_of_nothing);
                    source.keep_one(at, source.wanted_one(at), sent);
                }
            }
        }
    }

    /// Writes the codes of a bucket whose scale is a positive number.
    #[inline(always)]
    unsafe fn quantize<R: Lanes, const N: usize, const BITS: u32, const SIGN: bool>(
        self,
        codes: &mut [u8],
    ) {
        let Bucket { qsgd, scale, draws, source, elements } = self;
        let grid = grid_of(qsgd, scale);
        let step = BLOCK.max(WIDTH * 8 / BITS as usize);
        // The next bucket, for its search of the largest magnitude.
        let ahead = elements.max(AHEAD);
        let mut at = 0;
        // SAFETY: as the caller promises; every block is in range of values and codes.
        unsafe {
            let constants = Constants::<R, N> {
                levels_per_value: Wide::splat(grid.levels_per_value),
                level: Wide::splat(grid.level),
                half: Wide::splat(qsgd.half),
            };
            let codes_of = |at: usize, drawn: Words<R, N>| {
                codes_at::<R, N, KEEP, BITS, SIGN>(constants, source, at, uniform(drawn))
            };
            while elements - at >= step {
                for lane in (0..step).step_by(WIDTH) {
                    source.fetch(at + lane + ahead);
                }
                let to = codes.as_mut_ptr().add(at * BITS as usize / 8);
                let mut packed = Words::same(0);
                for block in 0..step / BLOCK {
                    let start = at + block * BLOCK;
                    let drawn = draw::<R, N>(draws, start / BLOCK);
                    let low = codes_of(start, drawn.left::<7>());
                    let high = codes_of(start + WIDTH, drawn.right::<9>());
                    match BITS {
                        2 if block == 0 => packed = Words::or(low, high.left::<2>()),
                        2 => {
                            let upper = Words::or(low.left::<4>(), high.left::<6>());
                            packed = Words::or(packed, upper);
                        }
                        4 => packed = Words::or(low, high.left::<4>()),
                        8 => {
                            low.store_bytes(to);
                            high.store_bytes(to.add(WIDTH));
                        }
                        _ => {
                            low.store_pairs(to);
                            high.store_pairs(to.add(2 * WIDTH));
                        }
                    }
                }
                if BITS < 8 {
                    packed.store_bytes(to);
                }
                at += step;
            }
            codes[at * BITS as usize / 8..].fill(0);
            while at < elements {
                let wanted = source.wanted_one(at);
                let code = code_of(qsgd, grid, wanted, draws.uniform(at));
                pack(BITS, elements, at, code, codes);
                source.keep_one(at, wanted, value_of(qsgd, scale, code));
                at += 1;
            }
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
    qsgd: Qsgd,
    bytes: &[u8],
    out: &mut [f32],
) {
    assert_eq!(bytes.len(), qsgd.bytes(out.len()), "the length was checked");
    // SAFETY: as the caller promises.
    unsafe {
        match qsgd.options.bits {
            2 => values::<R, N, ADD, 2>(qsgd, bytes, out),
            4 => values::<R, N, ADD, 4>(qsgd, bytes, out),
            8 => values::<R, N, ADD, 8>(qsgd, bytes, out),
            _ => values::<R, N, ADD, 16>(qsgd, bytes, out),
        }
    }
}

#[inline(always)]
unsafe fn values<R: Lanes, const N: usize, const ADD: bool, const BITS: u32>(
    qsgd: Qsgd,
    bytes: &[u8],
    out: &mut [f32],
) {
    let (scale, codes) = bytes.split_first_chunk::<SCALE_BYTES>().expect("the length was checked");
    let scale = f32::from_le_bytes(*scale);
    let elements = out.len();
    let per_byte = if BITS < 8 { 8 / BITS as usize } else { 1 };
    let step = WIDTH * per_byte;
    let mut at = 0;
    // SAFETY: as the caller promises; every block is in range of values and codes.
    unsafe {
        let level = Wide::<R, N>::splat(scale / qsgd.half);
        let half = Wide::splat(qsgd.half);
        let set = |at: usize, code: Words<R, N>, out: &mut [f32]| {
            let to = out.as_mut_ptr().add(at);
            let value = Wide::multiply(Wide::subtract(Wide::of_integers(code), half), level);
            let value = if ADD { Wide::add(Wide::load(to), value) } else { value };
            value.store(to);
        };
        while elements - at >= step {
            let from = codes.as_ptr().add(at * BITS as usize / 8);
            if BITS == 16 {
                set(at, Words::load_pairs(from), out);
            } else {
                let packed = Words::load_bytes(from);
                let lowest = Words::same((1 << BITS) - 1);
                match BITS {
                    2 => {
                        set(at, Words::and(packed, lowest), out);
                        set(at + WIDTH, Words::and(packed.right::<2>(), lowest), out);
                        set(at + 2 * WIDTH, Words::and(packed.right::<4>(), lowest), out);
                        set(at + 3 * WIDTH, packed.right::<6>(), out);
                    }
                    4 => {
                        set(at, Words::and(packed, lowest), out);
                        set(at + WIDTH, packed.right::<4>(), out);
                    }
                    _ => set(at, packed, out),
                }
            }
            at += step;
        }
    }
    for (at, slot) in out.iter_mut().enumerate().skip(at) {
        let value = value_of(qsgd, scale, unpack(BITS, elements, at, codes));
        *slot = if ADD { *slot + value } else { value };
    }
}
