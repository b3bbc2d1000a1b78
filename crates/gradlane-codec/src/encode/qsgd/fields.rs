//! Sums of codes as they lie on the wire: wider than codes, by any number of bits.
//!
//! A sum of `width` bits is cut into fields by the binary digits of `width`, the widest field from the
//! lowest bits: ten bits are the lower eight and the upper two. Each field of all values of a bucket
//! is packed as codes of so many bits are; the fields follow one another. So registers of any width
//! pack and unpack all of them without moving lanes, 128 values at a time.

use super::oracle::{pack, unpack};
use crate::encode::lanes::{Lanes, Wide, Words, WIDTH};

/// The widest sum. f32 holds every integer of this many bits.
pub(super) const WIDTH_MAX: u32 = 24;
/// Values that are packed together: whole blocks of every field.
const RUN: usize = 128;
/// Sixteen lanes each.
const ROWS: usize = RUN / WIDTH;

/// A part of the bits of a sum.
#[derive(Clone, Copy, Debug, Default)]
struct Field {
    bits: u32,
    /// Its lowest bit in the sum.
    shift: u32,
    /// Where it begins in the bucket's bytes.
    start: usize,
}

/// How the sums of a bucket lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    fields: [Field; 5],
    count: usize,
    elements: usize,
    /// Bytes of all fields.
    pub(super) bytes: usize,
}

impl Layout {
    #[inline(always)]
    pub(super) fn new(width: u32, elements: usize) -> Layout {
        debug_assert!(width <= WIDTH_MAX);
        let mut layout = Layout { fields: [Field::default(); 5], count: 0, elements, bytes: 0 };
        let mut shift = 0;
        for bits in [16, 8, 4, 2, 1] {
            if width & bits != 0 {
                layout.fields[layout.count] = Field { bits, shift, start: layout.bytes };
                layout.count += 1;
                layout.bytes += (elements * bits as usize).div_ceil(8);
                shift += bits;
            }
        }
        layout
    }

    #[inline(always)]
    fn fields(&self) -> &[Field] {
        &self.fields[..self.count]
    }

    /// The bytes of a field.
    fn field<'a>(&self, field: Field, sums: &'a mut [u8]) -> &'a mut [u8] {
        &mut sums[field.start..][..(self.elements * field.bits as usize).div_ceil(8)]
    }

    /// The sum of one value.
    pub(super) fn sum(&self, sums: &[u8], index: usize) -> u32 {
        let part = |field: &Field| {
            unpack(field.bits, self.elements, index, &sums[field.start..]) << field.shift
        };
        self.fields().iter().map(part).fold(0, |sum, part| sum | part)
    }

    /// Adds codes of this many bits to the sums of up to 128 values from `at` on, one after another.
    fn add_run(&self, bits: u32, sums: &mut [u8], codes: &[u8], at: usize) {
        let end = self.elements.min(at + RUN);
        let mut run = [0; RUN];
        for (index, sum) in (at..end).zip(&mut run) {
            *sum = self.sum(sums, index) + unpack(bits, self.elements, index, codes);
        }
        for &field in self.fields() {
            let lowest = (1 << field.bits) - 1;
            let bytes = self.field(field, sums);
            let first = at * field.bits as usize / 8;
            let last = (end * field.bits as usize).div_ceil(8);
            bytes[first..last].fill(0);
            for (index, sum) in (at..end).zip(&run) {
                pack(field.bits, self.elements, index, (sum >> field.shift) & lowest, bytes);
            }
        }
    }

    /// Adds codes of this many bits, as the definition says.
    pub(super) fn add_plainly(&self, bits: u32, sums: &mut [u8], codes: &[u8]) {
        for at in (0..self.elements).step_by(RUN) {
            self.add_run(bits, sums, codes, at);
        }
    }

    /// Adds codes of this many bits in wide registers.
    ///
    /// # Safety
    ///
    /// Runs where the instructions of `R` are enabled.
    #[inline(always)]
    pub(super) unsafe fn add<R: Lanes, const N: usize>(
        &self,
        bits: u32,
        sums: &mut [u8],
        codes: &[u8],
    ) {
        assert!(sums.len() >= self.bytes, "sums of {} bytes", self.bytes);
        assert!(codes.len() >= (self.elements * bits as usize).div_ceil(8), "codes of all sums");
        let mut at = 0;
        while self.elements - at >= RUN {
            // SAFETY: as the caller promises; the run is in range of sums and codes.
            unsafe {
                let mut rows = self.load::<R, N>(sums.as_ptr(), at);
                let own = load_rows::<R, N>(bits, codes.as_ptr().add(at * bits as usize / 8));
                for (row, own) in rows.iter_mut().zip(own) {
                    *row = Words::plus(*row, own);
                }
                for field in self.fields() {
                    let mut part = rows;
                    for row in &mut part {
                        *row = row.right_by(field.shift);
                    }
                    let start = field.start + at * field.bits as usize / 8;
                    store_rows(field.bits, &part, sums.as_mut_ptr().add(start));
                }
            }
            at += RUN;
        }
        if at < self.elements {
            self.add_run(bits, sums, codes, at);
        }
    }

    /// The sums of 128 values from `at` on.
    #[inline(always)]
    unsafe fn load<R: Lanes, const N: usize>(
        &self,
        sums: *const u8,
        at: usize,
    ) -> [Words<R, N>; ROWS] {
        // SAFETY: the caller enables the instructions; the run is in range.
        unsafe {
            let mut rows = [Words::same(0); ROWS];
            for field in self.fields() {
                let from = sums.add(field.start + at * field.bits as usize / 8);
                let part = load_rows::<R, N>(field.bits, from);
                for (row, part) in rows.iter_mut().zip(part) {
                    *row = Words::or(*row, part.left_by(field.shift));
                }
            }
            rows
        }
    }

    /// Writes what sums stand for: (sum - `zero`) × `level`.
    ///
    /// # Safety
    ///
    /// Runs where the instructions of `R` are enabled.
    #[inline(always)]
    pub(super) unsafe fn values<R: Lanes, const N: usize>(
        &self,
        sums: &[u8],
        (zero, level): (u32, f32),
        out: &mut [f32],
    ) {
        assert!(sums.len() >= self.bytes, "sums of {} bytes", self.bytes);
        assert_eq!(out.len(), self.elements, "room for all values");
        let mut at = 0;
        // SAFETY: as the caller promises; every run is in range of sums and values.
        unsafe {
            let down = Words::same(zero.wrapping_neg());
            let levels = Wide::<R, N>::splat(level);
            while self.elements - at >= RUN {
                let rows = self.load::<R, N>(sums.as_ptr(), at);
                for (row, sum) in rows.into_iter().enumerate() {
                    let value = Wide::of_integers(Words::plus(sum, down));
                    let to = out.as_mut_ptr().add(at + row * WIDTH);
                    Wide::multiply(value, levels).store(to);
                }
                at += RUN;
            }
        }
        self.values_from(at, sums, (zero, level), out);
    }

    /// The same from `at` on, one after another.
    pub(super) fn values_from(
        &self,
        at: usize,
        sums: &[u8],
        (zero, level): (u32, f32),
        out: &mut [f32],
    ) {
        for (index, value) in out.iter_mut().enumerate().skip(at) {
            *value = self.sum(sums, index).wrapping_sub(zero) as i32 as f32 * level;
        }
    }
}

/// 128 numbers of 1, 2, 4, 8 or 16 bits, sixteen a row.
#[inline(always)]
unsafe fn load_rows<R: Lanes, const N: usize>(bits: u32, from: *const u8) -> [Words<R, N>; ROWS] {
    // SAFETY: the caller enables the instructions and promises 16 × `bits` bytes.
    unsafe {
        let mut rows = [Words::same(0); ROWS];
        if bits == 16 {
            for (index, row) in rows.iter_mut().enumerate() {
                *row = Words::load_pairs(from.add(2 * WIDTH * index));
            }
            return rows;
        }
        let per_byte = 8 / bits as usize;
        let lowest = Words::same((1 << bits) - 1);
        for (block, rows) in rows.chunks_exact_mut(per_byte).enumerate() {
            let packed = Words::<R, N>::load_bytes(from.add(WIDTH * block));
            for (index, row) in rows.iter_mut().enumerate() {
                *row = Words::and(packed.right_by(index as u32 * bits), lowest);
            }
        }
        rows
    }
}

/// Writes the lowest 1, 2, 4, 8 or 16 bits of 128 numbers.
#[inline(always)]
unsafe fn store_rows<R: Lanes, const N: usize>(bits: u32, rows: &[Words<R, N>; ROWS], to: *mut u8) {
    // SAFETY: the caller enables the instructions and promises room for 16 × `bits` bytes.
    unsafe {
        if bits == 16 {
            for (index, row) in rows.iter().enumerate() {
                row.store_pairs(to.add(2 * WIDTH * index));
            }
            return;
        }
        let per_byte = 8 / bits as usize;
        let lowest = Words::same((1 << bits) - 1);
        for (block, rows) in rows.chunks_exact(per_byte).enumerate() {
            let mut packed = Words::same(0);
            for (index, row) in rows.iter().enumerate() {
                let part = Words::and(*row, lowest).left_by(index as u32 * bits);
                packed = Words::or(packed, part);
            }
            packed.store_bytes(to.add(WIDTH * block));
        }
    }
}
