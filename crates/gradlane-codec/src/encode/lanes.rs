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
mod one;

use crate::element::{Bf16, Element, Register, Storage, F16};
use crate::variant::Instructions;
use crate::Variant;

/// Lanes of a [`Wide`].
pub(super) const WIDTH: usize = 16;

/// A register of f32 whose bits can be computed with.
///
/// As for [`Register`], methods run where the instructions are enabled and pointers may be unaligned.
pub(super) trait Lanes: Register<Lane = f32> {
    /// As many words of 32 bits.
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
}

/// Makes methods of [`Lanes`] from an expression each.
macro_rules! lanes_by {
    ($($name:ident $(<const $bits:ident>)? ( $($argument:ident : $type:ty),* ) $(-> $result:ty)? = $value:expr;)*) => {$(
        #[inline(always)]
        #[allow(unused_unsafe, reason = "some operations are plain Rust")]
        unsafe fn $name $(<const $bits: u32>)? ($($argument: $type),*) $(-> $result)? {
            // SAFETY: the caller enables the instructions, promises the memory that pointers are to
            // and the range of what is made an integer.
            unsafe { $value }
        }
    )*};
}
use lanes_by;

/// Sixteen lanes in `N` registers.
#[derive(Clone, Copy)]
pub(super) struct Wide<R, const N: usize>([R; N]);

/// Sixteen words in `N` registers.
#[derive(Clone, Copy)]
pub(super) struct Words<R: Lanes, const N: usize>([R::Words; N]);

/// Sixteen answers in `N` registers.
#[derive(Clone, Copy)]
pub(super) struct Mask<R: Lanes, const N: usize>([R::Mask; N]);

/// Makes an operation on registers one on all `N` of them.
macro_rules! each {
    ($index:ident, $register:expr) => {{
        let mut index = 1;
        let mut all = [{
            let $index = 0;
            $register
        }; N];
        while index < N {
            let $index = index;
            all[index] = $register;
            index += 1;
        }
        all
    }};
}

/// Methods that apply one of [`Lanes`] or [`Register`] to every register.
macro_rules! lane_wise {
    ($($(#[$comment:meta])* $name:ident ( $($argument:ident : $type:ty),* ) -> $result:ident by $via:path;)*) => {$(
        $(#[$comment])*
        #[inline(always)]
        pub(super) unsafe fn $name($($argument: $type),*) -> $result<R, N> {
            // SAFETY: the caller enables the instructions.
            unsafe { $result(each!(index, $via($($argument.0[index]),*))) }
        }
    )*};
}

impl<R: Lanes, const N: usize> Wide<R, N> {
    lane_wise! {
        /// `one + other`.
        add(one: Self, other: Self) -> Wide by R::add;
        /// `one - other`.
        subtract(one: Self, other: Self) -> Wide by R::subtract;
        /// `one * other`.
        multiply(one: Self, other: Self) -> Wide by R::multiply;
        /// As [`Lanes::words`].
        words(one: Self) -> Words by R::words;
        /// As [`Lanes::of_words`].
        of_words(words: Words<R, N>) -> Wide by R::of_words;
        /// As [`Lanes::truncated`].
        truncated(one: Self) -> Words by R::truncated;
        /// As [`Lanes::rounded`].
        rounded(one: Self) -> Words by R::rounded;
        /// As [`Lanes::of_integers`].
        of_integers(words: Words<R, N>) -> Wide by R::of_integers;
        /// As [`Lanes::not_negative`].
        not_negative(one: Self) -> Mask by R::not_negative;
        /// As [`Lanes::select`].
        select(mask: Mask<R, N>, yes: Self, no: Self) -> Wide by R::select;
    }

    /// The same value in every lane.
    #[inline(always)]
    pub(super) unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller enables the instructions.
        Wide([unsafe { R::splat(value) }; N])
    }

    /// Reads sixteen values.
    #[inline(always)]
    pub(super) unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller enables the instructions and promises the memory.
        unsafe { Wide(each!(index, R::load(from.add(index * R::LANES).cast()))) }
    }

    /// Writes sixteen values.
    #[inline(always)]
    pub(super) unsafe fn store(self, to: *mut f32) {
        for index in 0..N {
            // SAFETY: the caller enables the instructions and promises the memory.
            unsafe { self.0[index].store(to.add(index * R::LANES).cast()) };
        }
    }

    /// The lanes as an array.
    #[inline(always)]
    pub(super) unsafe fn lanes(self) -> [f32; WIDTH] {
        let mut lanes = [0.0; WIDTH];
        // SAFETY: the caller enables the instructions, and sixteen lanes fit.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }

    /// The sum of sixteen lanes: each with the one eight further, the sums with those four further,
    /// and so on.
    #[inline(always)]
    pub(super) unsafe fn in_pairs(mut self) -> f32 {
        let mut registers = N;
        while registers > 1 {
            registers /= 2;
            for index in 0..registers {
                // SAFETY: the caller enables the instructions.
                self.0[index] = unsafe { self.0[index].add(self.0[index + registers]) };
            }
        }
        // SAFETY: the caller enables the instructions.
        unsafe { R::in_pairs(self.0[0]) }
    }

    /// Reads and widens sixteen elements.
    #[inline(always)]
    pub(super) unsafe fn load_as<E: Element + Storage<R>>(from: *const u8) -> Self {
        // SAFETY: the caller enables the instructions and promises the memory.
        unsafe {
            let at = |index: usize| from.add(E::BYTES * index * R::LANES);
            Wide(each!(index, <E as Storage<R>>::load(at(index))))
        }
    }

    /// Rounds to sixteen elements and writes them.
    #[inline(always)]
    pub(super) unsafe fn store_as<E: Element + Storage<R>>(self, to: *mut u8) {
        for index in 0..N {
            // SAFETY: the caller enables the instructions and promises the memory.
            unsafe {
                let to = to.add(E::BYTES * index * R::LANES);
                <E as Storage<R>>::store(self.0[index], to);
            }
        }
    }
}

impl<R: Lanes, const N: usize> Words<R, N> {
    lane_wise! {
        /// As [`Lanes::plus`].
        plus(one: Self, other: Self) -> Words by R::plus;
        /// As [`Lanes::times`].
        times(one: Self, other: Self) -> Words by R::times;
        /// As [`Lanes::and`].
        and(one: Self, other: Self) -> Words by R::and;
        /// As [`Lanes::or`].
        or(one: Self, other: Self) -> Words by R::or;
        /// As [`Lanes::xor`].
        xor(one: Self, other: Self) -> Words by R::xor;
        /// As [`Lanes::smaller`].
        smaller(one: Self, other: Self) -> Words by R::smaller;
        /// As [`Lanes::larger`].
        larger(one: Self, other: Self) -> Words by R::larger;
        /// As [`Lanes::signs`].
        signs(one: Self) -> Words by R::signs;
        /// As [`Lanes::less`].
        less(one: Self, other: Self) -> Mask by R::less;

    }

    /// The same word in every lane.
    #[inline(always)]
    pub(super) unsafe fn same(word: u32) -> Self {
        // SAFETY: the caller enables the instructions.
        Words([unsafe { R::same(word) }; N])
    }

    /// Words that count from `first` on.
    #[inline(always)]
    pub(super) unsafe fn count_from(first: u32) -> Self {
        // SAFETY: the caller enables the instructions.
        unsafe { Words(each!(index, R::count_from(first.wrapping_add((index * R::LANES) as u32)))) }
    }

    /// Shifted to the left by a constant.
    #[inline(always)]
    pub(super) unsafe fn left<const BITS: u32>(self) -> Self {
        // SAFETY: the caller enables the instructions.
        unsafe { Words(each!(index, R::left::<BITS>(self.0[index]))) }
    }

    /// Shifted to the right by a constant.
    #[inline(always)]
    pub(super) unsafe fn right<const BITS: u32>(self) -> Self {
        // SAFETY: the caller enables the instructions.
        unsafe { Words(each!(index, R::right::<BITS>(self.0[index]))) }
    }

    /// Reads sixteen bytes.
    #[inline(always)]
    pub(super) unsafe fn load_bytes(from: *const u8) -> Self {
        // SAFETY: the caller enables the instructions and promises the memory.
        unsafe { Words(each!(index, R::load_bytes(from.add(index * R::LANES)))) }
    }

    /// Writes sixteen bytes.
    #[inline(always)]
    pub(super) unsafe fn store_bytes(self, to: *mut u8) {
        for index in 0..N {
            // SAFETY: the caller enables the instructions and promises the memory.
            unsafe { R::store_bytes(self.0[index], to.add(index * R::LANES)) };
        }
    }

    /// Reads sixteen pairs of bytes.
    #[inline(always)]
    pub(super) unsafe fn load_pairs(from: *const u8) -> Self {
        // SAFETY: the caller enables the instructions and promises the memory.
        unsafe { Words(each!(index, R::load_pairs(from.add(2 * index * R::LANES)))) }
    }

    /// Writes sixteen pairs of bytes.
    #[inline(always)]
    pub(super) unsafe fn store_pairs(self, to: *mut u8) {
        for index in 0..N {
            // SAFETY: the caller enables the instructions and promises the memory.
            unsafe { R::store_pairs(self.0[index], to.add(2 * index * R::LANES)) };
        }
    }

    /// The largest of sixteen words, signed.
    #[inline(always)]
    pub(super) unsafe fn largest(self) -> i32 {
        let mut largest = self.0[0];
        for other in &self.0[1..] {
            // SAFETY: the caller enables the instructions.
            largest = unsafe { R::larger(largest, *other) };
        }
        // SAFETY: the caller enables the instructions.
        unsafe { R::largest(largest) }
    }

    /// The smallest of sixteen words, signed.
    #[inline(always)]
    pub(super) unsafe fn smallest(self) -> i32 {
        // SAFETY: the caller enables the instructions.
        unsafe { !Words::xor(self, Words::same(u32::MAX)).largest() }
    }
}

impl<R: Lanes, const N: usize> Mask<R, N> {
    /// Sixteen bits, the first lane's the lowest.
    #[inline(always)]
    pub(super) unsafe fn bits(self) -> u16 {
        let mut bits = 0;
        for index in 0..N {
            // SAFETY: the caller enables the instructions.
            bits |= unsafe { R::mask_bits(self.0[index]) } << (index * R::LANES);
        }
        bits as u16
    }

    /// The mask of sixteen bits.
    #[inline(always)]
    pub(super) unsafe fn of_bits(bits: u16) -> Self {
        let bits = u32::from(bits);
        // SAFETY: the caller enables the instructions.
        unsafe { Mask(each!(index, R::mask_of_bits(bits >> (index * R::LANES)))) }
    }
}

/// Work that is compiled once for every instruction set.
pub(super) trait Work {
    /// What comes out of it.
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

/// Does work with the kernels of a variant.
pub(super) fn dispatch<W: Work>(variant: Variant, work: W) -> W::Output {
    match variant.instructions() {
        Instructions::Scalar => work.run_plainly(),
        // SAFETY: a variant exists only where its instructions do; one lane needs none.
        #[cfg(target_arch = "x86_64")]
        Instructions::Sse2 => unsafe { work.run::<f32, 16>() },
        // SAFETY: a variant exists only where its instructions do.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => unsafe { with_avx2(work) },
        // SAFETY: a variant exists only where its instructions do.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512 => unsafe { with_avx512(work) },
        // SAFETY: a variant exists only where its instructions do.
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
