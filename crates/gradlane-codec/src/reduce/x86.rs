//! The x86-64 variants: SSE2, AVX2 with F16C, and AVX-512F.
//!
//! Each function here enables its instructions and instantiates the shared loop for the registers
//! of that width; the registers themselves are in the files below.

mod avx2;
mod avx512;
mod sse2;

use std::arch::x86_64::{__m128, __m128d, __m256, __m256d, __m512, __m512d};

use super::kernel::{run, Sum, Update};
use crate::element::{Bf16, F16, F32, F64};
use crate::FloatDtype;

/// Runs a reduction with 128-bit registers.
///
/// # Safety
///
/// The pointers are as [`Sum`] and the update ask for.
pub(crate) unsafe fn run_sse2<U: Update>(dtype: FloatDtype, sum: Sum<'_>, update: U) {
    // SAFETY: every x86-64 machine has SSE2; pointers as promised by the caller.
    unsafe {
        match dtype {
            FloatDtype::F32 => run::<F32, __m128, U>(sum, update),
            FloatDtype::F16 => run::<F16, __m128, U>(sum, update),
            FloatDtype::Bf16 => run::<Bf16, __m128, U>(sum, update),
            FloatDtype::F64 => run::<F64, __m128d, U>(sum, update),
        }
    }
}

/// Runs a reduction with 256-bit registers.
///
/// # Safety
///
/// The machine has AVX2 and F16C, and the pointers are as [`Sum`] and the update ask for.
#[target_feature(enable = "avx2,f16c")]
pub(crate) unsafe fn run_avx2<U: Update>(dtype: FloatDtype, sum: Sum<'_>, update: U) {
    // SAFETY: this function enables the instructions; pointers as promised by the caller.
    unsafe {
        match dtype {
            FloatDtype::F32 => run::<F32, __m256, U>(sum, update),
            FloatDtype::F16 => run::<F16, __m256, U>(sum, update),
            FloatDtype::Bf16 => run::<Bf16, __m256, U>(sum, update),
            FloatDtype::F64 => run::<F64, __m256d, U>(sum, update),
        }
    }
}

/// Runs a reduction with 512-bit registers.
///
/// # Safety
///
/// The machine has AVX-512F, and the pointers are as [`Sum`] and the update ask for.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn run_avx512<U: Update>(dtype: FloatDtype, sum: Sum<'_>, update: U) {
    // SAFETY: this function enables the instructions; pointers as promised by the caller.
    unsafe {
        match dtype {
            FloatDtype::F32 => run::<F32, __m512, U>(sum, update),
            FloatDtype::F16 => run::<F16, __m512, U>(sum, update),
            FloatDtype::Bf16 => run::<Bf16, __m512, U>(sum, update),
            FloatDtype::F64 => run::<F64, __m512d, U>(sum, update),
        }
    }
}

/// Makes a vector type a register, from the intrinsics that do each operation.
macro_rules! register {
    ($vector:ty, $lane:ty, $splat:ident, $load:ident, $store:ident,
     $add:ident, $subtract:ident, $multiply:ident, $divide:ident, $square_root:ident) => {
        impl Register for $vector {
            type Lane = $lane;
            const LANES: usize = size_of::<$vector>() / size_of::<$lane>();

            #[inline(always)]
            unsafe fn splat(value: $lane) -> $vector {
                // SAFETY: the caller enables the instructions.
                unsafe { $splat(value) }
            }
            #[inline(always)]
            unsafe fn load(from: *const u8) -> $vector {
                // SAFETY: the caller enables the instructions and promises the memory.
                unsafe { $load(from.cast()) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut u8) {
                // SAFETY: the caller enables the instructions and promises the memory.
                unsafe { $store(to.cast(), self) }
            }
            #[inline(always)]
            unsafe fn add(self, other: $vector) -> $vector {
                // SAFETY: the caller enables the instructions.
                unsafe { $add(self, other) }
            }
            #[inline(always)]
            unsafe fn subtract(self, other: $vector) -> $vector {
                // SAFETY: the caller enables the instructions.
                unsafe { $subtract(self, other) }
            }
            #[inline(always)]
            unsafe fn multiply(self, other: $vector) -> $vector {
                // SAFETY: the caller enables the instructions.
                unsafe { $multiply(self, other) }
            }
            #[inline(always)]
            unsafe fn divide(self, other: $vector) -> $vector {
                // SAFETY: the caller enables the instructions.
                unsafe { $divide(self, other) }
            }
            #[inline(always)]
            unsafe fn square_root(self) -> $vector {
                // SAFETY: the caller enables the instructions.
                unsafe { $square_root(self) }
            }
        }
    };
}
use register;
