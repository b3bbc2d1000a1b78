//! JobRunner of a ring that adds up codes as integers: scales become the largest of all ranks, codes are
//! added to sums, sums become means.
//!
//! What other ranks sent is read, and written where sums grow in place; whatever its bytes are, it
//! makes numbers or is an error.

use crate::compute::encoded::{
    as_f32, check_tensor_bytes, fit_residual, write_chunk, Chunk, SliceCodec,
};
use crate::memory::Span;
use gradlane_codec::IntegerSums;

/// What was not sent before, where the codec keeps it.
pub(crate) type Residual<'a> = Option<&'a mut Vec<f32>>;

fn sums_of(slice_codec: &SliceCodec) -> Result<IntegerSums, String> {
    slice_codec.sums.ok_or_else(|| "the plan has no sums of codes for it".to_owned())
}

fn check_length(span: Span, expected: usize) -> Result<(), String> {
    if span.length() == expected {
        return Ok(());
    }
    Err(format!("{} bytes where {expected} are expected", span.length()))
}

/// The gradient of a block, or none.
fn values_of<'a>(
    slice_codec: &SliceCodec,
    own: Option<Span>,
    chunk: &Chunk,
    wide: &'a mut Vec<f32>,
) -> Option<&'a [f32]> {
    // SAFETY: the span is registered; the engine lends the gradient to this work to read.
    own.map(|own| as_f32(slice_codec, unsafe { own.bytes() }, chunk, wide))
}

fn max_scales(
    slice_codec: &SliceCodec,
    sums: &IntegerSums,
    own: Option<Span>,
    residual: Option<&[f32]>,
    scales: &mut [u8],
) -> Result<(), String> {
    let Some(own) = own else {
        return Ok(());
    };
    check_tensor_bytes(own, slice_codec)?;
    let mut wide = Vec::new();
    for chunk in slice_codec.chunks_by(|elements| sums.scale_bytes(elements)) {
        if let Some(values) = values_of(slice_codec, Some(own), &chunk, &mut wide) {
            let residual = residual.map(|all| &all[chunk.elements.clone()]);
            sums.enlarge(values, residual, &mut scales[chunk.bytes.clone()]);
        }
    }
    Ok(())
}

/// `output = the larger of received and the scales of own`. `output` may be `received`.
pub(crate) fn scale(
    slice_codec: &SliceCodec,
    received: Option<Span>,
    own: Span,
    mut residual: Residual<'_>,
    output: Span,
) -> Result<(), String> {
    let sums = sums_of(slice_codec)?;
    check_length(output, sums.scale_bytes(slice_codec.elements))?;
    if let Some(residual) = &mut residual {
        fit_residual(residual, slice_codec.elements)?;
    }
    match received {
        Some(received) if received.pointer() != output.pointer() => {
            check_length(received, output.length())?;
            received.copy_to(output);
        }
        Some(_) => {}
        // SAFETY: the output is this work's alone.
        None => unsafe { output.bytes_mut() }.fill(0),
    }
    // SAFETY: as above.
    let scales = unsafe { output.bytes_mut() };
    max_scales(slice_codec, &sums, Some(own), residual.map(|it| it.as_slice()), scales)
}

/// `output = codes of own`, to the larger of `scales` and its own.
pub(crate) fn begin(
    slice_codec: &SliceCodec,
    scales: Option<Span>,
    own: Option<Span>,
    mut residual: Residual<'_>,
    output: Span,
) -> Result<(), String> {
    let sums = sums_of(slice_codec)?;
    check_length(output, sums.sum_bytes(slice_codec.elements))?;
    if let Some(residual) = &mut residual {
        fit_residual(residual, slice_codec.elements)?;
    }
    let mut shared = vec![0; sums.scale_bytes(slice_codec.elements)];
    if let Some(scales) = scales {
        check_length(scales, shared.len())?;
        // SAFETY: the span is registered and nobody writes to what has arrived.
        shared.copy_from_slice(unsafe { scales.bytes() });
    }
    max_scales(slice_codec, &sums, own, residual.as_ref().map(|it| it.as_slice()), &mut shared)?;
    // SAFETY: the output is this work's alone.
    let out = unsafe { output.bytes_mut() };
    sums.begin(&shared, slice_codec.elements, out).map_err(|error| error.to_string())?;
    add(slice_codec, output, own, residual, None)
}

/// `sums = sums + codes of own`; the mean that they then stand for goes to `copy_to`.
pub(crate) fn add(
    slice_codec: &SliceCodec,
    into: Span,
    own: Option<Span>,
    mut residual: Residual<'_>,
    copy_to: Option<Span>,
) -> Result<(), String> {
    let sums = sums_of(slice_codec)?;
    check_length(into, sums.sum_bytes(slice_codec.elements))?;
    for memory in own.iter().chain(&copy_to) {
        check_tensor_bytes(*memory, slice_codec)?;
    }
    if let Some(residual) = &mut residual {
        fit_residual(residual, slice_codec.elements)?;
    }
    // What is not there is not fed back either.
    let mut residual = residual.filter(|_| own.is_some());
    // SAFETY: the sums are this work's alone.
    let bytes = unsafe { into.bytes_mut() };
    let (mut wide, mut means) = (Vec::new(), Vec::new());
    let zeros = vec![0.0; if own.is_none() { slice_codec.elements } else { 0 }];
    for chunk in slice_codec.chunks_by(|elements| sums.sum_bytes(elements)) {
        let part = &mut bytes[chunk.bytes.clone()];
        let values = values_of(slice_codec, own, &chunk, &mut wide);
        let values = values.unwrap_or_else(|| &zeros[chunk.elements.clone()]);
        let residual = residual.as_deref_mut().map(|all| &mut all[chunk.elements.clone()]);
        let added = sums.add(&slice_codec.place_of(&chunk), values, residual, part);
        added.map_err(|error| error.to_string())?;
        if let Some(copy) = copy_to {
            means.resize(chunk.elements.len(), 0.0);
            sums.mean(part, &mut means).map_err(|error| error.to_string())?;
            write_chunk(slice_codec, copy, &chunk, &means);
        }
    }
    Ok(())
}

/// `to = the means that sums stand for`.
pub(crate) fn means(slice_codec: &SliceCodec, from: Span, to: Span) -> Result<(), String> {
    let sums = sums_of(slice_codec)?;
    check_length(from, sums.sum_bytes(slice_codec.elements))?;
    check_tensor_bytes(to, slice_codec)?;
    // SAFETY: the span is registered and nobody writes to what has arrived.
    let bytes = unsafe { from.bytes() };
    let mut means = Vec::new();
    for chunk in slice_codec.chunks_by(|elements| sums.sum_bytes(elements)) {
        means.resize(chunk.elements.len(), 0.0);
        let part = &bytes[chunk.bytes.clone()];
        sums.mean(part, &mut means).map_err(|error| error.to_string())?;
        write_chunk(slice_codec, to, &chunk, &means);
    }
    Ok(())
}
