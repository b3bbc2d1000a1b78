//! Works as the engine describes them, turned into calls of the kernels in `gradlane-codec`.
//!
//! A job owns everything that it needs: checked spans, settings, the optimizer state of its slice. It can
//! run on any thread, and runs once.

use crate::encoded::{self, Coder, EncodedParts, Hop};
use crate::integer_ring;
use crate::memory::Span;
use crate::optimizer::{Rule, SliceState, StateKind, StateRead};
use crate::residual::WorkerResidual;
use crate::trace::WorkKind;
use gradlane_codec::{
    reduce_adam, reduce_mean, reduce_sgd, AdamMemory, AdamOptions, AdamStep, FloatDtype, Mean,
    SgdMemory, SgdOptions, SgdStep,
};
use gradlane_engine::JobId;
use gradlane_units::{Dtype, SliceId, Step};
use std::num::NonZeroU32;

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
        rule: Rule,
        state: SliceState,
    },
    /// Optimizer state goes where parameters go otherwise.
    ReadState {
        read: StateRead,
        dtype: Dtype,
        output: Span,
        copy_to: Option<Span>,
        state: SliceState,
    },
    Encode {
        coder: Coder,
        from: Span,
        output: Span,
        feedback: bool,
        /// Whether the step may go on without what is sent.
        may_be_late: bool,
        residual: WorkerResidual,
    },
    Recode {
        coder: Coder,
        from: EncodedParts,
        output: Span,
        copy_to: Option<Span>,
        residual: Vec<f32>,
    },
    DecodeApply {
        coder: Coder,
        from: EncodedParts,
        dtype: Dtype,
        parameters: Span,
        output: Span,
        rule: Rule,
        state: SliceState,
    },
    RingEncode {
        coder: Coder,
        from: Hop,
        output: Span,
        copy_to: Option<Span>,
        state: SliceState,
    },
    RingScale {
        coder: Coder,
        received: Option<Span>,
        own: Span,
        output: Span,
        state: SliceState,
    },
    RingBegin {
        coder: Coder,
        scales: Option<Span>,
        own: Option<Span>,
        output: Span,
        state: SliceState,
    },
    RingAdd {
        coder: Coder,
        sums: Span,
        own: Option<Span>,
        copy_to: Option<Span>,
        state: SliceState,
    },
    Decode {
        coder: Coder,
        from: Span,
        to: Span,
    },
    Copy {
        from: Span,
        to: Span,
    },
}

/// One work, ready to run.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) step: Step,
    pub(crate) slice: SliceId,
    pub(crate) kernel: Kernel,
}

/// What a job gives back of a slice's state. A rank that is late may encode its contribution while
/// it reduces those of others: each of the two has its own part.
#[derive(Debug)]
pub(crate) enum Kept {
    Whole(SliceState),
    Contributed(WorkerResidual),
    Reduced(Vec<f32>),
}

/// A job that has run: what is to be reported and kept.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) id: JobId,
    pub(crate) slice: SliceId,
    pub(crate) kept: Option<Kept>,
    /// The length of an encoding, of works that make one.
    pub(crate) result: Result<Option<u64>, String>,
}

impl Job {
    /// What the job does, in the words of a trace.
    pub(crate) fn kind(&self) -> WorkKind {
        match &self.kernel {
            Kernel::Reduce { .. } => WorkKind::Reduce,
            Kernel::Apply { .. } | Kernel::DecodeApply { .. } => WorkKind::Update,
            Kernel::Copy { .. } | Kernel::ReadState { .. } => WorkKind::Copy,
            Kernel::Encode { .. } | Kernel::RingScale { .. } => WorkKind::Encode,
            Kernel::Recode { .. }
            | Kernel::RingEncode { .. }
            | Kernel::RingBegin { .. }
            | Kernel::RingAdd { .. } => WorkKind::Recode,
            Kernel::Decode { .. } => WorkKind::Decode,
        }
    }

    /// Whether the job is never done on the I/O thread, however small it is.
    pub(crate) fn encodes(&self) -> bool {
        matches!(self.kind(), WorkKind::Encode | WorkKind::Recode)
    }

    /// Bytes that the job reads and writes: a measure of how long it takes.
    pub(crate) fn bytes(&self) -> usize {
        match &self.kernel {
            Kernel::Reduce { from, output, .. } => (from.inputs.len() + 1) * output.length(),
            Kernel::Apply { from, output, .. } => (from.inputs.len() + 3) * output.length(),
            Kernel::ReadState { output, .. } => 3 * output.length(),
            Kernel::Copy { from, .. } => 2 * from.length(),
            Kernel::Encode { from, .. } => 2 * from.length(),
            Kernel::Recode { coder, from, .. } => (from.inputs.len() + 1) * 4 * coder.elements,
            Kernel::RingScale { own, .. } => own.length(),
            Kernel::RingEncode { coder, .. }
            | Kernel::RingBegin { coder, .. }
            | Kernel::RingAdd { coder, .. } => 2 * 4 * coder.elements,
            Kernel::DecodeApply { from, output, .. } => (from.inputs.len() + 3) * output.length(),
            Kernel::Decode { to, .. } => 2 * to.length(),
        }
    }

    /// Runs the job.
    pub(crate) fn run(self) -> Done {
        let Job { id, step, slice, kernel } = self;
        let (result, kept) = match kernel {
            Kernel::Copy { from, to } => {
                from.copy_to(to);
                (Ok(None), None)
            }
            Kernel::Reduce { from, output, copy_to } => {
                (reduce(&from, output, copy_to).map(|()| None), None)
            }
            Kernel::Apply { from, parameters, output, rule, mut state } => {
                let result = apply(&from, parameters, output, rule, &mut state);
                (result.map(|()| None), Some(Kept::Whole(state)))
            }
            Kernel::ReadState { read, dtype, output, copy_to, mut state } => {
                let result = read_state(read, dtype, output, copy_to, &mut state);
                (result.map(|()| None), Some(Kept::Whole(state)))
            }
            Kernel::Encode { coder, from, output, feedback, may_be_late, mut residual } => {
                if feedback && may_be_late {
                    residual.remember(step);
                }
                let values = feedback.then_some(&mut residual.values);
                let result = encoded::encode(&coder, from, values, output);
                (result.map(Some), Some(Kept::Contributed(residual)))
            }
            Kernel::Recode { coder, from, output, copy_to, mut residual } => {
                let values = coder.codec.keeps_residual().then_some(&mut residual);
                let result = encoded::recode(&coder, &from, values, output, copy_to);
                (result.map(Some), Some(Kept::Reduced(residual)))
            }
            Kernel::DecodeApply { coder, from, dtype, parameters, output, rule, mut state } => {
                let memory = (parameters, output);
                let result = decode_apply(&coder, &from, memory, dtype, rule, &mut state);
                (result.map(|()| None), Some(Kept::Whole(state)))
            }
            Kernel::RingEncode { coder, from, output, copy_to, mut state } => {
                let result = ring_encode(&coder, &from, output, copy_to, &mut state);
                (result.map(Some), Some(Kept::Whole(state)))
            }
            Kernel::RingScale { coder, received, own, output, mut state } => {
                let kept = kept_for(&coder, &mut state);
                let result = integer_ring::scale(&coder, received, own, kept, output);
                (result.map(|()| None), Some(Kept::Whole(state)))
            }
            Kernel::RingBegin { coder, scales, own, output, mut state } => {
                let kept = kept_for(&coder, &mut state);
                let result = integer_ring::begin(&coder, scales, own, kept, output);
                (result.map(|()| None), Some(Kept::Whole(state)))
            }
            Kernel::RingAdd { coder, sums, own, copy_to, mut state } => {
                let kept = kept_for(&coder, &mut state);
                let result = integer_ring::add(&coder, sums, own, kept, copy_to);
                (result.map(|()| None), Some(Kept::Whole(state)))
            }
            Kernel::Decode { coder, from, to } => {
                let decode =
                    if coder.sums.is_some() { integer_ring::means } else { encoded::decode };
                (decode(&coder, from, to).map(|()| None), None)
            }
        };
        Done { id, slice, kept, result }
    }
}

/// What encoding this rank's contributions has lost, where the codec keeps that.
fn kept_for<'a>(coder: &Coder, state: &'a mut SliceState) -> integer_ring::Kept<'a> {
    coder.codec.keeps_residual().then(|| state.values(StateKind::WorkerResidual))
}

/// One hop. The last rank encodes the mean, and has no other turn for what a checkpoint says that
/// its contributions have lost.
fn ring_encode(
    coder: &Coder,
    from: &Hop,
    output: Span,
    copy_to: Option<Span>,
    state: &mut SliceState,
) -> Result<u64, String> {
    let is_last = from.divisor > 1;
    let keeps = coder.codec.keeps_residual();
    let late = match keeps && is_last {
        true => std::mem::take(state.values(StateKind::WorkerResidual)),
        false => Vec::new(),
    };
    let kind = if is_last { StateKind::OwnerResidual } else { StateKind::WorkerResidual };
    let residual = keeps.then(|| state.values(kind));
    encoded::hop(coder, from, &late, residual, output, copy_to)
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
    let inputs = pointers(from);
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
    rule: Rule,
    state: &mut SliceState,
) -> Result<(), String> {
    let lengths = from.inputs.iter().chain([&parameters]).map(|span| span.length());
    same_length(lengths, output.length())?;
    match rule {
        Rule::Sgd(options) => apply_sgd(from, parameters, output, options, state),
        Rule::Adam { options, steps } => {
            apply_adam(from, parameters, output, options, steps, state)
        }
    }
}

/// The spans are equally long.
fn apply_sgd(
    from: &Contributions,
    parameters: Span,
    output: Span,
    options: SgdOptions,
    state: &mut SliceState,
) -> Result<(), String> {
    let mean = mean_of(from)?;
    let elements = output.length() / mean.dtype.element_bytes();
    let momentum = state.values(StateKind::MomentumBuffer);
    let first = momentum.is_empty();
    if options.has_momentum() && first {
        momentum.resize(elements, 0.0);
    }
    if options.has_momentum() {
        same_elements(StateKind::MomentumBuffer, momentum.len(), elements)?;
    }
    let memory = SgdMemory {
        parameters: parameters.pointer().cast_const(),
        momentum_buffer: options.has_momentum().then(|| momentum.as_mut_ptr().cast::<u8>()),
        output: output.pointer(),
        copy_to: None,
    };
    let inputs = pointers(from);
    // SAFETY: all spans are registered and have `elements` elements, like the momentum (checked
    // above); the engine gives an output to one work at a time.
    unsafe { reduce_sgd(mean, SgdStep { options, first }, &inputs, memory, elements) }
        .map_err(|error| error.to_string())
}

/// The spans are equally long.
fn apply_adam(
    from: &Contributions,
    parameters: Span,
    output: Span,
    options: AdamOptions,
    steps: u64,
    state: &mut SliceState,
) -> Result<(), String> {
    let mean = mean_of(from)?;
    let elements = output.length() / mean.dtype.element_bytes();
    for kind in [StateKind::ExpAvg, StateKind::ExpAvgSq] {
        let values = state.values(kind);
        if steps == 0 {
            values.clear();
            values.resize(elements, 0.0);
        }
        same_elements(kind, values.len(), elements)?;
    }
    let memory = AdamMemory {
        parameters: parameters.pointer().cast_const(),
        exp_avg: state.values(StateKind::ExpAvg).as_mut_ptr().cast(),
        exp_avg_sq: state.values(StateKind::ExpAvgSq).as_mut_ptr().cast(),
        output: output.pointer(),
        copy_to: None,
    };
    let step = AdamStep { options, number: steps + 1 };
    let inputs = pointers(from);
    // SAFETY: all spans are registered and have `elements` elements, like both means (checked
    // above); the engine gives an output to one work at a time.
    unsafe { reduce_adam(mean, step, &inputs, memory, elements) }.map_err(|error| error.to_string())
}

fn read_state(
    read: StateRead,
    dtype: Dtype,
    output: Span,
    copy_to: Option<Span>,
    state: &mut SliceState,
) -> Result<(), String> {
    let element_bytes = dtype.bytes() as usize;
    let bytes = state.bytes(read, element_bytes, output.length() / element_bytes)?;
    output.write(&bytes);
    if let Some(copy) = copy_to {
        same_length(core::iter::once(copy.length()), output.length())?;
        copy.write(&bytes);
    }
    Ok(())
}

/// The mean of encoded contributions is applied like the gradient of a single rank.
fn decode_apply(
    coder: &Coder,
    from: &EncodedParts,
    (parameters, output): (Span, Span),
    dtype: Dtype,
    rule: Rule,
    state: &mut SliceState,
) -> Result<(), String> {
    let mut mean = encoded::decoded_mean(coder, from)?;
    let inputs = vec![Span::over(&mut mean)];
    let from = Contributions { inputs, absent: false, divisor: 1, dtype };
    apply(&from, parameters, output, rule, state)
}

fn pointers(from: &Contributions) -> Vec<*const u8> {
    from.inputs.iter().map(|it| it.pointer().cast_const()).collect()
}

fn mean_of(from: &Contributions) -> Result<Mean, String> {
    let dtype = FloatDtype::of(from.dtype).ok_or("plain bytes cannot be averaged")?;
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

fn same_elements(kind: StateKind, found: usize, expected: usize) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{} has {found} elements where the slice has {expected}", kind.name()))
}
