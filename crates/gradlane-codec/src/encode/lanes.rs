//! Sixteen lanes of f32, or of 32-bit words, in as many registers as an instruction set needs for
//! them: what the codecs' kernels are written in, once for all instruction sets.
//!
//! [`Lanes`] adds to a float [`Register`] the operations on bits that quantizers need; [`Wide`] makes
//! sixteen lanes of it. Sixteen is fixed, so that sums over lanes, draws and layouts are the same
//! everywhere. Every operation is exact or rounded as the scalar one is: kernels give the bits of
//! their oracles.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod wide;

pub(super) use wide::{Mask, Wide, Words, WIDTH};

use crate::element::{Bf16, Register, Storage, F16};
use crate::instruction_set::Instructions;
use crate::InstructionSet;

/// A register of f32 whose bits can be computed with.
///
/// As for [`Register`], methods run where the instructions are enabled and pointers may be unaligned.
pub(super) trait Lanes: Register<Lane = f32> {
    /// The same number of words of 32 bits.
    type Words: Copy;
    /// Yes or no for every lane.
    type Mask: Copy;

    /// The bits of every lane.
    unsafe fn words(lanes: Self) -> Self::Words;
    /// Lanes of these bits.
    unsafe fn of_words(words: Self::Words) -> Self;
    /// Rounded towards zero to integers; every lane is within the range of i32.
    unsafe fn truncated(lanes: Self) -> Self::Words;
    /// Rounded to the nearest integers, halves to even; every lane is within the range of i32.
    unsafe fn rounded(lanes: Self) -> Self::Words;
    /// Integers, signed and below 2^24, as f32.
    unsafe fn of_integers(words: Self::Words) -> Self;
    /// The same word in every lane.
    unsafe fn same(word: u32) -> Self::Words;
    /// Words that count from `first` on.
    unsafe fn count_from(first: u32) -> Self::Words;
    /// Sums, modulo 2^32.
    unsafe fn plus(one: Self::Words, other: Self::Words) -> Self::Words;
    /// Products, modulo 2^32.
    unsafe fn times(one: Self::Words, other: Self::Words) -> Self::Words;
    /// Bits set in both.
    unsafe fn and(one: Self::Words, other: Self::Words) -> Self::Words;
    /// Bits set in any.
    unsafe fn or(one: Self::Words, other: Self::Words) -> Self::Words;
    /// Bits set in one only.
    unsafe fn xor(one: Self::Words, other: Self::Words) -> Self::Words;
    /// The smaller of two, signed.
    unsafe fn smaller(one: Self::Words, other: Self::Words) -> Self::Words;
    /// The larger of two, signed.
    unsafe fn larger(one: Self::Words, other: Self::Words) -> Self::Words;
    /// Shifted to the left by a constant.
    unsafe fn left<const BITS: u32>(words: Self::Words) -> Self::Words;
    /// Shifted to the right by a constant, zeros coming in.
    unsafe fn right<const BITS: u32>(words: Self::Words) -> Self::Words;
    /// Shifted to the left by a number below 32.
    unsafe fn left_by(words: Self::Words, bits: u32) -> Self::Words;
    /// Shifted to the right by a number below 32, zeros coming in.
    unsafe fn right_by(words: Self::Words, bits: u32) -> Self::Words;
    /// All bits set where the upmost one is.
    unsafe fn signs(words: Self::Words) -> Self::Words;
    /// The largest word, signed.
    unsafe fn largest(words: Self::Words) -> i32;
    /// The sum of the lanes: each with the one half of the lanes further, and so on in pairs.
    unsafe fn in_pairs(lanes: Self) -> f32;
    /// Reads one byte for every lane.
    unsafe fn load_bytes(from: *const u8) -> Self::Words;
    /// Writes the lowest byte of every lane.
    unsafe fn store_bytes(words: Self::Words, to: *mut u8);
    /// Writes the lowest byte of every lane of one and of the other; words are below 256. Both have
    /// sixteen lanes.
    unsafe fn store_bytes_of_two<const N: usize>(
        one: [Self::Words; N],
        other: [Self::Words; N],
        to: *mut u8,
    );
    /// The same of signed words of 16 bits, each clamped to -127 ... 127 and 127 added.
    unsafe fn store_clamped_of_two<const N: usize>(
        one: [Self::Words; N],
        other: [Self::Words; N],
        to: *mut u8,
    );
    /// Reads two bytes for every lane, the lower first.
    unsafe fn load_pairs(from: *const u8) -> Self::Words;
    /// Writes the lower two bytes of every lane, the lowest first.
    unsafe fn store_pairs(words: Self::Words, to: *mut u8);
    /// Whether a lane is at least zero; minus zero is, NaN is not.
    unsafe fn not_negative(lanes: Self) -> Self::Mask;
    /// Whether one lane is smaller than the other, signed.
    unsafe fn less(one: Self::Words, other: Self::Words) -> Self::Mask;
    /// A mask as bits, the first lane's the lowest.
    unsafe fn mask_bits(mask: Self::Mask) -> u32;
    /// The mask of bits.
    unsafe fn mask_of_bits(bits: u32) -> Self::Mask;
    /// Lanes of one where the mask says yes, of the other elsewhere.
    unsafe fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;
    /// Does a part of some work in a function of its own, with the instructions enabled there. All
    /// else becomes one long function for each [`Work`], and what compilers do with that takes
    /// time that grows far faster than its length.
    unsafe fn apart<T>(part: impl FnOnce() -> T) -> T;
}

/// Makes methods of [`Lanes`] from an expression each.
macro_rules! lanes_by {
    ($($name:ident $(<const $bits:ident>)? ( $($argument:ident : $type:ty),* ) $(-> $result:ty)? = $value:expr;)*) => {$(
        #[inline(always)]
        #[allow(unused_unsafe, reason = "some intrinsics are safe where they are enabled")]
        unsafe fn $name $(<const $bits: u32>)? ($($argument: $type),*) $(-> $result)? {
            // SAFETY: the caller enables the instructions, promises the memory that pointers are to
            // and the range of what is made an integer.
            unsafe { $value }
        }
    )*};
}
use lanes_by;

/// Work that is compiled once for every instruction set.
pub(super) trait Work {
    /// The result.
    type Output;

    /// Does it one element at a time, as the definition says.
    fn run_plainly(self) -> Self::Output;

    /// Does it with `N` registers of type `R` for sixteen lanes.
    ///
    /// # Safety
    ///
    /// Runs where the instructions of `R` are enabled.
    unsafe fn run<R, const N: usize>(self) -> Self::Output
    where
        R: Lanes,
        F16: Storage<R>,
        Bf16: Storage<R>;
}

/// Does work with the kernels for an instruction set.
pub(super) fn dispatch<W: Work>(instruction_set: InstructionSet, work: W) -> W::Output {
    match instruction_set.instructions() {
        Instructions::Scalar => work.run_plainly(),
        // Without products and maxima of words, registers of SSE2 gain little.
        #[cfg(target_arch = "x86_64")]
        Instructions::Sse2 => work.run_plainly(),
        // SAFETY: an `InstructionSet` exists only where its instructions do.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => unsafe { with_avx2(work) },
        // SAFETY: an `InstructionSet` exists only where its instructions do.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => unsafe { with_avx512(work) },
        // SAFETY: an `InstructionSet` exists only where its instructions do.
        #[cfg(target_arch = "aarch64")]
        Instructions::Neon => unsafe { with_neon(work) },
    }
}

/// # Safety
///
/// The machine has AVX2, F16C and POPCNT.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c,popcnt")]
unsafe fn with_avx2<W: Work>(work: W) -> W::Output {
    // SAFETY: this function enables the instructions.
    unsafe { work.run::<std::arch::x86_64::__m256, 2>() }
}

/// # Safety
///
/// The machine has AVX-512F and POPCNT.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,popcnt")]
unsafe fn with_avx512<W: Work>(work: W) -> W::Output {
    // SAFETY: this function enables the instructions.
    unsafe { work.run::<std::arch::x86_64::__m512, 1>() }
}

/// # Safety
///
/// The machine has NEON.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn with_neon<W: Work>(work: W) -> W::Output {
    // SAFETY: this function enables the instructions.
    unsafe { work.run::<std::arch::aarch64::float32x4_t, 4>() }
}
