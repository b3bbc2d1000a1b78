//! One lane in plain Rust: what machines run that no wider registers are written for. The compiler
//! makes of sixteen of them what its baseline has.

use super::{lanes_by, Lanes};

impl Lanes for f32 {
    type Words = u32;
    type Mask = bool;

    lanes_by! {
        words(lane: Self) -> u32 = lane.to_bits();
        of_words(word: u32) -> Self = f32::from_bits(word);
        truncated(lane: Self) -> u32 = lane.to_int_unchecked::<i32>() as u32;
        rounded(lane: Self) -> u32 = lane.round_ties_even().to_int_unchecked::<i32>() as u32;
        of_integers(word: u32) -> Self = word as i32 as f32;
        same(word: u32) -> u32 = word;
        count_from(first: u32) -> u32 = first;
        plus(one: u32, other: u32) -> u32 = one.wrapping_add(other);
        times(one: u32, other: u32) -> u32 = one.wrapping_mul(other);
        and(one: u32, other: u32) -> u32 = one & other;
        or(one: u32, other: u32) -> u32 = one | other;
        xor(one: u32, other: u32) -> u32 = one ^ other;
        smaller(one: u32, other: u32) -> u32 = (one as i32).min(other as i32) as u32;
        larger(one: u32, other: u32) -> u32 = (one as i32).max(other as i32) as u32;
        left<const BITS>(word: u32) -> u32 = word << BITS;
        right<const BITS>(word: u32) -> u32 = word >> BITS;
        signs(word: u32) -> u32 = (word as i32 >> 31) as u32;
        largest(word: u32) -> i32 = word as i32;
        in_pairs(lane: Self) -> f32 = lane;
        load_bytes(from: *const u8) -> u32 = u32::from(from.read());
        store_bytes(word: u32, to: *mut u8) = to.write(word as u8);
        load_pairs(from: *const u8) -> u32 =
            u32::from(u16::from_le_bytes(from.cast::<[u8; 2]>().read()));
        store_pairs(word: u32, to: *mut u8) =
            to.cast::<[u8; 2]>().write((word as u16).to_le_bytes());
        not_negative(lane: Self) -> bool = lane >= 0.0;
        less(one: u32, other: u32) -> bool = (one as i32) < other as i32;
        mask_bits(mask: bool) -> u32 = u32::from(mask);
        mask_of_bits(bits: u32) -> bool = bits & 1 == 1;
        select(mask: bool, yes: Self, no: Self) -> Self = if mask { yes } else { no };
    }
}
