//! Stochastic gradient descent fused with the mean, for `update=server`.
//!
//! The averaged gradient never goes to memory: it is computed, applied to the parameters and to the
//! momentum in registers. The operations and their order are those of `torch.optim.SGD` (its
//! single-tensor form), each rounded on its own in the accumulator type.

use thiserror::Error;

use crate::element::{splat, Accumulator, Element, Register, Storage};
use crate::reduce::{self, pointers, same_length, Buffer, Lengths, Update};
use crate::{InstructionSet, Mean, ReduceError};

/// Hyper-parameters of `torch.optim.SGD`, by torch's names and with torch's meaning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdOptions {
    /// Learning rate.
    pub lr: f64,
    /// Momentum factor; 0 means that there is no momentum buffer.
    pub momentum: f64,
    /// Dampening of the momentum.
    pub dampening: f64,
    /// L2 penalty, added to the gradient; 0 means none.
    pub weight_decay: f64,
    /// Nesterov momentum; asks for a momentum and no dampening.
    pub nesterov: bool,
    /// Go up the gradient.
    pub maximize: bool,
}

impl SgdOptions {
    /// Plain descent with a learning rate: torch's defaults for everything else.
    pub const fn with_lr(lr: f64) -> SgdOptions {
        SgdOptions {
            lr,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            maximize: false,
        }
    }

    /// Checks what torch checks when an optimizer is made.
    ///
    /// # Errors
    ///
    /// [`SgdError::BadOption`] for a negative or NaN value, [`SgdError::Nesterov`] for Nesterov
    /// momentum without momentum or with dampening.
    pub fn validate(&self) -> Result<(), SgdError> {
        for (option, value) in
            [("lr", self.lr), ("momentum", self.momentum), ("weight_decay", self.weight_decay)]
        {
            if value.is_nan() || value < 0.0 {
                return Err(SgdError::BadOption { option, value });
            }
        }
        if self.dampening.is_nan() {
            return Err(SgdError::BadOption { option: "dampening", value: self.dampening });
        }
        if self.nesterov && (self.momentum <= 0.0 || self.dampening != 0.0) {
            return Err(SgdError::Nesterov { momentum: self.momentum, dampening: self.dampening });
        }
        Ok(())
    }

    /// Whether these options keep a momentum buffer.
    pub fn has_momentum(&self) -> bool {
        self.momentum != 0.0
    }
}

/// One step of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdStep {
    /// Hyper-parameters of this step.
    pub options: SgdOptions,
    /// Whether this is the first step of these elements: the momentum buffer is then not read but
    /// set to the gradient, undampened, as torch does.
    pub first: bool,
}

/// The memory that a step of SGD reads and writes besides the gradients.
#[derive(Clone, Copy, Debug)]
pub struct SgdMemory {
    /// Parameters before the step, in the dtype of the tensor.
    pub parameters: *const u8,
    /// Momentum of every element in the accumulator dtype ([`crate::FloatDtype::accumulator`]: f32 for
    /// f32, f16 and bf16); needed when the options have a momentum, otherwise not touched.
    pub momentum_buffer: Option<*mut u8>,
    /// Where the new parameters go, in the dtype of the tensor; may be `parameters`.
    pub output: *mut u8,
    /// Where the new parameters go as well.
    pub copy_to: Option<*mut u8>,
}

/// Averages gradients and takes a step of SGD with the result, with [`InstructionSet::active`] kernels.
///
/// `inputs` has one gradient pointer for each contribution in rank order, as in
/// [`crate::reduce_mean`]. For every element, with `g` the mean and `p` the parameter:
///
/// ```text
/// g = -g                                      if maximize
/// g = g + weight_decay * p                    if weight_decay != 0
/// b = g if first, else momentum * b + (1 - dampening) * g
/// g = g + momentum * b if nesterov, else b    if momentum != 0
/// p = p - lr * g
/// ```
///
/// All of it is computed in the accumulator dtype, and `p` is rounded once, when it is stored. For
/// f16 and bf16 this is more exact than torch, which rounds after each operation. For f32 and f64
/// it is torch's result without fused multiply-add; torch's vectorized CPU kernels do fuse, so that
/// theirs may differ in the last bit.
///
/// # Errors
///
/// [`SgdError::NoMomentumBuffer`] if the options have a momentum and there is no buffer for it;
/// nothing is then written.
///
/// # Safety
///
/// - Inputs and parameters are readable, and outputs writable, for `elements` elements of the
///   dtype; the momentum buffer is both, for `elements` elements of the accumulator dtype.
/// - The outputs do not overlap each other. Each of them either overlaps nothing else or is exactly
///   the parameters or one of the inputs. The momentum buffer overlaps nothing.
/// - Unless `first`, the momentum buffer holds what the step before left in it.
/// - Nothing else writes to this memory, or reads what is written, during the call.
pub unsafe fn reduce_sgd(
    mean: Mean,
    step: SgdStep,
    inputs: &[*const u8],
    memory: SgdMemory,
    elements: usize,
) -> Result<(), SgdError> {
    // SAFETY: forwarded, the caller's promise covers it.
    unsafe { reduce_sgd_with(InstructionSet::active(), mean, step, inputs, memory, elements) }
}

/// [`reduce_sgd`] with the kernels for a given instruction set.
///
/// # Errors
///
/// As for [`reduce_sgd`].
///
/// # Safety
///
/// As for [`reduce_sgd`].
pub unsafe fn reduce_sgd_with(
    instruction_set: InstructionSet,
    mean: Mean,
    step: SgdStep,
    inputs: &[*const u8],
    memory: SgdMemory,
    elements: usize,
) -> Result<(), SgdError> {
    let momentum_buffer = match memory.momentum_buffer {
        _ if !step.options.has_momentum() => None,
        Some(buffer) => Some(buffer),
        None => return Err(SgdError::NoMomentumBuffer { momentum: step.options.momentum }),
    };
    let sum = mean.sum(inputs, memory.output, memory.copy_to, elements);
    let update = Sgd { step, parameters: memory.parameters, momentum_buffer };
    // SAFETY: the caller's promise about the memory is that of `Sum` and of `Sgd`.
    unsafe { reduce::run(instruction_set, mean.dtype, sum, update) };
    Ok(())
}

/// SGD as an update of the shared loop.
///
/// `parameters` is valid for the elements of the reduction, and so is `momentum_buffer`, which is
/// there exactly if the options have a momentum.
#[derive(Clone, Copy)]
struct Sgd {
    step: SgdStep,
    parameters: *const u8,
    momentum_buffer: Option<*mut u8>,
}

impl Update for Sgd {
    #[inline(always)]
    unsafe fn apply<E, R>(self, mean: R, at: usize) -> R
    where
        E: Element + Storage<R>,
        R: Register<Lane = E::Accumulator>,
    {
        let SgdStep { options, first } = self.step;
        // SAFETY: the caller enables the instructions of `R` and promises that `at` and the lanes
        // after it are in range.
        unsafe {
            let parameter: R = E::load(self.parameters.add(at * E::BYTES));
            let mut gradient = mean;
            if options.maximize {
                gradient = gradient.multiply(splat(-1.0));
            }
            if options.weight_decay != 0.0 {
                gradient = gradient.add(parameter.multiply(splat(options.weight_decay)));
            }
            if let Some(buffer) = self.momentum_buffer {
                let slot = buffer.add(at * size_of::<E::Accumulator>());
                let momentum = splat(options.momentum);
                let mut velocity = gradient;
                if !first {
                    let kept = R::load(slot).multiply(momentum);
                    velocity = kept.add(gradient.multiply(splat(1.0 - options.dampening)));
                }
                velocity.store(slot);
                gradient = if options.nesterov {
                    gradient.add(velocity.multiply(momentum))
                } else {
                    velocity
                };
            }
            parameter.subtract(gradient.multiply(splat(options.lr)))
        }
    }

    unsafe fn apply_plainly<E>(self, mean: E::Accumulator, at: usize) -> E::Accumulator
    where
        E: Element,
    {
        let SgdStep { options, first } = self.step;
        let lr = E::Accumulator::from_f64(options.lr);
        let momentum = E::Accumulator::from_f64(options.momentum);
        let undampened = E::Accumulator::from_f64(1.0 - options.dampening);
        let weight_decay = E::Accumulator::from_f64(options.weight_decay);

        // SAFETY: the caller promises that `at` is in range.
        let parameter = unsafe { E::load(self.parameters.add(at * E::BYTES)) };
        let mut gradient = if options.maximize { -mean } else { mean };
        if options.weight_decay != 0.0 {
            gradient = gradient + weight_decay * parameter;
        }
        if let Some(buffer) = self.momentum_buffer {
            // SAFETY: the caller promises that `at` is in range.
            let slot = unsafe { buffer.cast::<E::Accumulator>().add(at) };
            let velocity = if first {
                gradient
            } else {
                // SAFETY: the caller promises that the slot is readable.
                momentum * unsafe { slot.read_unaligned() } + undampened * gradient
            };
            // SAFETY: the caller promises that the slot is writable.
            unsafe { slot.write_unaligned(velocity) };
            gradient = if options.nesterov { gradient + momentum * velocity } else { velocity };
        }
        parameter - lr * gradient
    }
}

/// The memory of [`SgdMemory`] as slices of bytes.
#[derive(Debug)]
pub struct SgdSlices<'a> {
    /// Parameters before the step.
    pub parameters: &'a [u8],
    /// Momentum of every element in the accumulator dtype, where the options have one.
    pub momentum_buffer: Option<&'a mut [u8]>,
    /// Where the new parameters go.
    pub output: &'a mut [u8],
    /// Where the new parameters go as well.
    pub copy_to: Option<&'a mut [u8]>,
}

/// [`reduce_sgd_with`] over slices of bytes, with every length checked.
///
/// # Errors
///
/// [`SgdError`] if a buffer is missing, has another length than the output asks for, or holds a
/// broken element; nothing is then written.
pub fn reduce_sgd_slices(
    instruction_set: InstructionSet,
    mean: Mean,
    step: SgdStep,
    inputs: &[&[u8]],
    memory: SgdSlices<'_>,
) -> Result<(), SgdError> {
    let lengths = Lengths {
        inputs,
        parameters: Some(memory.parameters),
        output: memory.output,
        copy_to: memory.copy_to.as_deref(),
    };
    let elements = lengths.elements(mean.dtype)?;
    if let Some(buffer) = &memory.momentum_buffer {
        let expected_bytes = elements * mean.dtype.accumulator().element_bytes();
        same_length(Buffer::Momentum, buffer.len(), expected_bytes)?;
    }
    let raw = SgdMemory {
        parameters: memory.parameters.as_ptr(),
        momentum_buffer: memory.momentum_buffer.map(<[u8]>::as_mut_ptr),
        output: memory.output.as_mut_ptr(),
        copy_to: memory.copy_to.map(<[u8]>::as_mut_ptr),
    };
    // SAFETY: all lengths fit, and slices that are borrowed together do not overlap.
    unsafe { reduce_sgd_with(instruction_set, mean, step, &pointers(inputs), raw, elements) }
}

/// A step of SGD that cannot be taken.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SgdError {
    /// A hyper-parameter is negative or not a number.
    #[error("sgd option {option} is {value}: pass a number that is not negative")]
    BadOption {
        /// Name of the option.
        option: &'static str,
        /// Its value.
        value: f64,
    },
    /// Nesterov momentum asks for a momentum and no dampening.
    #[error(
        "nesterov momentum needs momentum > 0 and dampening = 0, not {momentum} and {dampening}"
    )]
    Nesterov {
        /// The momentum that was given.
        momentum: f64,
        /// The dampening that was given.
        dampening: f64,
    },
    /// The options have a momentum, but there is no buffer for it.
    #[error(
        "momentum is {momentum} but there is no momentum buffer: pass one, kept between steps"
    )]
    NoMomentumBuffer {
        /// The momentum that was given.
        momentum: f64,
    },
    /// The buffers do not fit together.
    #[error(transparent)]
    Buffers(#[from] ReduceError),
}
