//! From an operation of the engine to a job: each operation stands here once, with its memory, its cost
//! and its kernel.

use super::encoded::{self, EncodedParts, SliceCodec};
use super::error::JobError;
use super::jobs::{Job, Outcome};
use super::kernels::{self, Averaging, ReduceMemory};
use super::quantized_ring;
use super::server_optimizer::{JobState, SliceState, StateKind};
use super::state::{ComputeState, Write};
use crate::memory::{InPlace, MemoryTable, ReadSpan, Span, WriteSpan};
use crate::metrics::JobKind;
use gradlane_codec::{square_sum, DrawKey, FloatDtype};
use gradlane_engine::{Job as Request, JobResult, Operation, Region};

/// Lends the memory of one operation.
struct Lender<'a>(&'a mut MemoryTable);

impl Lender<'_> {
    fn span(&mut self, region: &Region) -> Result<Span, JobError> {
        Ok(self.0.locate(*region)?)
    }

    fn maybe(&mut self, region: Option<&Region>) -> Result<Option<Span>, JobError> {
        region.map(|region| self.span(region)).transpose()
    }

    fn read(&mut self, region: &Region) -> Result<ReadSpan, JobError> {
        // SAFETY: the engine lends an operation's regions until the job is reported, and nobody writes
        // to its inputs.
        Ok(unsafe { self.span(region)?.read() })
    }

    fn write(&mut self, region: &Region) -> Result<WriteSpan, JobError> {
        // SAFETY: as in `read`; an output that is apart from the inputs is the job's alone.
        Ok(unsafe { self.span(region)?.write() })
    }

    fn maybe_read(&mut self, region: Option<&Region>) -> Result<Option<ReadSpan>, JobError> {
        region.map(|region| self.read(region)).transpose()
    }

    fn maybe_write(&mut self, region: Option<&Region>) -> Result<Option<WriteSpan>, JobError> {
        region.map(|region| self.write(region)).transpose()
    }

    fn in_place(
        &mut self,
        source: Option<&Region>,
        dest: Option<&Region>,
    ) -> Result<InPlace, JobError> {
        let (source, dest) = (self.maybe(source)?, self.maybe(dest)?);
        // SAFETY: as in `read` and `write`; two regions are the same or apart.
        Ok(unsafe { InPlace::new(source, dest) })
    }

    fn reduction(
        &mut self,
        inputs: &[Region],
        parameters: Option<&Region>,
        output: &Region,
        copy_to: Option<&Region>,
    ) -> Result<ReduceMemory, JobError> {
        let inputs = inputs.iter().map(|input| self.span(input)).collect::<Result<_, _>>()?;
        let (parameters, copy_to) = (self.maybe(parameters)?, self.maybe(copy_to)?);
        let output = self.span(output)?;
        // SAFETY: as in `read` and `write`; an output is one of the inputs, or apart from all of them.
        unsafe { ReduceMemory::new(inputs, parameters, output, copy_to) }
    }

    fn parts(
        &mut self,
        inputs: &[Region],
        absent: bool,
        divisor: u32,
    ) -> Result<EncodedParts, JobError> {
        let inputs = inputs.iter().map(|input| self.read(input)).collect::<Result<_, _>>()?;
        Ok(EncodedParts { inputs, absent, divisor })
    }
}

fn outcome(result: Result<(), JobError>, state: SliceState) -> Outcome {
    Outcome { result: result.map(|()| JobResult::Written), state: Some(JobState::Slice(state)) }
}

fn stateless(result: Result<(), JobError>) -> Outcome {
    Outcome { result: result.map(|()| JobResult::Written), state: None }
}

fn encoding(result: Result<u64, JobError>, state: JobState) -> Outcome {
    Outcome { result: result.map(JobResult::Encoded), state: Some(state) }
}

/// The residual of this rank's contributions, where the codec keeps one.
fn worker_residual<'a>(codec: &SliceCodec, state: &'a mut SliceState) -> Option<&'a mut Vec<f32>> {
    codec.codec.keeps_residual().then(|| state.values(StateKind::WorkerResidual))
}

impl ComputeState {
    /// Makes the job of an operation.
    pub(super) fn prepare(
        &mut self,
        request: &Request,
        memory: &mut MemoryTable,
    ) -> Result<Job, JobError> {
        let mut lend = Lender(memory);
        let (slice, step) = (request.slice, request.step);
        let dtype = self.plan.tensor(request.tensor).spec.dtype;
        let (read, writing) = (self.read_in(step), self.writing());
        match &request.operation {
            Operation::Copy { from, to } => {
                check_length(from.length, to.length)?;
                let mut memory = lend.in_place(Some(from), Some(to))?;
                let bytes = 2 * from.length as usize;
                Ok(Job::new(request, JobKind::Copy, bytes, move || {
                    memory.seed_dest();
                    stateless(Ok(()))
                }))
            }
            Operation::AddSquares { input } => {
                let input = lend.read(input)?;
                let dtype = FloatDtype::of(dtype).ok_or(JobError::PlainBytes)?;
                Ok(Job::new(request, JobKind::Reduce, input.len(), move || {
                    let sum = square_sum(dtype, &input);
                    Outcome { result: Ok(JobResult::Squares(sum)), state: None }
                }))
            }
            Operation::Reduce { output, .. }
            | Operation::ReduceApply { output, .. }
            | Operation::DecodeReduceApply { output, .. }
                if read.is_some() =>
            {
                let copy_to = match &request.operation {
                    Operation::Reduce { copy_to, .. } => copy_to.as_ref(),
                    _ => None,
                };
                let (mut output, mut copy) = (lend.write(output)?, lend.maybe_write(copy_to)?);
                let read = read.expect("the guard has checked it");
                let mut state = self.take_state(slice);
                Ok(Job::new(request, JobKind::Copy, 3 * output.len(), move || {
                    let copy = copy.as_deref_mut();
                    let result = kernels::read_state(read, dtype, &mut output, copy, &mut state);
                    outcome(result, state)
                }))
            }
            Operation::ReduceApply { inputs, parameters, output, .. } if writing.is_some() => {
                let [given] = inputs.as_slice() else {
                    return Err(JobError::WrittenTwice);
                };
                let (given, kept) = (lend.span(given)?, lend.span(parameters)?);
                let output = lend.span(output)?;
                // SAFETY: as in `read` and `write`; only the contribution may be the output.
                let memory = unsafe { ReduceMemory::new(vec![given], Some(kept), output, None)? };
                let mut state = self.take_state(slice);
                Ok(Job::new(request, JobKind::Copy, 3 * memory.bytes(), move || {
                    let result = match writing {
                        Some(Write::State(part)) => {
                            kernels::write_state(part, dtype, &memory, &mut state)
                        }
                        _ => kernels::write_parameters(&memory),
                    };
                    outcome(result, state)
                }))
            }
            Operation::DecodeReduceApply { .. } if writing.is_some() => {
                Err(JobError::WrittenEncoded)
            }
            Operation::Reduce { inputs, absent, divisor, output, copy_to } => {
                let memory = lend.reduction(inputs, None, output, copy_to.as_ref())?;
                let averaging = Averaging { absent: *absent, divisor: *divisor, dtype };
                let bytes = (inputs.len() + 1) * memory.bytes();
                Ok(Job::new(request, JobKind::Reduce, bytes, move || {
                    stateless(kernels::reduce(averaging, &memory))
                }))
            }
            Operation::ReduceApply { inputs, absent, divisor, parameters, output } => {
                let rule = self.update_rule(request.tensor)?;
                let memory = lend.reduction(inputs, Some(parameters), output, None)?;
                let averaging = Averaging { absent: *absent, divisor: *divisor, dtype };
                let mut state = self.take_state(slice);
                let rule = if self.is_async { state.count(rule) } else { rule };
                let bytes = (inputs.len() + 3) * memory.bytes();
                Ok(Job::new(request, JobKind::Update, bytes, move || {
                    outcome(kernels::apply(averaging, &memory, rule, &mut state), state)
                }))
            }
            Operation::Encode { input, output } => {
                let codec = self.slice_codec(request, self.rank.0)?;
                let (input, mut output) = (lend.read(input)?, lend.write(output)?);
                let mut residual = std::mem::take(self.state(slice).contributed());
                // State that a step reads is exact and leaves no residual.
                let feedback = codec.codec.keeps_residual() && read.is_none();
                let may_be_late = self.may_be_late;
                Ok(Job::new(request, JobKind::Encode, 2 * input.len(), move || {
                    if feedback && may_be_late {
                        residual.snapshot(step);
                    }
                    let values = feedback.then_some(&mut residual.values);
                    let result = encoded::encode(&codec, &input, values, &mut output);
                    encoding(result, JobState::WorkerResidual(residual))
                }))
            }
            Operation::DecodeReduceEncode { inputs, absent, divisor, output, copy_to } => {
                let codec = self.slice_codec(request, DrawKey::BROADCAST)?;
                let parts = lend.parts(inputs, *absent, *divisor)?;
                let mut output = lend.write(output)?;
                let mut copy = lend.maybe_write(copy_to.as_ref())?;
                let mut residual =
                    std::mem::take(self.state(slice).values(StateKind::OwnerResidual));
                let bytes = (inputs.len() + 1) * 4 * codec.elements;
                Ok(Job::new(request, JobKind::Recode, bytes, move || {
                    let values = codec.codec.keeps_residual().then_some(&mut residual);
                    let copy = copy.as_deref_mut();
                    let result =
                        encoded::decode_reduce_encode(&codec, &parts, values, &mut output, copy);
                    encoding(result, JobState::OwnerResidual(residual))
                }))
            }
            Operation::DecodeReduceApply { inputs, absent, divisor, parameters, output } => {
                let codec = self.slice_codec(request, DrawKey::BROADCAST)?;
                let rule = self.update_rule(request.tensor)?;
                let parts = lend.parts(inputs, *absent, *divisor)?;
                let (parameters, mut output) = (lend.read(parameters)?, lend.write(output)?);
                let mut state = self.take_state(slice);
                let rule = if self.is_async { state.count(rule) } else { rule };
                let bytes = (inputs.len() + 3) * output.len();
                Ok(Job::new(request, JobKind::Update, bytes, move || {
                    let result = encoded::decoded_mean(&codec, &parts).and_then(|mean| {
                        kernels::apply_mean(
                            dtype,
                            &mean,
                            &parameters,
                            &mut output,
                            rule,
                            &mut state,
                        )
                    });
                    outcome(result, state)
                }))
            }
            Operation::RingEncode { received, own, divisor, output, copy_to } => {
                let is_last = *divisor > 1;
                let leg = if is_last { DrawKey::BROADCAST } else { self.rank.0 };
                let codec = self.slice_codec(request, leg)?;
                let divisor = *divisor;
                // The first rank of a ring has nothing to decode and to add to.
                let kind = if received.is_none() { JobKind::Encode } else { JobKind::Recode };
                let received = lend.maybe_read(received.as_ref())?;
                let mut memory = lend.in_place(own.as_ref(), copy_to.as_ref())?;
                let mut output = lend.write(output)?;
                let mut state = self.take_state(slice);
                let bytes = 2 * 4 * codec.elements;
                Ok(Job::new(request, kind, bytes, move || {
                    let keeps = codec.codec.keeps_residual();
                    // The last rank encodes the mean, and has no other turn for the residual of its
                    // contributions that a checkpoint may hold.
                    let carried = match keeps && is_last {
                        true => std::mem::take(state.values(StateKind::WorkerResidual)),
                        false => Vec::new(),
                    };
                    let kind = match is_last {
                        true => StateKind::OwnerResidual,
                        false => StateKind::WorkerResidual,
                    };
                    let residual = keeps.then(|| state.values(kind));
                    let hop =
                        encoded::Hop { received: received.as_deref(), divisor, carried: &carried };
                    let result = encoded::hop(&codec, &hop, residual, &mut output, &mut memory);
                    encoding(result, JobState::Slice(state))
                }))
            }
            Operation::RingMaxScales { received, own, output } => {
                let codec = self.slice_codec(request, self.rank.0)?;
                let own = lend.read(own)?;
                let mut scales = lend.in_place(received.as_ref(), Some(output))?;
                let mut state = self.take_state(slice);
                Ok(Job::new(request, JobKind::Encode, own.len(), move || {
                    let residual = worker_residual(&codec, &mut state);
                    let result = quantized_ring::max_scales(&codec, &own, residual, &mut scales);
                    outcome(result, state)
                }))
            }
            Operation::RingBeginCodes { scales, own, output } => {
                let codec = self.slice_codec(request, self.rank.0)?;
                let scales = lend.maybe_read(scales.as_ref())?;
                let mut memory = lend.in_place(own.as_ref(), None)?;
                let mut output = lend.write(output)?;
                let mut state = self.take_state(slice);
                let bytes = 2 * 4 * codec.elements;
                Ok(Job::new(request, JobKind::Encode, bytes, move || {
                    let residual = worker_residual(&codec, &mut state);
                    let scales = scales.as_deref();
                    let result =
                        quantized_ring::begin(&codec, scales, residual, &mut output, &mut memory);
                    outcome(result, state)
                }))
            }
            Operation::RingAddCodes { sums, own, copy_to } => {
                let codec = self.slice_codec(request, self.rank.0)?;
                let mut sums = lend.write(sums)?;
                let mut memory = lend.in_place(own.as_ref(), copy_to.as_ref())?;
                let mut state = self.take_state(slice);
                let bytes = 2 * 4 * codec.elements;
                Ok(Job::new(request, JobKind::Recode, bytes, move || {
                    let residual = worker_residual(&codec, &mut state);
                    let result = quantized_ring::add(&codec, &mut sums, residual, &mut memory);
                    outcome(result, state)
                }))
            }
            Operation::Decode { from, to } => {
                let codec = self.slice_codec(request, DrawKey::BROADCAST)?;
                let (from, mut to) = (lend.read(from)?, lend.write(to)?);
                Ok(Job::new(request, JobKind::Decode, 2 * to.len(), move || {
                    let decode = match codec.sums.is_some() {
                        true => quantized_ring::means,
                        false => encoded::decode,
                    };
                    stateless(decode(&codec, &from, &mut to))
                }))
            }
        }
    }

    /// The codec of a slice, for a push of a rank or a broadcast.
    fn slice_codec(&self, request: &Request, leg: u32) -> Result<SliceCodec, JobError> {
        let planned = self.codecs[request.tensor.index()].as_ref().ok_or(JobError::NoCodec)?;
        let slice = self.plan.slice(request.slice);
        let dtype = self.plan.tensor(request.tensor).spec.dtype;
        Ok(SliceCodec {
            codec: planned.codec.clone(),
            sums: planned.sums,
            key: DrawKey {
                seed: self.seed,
                step: request.step.0,
                tensor: request.tensor.0,
                leg,
                first_element: slice.start,
            },
            elements: slice.length as usize,
            dtype: FloatDtype::of(dtype).ok_or(JobError::PlainBytes)?,
        })
    }
}

fn check_length(found: u64, expected: u64) -> Result<(), JobError> {
    if found == expected {
        return Ok(());
    }
    Err(JobError::Length { found: found as usize, expected: expected as usize })
}
