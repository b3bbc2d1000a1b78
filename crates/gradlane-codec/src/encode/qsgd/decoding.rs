//! Decoding QSGD in wide registers: the same operations as the oracle's, sixteen at a time.

use super::oracle::{unpack, value_of};
use super::{Qsgd, SCALE_BYTES};
use crate::encode::lanes::{Lanes, Wide, Words, WIDTH};

/// Decodes a bucket into `out`, or adds it where `ADD`.
///
/// # Safety
///
/// Runs where the instructions of `R` are enabled.
#[inline(always)]
pub(super) unsafe fn decode<R: Lanes, const N: usize, const ADD: bool>(
    qsgd: Qsgd,
    bytes: &[u8],
    out: &mut [f32],
) {
    assert_eq!(bytes.len(), qsgd.bytes(out.len()), "the length was checked");
    // SAFETY: as the caller promises.
    unsafe {
        match qsgd.options.bits {
            1 => values::<R, N, ADD, 1>(qsgd, bytes, out),
            2 => values::<R, N, ADD, 2>(qsgd, bytes, out),
            4 => values::<R, N, ADD, 4>(qsgd, bytes, out),
            8 => values::<R, N, ADD, 8>(qsgd, bytes, out),
            _ => values::<R, N, ADD, 16>(qsgd, bytes, out),
        }
    }
}

#[inline(always)]
unsafe fn values<R: Lanes, const N: usize, const ADD: bool, const BITS: u32>(
    qsgd: Qsgd,
    bytes: &[u8],
    out: &mut [f32],
) {
    let (scale, codes) = bytes.split_first_chunk::<SCALE_BYTES>().expect("the length was checked");
    let scale = f32::from_le_bytes(*scale);
    let elements = out.len();
    let per_byte = if BITS < 8 { 8 / BITS as usize } else { 1 };
    let step = WIDTH * per_byte;
    let mut at = 0;
    // SAFETY: as the caller promises; every block is in range of values and codes.
    unsafe {
        let level = Wide::<R, N>::splat(scale / qsgd.half);
        let half = Wide::splat(qsgd.half);
        let set = |at: usize, code: Words<R, N>, out: &mut [f32]| {
            let to = out.as_mut_ptr().add(at);
            let value = Wide::multiply(Wide::subtract(Wide::of_integers(code), half), level);
            let value = if ADD { Wide::add(Wide::load(to), value) } else { value };
            value.store(to);
        };
        while elements - at >= step {
            let from = codes.as_ptr().add(at * BITS as usize / 8);
            if BITS == 16 {
                set(at, Words::load_pairs(from), out);
            } else {
                let packed = Words::load_bytes(from);
                let lowest = Words::same((1 << BITS) - 1);
                match BITS {
                    1 => {
                        for bit in 0..8 {
                            let code = Words::and(packed.right_by(bit), lowest);
                            set(at + bit as usize * WIDTH, code, out);
                        }
                    }
                    2 => {
                        set(at, Words::and(packed, lowest), out);
                        set(at + WIDTH, Words::and(packed.right::<2>(), lowest), out);
                        set(at + 2 * WIDTH, Words::and(packed.right::<4>(), lowest), out);
                        set(at + 3 * WIDTH, packed.right::<6>(), out);
                    }
                    4 => {
                        set(at, Words::and(packed, lowest), out);
                        set(at + WIDTH, packed.right::<4>(), out);
                    }
                    _ => set(at, packed, out),
                }
            }
            at += step;
        }
    }
    if at < elements {
        rest_of_values::<ADD>(qsgd, scale, codes, out, at);
    }
}

/// Decodes the values from `at` on, one after another.
#[inline(never)]
fn rest_of_values<const ADD: bool>(
    qsgd: Qsgd,
    scale: f32,
    codes: &[u8],
    out: &mut [f32],
    at: usize,
) {
    let elements = out.len();
    for (at, slot) in out.iter_mut().enumerate().skip(at) {
        let value = value_of(qsgd, scale, unpack(qsgd.options.bits, elements, at, codes));
        *slot = if ADD { *slot + value } else { value };
    }
}
