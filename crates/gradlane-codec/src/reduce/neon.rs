//! The aarch64 variant: 128-bit NEON registers, 4 lanes of f32 or 2 of f64.
//!
//! f16 is converted by two instructions that every NEON has and whose intrinsics are not in the oldest
//! Rust that this crate is built with; bf16 is the upper half of an f32, shifted up to widen and
//! rounded by an integer addition to narrow.

use std::arch::aarch64::*;
use std::arch::asm;

use super::kernel::{run, Sum, Update};
use crate::element::{Bf16, Register, Storage, F16, F32, F64};
use crate::FloatDtype;

/// Runs a reduction with NEON registers.
///
/// # Safety
///
/// The machine has NEON, and the pointers are as [`Sum`] and the update ask for.
#[target_feature(enable = "neon")]
pub(crate) unsafe fn run_neon<U: Update>(dtype: FloatDtype, sum: Sum<'_>, update: U) {
    // SAFETY: this function enables the instructions; pointers as promised by the caller.
    unsafe {
        match dtype {
            FloatDtype::F32 => run::<F32, float32x4_t, U>(sum, update),
            FloatDtype::F16 => run::<F16, float32x4_t, U>(sum, update),
            FloatDtype::Bf16 => run::<Bf16, float32x4_t, U>(sum, update),
            FloatDtype::F64 => run::<F64, float64x2_t, U>(sum, update),
        }
    }
}

/// Makes a vector type a register; bytes are loaded as such, since that asks for no alignment.
macro_rules! register {
    ($vector:ty, $lane:ty, $splat:ident, $from_bytes:ident, $to_bytes:ident,
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
                unsafe { $from_bytes(vld1q_u8(from)) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut u8) {
                // SAFETY: the caller enables the instructions and promises the memory.
                unsafe { vst1q_u8(to, $to_bytes(self)) }
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

register!(
    float32x4_t,
    f32,
    vdupq_n_f32,
    vreinterpretq_f32_u8,
    vreinterpretq_u8_f32,
    vaddq_f32,
    vsubq_f32,
    vmulq_f32,
    vdivq_f32,
    vsqrtq_f32
);
register!(
    float64x2_t,
    f64,
    vdupq_n_f64,
    vreinterpretq_f64_u8,
    vreinterpretq_u8_f64,
    vaddq_f64,
    vsubq_f64,
    vmulq_f64,
    vdivq_f64,
    vsqrtq_f64
);

impl Storage<float32x4_t> for F16 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> float32x4_t {
        let wide: float32x4_t;
        // SAFETY: the caller enables NEON and promises eight readable bytes; the instruction reads and
        // writes these registers alone.
        unsafe {
            let narrow = vld1_u8(from);
            asm!(
                "fcvtl {wide:v}.4s, {narrow:v}.4h",
                wide = lateout(vreg) wide,
                narrow = in(vreg) narrow,
                options(pure, nomem, nostack),
            );
        }
        wide
    }

    #[inline(always)]
    unsafe fn store(value: float32x4_t, to: *mut u8) {
        // SAFETY: the caller enables NEON and promises eight writable bytes; the instruction reads and
        // writes these registers alone.
        unsafe {
            let narrow: uint8x8_t;
            asm!(
                "fcvtn {narrow:v}.4h, {wide:v}.4s",
                narrow = lateout(vreg) narrow,
                wide = in(vreg) value,
                options(pure, nomem, nostack),
            );
            vst1_u8(to, narrow);
        }
    }
}

impl Storage<float32x4_t> for Bf16 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> float32x4_t {
        // SAFETY: the caller enables NEON and promises eight readable bytes.
        unsafe {
            let narrow = vreinterpret_u16_u8(vld1_u8(from));
            vreinterpretq_f32_u32(vshll_n_u16::<16>(narrow))
        }
    }

    #[inline(always)]
    unsafe fn store(value: float32x4_t, to: *mut u8) {
        // SAFETY: the caller enables NEON and promises eight writable bytes.
        unsafe {
            let bits = vreinterpretq_u32_f32(value);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
            let quieted = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
            let is_number = vceqq_f32(value, value);
            let chosen = vbslq_u32(is_number, rounded, quieted);
            vst1_u8(to, vreinterpret_u8_u16(vshrn_n_u32::<16>(chosen)));
        }
    }
}
