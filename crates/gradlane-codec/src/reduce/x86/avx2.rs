//! 256-bit registers: 8 lanes of f32 or 4 of f64, with F16C for f16.
//!
//! bf16 is the upper half of an f32: shifted up to widen, rounded by an integer addition to narrow.

use std::arch::x86_64::*;

use super::register;
use crate::element::{Bf16, Register, Storage, F16};

register!(
    __m256,
    f32,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_add_ps,
    _mm256_sub_ps,
    _mm256_mul_ps,
    _mm256_div_ps,
    _mm256_sqrt_ps
);
register!(
    __m256d,
    f64,
    _mm256_set1_pd,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    _mm256_add_pd,
    _mm256_sub_pd,
    _mm256_mul_pd,
    _mm256_div_pd,
    _mm256_sqrt_pd
);

impl Storage<__m256> for F16 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m256 {
        // SAFETY: the caller enables AVX2 and F16C and promises sixteen readable bytes.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store(value: __m256, to: *mut u8) {
        // SAFETY: the caller enables AVX2 and F16C and promises sixteen writable bytes.
        unsafe {
            let narrow = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(value);
            _mm_storeu_si128(to.cast(), narrow);
        }
    }
}

impl Storage<__m256> for Bf16 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m256 {
        // SAFETY: the caller enables AVX2 and promises sixteen readable bytes.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn store(value: __m256, to: *mut u8) {
        // SAFETY: the caller enables AVX2 and promises sixteen writable bytes.
        unsafe {
            let bits = _mm256_castps_si256(value);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
            let quieted = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
            let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(value, value));
            let chosen = _mm256_blendv_epi8(rounded, quieted, is_nan);
            // The arithmetic shift keeps the upper half in the range of the saturating pack.
            let upper = _mm256_srai_epi32::<16>(chosen);
            let low = _mm256_castsi256_si128(upper);
            let high = _mm256_extracti128_si256::<1>(upper);
            _mm_storeu_si128(to.cast(), _mm_packs_epi32(low, high));
        }
    }
}
