//! The oracle: every element on its own, as the definition says, with nothing clever in it.
//!
//! It shares the definition of the element types with the SIMD loop and nothing else, so that each
//! can be held against the other. It is also what machines run that no SIMD variant is built for.

use super::kernel::{Sum, Update};
use crate::element::{Accumulator, Bf16, Element, F16, F32, F64};
use crate::FloatDtype;

/// Runs a reduction one element at a time.
///
/// # Safety
///
/// The pointers are as [`Sum`] and the update ask for.
pub(crate) unsafe fn run<U: Update>(dtype: FloatDtype, sum: Sum<'_>, update: U) {
    // SAFETY: forwarded, the caller's promise covers it.
    unsafe {
        match dtype {
            FloatDtype::F32 => run_element::<F32, U>(sum, update),
            FloatDtype::F16 => run_element::<F16, U>(sum, update),
            FloatDtype::Bf16 => run_element::<Bf16, U>(sum, update),
            FloatDtype::F64 => run_element::<F64, U>(sum, update),
        }
    }
}

unsafe fn run_element<E, U>(sum: Sum<'_>, update: U)
where
    E: Element,
    U: Update,
{
    let divisor = E::Accumulator::from_f64(f64::from(sum.divisor));
    for at in 0..sum.elements {
        let offset = at * E::BYTES;
        let mut total = None;
        for input in sum.inputs {
            // SAFETY: `at` is below `elements`, and the caller promises that many.
            let value = unsafe { E::load(input.add(offset)) };
            total = Some(total.map_or(value, |before| before + value));
        }
        let mut total = total.unwrap_or(E::Accumulator::ZERO);
        if sum.add_zero {
            total = total + E::Accumulator::ZERO;
        }
        // SAFETY: as above, for the outputs and for what the update reads and writes.
        unsafe {
            let result = update.apply_plainly::<E>(total / divisor, at);
            E::store(result, sum.output.add(offset));
            if let Some(copy_to) = sum.copy_to {
                E::store(result, copy_to.add(offset));
            }
        }
    }
}
