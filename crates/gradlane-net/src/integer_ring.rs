//! Works of a ring that adds up codes as integers: scales become the largest of all ranks, codes are
//! added to sums, sums become means.
//!
//! What other ranks sent is read, and written where sums grow in place; whatever its bytes are, it
//! makes numbers or is an error.

use crate::encoded::{as_f32, fit, same_bytes, write_block, Block, Coder};
use crate::memory::Span;
use gradlane_codec::IntegerSums;

/// What was not sent before, where the codec keeps it.
pub(crate) type Kept<'a> = Option<&'a mut Vec<f32>>;

fn sums_of(coder: &Coder) -> Result<IntegerSums, String> {
    coder.sums.ok_or_else(|| "the plan has no sums of codes for it".to_owned())
}

fn check_length(span: Span, expected: usize) -> Result<(), String> {
    if span.length() == expected {
        return Ok(());
    }
    Err(format!("{} bytes where {expected} are expected", span.length()))
}

/// The gradient of a block, or none.
fn values_of<'a>(
    coder: &Coder,
    own: Option<Span>,
    block: &Block,
    wide: &'a mut Vec<f32>,
) -> Option<&'a [f32]> {
    // SAFETY: the span is registered; the engine lends the gradient to this work to read.
    own.map(|own| as_f32(coder, unsafe { own.bytes() }, block, wide))
}

fn enlarge(
    coder: &Coder,
    sums: &IntegerSums,
    own: Option<Span>,
    kept: Option<&[f32]>,
    scales: &mut [u8],
) -> Result<(), String> {
    let Some(own) = own else {
        return Ok(());
    };
    same_bytes(own, coder)?;
    let mut wide = Vec::new();
    for block in coder.blocks_by(|elements| sums.scale_bytes(elements)) {
        if let Some(values) = values_of(coder, Some(own), &block, &mut wide) {
            let kept = kept.map(|all| &all[block.elements.clone()]);
            sums.enlarge(values, kept, &mut scales[block.bytes.clone()]);
        }
    }
    Ok(())
}

/// `output = the larger of received and the scales of own`. `output` may be `received`.
pub(crate) fn scale(
    coder: &Coder,
    received: Option<Span>,
    own: Span,
    mut kept: Kept<'_>,
    output: Span,
) -> Result<(), String> {
    let sums = sums_of(coder)?;
    check_length(output, sums.scale_bytes(coder.elements))?;
    if let Some(kept) = &mut kept {
        fit(kept, coder.elements)?;
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
    enlarge(coder, &sums, Some(own), kept.map(|it| it.as_slice()), scales)
}

/// `output = codes of own`, to the larger of `scales` and its own.
pub(crate) fn begin(
    coder: &Coder,
    scales: Option<Span>,
    own: Option<Span>,
    mut kept: Kept<'_>,
    output: Span,
) -> Result<(), String> {
    let sums = sums_of(coder)?;
    check_length(output, sums.sum_bytes(coder.elements))?;
    if let Some(kept) = &mut kept {
        fit(kept, coder.elements)?;
    }
    let mut shared = vec![0; sums.scale_bytes(coder.elements)];
    if let Some(scales) = scales {
        check_length(scales, shared.len())?;
        // SAFETY: the span is registered and nobody writes to what has arrived.
        shared.copy_from_slice(unsafe { scales.bytes() });
    }
    enlarge(coder, &sums, own, kept.as_ref().map(|it| it.as_slice()), &mut shared)?;
    // SAFETY: the output is this work's alone.
    let out = unsafe { output.bytes_mut() };
    sums.begin(&shared, coder.elements, out).map_err(|error| error.to_string())?;
    add(coder, output, own, kept, None)
}

/// `sums = sums + codes of own`; the mean that they then stand for goes to `copy_to`.
pub(crate) fn add(
    coder: &Coder,
    into: Span,
    own: Option<Span>,
    mut kept: Kept<'_>,
    copy_to: Option<Span>,
) -> Result<(), String> {
    let sums = sums_of(coder)?;
    check_length(into, sums.sum_bytes(coder.elements))?;
    for memory in own.iter().chain(&copy_to) {
        same_bytes(*memory, coder)?;
    }
    if let Some(kept) = &mut kept {
        fit(kept, coder.elements)?;
    }
    // What is not there is not fed back either.
    let mut kept = kept.filter(|_| own.is_some());
    // SAFETY: the sums are this work's alone.
    let bytes = unsafe { into.bytes_mut() };
    let (mut wide, mut means) = (Vec::new(), Vec::new());
    let zeros = vec![0.0; if own.is_none() { coder.elements } else { 0 }];
    for block in coder.blocks_by(|elements| sums.sum_bytes(elements)) {
        let part = &mut bytes[block.bytes.clone()];
        let values = values_of(coder, own, &block, &mut wide);
        let values = values.unwrap_or_else(|| &zeros[block.elements.clone()]);
        let kept = kept.as_deref_mut().map(|all| &mut all[block.elements.clone()]);
        let added = sums.add(&coder.place_of(&block), values, kept, part);
        added.map_err(|error| error.to_string())?;
        if let Some(copy) = copy_to {
            means.resize(block.elements.len(), 0.0);
            sums.mean(part, &mut means).map_err(|error| error.to_string())?;
            write_block(coder, copy, &block, &means);
        }
    }
    Ok(())
}

/// `to = the means that sums stand for`.
pub(crate) fn means(coder: &Coder, from: Span, to: Span) -> Result<(), String> {
    let sums = sums_of(coder)?;
    check_length(from, sums.sum_bytes(coder.elements))?;
    same_bytes(to, coder)?;
    // SAFETY: the span is registered and nobody writes to what has arrived.
    let bytes = unsafe { from.bytes() };
    let mut means = Vec::new();
    for block in coder.blocks_by(|elements| sums.sum_bytes(elements)) {
        means.resize(block.elements.len(), 0.0);
        let part = &bytes[block.bytes.clone()];
        sums.mean(part, &mut means).map_err(|error| error.to_string())?;
        write_block(coder, to, &block, &means);
    }
    Ok(())
}
