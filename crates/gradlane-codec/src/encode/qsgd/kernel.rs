//! Encoding QSGD in wide registers: the same operations as the oracle's, sixteen at a time.
//!
//! Whole blocks of the layout are done here; what is left of a bucket is done by the oracle's steps.

use super::oracle::{code_of, grid_of, norm2, pack, scale_or_nothing, value_of};
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
        let scale = scale_of::<R, N, KEEP>(qsgd, source, elements);
        scale_bytes.copy_from_slice(&scale.to_le_bytes());
        quantize::<R, N, KEEP>(qsgd, draws, source, elements, scale, codes);
    }
}

/// The scale of a bucket, as it is sent.
///
/// # Safety
///
/// As for [`encode`].
#[inline(always)]
pub(super) unsafe fn scale_of<R: Lanes, const N: usize, const KEEP: bool>(
    qsgd: Qsgd,
    source: Source<KEEP>,
    elements: usize,
) -> f32 {
    // SAFETY: as the caller promises.
    scale_or_nothing(unsafe {
        match qsgd.options.norm {
            Norm::Max => largest::<R, N, KEEP>(source, elements),
            Norm::L2 => norm2((0..elements).map(|at| source.wanted_one(at))),
        }
    })
}

/// Writes the codes of a bucket to a scale that is at least every magnitude, zero or NaN.
///
/// # Safety
///
/// As for [`encode`].
#[inline(always)]
pub(super) unsafe fn quantize<R: Lanes, const N: usize, const KEEP: bool>(
    qsgd: Qsgd,
    draws: Draws,
    source: Source<KEEP>,
    elements: usize,
    scale: f32,
    codes: &mut [u8],
) {
    let bytes = (elements * qsgd.options.bits as usize).div_ceil(8);
    assert_eq!(codes.len(), bytes, "room for the codes");
    // SAFETY: as the caller promises; the codes have the room that was checked.
    unsafe {
        let bucket = Bucket { qsgd, scale, draws, source, elements };
        macro_rules! apart {
            ($bits:literal, $sign:literal) => {
                R::apart(
                    #[inline(always)]
                    || bucket.quantize::<R, N, $bits, $sign>(codes),
                )
            };
        }
        match (qsgd.options.bits, qsgd.options.levels) {
            _ if scale.is_nan() || scale == 0.0 => bucket.send_nothing(codes),
            (2, Levels::Sign) => apart!(2, true),
            (4, Levels::Sign) => apart!(4, true),
            (8, Levels::Sign) => apart!(8, true),
            (_, Levels::Sign) => apart!(16, true),
            (1, _) => apart!(1, false),
            (2, _) => apart!(2, false),
            (4, _) => apart!(4, false),
            (8, _) => apart!(8, false),
            _ => apart!(16, false),
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

/// Sixteen draws for each of some blocks.
///
/// The rounds of all blocks go on together: a single draw is one long chain of dependent operations.
#[inline(always)]
unsafe fn draw<R: Lanes, const N: usize, const BLOCKS: usize>(
    draws: Draws,
    first: usize,
) -> [Words<R, N>; BLOCKS] {
    // SAFETY: the caller enables the instructions.
    unsafe {
        let [before, second, third] = draws.key.map(|word| Words::same(word));
        let counters = Words::count_from(draws.start.wrapping_add((first * DRAWS) as u32));
        let mut all = [before; BLOCKS];
        for (block, bits) in all.iter_mut().enumerate() {
            let counters = Words::plus(counters, Words::same((block * DRAWS) as u32));
            *bits = Words::xor(counters, before);
        }
        for bits in &mut all {
            let mixed = Words::xor(*bits, bits.right::<17>());
            *bits = Words::plus(Words::times(mixed, Words::same(Draws::FIRST)), second);
        }
        for bits in &mut all {
            let mixed = Words::xor(*bits, bits.right::<11>());
            *bits = Words::plus(Words::times(mixed, Words::same(Draws::SECOND)), third);
        }
        for bits in &mut all {
            let mixed = Words::xor(*bits, bits.right::<15>());
            *bits = Words::times(mixed, Words::same(Draws::THIRD));
        }
        for bits in &mut all {
            *bits = Words::xor(*bits, bits.right::<14>());
        }
        all
    }
}

/// Sixteen numbers between 0 and 1, of bits that stand at the upper end of the mantissa.
#[inline(always)]
unsafe fn uniform<R: Lanes, const N: usize>(bits: Words<R, N>) -> Wide<R, N> {
    // SAFETY: the caller enables the instructions.
    unsafe {
        let bits = Words::and(bits, Words::same(0xffff << 7));
        // Half of the last bit drawn on top: exact, and so is the difference.
        let above_one = Words::or(bits, Words::same(0x3f80_0040));
        Wide::subtract(Wide::of_words(above_one), Wide::splat(1.0))
    }
}

/// Codes of more bits are clamped. With fewer, what rounding adds to the largest value (2^-22 of `h`)
/// is less than what the largest random number lacks to 1 (2^-17): a code is never out of range.
const CLAMPED_ABOVE: u32 = 4;

/// Whether bytes are made of signed codes by packing, which clamps on the way.
const fn packs_signed(bits: u32, sign: bool) -> bool {
    bits == 8 && sign
}

/// The constants of quantizing, in every lane.
#[derive(Clone, Copy)]
struct Constants<R: Lanes, const N: usize> {
    levels_per_value: Wide<R, N>,
    level: Wide<R, N>,
    half: Wide<R, N>,
}

/// Codes of sixteen values from `at` on, by sixteen numbers between 0 and 1; where [`packs_signed`],
/// signed ones, which only a residual asks to be clamped here.
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
            let mut code = Wide::truncated(Wide::add(levels, signed));
            if BITS > CLAMPED_ABOVE && (KEEP || !packs_signed(BITS, SIGN)) {
                code = Words::smaller(code, Words::same(largest));
                code = Words::larger(code, Words::same(largest.wrapping_neg()));
            }
            source.keep(at, wanted, Wide::multiply(Wide::of_integers(code), level));
            if packs_signed(BITS, SIGN) {
                code
            } else {
                Words::plus(code, Words::same(largest))
            }
        } else {
            let mut code = Wide::truncated(Wide::add(Wide::add(levels, half), uniform));
            if BITS > CLAMPED_ABOVE {
                code = Words::smaller(code, Words::same((1 << BITS) - 1));
                code = Words::larger(code, Words::same(0));
            }
            let steps = Wide::subtract(Wide::of_integers(code), half);
            source.keep(at, wanted, Wide::multiply(steps, level));
            code
        }
    }
}

/// Blocks whose draws are made together.
const MANY: usize = 4;

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
        let Bucket { qsgd, scale, elements, .. } = self;
        let grid = grid_of(qsgd, scale);
        let mut at = 0;
        // SAFETY: as the caller promises; every block is in range of values and codes.
        unsafe {
            let constants = Constants::<R, N> {
                levels_per_value: Wide::splat(grid.levels_per_value),
                level: Wide::splat(grid.level),
                half: Wide::splat(qsgd.half),
            };
            // Uniform levels are the rarer choice, and every body takes its time to compile.
            while SIGN && elements - at >= MANY * BLOCK {
                self.blocks::<R, N, BITS, SIGN, MANY>(constants, at, codes);
                at += MANY * BLOCK;
            }
            if BITS == 1 {
                while elements - at >= 4 * BLOCK {
                    self.blocks::<R, N, BITS, SIGN, 4>(constants, at, codes);
                    at += 4 * BLOCK;
                }
            } else if BITS == 2 {
                while elements - at >= 2 * BLOCK {
                    self.blocks::<R, N, BITS, SIGN, 2>(constants, at, codes);
                    at += 2 * BLOCK;
                }
            } else {
                while elements - at >= BLOCK {
                    self.blocks::<R, N, BITS, SIGN, 1>(constants, at, codes);
                    at += BLOCK;
                }
            }
            if at < elements {
                self.rest(at, codes);
            }
        }
    }

    /// Writes the codes of the values from `at` on, one after another.
    #[inline(never)]
    unsafe fn rest(self, at: usize, codes: &mut [u8]) {
        let Bucket { qsgd, scale, draws, source, elements } = self;
        let grid = grid_of(qsgd, scale);
        let bits = qsgd.options.bits;
        codes[at * bits as usize / 8..].fill(0);
        for at in at..elements {
            // SAFETY: as the caller promises.
            unsafe {
                let wanted = source.wanted_one(at);
                let code = code_of(qsgd, grid, wanted, draws.uniform(at));
                pack(bits, elements, at, code, codes);
                source.keep_one(at, wanted, value_of(qsgd, scale, code));
            }
        }
    }

    /// Writes the codes of some blocks from `at` on; of two bits, two blocks share bytes, and of one
    /// bit four.
    #[inline(always)]
    unsafe fn blocks<
        R: Lanes,
        const N: usize,
        const BITS: u32,
        const SIGN: bool,
        const BLOCKS: usize,
    >(
        self,
        constants: Constants<R, N>,
        at: usize,
        codes: &mut [u8],
    ) {
        let Bucket { draws, source, elements, .. } = self;
        // The next bucket is fetched, for its search of the largest magnitude, which begins at once: what
        // it reads last has to be asked for before.
        let ahead = elements + AHEAD;
        // SAFETY: as the caller promises; the blocks are in range of values and codes.
        unsafe {
            let drawn = draw::<R, N, BLOCKS>(draws, at / BLOCK);
            // Of two and four bits, two times sixteen bytes are written together.
            let mut packed = Words::same(0);
            let mut bytes_before = Words::same(0);
            for (block, drawn) in drawn.into_iter().enumerate() {
                let start = at + block * BLOCK;
                source.fetch(start + ahead);
                source.fetch(start + ahead + WIDTH);
                let codes_of = |at: usize, drawn: Words<R, N>| {
                    codes_at::<R, N, KEEP, BITS, SIGN>(constants, source, at, uniform(drawn))
                };
                let low = codes_of(start, drawn.left::<7>());
                let high = codes_of(start + WIDTH, drawn.right::<9>());
                let to = codes.as_mut_ptr().add(start * BITS as usize / 8);
                let (bytes, blocks_before) = match BITS {
                    1 => {
                        let shift = 2 * (block % 4) as u32;
                        let both = Words::or(low.left_by(shift), high.left_by(shift + 1));
                        packed = Words::or(if shift == 0 { Words::same(0) } else { packed }, both);
                        if shift < 6 {
                            continue;
                        }
                        (packed, 3)
                    }
                    2 if block % 2 == 0 => {
                        packed = Words::or(low, high.left::<2>());
                        continue;
                    }
                    2 => {
                        let upper = Words::or(low.left::<4>(), high.left::<6>());
                        (Words::or(packed, upper), 1)
                    }
                    4 => (Words::or(low, high.left::<4>()), 0),
                    8 if SIGN => {
                        Words::store_clamped_of_two(low, high, to);
                        continue;
                    }
                    8 => {
                        Words::store_bytes_of_two(low, high, to);
                        continue;
                    }
                    _ => {
                        low.store_pairs(to);
                        high.store_pairs(to.add(2 * WIDTH));
                        continue;
                    }
                };
                // The bytes begin with the first of the blocks that share them.
                let to = to.sub(blocks_before * BLOCK * BITS as usize / 8);
                let number = block / (blocks_before + 1);
                match BLOCKS / (blocks_before + 1) {
                    1 => bytes.store_bytes(to),
                    _ if number % 2 == 0 => bytes_before = bytes,
                    _ => Words::store_bytes_of_two(bytes_before, bytes, to.sub(WIDTH)),
                }
            }
        }
    }
}
