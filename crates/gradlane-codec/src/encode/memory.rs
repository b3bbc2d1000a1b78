//! Between tensors in memory and the f32 values that codecs take.
//!
//! A tensor that is not f32 is encoded and decoded in blocks: some thousand elements at a time are
//! widened into a block of f32 that stays in cache. f16 and bf16 widen exactly; f64 is rounded to f32
//! first, so that under a lossy codec it has the range and the precision of f32.

use crate::element::{Bf16, Element, Storage, F16};
use crate::Dtype;

/// Reads elements of a dtype as f32.
///
/// # Panics
///
/// When `elements` has another number of elements than `values`.
pub fn widen(dtype: Dtype, elements: &[u8], values: &mut [f32]) {
    assert_eq!(elements.len(), values.len() * dtype.element_bytes(), "{dtype} elements to widen");
    match dtype {
        Dtype::F32 => each::<4>(elements, values, f32::from_ne_bytes),
        Dtype::F16 => widen_half::<F16>(elements, values),
        Dtype::Bf16 => widen_half::<Bf16>(elements, values),
        #[allow(clippy::cast_possible_truncation)]
        Dtype::F64 => each::<8>(elements, values, |bytes| f64::from_ne_bytes(bytes) as f32),
    }
}

/// Writes f32 values as elements of a dtype, rounded to nearest even.
///
/// # Panics
///
/// As for [`widen`].
pub fn narrow(dtype: Dtype, values: &[f32], elements: &mut [u8]) {
    assert_eq!(elements.len(), values.len() * dtype.element_bytes(), "{dtype} elements to narrow");
    match dtype {
        Dtype::F32 => each_mut::<4>(values, elements, f32::to_ne_bytes),
        Dtype::F16 => narrow_half::<F16>(values, elements),
        Dtype::Bf16 => narrow_half::<Bf16>(values, elements),
        Dtype::F64 => each_mut::<8>(values, elements, |value| f64::from(value).to_ne_bytes()),
    }
}

fn each<const N: usize>(elements: &[u8], values: &mut [f32], read: impl Fn([u8; N]) -> f32) {
    for (value, bytes) in values.iter_mut().zip(elements.as_chunks::<N>().0) {
        *value = read(*bytes);
    }
}

fn each_mut<const N: usize>(values: &[f32], elements: &mut [u8], write: impl Fn(f32) -> [u8; N]) {
    for (value, bytes) in values.iter().zip(elements.as_chunks_mut::<N>().0) {
        *bytes = write(*value);
    }
}

fn widen_half<E: Element + Storage<f32>>(elements: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(elements.chunks_exact(2)) {
        // SAFETY: two bytes are one element.
        *value = unsafe { <E as Storage<f32>>::load(bytes.as_ptr()) };
    }
}

fn narrow_half<E: Element + Storage<f32>>(values: &[f32], elements: &mut [u8]) {
    for (value, bytes) in values.iter().zip(elements.chunks_exact_mut(2)) {
        // SAFETY: two bytes are one element.
        unsafe { <E as Storage<f32>>::store(*value, bytes.as_mut_ptr()) };
    }
}
