//! 128-bit registers: 4 lanes of f32 or 2 of f64, on every x86-64 machine.
//!
//! SSE2 has no conversion from and to f16, so those go lane by lane, which is slow; only machines
//! without AVX2 or F16C choose this variant.

use std::arch::x86_64::*;

use super::register;
use crate::element::{Bf16, Register, Storage, F16};

register!(
    __m128,
    f32,
    _mm_set1_ps,
    _mm_loadu_ps,
    _mm_storeu_ps,
    _mm_add_ps,
    _mm_sub_ps,
    _mm_mul_ps,
    _mm_div_ps,
    _mm_sqrt_ps
);
register!(
    __m128d,
    f64,
    _mm_set1_pd,
    _mm_loadu_pd,
    _mm_storeu_pd,
    _mm_add_pd,
    _mm_sub_pd,
    _mm_mul_pd,
    _mm_div_pd,
    _mm_sqrt_pd
);

impl Storage<__m128> for F16 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m128 {
        let mut lanes = [0.0_f32; 4];
        for (index, lane) in lanes.iter_mut().enumerate() {
            // SAFETY: the caller promises four elements of two bytes.
            *lane = unsafe { <F16 as Storage<f32>>::load(from.add(2 * index)) };
        }
        // SAFETY: four lanes are sixteen bytes, and SSE2 is on every x86-64 machine.
        unsafe { _mm_loadu_ps(lanes.as_ptr()) }
    }

    #[inline(always)]
    unsafe fn store(value: __m128, to: *mut u8) {
        let mut lanes = [0.0_f32; 4];
        // SAFETY: four lanes are sixteen bytes, and SSE2 is on every x86-64 machine.
        unsafe { _mm_storeu_ps(lanes.as_mut_ptr(), value) };
        for (index, lane) in lanes.into_iter().enumerate() {
            // SAFETY: the caller promises four elements of two bytes.
            unsafe { <F16 as Storage<f32>>::store(lane, to.add(2 * index)) };
        }
    }
}

impl Storage<__m128> for Bf16 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> __m128 {
        // SAFETY: the caller promises eight readable bytes; SSE2 is on every x86-64 machine.
        unsafe {
            let narrow = _mm_loadl_epi64(from.cast());
            _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), narrow))
        }
    }

    #[inline(always)]
    unsafe fn store(value: __m128, to: *mut u8) {
        // SAFETY: the caller promises eight writable bytes; SSE2 is on every x86-64 machine.
        unsafe {
            let bits = _mm_castps_si128(value);
            let odd = _mm_and_si128(_mm_srli_epi32::<16>(bits), _mm_set1_epi32(1));
            let rounded = _mm_add_epi32(_mm_add_epi32(bits, _mm_set1_epi32(0x7fff)), odd);
            let quieted = _mm_or_si128(bits, _mm_set1_epi32(0x0040_0000));
            let is_nan = _mm_castps_si128(_mm_cmpunord_ps(value, value));
            let chosen =
                _mm_or_si128(_mm_and_si128(is_nan, quieted), _mm_andnot_si128(is_nan, rounded));
            // The arithmetic shift keeps the upper half in the range of the saturating pack.
            let upper = _mm_srai_epi32::<16>(chosen);
            _mm_storel_epi64(to.cast(), _mm_packs_epi32(upper, upper));
        }
    }
}
