//! Works as the engine describes them, turned into calls of the kernels in `gradlane-codec`.
//!
//! A job owns everything that it needs: checked spans, settings, the momentum of its slice. It can
//! run on any thread, and runs once.

use crate::memory::Span;
use gradlane_codec::{reduce_mean, reduce_sgd, Mean, SgdMemory, SgdOptions, SgdStep};
use gradlane_engine::WorkId;
use gradlane_units::{Dtype, SliceId};
use std::num::NonZeroU32;

/// Momentum of one slice, in f32, and whether it was set before.
#[derive(Debug, Default)]
pub(crate) struct Momentum {
    values: Vec<f32>,
}

/// Inputs in rank order and how they are averaged.
#[derive(Debug)]
pub(crate) struct Contributions {
    pub(crate) inputs: Vec<Span>,
    pub(crate) absent: bool,
    pub(crate) divisor: u32,
    pub(crate) dtype: Dtype,
}

/// What a job computes.
#[derive(Debug)]
pub(crate) enum Kernel {
    Reduce {
        from: Contributions,
        output: Span,
        copy_to: Option<Span>,
    },
    Apply {
        from: Contributions,
        parameters: Span,
        output: Span,
        options: SgdOptions,
        momentum: Momentum,
    },
    Copy {
        from: Span,
        to: Span,
    },
}

/// One work, ready to run.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: WorkId,
    pub(crate) slice: SliceId,
    pub(crate) kernel: Kernel,
}

/// A job that has run: what is to be reported and kept.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) id: WorkId,
    pub(crate) slice: SliceId,
    pub(crate) momentum: Option<Momentum>,
    pub(crate) result: Result<(), String>,
}

impl Job {
    /// Bytes that the job reads and writes: a measure of how long it takes.
    pub(crate) fn bytes(&self) -> usize {
        match &self.kernel {
            Kernel::Reduce { from, output, .. } => (from.inputs.len() + 1) * output.length(),
            Kernel::Apply { from, output, .. } => (from.inputs.len() + 3) * output.length(),
            Kernel::Copy { from, .. } => 2 * from.length(),
        }
    }

    /// Runs the job.
    pub(crate) fn run(self) -> Done {
        let Job { id, slice, kernel } = self;
        let (result, momentum) = match kernel {
            Kernel::Copy { from, to } => {
                from.copy_to(to);
                (Ok(()), None)
            }
            Kernel::Reduce { from, output, copy_to } => (reduce(&from, output, copy_to), None),
            Kernel::Apply { from, parameters, output, options, mut momentum } => {
                let result = apply(&from, parameters, output, options, &mut momentum);
                (result, Some(momentum))
            }
        };
        Done { id, slice, momentum, result }
    }
}

fn reduce(from: &Contributions, output: Span, copy_to: Option<Span>) -> Result<(), String> {
    let lengths = from.inputs.iter().chain(&copy_to).map(|span| span.length());
    same_length(lengths, output.length())?;
    if let ([only], 1, false) = (from.inputs.as_slice(), from.divisor, from.absent) {
        // Bytes of any meaning can be copied, also those that no kernel adds.
        only.copy_to(output);
        if let Some(copy) = copy_to {
            only.copy_to(copy);
        }
        return Ok(());
    }
    let mean = mean_of(from)?;
    let inputs: Vec<*const u8> = from.inputs.iter().map(|it| it.pointer().cast_const()).collect();
    let elements = output.length() / mean.dtype.element_bytes();
    // SAFETY: all spans are registered and have `elements` elements (checked above); the engine
    // gives an output to one work at a time, and it is an input exactly or not at all.
    unsafe {
        reduce_mean(mean, &inputs, output.pointer(), copy_to.map(Span::pointer), elements);
    }
    Ok(())
}

fn apply(
    from: &Contributions,
    parameters: Span,
    output: Span,
    options: SgdOptions,
    momentum: &mut Momentum,
) -> Result<(), String> {
    let lengths = from.inputs.iter().chain([&parameters]).map(|span| span.length());
    same_length(lengths, output.length())?;
    let mean = mean_of(from)?;
    let elements = output.length() / mean.dtype.element_bytes();
    let first = momentum.values.is_empty();
    if options.has_momentum() && first {
        momentum.values.resize(elements, 0.0);
    }
    let buffer = options.has_momentum().then(|| momentum.values.as_mut_ptr().cast::<u8>());
    if buffer.is_some() && momentum.values.len() != elements {
        return Err(format!("momentum of {} elements for {elements}", momentum.values.len()));
    }
    let inputs: Vec<*const u8> = from.inputs.iter().map(|it| it.pointer().cast_const()).collect();
    let memory = SgdMemory {
        parameters: parameters.pointer().cast_const(),
        momentum_buffer: buffer,
        output: output.pointer(),
        copy_to: None,
    };
    // SAFETY: all spans are registered and have `elements` elements, like the momentum (checked
    // above); the engine gives an output to one work at a time.
    unsafe { reduce_sgd(mean, SgdStep { options, first }, &inputs, memory, elements) }
        .map_err(|error| error.to_string())
}

fn mean_of(from: &Contributions) -> Result<Mean, String> {
    let dtype = match from.dtype {
        Dtype::F32 => gradlane_codec::Dtype::F32,
        Dtype::F16 => gradlane_codec::Dtype::F16,
        Dtype::Bf16 => gradlane_codec::Dtype::Bf16,
        Dtype::F64 => gradlane_codec::Dtype::F64,
        Dtype::U8 => return Err("plain bytes cannot be averaged".to_owned()),
    };
    let divisor = NonZeroU32::new(from.divisor).ok_or("a mean over no ranks")?;
    Ok(Mean { dtype, divisor, add_zero: from.absent })
}

fn same_length(lengths: impl Iterator<Item = usize>, expected: usize) -> Result<(), String> {
    for length in lengths {
        if length != expected {
            return Err(format!("a work over {length} and {expected} bytes"));
        }
    }
    Ok(())
}
