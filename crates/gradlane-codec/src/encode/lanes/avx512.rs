//! Sixteen lanes in one register of AVX-512F.

use std::arch::x86_64::*;

use super::{lanes_by, Lanes};

impl Lanes for __m512 {
    type Words = __m512i;
    type Mask = __mmask16;

    lanes_by! {
        words(lanes: Self) -> __m512i = _mm512_castps_si512(lanes);
        of_words(words: __m512i) -> Self = _mm512_castsi512_ps(words);
        truncated(lanes: Self) -> __m512i = _mm512_cvttps_epi32(lanes);
        rounded(lanes: Self) -> __m512i = _mm512_cvtps_epi32(lanes);
        of_integers(words: __m512i) -> Self = _mm512_cvtepi32_ps(words);
        same(word: u32) -> __m512i = _mm512_set1_epi32(word as i32);
        count_from(first: u32) -> __m512i = {
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            _mm512_add_epi32(_mm512_set1_epi32(first as i32), lanes)
        };
        plus(one: __m512i, other: __m512i) -> __m512i = _mm512_add_epi32(one, other);
        times(one: __m512i, other: __m512i) -> __m512i = _mm512_mullo_epi32(one, other);
        and(one: __m512i, other: __m512i) -> __m512i = _mm512_and_si512(one, other);
        or(one: __m512i, other: __m512i) -> __m512i = _mm512_or_si512(one, other);
        xor(one: __m512i, other: __m512i) -> __m512i = _mm512_xor_si512(one, other);
        smaller(one: __m512i, other: __m512i) -> __m512i = _mm512_min_epi32(one, other);
        larger(one: __m512i, other: __m512i) -> __m512i = _mm512_max_epi32(one, other);
        left<const BITS>(words: __m512i) -> __m512i = _mm512_slli_epi32::<BITS>(words);
        right<const BITS>(words: __m512i) -> __m512i = _mm512_srli_epi32::<BITS>(words);
        left_by(words: __m512i, bits: u32) -> __m512i =
            _mm512_sll_epi32(words, _mm_cvtsi32_si128(bits as i32));
        right_by(words: __m512i, bits: u32) -> __m512i =
            _mm512_srl_epi32(words, _mm_cvtsi32_si128(bits as i32));
        signs(words: __m512i) -> __m512i = _mm512_srai_epi32::<31>(words);
        largest(words: __m512i) -> i32 = _mm512_reduce_max_epi32(words);
        in_pairs(lanes: Self) -> f32 = {
            let high = _mm512_extractf64x4_pd::<1>(_mm512_castps_pd(lanes));
            let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm256_castpd_ps(high));
            <__m256 as Lanes>::in_pairs(eight)
        };
        load_bytes(from: *const u8) -> __m512i =
            _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
        store_bytes(words: __m512i, to: *mut u8) =
            _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(words));
        load_pairs(from: *const u8) -> __m512i =
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        store_pairs(words: __m512i, to: *mut u8) =
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(words));
        not_negative(lanes: Self) -> __mmask16 =
            _mm512_cmp_ps_mask::<_CMP_GE_OQ>(lanes, _mm512_setzero_ps());
        less(one: __m512i, other: __m512i) -> __mmask16 = _mm512_cmplt_epi32_mask(one, other);
        mask_bits(mask: __mmask16) -> u32 = u32::from(mask);
        mask_of_bits(bits: u32) -> __mmask16 = bits as __mmask16;
        select(mask: __mmask16, yes: Self, no: Self) -> Self = _mm512_mask_blend_ps(mask, no, yes);
    }

    #[inline(always)]
    unsafe fn store_bytes_of_two<const N: usize>(
        one: [__m512i; N],
        other: [__m512i; N],
        to: *mut u8,
    ) {
        // SAFETY: the caller enables AVX-512F and promises 32 writable bytes.
        unsafe {
            Self::store_bytes(one[0], to);
            Self::store_bytes(other[0], to.add(16));
        }
    }

    #[inline(always)]
    unsafe fn store_clamped_of_two<const N: usize>(
        one: [__m512i; N],
        other: [__m512i; N],
        to: *mut u8,
    ) {
        // SAFETY: the caller enables AVX-512F and promises 32 writable bytes.
        unsafe {
            // Packing clamps to -128 ... 127.
            let [one, other] = [one[0], other[0]].map(|it| _mm512_cvtsepi32_epi8(it));
            let bytes = _mm256_max_epi8(_mm256_set_m128i(other, one), _mm256_set1_epi8(-127));
            _mm256_storeu_si256(to.cast(), _mm256_add_epi8(bytes, _mm256_set1_epi8(127)));
        }
    }

    #[inline(never)]
    #[target_feature(enable = "avx512f,popcnt")]
    unsafe fn apart<T>(part: impl FnOnce() -> T) -> T {
        part()
    }
}
