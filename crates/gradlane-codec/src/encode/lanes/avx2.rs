//! Eight lanes in a register of AVX2.

use std::arch::x86_64::*;

use super::{lanes_by, Lanes};

/// The order of four bytes each after two packings by halves of registers.
macro_rules! in_order {
    ($bytes:expr) => {
        _mm256_permutevar8x32_epi32($bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
    };
}

impl Lanes for __m256 {
    type Words = __m256i;
    type Mask = __m256i;

    lanes_by! {
        words(lanes: Self) -> __m256i = _mm256_castps_si256(lanes);
        of_words(words: __m256i) -> Self = _mm256_castsi256_ps(words);
        truncated(lanes: Self) -> __m256i = _mm256_cvttps_epi32(lanes);
        rounded(lanes: Self) -> __m256i = _mm256_cvtps_epi32(lanes);
        of_integers(words: __m256i) -> Self = _mm256_cvtepi32_ps(words);
        same(word: u32) -> __m256i = _mm256_set1_epi32(word as i32);
        count_from(first: u32) -> __m256i = {
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_add_epi32(_mm256_set1_epi32(first as i32), lanes)
        };
        plus(one: __m256i, other: __m256i) -> __m256i = _mm256_add_epi32(one, other);
        times(one: __m256i, other: __m256i) -> __m256i = _mm256_mullo_epi32(one, other);
        and(one: __m256i, other: __m256i) -> __m256i = _mm256_and_si256(one, other);
        or(one: __m256i, other: __m256i) -> __m256i = _mm256_or_si256(one, other);
        xor(one: __m256i, other: __m256i) -> __m256i = _mm256_xor_si256(one, other);
        smaller(one: __m256i, other: __m256i) -> __m256i = _mm256_min_epi32(one, other);
        larger(one: __m256i, other: __m256i) -> __m256i = _mm256_max_epi32(one, other);
        left<const BITS>(words: __m256i) -> __m256i =
            _mm256_sll_epi32(words, _mm_cvtsi32_si128(BITS as i32));
        right<const BITS>(words: __m256i) -> __m256i =
            _mm256_srl_epi32(words, _mm_cvtsi32_si128(BITS as i32));
        left_by(words: __m256i, bits: u32) -> __m256i =
            _mm256_sll_epi32(words, _mm_cvtsi32_si128(bits as i32));
        right_by(words: __m256i, bits: u32) -> __m256i =
            _mm256_srl_epi32(words, _mm_cvtsi32_si128(bits as i32));
        signs(words: __m256i) -> __m256i = _mm256_srai_epi32::<31>(words);
        largest(words: __m256i) -> i32 = {
            let high = _mm256_extracti128_si256::<1>(words);
            let four = _mm_max_epi32(_mm256_castsi256_si128(words), high);
            let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b_01_00_11_10>(four));
            let one = _mm_max_epi32(two, _mm_shuffle_epi32::<0b_10_11_00_01>(two));
            _mm_cvtsi128_si32(one)
        };
        in_pairs(lanes: Self) -> f32 = {
            let high = _mm256_extractf128_ps::<1>(lanes);
            let four = _mm_add_ps(_mm256_castps256_ps128(lanes), high);
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            let one = _mm_add_ss(two, _mm_shuffle_ps::<1>(two, two));
            _mm_cvtss_f32(one)
        };
        load_bytes(from: *const u8) -> __m256i =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
        store_bytes(words: __m256i, to: *mut u8) = {
            // The lowest bytes of each half's four lanes, then both halves' four bytes together.
            let lowest = _mm256_setr_epi8(
                0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
            );
            let bytes = _mm256_shuffle_epi8(words, lowest);
            let low = _mm256_castsi256_si128(bytes);
            let high = _mm256_extracti128_si256::<1>(bytes);
            _mm_storel_epi64(to.cast(), _mm_unpacklo_epi32(low, high));
        };
        load_pairs(from: *const u8) -> __m256i =
            _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        store_pairs(words: __m256i, to: *mut u8) = {
            let low = _mm256_castsi256_si128(words);
            let high = _mm256_extracti128_si256::<1>(words);
            let lower_half = _mm_set1_epi32(0xffff);
            let pairs =
                _mm_packus_epi32(_mm_and_si128(low, lower_half), _mm_and_si128(high, lower_half));
            _mm_storeu_si128(to.cast(), pairs);
        };
        not_negative(lanes: Self) -> __m256i =
            _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GE_OQ>(lanes, _mm256_setzero_ps()));
        less(one: __m256i, other: __m256i) -> __m256i = _mm256_cmpgt_epi32(other, one);
        mask_bits(mask: __m256i) -> u32 = _mm256_movemask_ps(_mm256_castsi256_ps(mask)) as u32;
        mask_of_bits(bits: u32) -> __m256i = {
            let lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let bits = _mm256_and_si256(_mm256_set1_epi32(bits as i32), lanes);
            _mm256_cmpeq_epi32(bits, lanes)
        };
        select(mask: __m256i, yes: Self, no: Self) -> Self =
            _mm256_blendv_ps(no, yes, _mm256_castsi256_ps(mask));
    }

    #[inline(always)]
    unsafe fn store_bytes_of_two<const N: usize>(
        one: [__m256i; N],
        other: [__m256i; N],
        to: *mut u8,
    ) {
        // SAFETY: the caller enables AVX2 and promises 32 writable bytes.
        unsafe {
            let pairs = [one, other].map(|it| _mm256_packs_epi32(it[0], it[1]));
            let bytes = in_order!(_mm256_packus_epi16(pairs[0], pairs[1]));
            _mm256_storeu_si256(to.cast(), bytes);
        }
    }

    #[inline(always)]
    unsafe fn store_clamped_of_two<const N: usize>(
        one: [__m256i; N],
        other: [__m256i; N],
        to: *mut u8,
    ) {
        // SAFETY: the caller enables AVX2 and promises 32 writable bytes.
        unsafe {
            let pairs = [one, other].map(|it| _mm256_packs_epi32(it[0], it[1]));
            // Packing clamps to -128 ... 127.
            let bytes = in_order!(_mm256_packs_epi16(pairs[0], pairs[1]));
            let bytes = _mm256_max_epi8(bytes, _mm256_set1_epi8(-127));
            _mm256_storeu_si256(to.cast(), _mm256_add_epi8(bytes, _mm256_set1_epi8(127)));
        }
    }

    #[inline(never)]
    #[target_feature(enable = "avx2,f16c,popcnt")]
    unsafe fn apart<T>(part: impl FnOnce() -> T) -> T {
        part()
    }
}
