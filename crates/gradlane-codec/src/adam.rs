//! Adam and AdamW fused with the mean, for `update=server`.
//!
//! The operations and their order are those of `torch.optim.Adam` in its single-tensor form: what
//! depends on the step alone is computed in f64 as Python does, everything else in the accumulator
//! type, each operation rounded on its own.

use std::hint::black_box;

use thiserror::Error;

use crate::element::{splat, Accumulator, Element, Register, Storage};
use crate::reduce::{self, pointers, same_length, Buffer, Lengths, Update};
use crate::{InstructionSet, Mean, ReduceError};

/// Hyper-parameters of `torch.optim.Adam` and `AdamW`, by torch's names and with torch's meaning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamOptions {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the mean of the gradients, in `0..1`.
    pub beta1: f64,
    /// Decay of the mean of the squared gradients, in `0..1`.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay; 0 means none.
    pub weight_decay: f64,
    /// Whether the weight decays by itself (AdamW) or is added to the gradient (Adam).
    pub decoupled_weight_decay: bool,
    /// Go up the gradient.
    pub maximize: bool,
}

impl AdamOptions {
    /// Adam with a learning rate: torch's defaults for everything else.
    pub const fn with_lr(lr: f64) -> AdamOptions {
        AdamOptions {
            lr,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled_weight_decay: false,
            maximize: false,
        }
    }

    /// Checks what torch checks when an optimizer is made.
    ///
    /// # Errors
    ///
    /// [`AdamError::BadOption`] for a negative or NaN value, [`AdamError::BadBeta`] for a decay
    /// outside of `0..1`.
    pub fn validate(&self) -> Result<(), AdamError> {
        for (option, value) in
            [("lr", self.lr), ("eps", self.eps), ("weight_decay", self.weight_decay)]
        {
            if value.is_nan() || value < 0.0 {
                return Err(AdamError::BadOption { option, value });
            }
        }
        for (option, value) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&value) {
                return Err(AdamError::BadBeta { option, value });
            }
        }
        Ok(())
    }
}

/// One step of Adam.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamStep {
    /// Hyper-parameters of this step.
    pub options: AdamOptions,
    /// The number of this step for these elements: 1 for their first. It corrects the bias of means
    /// that began at zero.
    pub number: u64,
}

/// The memory that a step of Adam reads and writes besides the gradients.
#[derive(Clone, Copy, Debug)]
pub struct AdamMemory {
    /// Parameters before the step, in the dtype of the tensor.
    pub parameters: *const u8,
    /// Mean of the gradients of every element, in the accumulator dtype
    /// ([`crate::FloatDtype::accumulator`]: f32 for f32, f16 and bf16); zeros before the first step.
    pub exp_avg: *mut u8,
    /// Mean of the squared gradients, likewise.
    pub exp_avg_sq: *mut u8,
    /// Where the new parameters go, in the dtype of the tensor; may be `parameters`.
    pub output: *mut u8,
    /// Where the new parameters go as well.
    pub copy_to: Option<*mut u8>,
}

/// Averages gradients and takes a step of Adam with the result, with [`InstructionSet::active`] kernels.
///
/// `inputs` has one gradient pointer for each contribution in rank order, as in
/// [`crate::reduce_mean`]. For every element, with `g` the mean, `p` the parameter, `m` and `v` the
/// two means, and `t` the step's number:
///
/// ```text
/// g = -g                                             if maximize
/// p = p * (1 - lr * weight_decay)                    if weight_decay != 0, decoupled
/// g = g + p * weight_decay                           if weight_decay != 0, not decoupled
/// m = m + (1 - beta1) * (g - m)                      if 1 - beta1 < 0.5
/// m = g - (g - m) * (1 - (1 - beta1))                otherwise
/// v = v * beta2 + ((1 - beta2) * g) * g
/// d = sqrt(v) / (1 - beta2^t)^0.5 + eps
/// p = p + (-(lr / (1 - beta1^t)) * m) / d
/// ```
///
/// What has neither of the letters `g`, `p`, `m`, `v`, `d` in it is computed in f64 and rounded once.
/// The rest is computed in the accumulator dtype, and `p` is rounded to the tensor's dtype once,
/// when it is stored. For f16 and bf16 this is more exact than torch, which rounds after each
/// operation. For f32 and f64 it is torch's formula, operation by operation, without fused
/// multiply-add. Torch's own CPU kernels differ from it in the last bit where they fuse, and where
/// their square root is a vector library's, which is not correctly rounded.
///
/// # Errors
///
/// [`AdamError::StepZero`] when the step's number is 0; nothing is then written.
///
/// # Safety
///
/// - Inputs and parameters are readable, and outputs writable, for `elements` elements of the
///   dtype; `exp_avg` and `exp_avg_sq` are both, for `elements` elements of the accumulator dtype.
/// - The outputs do not overlap each other. Each of them either overlaps nothing else or is exactly
///   the parameters or one of the inputs. The two means overlap nothing.
/// - Nothing else writes to this memory, or reads what is written, during the call.
pub unsafe fn reduce_adam(
    mean: Mean,
    step: AdamStep,
    inputs: &[*const u8],
    memory: AdamMemory,
    elements: usize,
) -> Result<(), AdamError> {
    // SAFETY: forwarded, the caller's promise covers it.
    unsafe { reduce_adam_with(InstructionSet::active(), mean, step, inputs, memory, elements) }
}

/// [`reduce_adam`] with the kernels for a given instruction set.
///
/// # Errors
///
/// As for [`reduce_adam`].
///
/// # Safety
///
/// As for [`reduce_adam`].
pub unsafe fn reduce_adam_with(
    instruction_set: InstructionSet,
    mean: Mean,
    step: AdamStep,
    inputs: &[*const u8],
    memory: AdamMemory,
    elements: usize,
) -> Result<(), AdamError> {
    let factors = Factors::of(step)?;
    let sum = mean.sum(inputs, memory.output, memory.copy_to, elements);
    let update = Adam {
        factors,
        parameters: memory.parameters,
        exp_avg: memory.exp_avg,
        exp_avg_sq: memory.exp_avg_sq,
    };
    // SAFETY: the caller's promise about the memory is that of `Sum` and of `Adam`.
    unsafe { reduce::run(instruction_set, mean.dtype, sum, update) };
    Ok(())
}

/// The factors and divisors of a step: the same for all elements, computed in f64.
#[derive(Clone, Copy)]
struct Factors {
    maximize: bool,
    /// `1 - lr * weight_decay`, when the weight decays by itself.
    shrink: Option<f64>,
    /// `weight_decay`, when it is added to the gradient.
    penalty: Option<f64>,
    /// `1 - beta1`.
    weight: f64,
    beta2: f64,
    /// `1 - beta2`.
    square_weight: f64,
    /// `(1 - beta2^t)^0.5`.
    correction: f64,
    eps: f64,
    /// `-(lr / (1 - beta1^t))`.
    rate: f64,
}

impl Factors {
    fn of(step: AdamStep) -> Result<Factors, AdamError> {
        let AdamStep { options, number } = step;
        if number == 0 {
            return Err(AdamError::StepZero);
        }
        // Python's powers are those of the C library; a compiler that knows the exponent would
        // take the square root instead, which may be another number.
        let power = |base: f64, exponent: f64| base.powf(black_box(exponent));
        let decays = options.weight_decay != 0.0;
        let decoupled = options.decoupled_weight_decay;
        Ok(Factors {
            maximize: options.maximize,
            shrink: (decays && decoupled).then_some(1.0 - options.lr * options.weight_decay),
            penalty: (decays && !decoupled).then_some(options.weight_decay),
            weight: 1.0 - options.beta1,
            beta2: options.beta2,
            square_weight: 1.0 - options.beta2,
            correction: power(1.0 - power(options.beta2, number as f64), 0.5),
            eps: options.eps,
            rate: -(options.lr / (1.0 - power(options.beta1, number as f64))),
        })
    }
}

/// Adam as an update of the shared loop.
///
/// The pointers are valid for the elements of the reduction.
#[derive(Clone, Copy)]
struct Adam {
    factors: Factors,
    parameters: *const u8,
    exp_avg: *mut u8,
    exp_avg_sq: *mut u8,
}

impl Update for Adam {
    #[inline(always)]
    unsafe fn apply<E, R>(self, mean: R, at: usize) -> R
    where
        E: Element + Storage<R>,
        R: Register<Lane = E::Accumulator>,
    {
        let factors = self.factors;
        let slot = at * size_of::<E::Accumulator>();
        // SAFETY: the caller enables the instructions of `R` and promises that `at` and the lanes
        // after it are in range.
        unsafe {
            let mut parameter: R = E::load(self.parameters.add(at * E::BYTES));
            let mut gradient = mean;
            if factors.maximize {
                gradient = gradient.multiply(splat(-1.0));
            }
            if let Some(shrink) = factors.shrink {
                parameter = parameter.multiply(splat(shrink));
            }
            if let Some(penalty) = factors.penalty {
                gradient = gradient.add(parameter.multiply(splat(penalty)));
            }

            let before = R::load(self.exp_avg.add(slot));
            let distance = gradient.subtract(before);
            let weight: R = splat(factors.weight);
            // Torch's lerp goes from the nearer end.
            let average = if factors.weight < 0.5 {
                before.add(weight.multiply(distance))
            } else {
                let rest = R::splat(Accumulator::from_f64(1.0)).subtract(weight);
                gradient.subtract(distance.multiply(rest))
            };
            average.store(self.exp_avg.add(slot));

            let kept = R::load(self.exp_avg_sq.add(slot)).multiply(splat(factors.beta2));
            let fresh = gradient.multiply(splat(factors.square_weight)).multiply(gradient);
            let square = kept.add(fresh);
            square.store(self.exp_avg_sq.add(slot));

            let corrected = square.square_root().divide(splat(factors.correction));
            let denominator = corrected.add(splat(factors.eps));
            parameter.add(average.multiply(splat(factors.rate)).divide(denominator))
        }
    }

    unsafe fn apply_plainly<E>(self, mean: E::Accumulator, at: usize) -> E::Accumulator
    where
        E: Element,
    {
        let factors = self.factors;
        let number = E::Accumulator::from_f64;
        // SAFETY: the caller promises that `at` is in range.
        let (mut parameter, exp_avg, exp_avg_sq) = unsafe {
            (
                E::load(self.parameters.add(at * E::BYTES)),
                self.exp_avg.cast::<E::Accumulator>().add(at),
                self.exp_avg_sq.cast::<E::Accumulator>().add(at),
            )
        };
        let mut gradient = if factors.maximize { -mean } else { mean };
        if let Some(shrink) = factors.shrink {
            parameter = parameter * number(shrink);
        }
        if let Some(penalty) = factors.penalty {
            gradient = gradient + parameter * number(penalty);
        }
        // SAFETY: the caller promises that both slots are readable.
        let (before, square_before) =
            unsafe { (exp_avg.read_unaligned(), exp_avg_sq.read_unaligned()) };
        let weight = number(factors.weight);
        let average = if factors.weight < 0.5 {
            before + weight * (gradient - before)
        } else {
            gradient - (gradient - before) * (number(1.0) - weight)
        };
        let square = square_before * number(factors.beta2)
            + (number(factors.square_weight) * gradient) * gradient;
        // SAFETY: the caller promises that both slots are writable.
        unsafe {
            exp_avg.write_unaligned(average);
            exp_avg_sq.write_unaligned(square);
        }
        let denominator = square.root() / number(factors.correction) + number(factors.eps);
        parameter + (number(factors.rate) * average) / denominator
    }
}

/// The memory of [`AdamMemory`] as slices of bytes.
#[derive(Debug)]
pub struct AdamSlices<'a> {
    /// Parameters before the step.
    pub parameters: &'a [u8],
    /// Mean of the gradients of every element, in the accumulator dtype.
    pub exp_avg: &'a mut [u8],
    /// Mean of the squared gradients of every element, in the accumulator dtype.
    pub exp_avg_sq: &'a mut [u8],
    /// Where the new parameters go.
    pub output: &'a mut [u8],
    /// Where the new parameters go as well.
    pub copy_to: Option<&'a mut [u8]>,
}

/// [`reduce_adam_with`] over slices of bytes, with every length checked.
///
/// # Errors
///
/// [`AdamError`] if a buffer has another length than the output asks for or holds a broken element,
/// or the step's number is 0; nothing is then written.
pub fn reduce_adam_slices(
    instruction_set: InstructionSet,
    mean: Mean,
    step: AdamStep,
    inputs: &[&[u8]],
    memory: AdamSlices<'_>,
) -> Result<(), AdamError> {
    let lengths = Lengths {
        inputs,
        parameters: Some(memory.parameters),
        output: memory.output,
        copy_to: memory.copy_to.as_deref(),
    };
    let elements = lengths.elements(mean.dtype)?;
    let state_bytes = elements * mean.dtype.accumulator().element_bytes();
    same_length(Buffer::ExpAvg, memory.exp_avg.len(), state_bytes)?;
    same_length(Buffer::ExpAvgSq, memory.exp_avg_sq.len(), state_bytes)?;
    let raw = AdamMemory {
        parameters: memory.parameters.as_ptr(),
        exp_avg: memory.exp_avg.as_mut_ptr(),
        exp_avg_sq: memory.exp_avg_sq.as_mut_ptr(),
        output: memory.output.as_mut_ptr(),
        copy_to: memory.copy_to.map(<[u8]>::as_mut_ptr),
    };
    // SAFETY: all lengths fit, and slices that are borrowed together do not overlap.
    unsafe { reduce_adam_with(instruction_set, mean, step, &pointers(inputs), raw, elements) }
}

/// A step of Adam that cannot be taken.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum AdamError {
    /// A hyper-parameter is negative or not a number.
    #[error("adam option {option} is {value}: pass a number that is not negative")]
    BadOption {
        /// Name of the option.
        option: &'static str,
        /// Its value.
        value: f64,
    },
    /// A decay is not one.
    #[error("adam option {option} is {value}: pass a number from 0 to below 1")]
    BadBeta {
        /// Name of the option.
        option: &'static str,
        /// Its value.
        value: f64,
    },
    /// Steps count from 1.
    #[error("step 0 of adam has no bias correction: count steps from 1")]
    StepZero,
    /// The buffers do not fit together.
    #[error(transparent)]
    Buffers(#[from] ReduceError),
}
