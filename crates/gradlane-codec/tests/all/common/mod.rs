//! Buffers and comparisons that the tests of the kernels share.
//!
//! A buffer lies at a chosen byte offset between guard bytes, so that a kernel that writes beside
//! its range is caught. Values are drawn from a seed, so that a failure repeats.

use gradlane_codec::FloatDtype;

pub mod codecs;

const GUARD: u8 = 0xa5;
const GUARD_BYTES: usize = 64;

/// A range of bytes at a given offset from an aligned address, between guard bytes.
#[derive(Clone)]
pub struct Placed {
    memory: Vec<u64>,
    start: usize,
    bytes: usize,
}

impl Placed {
    /// Room for `bytes` bytes that starts `offset` bytes after a multiple of 8.
    pub fn room(bytes: usize, offset: usize) -> Placed {
        let start = GUARD_BYTES + offset;
        let words = (start + bytes + GUARD_BYTES).div_ceil(8);
        Placed { memory: vec![u64::from_ne_bytes([GUARD; 8]); words], start, bytes }
    }

    /// A copy of `content` that starts `offset` bytes after a multiple of 8.
    pub fn holding(content: &[u8], offset: usize) -> Placed {
        let mut placed = Placed::room(content.len(), offset);
        placed.as_mut().copy_from_slice(content);
        placed
    }

    fn everything(&self) -> &[u8] {
        // SAFETY: bytes of initialized words; u8 has no alignment.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), 8 * self.memory.len()) }
    }

    pub fn as_ref(&self) -> &[u8] {
        &self.everything()[self.start..self.start + self.bytes]
    }

    pub fn as_mut(&mut self) -> &mut [u8] {
        let (start, bytes, words) = (self.start, self.bytes, self.memory.len());
        // SAFETY: bytes of initialized words, borrowed mutably through `self`.
        let everything = unsafe {
            std::slice::from_raw_parts_mut(self.memory.as_mut_ptr().cast::<u8>(), 8 * words)
        };
        &mut everything[start..start + bytes]
    }

    /// Fails if a byte outside the range was written.
    pub fn assert_guards(&self) {
        let end = self.start + self.bytes;
        let (before, after) = (&self.everything()[..self.start], &self.everything()[end..]);
        assert!(before.iter().chain(after).all(|byte| *byte == GUARD), "wrote beside the buffer");
    }
}

/// A generator of numbers from a seed (splitmix64).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).unwrap()
    }

    /// The bytes of one element: mostly of the size of a gradient, sometimes any bits at all,
    /// sometimes one of the values that arithmetic treats in its own way.
    pub fn element(&mut self, dtype: FloatDtype) -> Vec<u8> {
        match self.below(8) {
            0 => self.next().to_ne_bytes()[..dtype.element_bytes()].to_vec(),
            1 => {
                let special = special_values(dtype);
                special[self.below(special.len())].clone()
            }
            _ => {
                let unit = f64::from(u32::try_from(self.next() >> 32).unwrap()) / 2_f64.powi(31);
                bytes_of(dtype, (unit - 1.0) * 10_f64.powi(-(self.below(6) as i32)))
            }
        }
    }

    pub fn elements(&mut self, dtype: FloatDtype, count: usize) -> Vec<u8> {
        (0..count).flat_map(|_| self.element(dtype)).collect()
    }

    /// Elements of moderate size: no infinity, no NaN.
    pub fn plain_elements(&mut self, dtype: FloatDtype, count: usize) -> Vec<u8> {
        let mut unit = || (self.next() >> 11) as f64 / 2_f64.powi(52) - 1.0;
        (0..count).flat_map(|_| bytes_of(dtype, unit())).collect()
    }
}

/// The bytes of the element nearest to `value`.
pub fn bytes_of(dtype: FloatDtype, value: f64) -> Vec<u8> {
    match dtype {
        FloatDtype::F32 => (value as f32).to_ne_bytes().to_vec(),
        FloatDtype::F16 => half::f16::from_f64(value).to_ne_bytes().to_vec(),
        FloatDtype::Bf16 => half::bf16::from_f64(value).to_ne_bytes().to_vec(),
        FloatDtype::F64 => value.to_ne_bytes().to_vec(),
    }
}

/// The value of one element.
pub fn value_of(dtype: FloatDtype, bytes: &[u8]) -> f64 {
    match dtype {
        FloatDtype::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()).into(),
        FloatDtype::F16 => half::f16::from_ne_bytes(bytes.try_into().unwrap()).into(),
        FloatDtype::Bf16 => half::bf16::from_ne_bytes(bytes.try_into().unwrap()).into(),
        FloatDtype::F64 => f64::from_ne_bytes(bytes.try_into().unwrap()),
    }
}

/// Zeros, infinities, quiet and signalling NaN, the ends of the subnormal and the normal range.
fn special_values(dtype: FloatDtype) -> Vec<Vec<u8>> {
    // Bits of the exponent and of the mantissa.
    let (exponent_bits, mantissa_bits) = match dtype {
        FloatDtype::F32 => (8, 23),
        FloatDtype::F16 => (5, 10),
        FloatDtype::Bf16 => (8, 7),
        FloatDtype::F64 => (11, 52),
    };
    let infinity = ((1_u64 << exponent_bits) - 1) << mantissa_bits;
    let sign = 1_u64 << (exponent_bits + mantissa_bits);
    let smallest_normal = 1_u64 << mantissa_bits;
    let quiet = 1_u64 << (mantissa_bits - 1);
    let largest = infinity - 1;
    [
        0,
        1,
        smallest_normal - 1,
        smallest_normal,
        largest,
        infinity,
        infinity | quiet,
        infinity | quiet | 3,
        infinity | 1,
    ]
    .into_iter()
    .flat_map(|bits| [bits, bits | sign])
    .map(|bits| bits.to_le_bytes()[..dtype.element_bytes()].to_vec())
    .map(|mut bytes| {
        if cfg!(target_endian = "big") {
            bytes.reverse();
        }
        bytes
    })
    .collect()
}

/// Fails unless both hold the same bits, where any NaN equals any other.
pub fn assert_same(dtype: FloatDtype, found: &[u8], expected: &[u8], what: &dyn Fn() -> String) {
    if found == expected {
        return;
    }
    assert_eq!(found.len(), expected.len(), "{}", what());
    let size = dtype.element_bytes();
    let pairs = found.chunks_exact(size).zip(expected.chunks_exact(size));
    for (index, (found, expected)) in pairs.enumerate() {
        let both_nan = value_of(dtype, found).is_nan() && value_of(dtype, expected).is_nan();
        assert!(
            both_nan || found == expected,
            "element {index} is {found:02x?} ({}), not {expected:02x?} ({}): {}",
            value_of(dtype, found),
            value_of(dtype, expected),
            what()
        );
    }
}
