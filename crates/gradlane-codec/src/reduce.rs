//! The mean of N buffers in rank order: the entrance, its safe form, and the choice of kernel.
//!
//! The unsafe entrance takes raw pointers because gradient memory belongs to a framework and is
//! shared with sockets; the safe one takes slices and checks them. Both run the same kernels.

mod kernel;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::num::NonZeroU32;

use thiserror::Error;

pub(crate) use kernel::{Sum, Update};

use crate::instruction_set::Instructions;
use crate::{FloatDtype, InstructionSet};

/// How buffers are averaged: `(((x0 + x1) + x2) + ...) / divisor` for each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mean {
    /// The type of the elements of all inputs and outputs.
    pub dtype: FloatDtype,
    /// Divisor of the sum: the number of ranks, those without a contribution included.
    ///
    /// It is used in the accumulator type, in which every integer up to 2^24 is exact.
    pub divisor: NonZeroU32,
    /// Whether some rank contributes nothing, which counts as zeros.
    ///
    /// Positive zero is then added once, after the last input: this gives the same bits as summing
    /// explicit zeros at any place, since it only turns a sum of -0.0 into +0.0.
    pub add_zero: bool,
}

impl Mean {
    /// The mean over `divisor` contributions, all of them present.
    pub fn of_all(dtype: FloatDtype, divisor: NonZeroU32) -> Mean {
        Mean { dtype, divisor, add_zero: false }
    }

    /// Whether the result of `inputs` contributions is the only one of them, bit for bit.
    fn is_copy(self, inputs: usize) -> bool {
        inputs == 1 && self.divisor.get() == 1 && !self.add_zero
    }

    /// The reduction of these buffers.
    pub(crate) fn sum(
        self,
        inputs: &[*const u8],
        output: *mut u8,
        copy_to: Option<*mut u8>,
        elements: usize,
    ) -> Sum<'_> {
        let (divisor, add_zero) = (self.divisor.get(), self.add_zero);
        Sum { inputs, output, copy_to, elements, divisor, add_zero }
    }
}

/// Averages buffers with the [`InstructionSet::active`] kernels.
///
/// `inputs` has one pointer for each contribution in rank order; with no inputs the result is
/// zeros. The result is written to `output` and, where given, to `copy_to` in the same pass.
/// Pointers may have any alignment. A single input with divisor 1 and no added zero is copied bit
/// for bit.
///
/// # Safety
///
/// - Every input is readable, and every output writable, for `elements` elements of the dtype.
/// - `output` and `copy_to` do not overlap each other. Each of them either overlaps no input or is
///   exactly one of them (in-place).
/// - Nothing else writes to this memory, or reads from the outputs, during the call.
pub unsafe fn reduce_mean(
    mean: Mean,
    inputs: &[*const u8],
    output: *mut u8,
    copy_to: Option<*mut u8>,
    elements: usize,
) {
    // SAFETY: forwarded, the caller's promise covers it.
    unsafe { reduce_mean_with(InstructionSet::active(), mean, inputs, output, copy_to, elements) }
}

/// [`reduce_mean`] with the kernels for a given instruction set.
///
/// # Safety
///
/// As for [`reduce_mean`].
pub unsafe fn reduce_mean_with(
    instruction_set: InstructionSet,
    mean: Mean,
    inputs: &[*const u8],
    output: *mut u8,
    copy_to: Option<*mut u8>,
    elements: usize,
) {
    if mean.is_copy(inputs.len()) {
        let bytes = elements * mean.dtype.element_bytes();
        for target in std::iter::once(output).chain(copy_to) {
            // An output that is the input has its result already.
            if !std::ptr::eq(inputs[0], target) {
                // SAFETY: the caller promises that many bytes on both sides, and no other overlap.
                unsafe { std::ptr::copy_nonoverlapping(inputs[0], target, bytes) };
            }
        }
        return;
    }
    let sum = mean.sum(inputs, output, copy_to, elements);
    // SAFETY: the caller's promise about the memory is that of `Sum`.
    unsafe { run(instruction_set, mean.dtype, sum, kernel::Keep) }
}

/// Runs a reduction and an update with the kernels for an instruction set.
///
/// # Safety
///
/// The pointers are as [`Sum`] and the update ask for.
pub(crate) unsafe fn run<U: Update>(
    instruction_set: InstructionSet,
    dtype: FloatDtype,
    sum: Sum<'_>,
    update: U,
) {
    // SAFETY: a `InstructionSet` exists only where the machine has its instructions; the caller promises
    // the memory.
    unsafe {
        match instruction_set.instructions() {
            Instructions::Scalar => scalar::run(dtype, sum, update),
            #[cfg(target_arch = "x86_64")]
            Instructions::Sse2 => x86::run_sse2(dtype, sum, update),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => x86::run_avx2(dtype, sum, update),
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => x86::run_avx512(dtype, sum, update),
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => neon::run_neon(dtype, sum, update),
        }
    }
}

/// [`reduce_mean_with`] over slices of bytes, with every length checked.
///
/// # Errors
///
/// [`ReduceError`] if the buffers differ in length or hold a broken element; nothing is then
/// written.
pub fn reduce_mean_slices(
    instruction_set: InstructionSet,
    mean: Mean,
    inputs: &[&[u8]],
    output: &mut [u8],
    copy_to: Option<&mut [u8]>,
) -> Result<(), ReduceError> {
    let lengths = Lengths { inputs, parameters: None, output, copy_to: copy_to.as_deref() };
    let elements = lengths.elements(mean.dtype)?;
    let copy_to = copy_to.map(<[u8]>::as_mut_ptr);
    // SAFETY: all lengths are equal, and slices that are borrowed together do not overlap.
    unsafe {
        let inputs = pointers(inputs);
        reduce_mean_with(instruction_set, mean, &inputs, output.as_mut_ptr(), copy_to, elements);
    }
    Ok(())
}

/// The buffers of a reduction that hold as many elements of the dtype as the output.
#[derive(Debug)]
pub(crate) struct Lengths<'a> {
    pub(crate) inputs: &'a [&'a [u8]],
    pub(crate) parameters: Option<&'a [u8]>,
    pub(crate) output: &'a [u8],
    pub(crate) copy_to: Option<&'a [u8]>,
}

impl Lengths<'_> {
    /// How many elements each of the buffers holds, if all hold as many, and whole ones.
    pub(crate) fn elements(&self, dtype: FloatDtype) -> Result<usize, ReduceError> {
        let bytes = self.output.len();
        let elements = whole_elements(dtype, bytes)?;
        for (index, input) in self.inputs.iter().enumerate() {
            same_length(Buffer::Input(index), input.len(), bytes)?;
        }
        if let Some(parameters) = self.parameters {
            same_length(Buffer::Parameters, parameters.len(), bytes)?;
        }
        if let Some(copy_to) = self.copy_to {
            same_length(Buffer::Copy, copy_to.len(), bytes)?;
        }
        Ok(elements)
    }
}

/// Where slices begin.
pub(crate) fn pointers(inputs: &[&[u8]]) -> Vec<*const u8> {
    inputs.iter().map(|input| input.as_ptr()).collect()
}

/// How many elements of a dtype a buffer holds, if it holds whole ones.
fn whole_elements(dtype: FloatDtype, bytes: usize) -> Result<usize, ReduceError> {
    if bytes.is_multiple_of(dtype.element_bytes()) {
        Ok(bytes / dtype.element_bytes())
    } else {
        Err(ReduceError::BrokenElement { dtype, bytes })
    }
}

/// Checks that a buffer is as long as it has to be.
pub(crate) fn same_length(
    buffer: Buffer,
    bytes: usize,
    expected_bytes: usize,
) -> Result<(), ReduceError> {
    if bytes == expected_bytes {
        Ok(())
    } else {
        Err(ReduceError::Length { buffer, bytes, expected_bytes })
    }
}

/// A buffer of a reduction, named in errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// The input at this position of the rank order.
    Input(usize),
    /// The second output.
    Copy,
    /// The parameters before the update.
    Parameters,
    /// The momentum of every element.
    Momentum,
    /// Adam's mean of the gradients of every element.
    ExpAvg,
    /// Adam's mean of the squared gradients of every element.
    ExpAvgSq,
}

impl std::fmt::Display for Buffer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Buffer::Input(index) => write!(formatter, "input {index}"),
            Buffer::Copy => formatter.write_str("the second output"),
            Buffer::Parameters => formatter.write_str("the parameters"),
            Buffer::Momentum => formatter.write_str("the momentum buffer"),
            Buffer::ExpAvg => formatter.write_str("exp_avg"),
            Buffer::ExpAvgSq => formatter.write_str("exp_avg_sq"),
        }
    }
}

/// Buffers that cannot be reduced together.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReduceError {
    /// A buffer is longer or shorter than the output asks for.
    #[error(
        "{buffer} has {bytes} bytes where the output asks for {expected_bytes}: pass equal ranges"
    )]
    Length {
        /// Which buffer.
        buffer: Buffer,
        /// Its length in bytes.
        bytes: usize,
        /// The length in bytes that the output asks for.
        expected_bytes: usize,
    },
    /// The output does not hold a whole number of elements.
    #[error("{bytes} bytes are no whole number of {dtype} elements: cut at element boundaries")]
    BrokenElement {
        /// The dtype of the elements.
        dtype: FloatDtype,
        /// The length of the output in bytes.
        bytes: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{Bf16, Element, Storage, F16};

    /// Widens and narrows `bits` through the registers of an instruction set: the second output of an update
    /// that keeps the mean of `x + 0.0`.
    fn convert<E: Element>(
        instruction_set: InstructionSet,
        dtype: FloatDtype,
        bits: &[u16],
    ) -> Vec<u16> {
        let bytes: Vec<u8> = bits.iter().flat_map(|one| one.to_ne_bytes()).collect();
        let mut output = vec![0; bytes.len()];
        let mean = Mean { dtype, divisor: NonZeroU32::MIN, add_zero: true };
        reduce_mean_slices(instruction_set, mean, &[&bytes], &mut output, None).unwrap();
        output.chunks_exact(E::BYTES).map(|one| u16::from_ne_bytes([one[0], one[1]])).collect()
    }

    #[test]
    fn every_16_bit_value_survives_widening_and_narrowing() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for instruction_set in InstructionSet::available() {
            let f16s = convert::<F16>(instruction_set, FloatDtype::F16, &all);
            let bf16s = convert::<Bf16>(instruction_set, FloatDtype::Bf16, &all);
            for (index, bits) in all.iter().enumerate() {
                // Adding zero turns -0.0 into +0.0 and quiets a signalling NaN.
                let sane = |bits: u16| if bits == 0x8000 { 0 } else { bits };
                let f16_quiet = if half::f16::from_bits(*bits).is_nan() { 0x0200 } else { 0 };
                let bf16_quiet = if half::bf16::from_bits(*bits).is_nan() { 0x0040 } else { 0 };
                assert_eq!(
                    f16s[index],
                    sane(*bits) | f16_quiet,
                    "f16 {bits:#06x} {instruction_set}"
                );
                assert_eq!(
                    bf16s[index],
                    sane(*bits) | bf16_quiet,
                    "bf16 {bits:#06x} {instruction_set}"
                );
            }
        }
    }

    /// Every f32 whose upper bits are any and whose lower bits lie around a rounding boundary.
    fn f32s_around_rounding_boundaries() -> impl Iterator<Item = f32> {
        let f16_boundaries = [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000];
        let bf16_boundaries = [0x7fff, 0x8000, 0x8001, 0xffff];
        (0..=u16::MAX).flat_map(move |upper| {
            f16_boundaries
                .into_iter()
                .chain(bf16_boundaries)
                .map(move |lower| f32::from_bits(u32::from(upper) << 16 | lower))
        })
    }

    /// Narrows through one register type and compares with the `half` crate, NaN bits included.
    ///
    /// # Safety
    ///
    /// The machine has the instructions of `R`.
    #[inline(always)]
    unsafe fn narrows_like_half<R>()
    where
        R: crate::element::Register<Lane = f32>,
        F16: Storage<R>,
        Bf16: Storage<R>,
    {
        let values: Vec<f32> = f32s_around_rounding_boundaries().collect();
        for chunk in values.chunks_exact(R::LANES) {
            let mut f16s = [0_u16; 16];
            let mut bf16s = [0_u16; 16];
            // SAFETY: the chunk has as many values as the register, the arrays at least as many.
            unsafe {
                let register = R::load(chunk.as_ptr().cast());
                <F16 as Storage<R>>::store(register, f16s.as_mut_ptr().cast());
                <Bf16 as Storage<R>>::store(register, bf16s.as_mut_ptr().cast());
            }
            for (index, value) in chunk.iter().enumerate() {
                let (f16, bf16) = (half::f16::from_f32(*value), half::bf16::from_f32(*value));
                assert_eq!(f16s[index], f16.to_bits(), "f16 of {:#010x}", value.to_bits());
                assert_eq!(bf16s[index], bf16.to_bits(), "bf16 of {:#010x}", value.to_bits());
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn all_registers_narrow_like_the_half_crate() {
        use std::arch::x86_64::{__m128, __m256, __m512};

        #[target_feature(enable = "avx2,f16c")]
        unsafe fn with_avx2() {
            // SAFETY: this function enables the instructions.
            unsafe { narrows_like_half::<__m256>() }
        }
        #[target_feature(enable = "avx512f")]
        unsafe fn with_avx512() {
            // SAFETY: this function enables the instructions.
            unsafe { narrows_like_half::<__m512>() }
        }
        for instruction_set in InstructionSet::available() {
            // SAFETY: an `InstructionSet` exists only where the machine has its instructions.
            unsafe {
                match instruction_set.instructions() {
                    Instructions::Scalar => narrows_like_half::<f32>(),
                    Instructions::Sse2 => narrows_like_half::<__m128>(),
                    Instructions::Avx2 => with_avx2(),
                    Instructions::Avx512 => with_avx512(),
                }
            }
        }
    }

    #[cfg(target_arch = "aarch64")]
    #[test]
    fn all_registers_narrow_like_the_half_crate() {
        // SAFETY: NEON is on every aarch64 machine that Rust's standard library runs on.
        unsafe { narrows_like_half::<std::arch::aarch64::float32x4_t>() }
    }
}
