//! JobRunner as the engine describes them, turned into calls of the kernels in `gradlane-codec`.
//!
//! A job owns everything that it needs: checked spans, settings, the optimizer state of its slice. It can
//! run on any thread, and runs once.

use crate::compute::encoded::{self, EncodedParts, Hop, SliceCodec};
use crate::compute::optimizer::{SliceState, StateKind, StateRead, UpdateRule};
use crate::compute::quantized_ring;
use crate::compute::residual::WorkerResidual;
use crate::memory::Span;
use crate::metrics::trace::JobKind;
use gradlane_codec::{
    reduce_adam, reduce_mean, reduce_sgd, AdamMemory, AdamOptions, AdamStep, Mean, SgdMemory,
    SgdOptions, SgdStep,
};
use gradlane_engine::WorkId;
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
        rule: UpdateRule,
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
        slice_codec: SliceCodec,
        from: Span,
        output: Span,
        feedback: bool,
        /// Whether the step may go on without what is sent.
        may_be_late: bool,
        residual: WorkerResidual,
    },
    Recode {
        slice_codec: SliceCodec,
        from: EncodedParts,
        output: Span,
        copy_to: Option<Span>,
        residual: Vec<f32>,
    },
    DecodeApply {
        slice_codec: SliceCodec,
        from: EncodedParts,
        dtype: Dtype,
        parameters: Span,
        output: Span,
        rule: UpdateRule,
        state: SliceState,
    },
    RingEncode {
        slice_codec: SliceCodec,
        from: Hop,
        output: Span,
        copy_to: Option<Span>,
        state: SliceState,
    },
    RingScale {
        slice_codec: SliceCodec,
        received: Option<Span>,
        own: Span,
        output: Span,
        state: SliceState,
    },
    RingBegin {
        slice_codec: SliceCodec,
        scales: Option<Span>,
        own: Option<Span>,
        output: Span,
        state: SliceState,
    },
    RingAdd {
        slice_codec: SliceCodec,
        sums: Span,
        own: Option<Span>,
        copy_to: Option<Span>,
        state: SliceState,
    },
    Decode {
        slice_codec: SliceCodec,
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
    pub(crate) id: WorkId,
    pub(crate) step: Step,
    pub(crate) slice: SliceId,
    pub(crate) kernel: Kernel,
}

/// What a job gives back of a slice's state. A rank that is late may encode its contribution while
/// it reduces those of others: each of the two has its own part.
#[derive(Debug)]
pub(crate) enum JobState {
    Whole(SliceState),
    Contributed(WorkerResidual),
    Reduced(Vec<f32>),
}

/// A job that has run: what is to be reported and kept.
#[derive(Debug)]
pub(crate) struct FinishedJob {
    pub(crate) id: WorkId,
    pub(crate) slice: SliceId,
    pub(crate) state_back: Option<JobState>,
    /// The length of an encoding, of works that make one.
    pub(crate) result: Result<Option<u64>, String>,
}

impl Job {
    /// What the job does, in the words of a trace.
    pub(crate) fn kind(&self) -> JobKind {
        match &self.kernel {
            Kernel::Reduce { .. } => JobKind::Reduce,
            Kernel::Apply { .. } | Kernel::DecodeApply { .. } => JobKind::Update,
            Kernel::Copy { .. } | Kernel::ReadState { .. } => JobKind::Copy,
            Kernel::Encode { .. } | Kernel::RingScale { .. } => JobKind::Encode,
            Kernel::Recode { .. }
            | Kernel::RingEncode { .. }
            | Kernel::RingBegin { .. }
            | Kernel::RingAdd { .. } => JobKind::Recode,
            Kernel::Decode { .. } => JobKind::Decode,
        }
    }

    /// Whether the job is never done on the I/O thread, however small it is.
    pub(crate) fn encodes(&self) -> bool {
        matches!(self.kind(), JobKind::Encode | JobKind::Recode)
    }

    /// Bytes that the job reads and writes: a measure of how long it takes.
    pub(crate) fn bytes(&self) -> usize {
        match &self.kernel {
            Kernel::Reduce { from, output, .. } => (from.inputs.len() + 1) * output.length(),
            Kernel::Apply { from, output, .. } => (from.inputs.len() + 3) * output.length(),
            Kernel::ReadState { output, .. } => 3 * output.length(),
            Kernel::Copy { from, .. } => 2 * from.length(),
            Kernel::Encode { from, .. } => 2 * from.length(),
            Kernel::Recode { slice_codec, from, .. } => {
                (from.inputs.len() + 1) * 4 * slice_codec.elements
            }
            Kernel::RingScale { own, .. } => own.length(),
            Kernel::RingEncode { slice_codec, .. }
            | Kernel::RingBegin { slice_codec, .. }
            | Kernel::RingAdd { slice_codec, .. } => 2 * 4 * slice_codec.elements,
            Kernel::DecodeApply { from, output, .. } => (from.inputs.len() + 3) * output.length(),
            Kernel::Decode { to, .. } => 2 * to.length(),
        }
    }

    /// Runs the job.
    pub(crate) fn run(self) -> FinishedJob {
        let Job { id, step, slice, kernel } = self;
        let (result, state_back) = match kernel {
            Kernel::Copy { from, to } => {
                from.copy_to(to);
                (Ok(None), None)
            }
            Kernel::Reduce { from, output, copy_to } => {
                (reduce(&from, output, copy_to).map(|()| None), None)
            }
            Kernel::Apply { from, parameters, output, rule, mut state } => {
                let result = apply(&from, parameters, output, rule, &mut state);
                (result.map(|()| None), Some(JobState::Whole(state)))
            }
            Kernel::ReadState { read, dtype, output, copy_to, mut state } => {
                let result = read_state(read, dtype, output, copy_to, &mut state);
                (result.map(|()| None), Some(JobState::Whole(state)))
            }
            Kernel::Encode { slice_codec, from, output, feedback, may_be_late, mut residual } => {
                if feedback && may_be_late {
                    residual.snapshot(step);
                }
                let values = feedback.then_some(&mut residual.values);
                let result = encoded::encode(&slice_codec, from, values, output);
                (result.map(Some), Some(JobState::Contributed(residual)))
            }
            Kernel::Recode { slice_codec, from, output, copy_to, mut residual } => {
                let values = slice_codec.codec.keeps_residual().then_some(&mut residual);
                let result =
                    encoded::decode_reduce_encode(&slice_codec, &from, values, output, copy_to);
                (result.map(Some), Some(JobState::Reduced(residual)))
            }
            Kernel::DecodeApply {
                slice_codec,
                from,
                dtype,
                parameters,
                output,
                rule,
                mut state,
            } => {
                let memory = (parameters, output);
                let result = decode_apply(&slice_codec, &from, memory, dtype, rule, &mut state);
                (result.map(|()| None), Some(JobState::Whole(state)))
            }
            Kernel::RingEncode { slice_codec, from, output, copy_to, mut state } => {
                let result = ring_encode(&slice_codec, &from, output, copy_to, &mut state);
                (result.map(Some), Some(JobState::Whole(state)))
            }
            Kernel::RingScale { slice_codec, received, own, output, mut state } => {
                let state_back = contributed_residual(&slice_codec, &mut state);
                let result = quantized_ring::scale(&slice_codec, received, own, state_back, output);
                (result.map(|()| None), Some(JobState::Whole(state)))
            }
            Kernel::RingBegin { slice_codec, scales, own, output, mut state } => {
                let state_back = contributed_residual(&slice_codec, &mut state);
                let result = quantized_ring::begin(&slice_codec, scales, own, state_back, output);
                (result.map(|()| None), Some(JobState::Whole(state)))
            }
            Kernel::RingAdd { slice_codec, sums, own, copy_to, mut state } => {
                let state_back = contributed_residual(&slice_codec, &mut state);
                let result = quantized_ring::add(&slice_codec, sums, own, state_back, copy_to);
                (result.map(|()| None), Some(JobState::Whole(state)))
            }
            Kernel::Decode { slice_codec, from, to } => {
                let decode = if slice_codec.sums.is_some() {
                    quantized_ring::means
                } else {
                    encoded::decode
                };
                (decode(&slice_codec, from, to).map(|()| None), None)
            }
        };
        FinishedJob { id, slice, state_back, result }
    }
}

/// What encoding this rank's contributions has lost, where the codec keeps that.
fn contributed_residual<'a>(
    slice_codec: &SliceCodec,
    state: &'a mut SliceState,
) -> quantized_ring::Residual<'a> {
    slice_codec.codec.keeps_residual().then(|| state.values(StateKind::WorkerResidual))
}

/// One hop. The last rank encodes the mean, and has no other turn for what a checkpoint says that
/// its contributions have lost.
fn ring_encode(
    slice_codec: &SliceCodec,
    from: &Hop,
    output: Span,
    copy_to: Option<Span>,
    state: &mut SliceState,
) -> Result<u64, String> {
    let is_last = from.divisor > 1;
    let keeps = slice_codec.codec.keeps_residual();
    let late = match keeps && is_last {
        true => std::mem::take(state.values(StateKind::WorkerResidual)),
        false => Vec::new(),
    };
    let kind = if is_last { StateKind::OwnerResidual } else { StateKind::WorkerResidual };
    let residual = keeps.then(|| state.values(kind));
    encoded::hop(slice_codec, from, &late, residual, output, copy_to)
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
    rule: UpdateRule,
    state: &mut SliceState,
) -> Result<(), String> {
    let lengths = from.inputs.iter().chain([&parameters]).map(|span| span.length());
    same_length(lengths, output.length())?;
    match rule {
        UpdateRule::Sgd(options) => apply_sgd(from, parameters, output, options, state),
        UpdateRule::Adam { options, steps } => {
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
    slice_codec: &SliceCodec,
    from: &EncodedParts,
    (parameters, output): (Span, Span),
    dtype: Dtype,
    rule: UpdateRule,
    state: &mut SliceState,
) -> Result<(), String> {
    let mut mean = encoded::decoded_mean(slice_codec, from)?;
    let inputs = vec![Span::over(&mut mean)];
    let from = Contributions { inputs, absent: false, divisor: 1, dtype };
    apply(&from, parameters, output, rule, state)
}

fn pointers(from: &Contributions) -> Vec<*const u8> {
    from.inputs.iter().map(|it| it.pointer().cast_const()).collect()
}

fn mean_of(from: &Contributions) -> Result<Mean, String> {
    let dtype = codec_dtype(from.dtype).ok_or("plain bytes cannot be averaged")?;
    let divisor = NonZeroU32::new(from.divisor).ok_or("a mean over no ranks")?;
    Ok(Mean { dtype, divisor, add_zero: from.absent })
}

/// A dtype as the kernels name it; none for plain bytes.
pub(crate) fn codec_dtype(dtype: Dtype) -> Option<gradlane_codec::Dtype> {
    match dtype {
        Dtype::F32 => Some(gradlane_codec::Dtype::F32),
        Dtype::F16 => Some(gradlane_codec::Dtype::F16),
        Dtype::Bf16 => Some(gradlane_codec::Dtype::Bf16),
        Dtype::F64 => Some(gradlane_codec::Dtype::F64),
        Dtype::U8 => None,
    }
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
