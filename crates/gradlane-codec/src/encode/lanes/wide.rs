//! Sixteen lanes in as many registers as they need, with the operations of [`Lanes`] on all of them.

use super::Lanes;
use crate::element::{Element, Storage};

/// Lanes of a [`Wide`].
pub(in crate::encode) const WIDTH: usize = 16;

/// Sixteen lanes in `N` registers.
#[derive(Clone, Copy)]
pub(in crate::encode) struct Wide<R, const N: usize>([R; N]);

/// Sixteen words in `N` registers.
#[derive(Clone, Copy)]
pub(in crate::encode) struct Words<R: Lanes, const N: usize>([R::Words; N]);

/// Sixteen answers in `N` registers.
#[derive(Clone, Copy)]
pub(in crate::encode) struct Mask<R: Lanes, const N: usize>([R::Mask; N]);

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
        pub(in crate::encode) unsafe fn $name($($argument: $type),*) -> $result<R, N> {
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
    pub(in crate::encode) unsafe fn splat(value: f32) -> Self {
        // SAFETY: the caller enables the instructions.
        Wide([unsafe { R::splat(value) }; N])
    }

    /// Reads sixteen values.
    #[inline(always)]
    pub(in crate::encode) unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller enables the instructions and promises the memory.
        unsafe { Wide(each!(index, R::load(from.add(index * R::LANES).cast()))) }
    }

    /// Writes sixteen values.
    #[inline(always)]
    pub(in crate::encode) unsafe fn store(self, to: *mut f32) {
        for index in 0..N {
            // SAFETY: the caller enables the instructions and promises the memory.
            unsafe { self.0[index].store(to.add(index * R::LANES).cast()) };
        }
    }

    /// The lanes as an array.
    #[inline(always)]
    pub(in crate::encode) unsafe fn lanes(self) -> [f32; WIDTH] {
        let mut lanes = [0.0; WIDTH];
        // SAFETY: the caller enables the instructions, and sixteen lanes fit.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }

    /// The sum of sixteen lanes: each with the one eight further, the sums with those four further,
    /// and so on.
    #[inline(always)]
    pub(in crate::encode) unsafe fn in_pairs(mut self) -> f32 {
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
    pub(in crate::encode) unsafe fn load_as<E: Element + Storage<R>>(from: *const u8) -> Self {
        // SAFETY: the caller enables the instructions and promises the memory.
        unsafe {
            let at = |index: usize| from.add(E::BYTES * index * R::LANES);
            Wide(each!(index, <E as Storage<R>>::load(at(index))))
        }
    }

    /// Rounds to sixteen elements and writes them.
    #[inline(always)]
    pub(in crate::encode) unsafe fn store_as<E: Element + Storage<R>>(self, to: *mut u8) {
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
    pub(in crate::encode) unsafe fn same(word: u32) -> Self {
        // SAFETY: the caller enables the instructions.
        Words([unsafe { R::same(word) }; N])
    }

    /// Words that count from `first` on.
    #[inline(always)]
    pub(in crate::encode) unsafe fn count_from(first: u32) -> Self {
        // SAFETY: the caller enables the instructions.
        unsafe { Words(each!(index, R::count_from(first.wrapping_add((index * R::LANES) as u32)))) }
    }

    /// Shifted to the left by a constant.
    #[inline(always)]
    pub(in crate::encode) unsafe fn left<const BITS: u32>(self) -> Self {
        // SAFETY: the caller enables the instructions.
        unsafe { Words(each!(index, R::left::<BITS>(self.0[index]))) }
    }

    /// Shifted to the right by a constant.
    #[inline(always)]
    pub(in crate::encode) unsafe fn right<const BITS: u32>(self) -> Self {
        // SAFETY: the caller enables the instructions.
        unsafe { Words(each!(index, R::right::<BITS>(self.0[index]))) }
    }

    /// Shifted to the left by a number below 32.
    #[inline(always)]
    pub(in crate::encode) unsafe fn left_by(self, bits: u32) -> Self {
        // SAFETY: the caller enables the instructions.
        unsafe { Words(each!(index, R::left_by(self.0[index], bits))) }
    }

    /// Shifted to the right by a number below 32.
    #[inline(always)]
    pub(in crate::encode) unsafe fn right_by(self, bits: u32) -> Self {
        // SAFETY: the caller enables the instructions.
        unsafe { Words(each!(index, R::right_by(self.0[index], bits))) }
    }

    /// Reads sixteen bytes.
    #[inline(always)]
    pub(in crate::encode) unsafe fn load_bytes(from: *const u8) -> Self {
        // SAFETY: the caller enables the instructions and promises the memory.
        unsafe { Words(each!(index, R::load_bytes(from.add(index * R::LANES)))) }
    }

    /// Writes sixteen bytes.
    #[inline(always)]
    pub(in crate::encode) unsafe fn store_bytes(self, to: *mut u8) {
        for index in 0..N {
            // SAFETY: the caller enables the instructions and promises the memory.
            unsafe { R::store_bytes(self.0[index], to.add(index * R::LANES)) };
        }
    }

    /// As [`Lanes::store_bytes_of_two`].
    #[inline(always)]
    pub(in crate::encode) unsafe fn store_bytes_of_two(one: Self, other: Self, to: *mut u8) {
        // SAFETY: the caller enables the instructions and promises the memory.
        unsafe { R::store_bytes_of_two(one.0, other.0, to) };
    }

    /// As [`Lanes::store_clamped_of_two`].
    #[inline(always)]
    pub(in crate::encode) unsafe fn store_clamped_of_two(one: Self, other: Self, to: *mut u8) {
        // SAFETY: the caller enables the instructions and promises the memory.
        unsafe { R::store_clamped_of_two(one.0, other.0, to) };
    }

    /// Reads sixteen pairs of bytes.
    #[inline(always)]
    pub(in crate::encode) unsafe fn load_pairs(from: *const u8) -> Self {
        // SAFETY: the caller enables the instructions and promises the memory.
        unsafe { Words(each!(index, R::load_pairs(from.add(2 * index * R::LANES)))) }
    }

    /// Writes sixteen pairs of bytes.
    #[inline(always)]
    pub(in crate::encode) unsafe fn store_pairs(self, to: *mut u8) {
        for index in 0..N {
            // SAFETY: the caller enables the instructions and promises the memory.
            unsafe { R::store_pairs(self.0[index], to.add(2 * index * R::LANES)) };
        }
    }

    /// The largest of sixteen words, signed.
    #[inline(always)]
    pub(in crate::encode) unsafe fn largest(self) -> i32 {
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
    pub(in crate::encode) unsafe fn smallest(self) -> i32 {
        // SAFETY: the caller enables the instructions.
        unsafe { !Words::xor(self, Words::same(u32::MAX)).largest() }
    }
}

impl<R: Lanes, const N: usize> Mask<R, N> {
    /// Sixteen bits, the first lane's the lowest.
    #[inline(always)]
    pub(in crate::encode) unsafe fn bits(self) -> u16 {
        let mut bits = 0;
        for index in 0..N {
            // SAFETY: the caller enables the instructions.
            bits |= unsafe { R::mask_bits(self.0[index]) } << (index * R::LANES);
        }
        bits as u16
    }

    /// The mask of sixteen bits.
    #[inline(always)]
    pub(in crate::encode) unsafe fn of_bits(bits: u16) -> Self {
        let bits = u32::from(bits);
        // SAFETY: the caller enables the instructions.
        unsafe { Mask(each!(index, R::mask_of_bits(bits >> (index * R::LANES)))) }
    }
}
