//! Kernels of a ring that adds up codes as integers: scales become the largest of all ranks, codes are
//! added to sums, sums become means.
//!
//! Bytes of other ranks are read, and written where sums grow in place; whatever they are, they make
//! numbers or are an error.

use super::encoded::{fit_residual, SliceCodec};
use super::error::JobError;
use crate::memory::InPlace;
use gradlane_codec::IntegerSums;

/// The part of a contribution that was not sent before, where the codec keeps it.
pub(crate) type Residual<'a> = Option<&'a mut Vec<f32>>;

fn sums_of(codec: &SliceCodec) -> Result<IntegerSums, JobError> {
    codec.sums.ok_or(JobError::NoSums)
}

fn check_length(found: usize, expected: usize) -> Result<(), JobError> {
    if found == expected {
        return Ok(());
    }
    Err(JobError::EncodingLength { found, expected })
}

/// Raises scales to those of this rank's values.
fn raise_scales(
    codec: &SliceCodec,
    sums: &IntegerSums,
    own: &[u8],
    residual: Option<&[f32]>,
    scales: &mut [u8],
) -> Result<(), JobError> {
    codec.check_memory(Some(own))?;
    let mut wide = Vec::new();
    for chunk in codec.chunks_by(|elements| sums.scale_bytes(elements)) {
        let values = codec.values(own, &chunk, &mut wide);
        let residual = residual.map(|all| &all[chunk.elements.clone()]);
        sums.max_scales(values, residual, &mut scales[chunk.bytes.clone()]);
    }
    Ok(())
}

/// Writes the larger of the received scales, which are the source, and this rank's own.
pub(crate) fn max_scales(
    codec: &SliceCodec,
    own: &[u8],
    mut residual: Residual<'_>,
    scales: &mut InPlace,
) -> Result<(), JobError> {
    let sums = sums_of(codec)?;
    let expected = sums.scale_bytes(codec.elements);
    for side in [scales.source().map(<[u8]>::len), scales.dest().map(|dest| dest.len())] {
        side.map_or(Ok(()), |found| check_length(found, expected))?;
    }
    if let Some(residual) = &mut residual {
        fit_residual(residual, codec.elements)?;
    }
    let residual = residual.map(|it| it.as_slice());
    scales.seed_dest().map_or(Ok(()), |dest| raise_scales(codec, &sums, own, residual, dest))
}

/// Begins sums of codes with this rank's, scaled to the larger of `scales` and its own.
pub(crate) fn begin(
    codec: &SliceCodec,
    scales: Option<&[u8]>,
    mut residual: Residual<'_>,
    output: &mut [u8],
    own: &mut InPlace,
) -> Result<(), JobError> {
    let sums = sums_of(codec)?;
    check_length(output.len(), sums.sum_bytes(codec.elements))?;
    if let Some(residual) = &mut residual {
        fit_residual(residual, codec.elements)?;
    }
    let mut shared = vec![0; sums.scale_bytes(codec.elements)];
    if let Some(scales) = scales {
        check_length(scales.len(), shared.len())?;
        shared.copy_from_slice(scales);
    }
    if let Some(own) = own.source() {
        let residual = residual.as_ref().map(|it| it.as_slice());
        raise_scales(codec, &sums, own, residual, &mut shared)?;
    }
    sums.begin(&shared, codec.elements, output)?;
    add(codec, output, residual, own)
}

/// Adds the codes of this rank's values, the source of `memory`, to sums. The mean that they then stand
/// for goes to its destination.
pub(crate) fn add(
    codec: &SliceCodec,
    into: &mut [u8],
    mut residual: Residual<'_>,
    memory: &mut InPlace,
) -> Result<(), JobError> {
    let sums = sums_of(codec)?;
    check_length(into.len(), sums.sum_bytes(codec.elements))?;
    codec.check_in_place(memory)?;
    if let Some(residual) = &mut residual {
        fit_residual(residual, codec.elements)?;
    }
    let has_own = memory.source().is_some();
    // A gradient that does not exist has no residual to add.
    let mut residual = residual.filter(|_| has_own);
    let (mut wide, mut means) = (Vec::new(), Vec::new());
    let zeros = vec![0.0; if has_own { 0 } else { codec.elements }];
    for chunk in codec.chunks_by(|elements| sums.sum_bytes(elements)) {
        let part = &mut into[chunk.bytes.clone()];
        let values = match memory.source() {
            Some(own) => codec.values(own, &chunk, &mut wide),
            None => &zeros[chunk.elements.clone()],
        };
        let residual = residual.as_deref_mut().map(|all| &mut all[chunk.elements.clone()]);
        sums.add(&codec.place_of(&chunk), values, residual, part)?;
        if let Some(dest) = memory.dest() {
            means.resize(chunk.elements.len(), 0.0);
            sums.mean(part, &mut means)?;
            codec.write_values(dest, &chunk, &means);
        }
    }
    Ok(())
}

/// Computes `to = the means that sums stand for`.
pub(crate) fn means(codec: &SliceCodec, from: &[u8], to: &mut [u8]) -> Result<(), JobError> {
    let sums = sums_of(codec)?;
    check_length(from.len(), sums.sum_bytes(codec.elements))?;
    codec.check_memory(Some(to))?;
    let mut means = Vec::new();
    for chunk in codec.chunks_by(|elements| sums.sum_bytes(elements)) {
        means.resize(chunk.elements.len(), 0.0);
        sums.mean(&from[chunk.bytes.clone()], &mut means)?;
        codec.write_values(to, &chunk, &means);
    }
    Ok(())
}
