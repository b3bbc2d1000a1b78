//! The loop that all SIMD variants share: sum in rank order, mean, update, store.
//!
//! It is generic over element, register and update, and is compiled once for each inside a function
//! that enables the instructions. Body and tail run the same code with registers of different
//! width. All inputs of a block are read before any of it is written, so that an output may be
//! exactly one of the inputs.

use crate::element::{Accumulator, Element, Register, Storage};

/// One reduction: what is summed, what it is divided by, and where the result goes.
///
/// The pointers are valid for `elements` elements, at any alignment; the outputs are each either
/// apart from everything else or exactly one of the inputs.
#[derive(Clone, Copy)]
pub(crate) struct Sum<'a> {
    /// One pointer for each contribution, in rank order.
    pub(crate) inputs: &'a [*const u8],
    /// Where results go.
    pub(crate) output: *mut u8,
    /// Where results go as well.
    pub(crate) copy_to: Option<*mut u8>,
    /// How many elements each buffer has.
    pub(crate) elements: usize,
    /// Divisor of the sum.
    pub(crate) divisor: u32,
    /// Whether positive zero is added once after the last input.
    pub(crate) add_zero: bool,
}

/// The last operation on a mean, before it is stored.
///
/// Both methods compute the same bits: the first in registers, the second, for the oracle, plainly
/// and on its own.
pub(crate) trait Update: Copy {
    /// Turns the means of the elements from `at` on into what is stored.
    ///
    /// # Safety
    ///
    /// Runs where the instructions of `R` are enabled; `at` and the lanes after it are in range.
    unsafe fn apply<E, R>(self, mean: R, at: usize) -> R
    where
        E: Element + Storage<R>,
        R: Register<Lane = E::Accumulator>;

    /// Turns the mean of element `at` into what is stored.
    ///
    /// # Safety
    ///
    /// `at` is in range.
    unsafe fn apply_plainly<E>(self, mean: E::Accumulator, at: usize) -> E::Accumulator
    where
        E: Element;
}

/// The update of a plain mean: none.
#[derive(Clone, Copy)]
pub(crate) struct Keep;

impl Update for Keep {
    #[inline(always)]
    unsafe fn apply<E, R>(self, mean: R, _at: usize) -> R
    where
        E: Element + Storage<R>,
        R: Register<Lane = E::Accumulator>,
    {
        mean
    }

    #[inline(always)]
    unsafe fn apply_plainly<E>(self, mean: E::Accumulator, _at: usize) -> E::Accumulator
    where
        E: Element,
    {
        mean
    }
}

/// Registers that one block of the loop works on at once, to hide the latency of an addition.
const BLOCK_REGISTERS: usize = 4;

/// Runs a reduction with registers of type `R`, and element by element at the end.
///
/// # Safety
///
/// The pointers are as [`Sum`] and the update ask for, and the caller enables the instructions of
/// `R`.
#[inline(always)]
pub(crate) unsafe fn run<E, R, U>(sum: Sum<'_>, update: U)
where
    E: Element + Storage<R>,
    R: Register<Lane = E::Accumulator>,
    U: Update,
{
    let elements = sum.elements;
    let mut at = 0;
    // SAFETY: every block lies within `elements`, of which the caller promises memory.
    unsafe {
        while elements - at >= BLOCK_REGISTERS * R::LANES {
            block::<E, R, U, BLOCK_REGISTERS>(sum, update, at);
            at += BLOCK_REGISTERS * R::LANES;
        }
        while elements - at >= R::LANES {
            block::<E, R, U, 1>(sum, update, at);
            at += R::LANES;
        }
        while at < elements {
            block::<E, E::Accumulator, U, 1>(sum, update, at);
            at += 1;
        }
    }
}

/// Reduces `COUNT` registers of elements from element `at` on.
#[inline(always)]
unsafe fn block<E, R, U, const COUNT: usize>(sum: Sum<'_>, update: U, at: usize)
where
    E: Element + Storage<R>,
    R: Register<Lane = E::Accumulator>,
    U: Update,
{
    let stride = R::LANES * E::BYTES;
    let offset = at * E::BYTES;
    // SAFETY: the caller promises that the block is in range of all buffers.
    unsafe {
        let zero = R::splat(E::Accumulator::ZERO);
        let mut totals = [zero; COUNT];
        if let Some((first, others)) = sum.inputs.split_first() {
            for (index, total) in totals.iter_mut().enumerate() {
                *total = E::load(first.add(offset + index * stride));
            }
            for input in others {
                for (index, total) in totals.iter_mut().enumerate() {
                    *total = total.add(E::load(input.add(offset + index * stride)));
                }
            }
        }
        for (index, total) in totals.iter().enumerate() {
            let total = if sum.add_zero { total.add(zero) } else { *total };
            let mean = divide::<E, R>(total, sum.divisor);
            let result = update.apply::<E, R>(mean, at + index * R::LANES);
            E::store(result, sum.output.add(offset + index * stride));
            if let Some(copy_to) = sum.copy_to {
                E::store(result, copy_to.add(offset + index * stride));
            }
        }
    }
}

/// `total / divisor`, correctly rounded.
///
/// The reciprocal of a power of two is exact, and a product with it is the same real number as the
/// quotient, so that it rounds to the same bits (subnormal results included) at a fraction of the
/// time.
#[inline(always)]
unsafe fn divide<E, R>(total: R, divisor: u32) -> R
where
    E: Element,
    R: Register<Lane = E::Accumulator>,
{
    let divisor_value = f64::from(divisor);
    // SAFETY: the caller enables the instructions of `R`.
    unsafe {
        if divisor.is_power_of_two() {
            total.multiply(R::splat(Accumulator::from_f64(divisor_value.recip())))
        } else {
            total.divide(R::splat(Accumulator::from_f64(divisor_value)))
        }
    }
}
