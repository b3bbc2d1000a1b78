//! 512-bit registers: 16 lanes of f32 or 8 of f64, with nothing beyond AVX-512F.
//!
//! The instructions that convert to bf16 (AVX512_BF16) are not used: they flush subnormals, and
//! results must have the same bits on machines that lack them.

use std::arch::x86_64::*;

use super::register;
use crate::element::{Bf16, Register, Storage, F16};

register!(
    __m512,
    f32,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_add_ps,
    _mm512_sub_ps,
    _mm512_mul_ps,
    _mm512_div_ps,
    _mm512_sqrt_ps
);
register!(
    __m512d,
    f64,
    _mm512_set1_pd,
    _mm512_loadu_pd,
    _mm512_storeu_pd,
    _mm512_add_pd,
    _mm512_sub_pd,
    _mm512_mul_pd,
    _mm512_div_pd,
    _mm512_sqrt_pd
);

impl Storage<__m512> for F16 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m512 {
        // SAFETY: the caller enables AVX-512F and promises 32 readable bytes.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store(value: __m512, to: *mut u8) {
        // SAFETY: the caller enables AVX-512F and promises 32 writable bytes.
        unsafe {
            let narrow = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value);
            _mm256_storeu_si256(to.cast(), narrow);
        }
    }
}

impl Storage<__m512> for Bf16 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m512 {
        // SAFETY: the caller enables AVX-512F and promises 32 readable bytes.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn store(value: __m512, to: *mut u8) {
        // SAFETY: the caller enables AVX-512F and promises 32 writable bytes.
        unsafe {
            let bits = _mm512_castps_si512(value);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
            let quieted = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(value, value);
            let chosen = _mm512_mask_blend_epi32(is_nan, rounded, quieted);
            let narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(chosen));
            _mm256_storeu_si256(to.cast(), narrow);
        }
    }
}
