//! Between tensors in memory and the f32 values that codecs take.
//!
//! A tensor that is not f32 is encoded and decoded in blocks: some thousand elements at a time are
//! widened into a block of f32 that stays in cache. f16 and bf16 widen exactly; f64 is rounded to f32
//! first, so that under a lossy codec it has the range and the precision of f32.

use super::cast::{narrow_to, widen_from};
use crate::element::{Bf16, F16, F32};
use crate::{FloatDtype, InstructionSet};

/// Reads elements of a dtype as f32.
///
/// # Panics
///
/// When `elements` has another number of elements than `values`.
pub fn widen(dtype: FloatDtype, elements: &[u8], values: &mut [f32]) {
    assert_eq!(elements.len(), values.len() * dtype.element_bytes(), "{dtype} elements to widen");
    match dtype {
        FloatDtype::F32 => widen_from::<F32>(InstructionSet::active(), elements, values),
        FloatDtype::F16 => widen_from::<F16>(InstructionSet::active(), elements, values),
        FloatDtype::Bf16 => widen_from::<Bf16>(InstructionSet::active(), elements, values),
        #[allow(clippy::cast_possible_truncation)]
        FloatDtype::F64 => {
            for (value, bytes) in values.iter_mut().zip(elements.as_chunks().0) {
                *value = f64::from_ne_bytes(*bytes) as f32;
            }
        }
    }
}

/// Writes f32 values as elements of a dtype, rounded to nearest even.
///
/// # Panics
///
/// As for [`widen`].
pub fn narrow(dtype: FloatDtype, values: &[f32], elements: &mut [u8]) {
    assert_eq!(elements.len(), values.len() * dtype.element_bytes(), "{dtype} elements to narrow");
    match dtype {
        FloatDtype::F32 => narrow_to::<F32>(InstructionSet::active(), values, elements),
        FloatDtype::F16 => narrow_to::<F16>(InstructionSet::active(), values, elements),
        FloatDtype::Bf16 => narrow_to::<Bf16>(InstructionSet::active(), values, elements),
        FloatDtype::F64 => {
            for (value, bytes) in values.iter().zip(elements.as_chunks_mut().0) {
                *bytes = f64::from(*value).to_ne_bytes();
            }
        }
    }
}
