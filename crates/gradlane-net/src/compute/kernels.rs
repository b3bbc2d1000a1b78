//! Reductions and optimizer steps on raw values, by the kernels of `gradlane-codec`.

use super::error::{JobError, UpdateRuleError};
use super::server_optimizer::{SliceState, StateKind, StateRead, UpdateRule};
use crate::memory::Span;
use gradlane_codec::{
    reduce_adam, reduce_mean, reduce_sgd, AdamMemory, AdamOptions, AdamStep, FloatDtype, Mean,
    SgdMemory, SgdOptions, SgdStep,
};
use gradlane_units::Dtype;
use std::num::NonZeroU32;

/// How contributions become a mean.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Averaging {
    /// Whether a rank contributed nothing, which counts as zeros.
    pub(crate) absent: bool,
    pub(crate) divisor: u32,
    pub(crate) dtype: Dtype,
}

impl Averaging {
    fn mean(self) -> Result<Mean, JobError> {
        let dtype = FloatDtype::of(self.dtype).ok_or(JobError::PlainBytes)?;
        let divisor = NonZeroU32::new(self.divisor).ok_or(JobError::NoRanks)?;
        Ok(Mean { dtype, divisor, add_zero: self.absent })
    }
}

/// The memory of a reduction, which may work in place. All spans are equally long.
#[derive(Debug)]
pub(crate) struct ReduceMemory {
    inputs: Vec<Span>,
    /// Parameters before an update.
    parameters: Option<Span>,
    output: Span,
    copy_to: Option<Span>,
}

impl ReduceMemory {
    /// Lends memory to a reduction until the value is dropped.
    ///
    /// # Safety
    /// By the lifetime rule nobody writes to the inputs and the parameters, and nobody else touches the
    /// outputs, while the value lives. An output is one of the inputs or overlaps none of them.
    pub(crate) unsafe fn new(
        inputs: Vec<Span>,
        parameters: Option<Span>,
        output: Span,
        copy_to: Option<Span>,
    ) -> Result<ReduceMemory, JobError> {
        let expected = output.length();
        for span in inputs.iter().chain(&parameters).chain(&copy_to) {
            if span.length() != expected {
                return Err(JobError::Length { found: span.length(), expected });
            }
        }
        Ok(ReduceMemory { inputs, parameters, output, copy_to })
    }

    /// Bytes of each span.
    pub(crate) fn bytes(&self) -> usize {
        self.output.length()
    }

    fn inputs(&self) -> Vec<*const u8> {
        self.inputs.iter().map(|it| it.pointer().cast_const()).collect()
    }

    /// The parameters before an update.
    fn parameters(&self) -> Result<*const u8, JobError> {
        Ok(self.parameters.ok_or(JobError::NoUpdateRule)?.pointer().cast_const())
    }

    /// Copies an input bit for bit, whatever its bytes mean.
    fn copy(&self, input: Span) {
        for output in std::iter::once(self.output).chain(self.copy_to) {
            // SAFETY: `new` vouches for both spans, which are equally long.
            unsafe { std::ptr::copy(input.pointer(), output.pointer(), input.length()) };
        }
    }
}

/// Writes the mean of the inputs.
pub(crate) fn reduce(averaging: Averaging, memory: &ReduceMemory) -> Result<(), JobError> {
    if let ([only], 1, false) = (memory.inputs.as_slice(), averaging.divisor, averaging.absent) {
        memory.copy(*only);
        return Ok(());
    }
    let mean = averaging.mean()?;
    let inputs = memory.inputs();
    let elements = memory.bytes() / mean.dtype.element_bytes();
    let copy_to = memory.copy_to.map(Span::pointer);
    // SAFETY: `ReduceMemory::new` vouches for the memory; every span has `elements` elements.
    unsafe { reduce_mean(mean, &inputs, memory.output.pointer(), copy_to, elements) };
    Ok(())
}

/// Writes the parameters that the mean of the inputs updates.
pub(crate) fn apply(
    averaging: Averaging,
    memory: &ReduceMemory,
    rule: UpdateRule,
    state: &mut SliceState,
) -> Result<(), JobError> {
    match rule {
        UpdateRule::Sgd(options) => apply_sgd(averaging, memory, options, state),
        UpdateRule::Adam { options, steps } => apply_adam(averaging, memory, options, steps, state),
    }
}

/// Applies a mean like the gradient of a single rank.
pub(crate) fn apply_mean(
    dtype: Dtype,
    mean: &[u8],
    parameters: &[u8],
    output: &mut [u8],
    rule: UpdateRule,
    state: &mut SliceState,
) -> Result<(), JobError> {
    // SAFETY: the slices are borrowed for longer than the spans are used, and the kernels write to the
    // output alone.
    let memory = unsafe {
        let span = |bytes: &[u8]| Span::new(bytes.as_ptr().cast_mut(), bytes.len());
        let output = Span::new(output.as_mut_ptr(), output.len());
        ReduceMemory::new(vec![span(mean)], Some(span(parameters)), output, None)?
    };
    apply(Averaging { absent: false, divisor: 1, dtype }, &memory, rule, state)
}

fn apply_sgd(
    averaging: Averaging,
    memory: &ReduceMemory,
    options: SgdOptions,
    state: &mut SliceState,
) -> Result<(), JobError> {
    let mean = averaging.mean()?;
    let elements = memory.bytes() / mean.dtype.element_bytes();
    let momentum = state.values(StateKind::MomentumBuffer);
    let first = momentum.is_empty();
    if options.has_momentum() && first {
        momentum.resize(elements, 0.0);
    }
    if options.has_momentum() {
        check_state(StateKind::MomentumBuffer, momentum.len(), elements)?;
    }
    let inputs = memory.inputs();
    let sgd = SgdMemory {
        parameters: memory.parameters()?,
        momentum_buffer: options.has_momentum().then(|| momentum.as_mut_ptr().cast::<u8>()),
        output: memory.output.pointer(),
        copy_to: None,
    };
    // SAFETY: `ReduceMemory::new` vouches for the memory; every span has `elements` elements, like the
    // momentum.
    unsafe { reduce_sgd(mean, SgdStep { options, first }, &inputs, sgd, elements) }
        .map_err(|error| UpdateRuleError::from(error).into())
}

fn apply_adam(
    averaging: Averaging,
    memory: &ReduceMemory,
    options: AdamOptions,
    steps: u64,
    state: &mut SliceState,
) -> Result<(), JobError> {
    let mean = averaging.mean()?;
    let elements = memory.bytes() / mean.dtype.element_bytes();
    for kind in [StateKind::ExpAvg, StateKind::ExpAvgSq] {
        let values = state.values(kind);
        if steps == 0 {
            values.clear();
            values.resize(elements, 0.0);
        }
        check_state(kind, values.len(), elements)?;
    }
    let inputs = memory.inputs();
    let adam = AdamMemory {
        parameters: memory.parameters()?,
        exp_avg: state.values(StateKind::ExpAvg).as_mut_ptr().cast(),
        exp_avg_sq: state.values(StateKind::ExpAvgSq).as_mut_ptr().cast(),
        output: memory.output.pointer(),
        copy_to: None,
    };
    let step = AdamStep { options, number: steps + 1 };
    // SAFETY: `ReduceMemory::new` vouches for the memory; every span has `elements` elements, like both
    // averages.
    unsafe { reduce_adam(mean, step, &inputs, adam, elements) }
        .map_err(|error| UpdateRuleError::from(error).into())
}

/// Writes optimizer state in place of parameters.
pub(crate) fn read_state(
    read: StateRead,
    dtype: Dtype,
    output: &mut [u8],
    copy_to: Option<&mut [u8]>,
    state: &mut SliceState,
) -> Result<(), JobError> {
    let element_bytes = dtype.bytes() as usize;
    let bytes = state.bytes(read, element_bytes, output.len() / element_bytes)?;
    for memory in std::iter::once(output).chain(copy_to) {
        if memory.len() != bytes.len() {
            return Err(JobError::Length { found: memory.len(), expected: bytes.len() });
        }
        memory.copy_from_slice(&bytes);
    }
    Ok(())
}

/// Takes a slice's optimizer state from a contribution, and writes the parameters as they were.
pub(crate) fn write_state(
    part: StateRead,
    dtype: Dtype,
    memory: &ReduceMemory,
    state: &mut SliceState,
) -> Result<(), JobError> {
    let [given] = memory.inputs.as_slice() else {
        return Err(JobError::WrittenTwice);
    };
    // SAFETY: `ReduceMemory::new` vouches for the memory; the output may be the input, which is read
    // before.
    let bytes = unsafe { given.read() };
    state.take_bytes(part, dtype.bytes() as usize, &bytes)?;
    memory.copy(memory.parameters.ok_or(JobError::NoUpdateRule)?);
    Ok(())
}

/// Writes the parameters that a contribution is.
pub(crate) fn write_parameters(memory: &ReduceMemory) -> Result<(), JobError> {
    let [given] = memory.inputs.as_slice() else {
        return Err(JobError::WrittenTwice);
    };
    memory.copy(*given);
    Ok(())
}

fn check_state(kind: StateKind, found: usize, expected: usize) -> Result<(), JobError> {
    if found == expected {
        return Ok(());
    }
    Err(JobError::StateLength { name: kind.name(), found, expected })
}
