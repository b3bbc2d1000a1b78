//! Four lanes in a register of NEON.

use std::arch::aarch64::*;

use super::{lanes_by, Lanes};

impl Lanes for float32x4_t {
    type Words = uint32x4_t;
    type Mask = uint32x4_t;

    lanes_by! {
        words(lanes: Self) -> uint32x4_t = vreinterpretq_u32_f32(lanes);
        of_words(words: uint32x4_t) -> Self = vreinterpretq_f32_u32(words);
        truncated(lanes: Self) -> uint32x4_t = vreinterpretq_u32_s32(vcvtq_s32_f32(lanes));
        rounded(lanes: Self) -> uint32x4_t = vreinterpretq_u32_s32(vcvtnq_s32_f32(lanes));
        of_integers(words: uint32x4_t) -> Self = vcvtq_f32_s32(vreinterpretq_s32_u32(words));
        same(word: u32) -> uint32x4_t = vdupq_n_u32(word);
        count_from(first: u32) -> uint32x4_t =
            vaddq_u32(vdupq_n_u32(first), vld1q_u32([0, 1, 2, 3].as_ptr()));
        plus(one: uint32x4_t, other: uint32x4_t) -> uint32x4_t = vaddq_u32(one, other);
        times(one: uint32x4_t, other: uint32x4_t) -> uint32x4_t = vmulq_u32(one, other);
        and(one: uint32x4_t, other: uint32x4_t) -> uint32x4_t = vandq_u32(one, other);
        or(one: uint32x4_t, other: uint32x4_t) -> uint32x4_t = vorrq_u32(one, other);
        xor(one: uint32x4_t, other: uint32x4_t) -> uint32x4_t = veorq_u32(one, other);
        smaller(one: uint32x4_t, other: uint32x4_t) -> uint32x4_t = vreinterpretq_u32_s32(
            vminq_s32(vreinterpretq_s32_u32(one), vreinterpretq_s32_u32(other)),
        );
        larger(one: uint32x4_t, other: uint32x4_t) -> uint32x4_t = vreinterpretq_u32_s32(
            vmaxq_s32(vreinterpretq_s32_u32(one), vreinterpretq_s32_u32(other)),
        );
        left<const BITS>(words: uint32x4_t) -> uint32x4_t =
            vshlq_u32(words, vdupq_n_s32(BITS as i32));
        right<const BITS>(words: uint32x4_t) -> uint32x4_t =
            vshlq_u32(words, vdupq_n_s32(-(BITS as i32)));
        left_by(words: uint32x4_t, bits: u32) -> uint32x4_t =
            vshlq_u32(words, vdupq_n_s32(bits as i32));
        right_by(words: uint32x4_t, bits: u32) -> uint32x4_t =
            vshlq_u32(words, vdupq_n_s32(-(bits as i32)));
        signs(words: uint32x4_t) -> uint32x4_t =
            vreinterpretq_u32_s32(vshrq_n_s32::<31>(vreinterpretq_s32_u32(words)));
        largest(words: uint32x4_t) -> i32 = vmaxvq_s32(vreinterpretq_s32_u32(words));
        in_pairs(lanes: Self) -> f32 = {
            let two = vadd_f32(vget_low_f32(lanes), vget_high_f32(lanes));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        };
        load_bytes(from: *const u8) -> uint32x4_t = {
            let bytes = vcreate_u8(u64::from(from.cast::<u32>().read_unaligned()));
            vmovl_u16(vget_low_u16(vmovl_u8(bytes)))
        };
        store_bytes(words: uint32x4_t, to: *mut u8) = {
            let pairs = vmovn_u32(words);
            let bytes = vmovn_u16(vcombine_u16(pairs, pairs));
            to.cast::<u32>().write_unaligned(vget_lane_u32::<0>(vreinterpret_u32_u8(bytes)));
        };
        load_pairs(from: *const u8) -> uint32x4_t =
            vmovl_u16(vreinterpret_u16_u8(vld1_u8(from)));
        store_pairs(words: uint32x4_t, to: *mut u8) =
            vst1_u8(to, vreinterpret_u8_u16(vmovn_u32(words)));
        not_negative(lanes: Self) -> uint32x4_t = vcgezq_f32(lanes);
        less(one: uint32x4_t, other: uint32x4_t) -> uint32x4_t =
            vcltq_s32(vreinterpretq_s32_u32(one), vreinterpretq_s32_u32(other));
        mask_bits(mask: uint32x4_t) -> u32 =
            vaddvq_u32(vandq_u32(mask, vld1q_u32([1, 2, 4, 8].as_ptr())));
        mask_of_bits(bits: u32) -> uint32x4_t =
            vtstq_u32(vdupq_n_u32(bits), vld1q_u32([1, 2, 4, 8].as_ptr()));
        select(mask: uint32x4_t, yes: Self, no: Self) -> Self = vbslq_f32(mask, yes, no);
    }

    #[inline(always)]
    unsafe fn store_bytes_of_two<const N: usize>(
        one: [uint32x4_t; N],
        other: [uint32x4_t; N],
        to: *mut u8,
    ) {
        // SAFETY: the caller enables NEON and promises 32 writable bytes.
        unsafe {
            for (at, words) in [one, other].into_iter().enumerate() {
                let low = vcombine_u16(vmovn_u32(words[0]), vmovn_u32(words[1]));
                let high = vcombine_u16(vmovn_u32(words[2]), vmovn_u32(words[3]));
                vst1q_u8(to.add(16 * at), vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
            }
        }
    }

    #[inline(always)]
    unsafe fn store_clamped_of_two<const N: usize>(
        one: [uint32x4_t; N],
        other: [uint32x4_t; N],
        to: *mut u8,
    ) {
        // SAFETY: the caller enables NEON and promises 32 writable bytes.
        unsafe {
            for (at, words) in [one, other].into_iter().enumerate() {
                let pairs = words.map(|it| vqmovn_s32(vreinterpretq_s32_u32(it)));
                let low = vqmovn_s16(vcombine_s16(pairs[0], pairs[1]));
                let high = vqmovn_s16(vcombine_s16(pairs[2], pairs[3]));
                // Narrowing clamps to -128 ... 127.
                let bytes = vmaxq_s8(vcombine_s8(low, high), vdupq_n_s8(-127));
                let bytes = vaddq_s8(bytes, vdupq_n_s8(127));
                vst1q_u8(to.add(16 * at), vreinterpretq_u8_s8(bytes));
            }
        }
    }

    #[inline(never)]
    #[target_feature(enable = "neon")]
    unsafe fn apart<T>(part: impl FnOnce() -> T) -> T {
        part()
    }
}
