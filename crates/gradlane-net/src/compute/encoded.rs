//! Kernels on encoded slices: a contribution becomes an encoding, encodings become a mean, an encoding
//! becomes values.
//!
//! Where all encodings of a codec are equally long, the work is done in chunks that stay in cache: the
//! encoding of a slice is that of its chunks one after another. Bytes of other ranks are only read;
//! whatever they are, they decode to values or are an error.

use super::error::JobError;
use crate::memory::{as_f32, InPlace, ReadSpan};
use gradlane_codec::{narrow, widen, Codec, DrawKey, IntegerSums};
use std::ops::Range;
use std::sync::Arc;

/// Elements of a chunk: two chunks of f32 stay in the first cache.
const CHUNK_ELEMS: usize = 4096;

/// The codec of one slice, with everything that its encoding depends on beside the values.
#[derive(Clone, Debug)]
pub(crate) struct SliceCodec {
    pub(crate) codec: Arc<dyn Codec>,
    /// Where codes are added up as integers.
    pub(crate) sums: Option<IntegerSums>,
    pub(crate) key: DrawKey,
    pub(crate) elements: usize,
    pub(crate) dtype: gradlane_codec::FloatDtype,
}

/// Encoded contributions in rank order and how they are averaged.
#[derive(Debug)]
pub(crate) struct EncodedParts {
    pub(crate) inputs: Vec<ReadSpan>,
    /// Whether a rank contributed nothing, which counts as zeros.
    pub(crate) absent: bool,
    pub(crate) divisor: u32,
}

/// One hop of a sum round a ring.
#[derive(Debug)]
pub(crate) struct Hop<'a> {
    /// The encoded sum of the ranks before.
    pub(crate) received: Option<&'a [u8]>,
    /// On the last rank the number of ranks, else 1.
    pub(crate) divisor: u32,
    /// A residual that is added to the sum, where it has no later turn.
    pub(crate) carried: &'a [f32],
}

/// A chunk: its elements, and its bytes in the encoding of the slice.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) elements: Range<usize>,
    pub(crate) bytes: Range<usize>,
}

impl SliceCodec {
    /// Cuts the slice into chunks; a single one where encodings differ in length.
    fn chunks(&self) -> Vec<Chunk> {
        self.chunks_by(|elements| self.codec.max_wire_bytes(elements))
    }

    /// Cuts the slice into chunks whose bytes are a function of their number of elements.
    pub(crate) fn chunks_by(&self, bytes_of: impl Fn(usize) -> usize) -> Vec<Chunk> {
        let granule = usize::try_from(self.codec.granule()).unwrap_or(usize::MAX).max(1);
        let step = if self.codec.is_fixed_size() {
            (CHUNK_ELEMS / granule).max(1).saturating_mul(granule)
        } else {
            self.elements.max(1)
        };
        let mut chunks = Vec::with_capacity(self.elements.div_ceil(step));
        let (mut start, mut at) = (0, 0);
        while start < self.elements {
            let end = start.saturating_add(step).min(self.elements);
            let length = bytes_of(end - start);
            chunks.push(Chunk { elements: start..end, bytes: at..at + length });
            (start, at) = (end, at + length);
        }
        chunks
    }

    /// The range of a chunk in the residual of the slice.
    fn residual_range(&self, chunk: &Chunk) -> Range<usize> {
        let width = self.codec.residual_width();
        chunk.elements.start * width..chunk.elements.end * width
    }

    /// The range of a chunk in the memory of the slice.
    fn memory_range(&self, chunk: &Chunk) -> Range<usize> {
        let width = self.dtype.element_bytes();
        chunk.elements.start * width..chunk.elements.end * width
    }

    /// The key of the random draws of a chunk.
    pub(crate) fn place_of(&self, chunk: &Chunk) -> DrawKey {
        let first_element = self.key.first_element + chunk.elements.start as u64;
        DrawKey { first_element, ..self.key }
    }

    /// The bytes of a chunk in an encoding that arrived.
    fn encoded_chunk<'a>(&self, encoded: &'a [u8], chunk: &Chunk) -> Result<&'a [u8], JobError> {
        if !self.codec.is_fixed_size() {
            return Ok(encoded);
        }
        let (found, end) = (encoded.len(), chunk.bytes.end);
        encoded.get(chunk.bytes.clone()).ok_or(JobError::EncodingEnd { found, end })
    }

    fn check_encoding(&self, encoded: &[u8]) -> Result<(), JobError> {
        let expected = self.codec.max_wire_bytes(self.elements);
        let found = encoded.len();
        if found == expected || (!self.codec.is_fixed_size() && found < expected) {
            return Ok(());
        }
        Err(JobError::EncodingLength { found, expected })
    }

    /// Checks that a tensor's memory has the elements of the slice.
    pub(crate) fn check_memory(&self, memory: Option<&[u8]>) -> Result<(), JobError> {
        let expected = self.elements * self.dtype.element_bytes();
        match memory.map(<[u8]>::len) {
            Some(found) if found != expected => Err(JobError::SliceLength { found, expected }),
            _ => Ok(()),
        }
    }

    /// Checks both sides of [`SliceCodec::check_memory`].
    pub(crate) fn check_in_place(&self, memory: &mut InPlace) -> Result<(), JobError> {
        self.check_memory(memory.source())?;
        self.check_memory(memory.dest().as_deref())
    }

    /// Sizes a residual that does not exist yet, and checks one that does.
    fn fit_residual(&self, residual: Option<&mut Vec<f32>>) -> Result<(), JobError> {
        let length = self.elements * self.codec.residual_width();
        residual.map_or(Ok(()), |residual| fit_residual(residual, length))
    }

    /// Returns the values of a chunk as f32: in place, or widened into `wide`.
    pub(crate) fn values<'a>(
        &self,
        memory: &'a [u8],
        chunk: &Chunk,
        wide: &'a mut Vec<f32>,
    ) -> &'a [f32] {
        let bytes = &memory[self.memory_range(chunk)];
        if self.dtype == gradlane_codec::FloatDtype::F32 {
            if let Some(values) = as_f32(bytes) {
                return values;
            }
        }
        wide.resize(chunk.elements.len(), 0.0);
        widen(self.dtype, bytes, wide);
        wide
    }

    /// Writes the values of a chunk in the tensor's dtype.
    pub(crate) fn write_values(&self, memory: &mut [u8], chunk: &Chunk, values: &[f32]) {
        narrow(self.dtype, values, &mut memory[self.memory_range(chunk)]);
    }

    /// Encodes the values of a chunk, and writes the values that the encoding decodes to: all ranks use
    /// those, also this one. Returns the bytes of the encoding.
    fn encode_chunk(
        &self,
        chunk: &Chunk,
        values: &mut [f32],
        residual: Option<&mut [f32]>,
        room: &mut [u8],
        copy_to: Option<&mut [u8]>,
    ) -> Result<usize, JobError> {
        let length = self.codec.encode(&self.place_of(chunk), values, residual, room);
        if let Some(copy) = copy_to {
            self.codec.decode(&room[..length], values)?;
            self.write_values(copy, chunk, values);
        }
        Ok(length)
    }
}

/// Encodes values of the tensor's dtype and returns the bytes of the encoding. The residual, where one is
/// kept, takes the part that is not sent.
pub(crate) fn encode(
    codec: &SliceCodec,
    input: &[u8],
    mut residual: Option<&mut Vec<f32>>,
    output: &mut [u8],
) -> Result<u64, JobError> {
    codec.check_memory(Some(input))?;
    codec.fit_residual(residual.as_deref_mut())?;
    let mut wide = Vec::new();
    let mut used = 0;
    for chunk in codec.chunks() {
        let values = codec.values(input, &chunk, &mut wide);
        let residual = residual.as_deref_mut().map(|it| &mut it[codec.residual_range(&chunk)]);
        let room = output.get_mut(used..).unwrap_or_default();
        used += codec.codec.encode(&codec.place_of(&chunk), values, residual, room);
    }
    Ok(used as u64)
}

/// Computes `output = encode((decode(inputs[0]) + …) / divisor)`; the values that `output` decodes to also
/// go to `copy_to`. Returns the bytes of the encoding.
pub(crate) fn decode_reduce_encode(
    codec: &SliceCodec,
    parts: &EncodedParts,
    mut residual: Option<&mut Vec<f32>>,
    output: &mut [u8],
    mut copy_to: Option<&mut [u8]>,
) -> Result<u64, JobError> {
    codec.fit_residual(residual.as_deref_mut())?;
    codec.check_memory(copy_to.as_deref())?;
    check_parts(codec, parts)?;
    let mut mean = Vec::new();
    let mut used = 0;
    for chunk in codec.chunks() {
        mean_of_chunk(codec, parts, &chunk, &mut mean)?;
        let residual = residual.as_deref_mut().map(|it| &mut it[codec.residual_range(&chunk)]);
        let room = output.get_mut(used..).unwrap_or_default();
        used += codec.encode_chunk(&chunk, &mut mean, residual, room, copy_to.as_deref_mut())?;
    }
    Ok(used as u64)
}

/// Computes `output = encode((decode(received) + own) / divisor)`, where `memory` has `own` and takes the
/// values that `output` decodes to. Returns the bytes of the encoding.
pub(crate) fn hop(
    codec: &SliceCodec,
    hop: &Hop<'_>,
    mut residual: Option<&mut Vec<f32>>,
    output: &mut [u8],
    memory: &mut InPlace,
) -> Result<u64, JobError> {
    codec.fit_residual(residual.as_deref_mut())?;
    codec.check_in_place(memory)?;
    let (found, expected) = (hop.carried.len(), codec.elements);
    if found > 0 && found != expected {
        return Err(JobError::ResidualLength { found, expected });
    }
    if let Some(encoded) = hop.received {
        codec.check_encoding(encoded)?;
    }
    let absent = hop.received.is_none() || memory.source().is_none();
    let (mut sum, mut wide) = (Vec::new(), Vec::new());
    let mut used = 0;
    for chunk in codec.chunks() {
        sum.resize(chunk.elements.len(), 0.0);
        match hop.received {
            Some(encoded) => {
                codec.codec.decode(codec.encoded_chunk(encoded, &chunk)?, &mut sum)?;
            }
            // Adding to a negative zero changes nothing.
            None => sum.fill(-0.0),
        }
        // Where the result goes to the same memory, this chunk is read first.
        if let Some(own) = memory.source() {
            let values = codec.values(own, &chunk, &mut wide);
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        if !hop.carried.is_empty() {
            let carried = &hop.carried[chunk.elements.clone()];
            sum.iter_mut().zip(carried).for_each(|(sum, value)| *sum += value);
        }
        if hop.divisor > 1 {
            divide(&mut sum, hop.divisor, absent);
        }
        let residual = residual.as_deref_mut().map(|it| &mut it[codec.residual_range(&chunk)]);
        let room = output.get_mut(used..).unwrap_or_default();
        used += codec.encode_chunk(&chunk, &mut sum, residual, room, memory.dest())?;
    }
    Ok(used as u64)
}

/// Returns the mean of encoded contributions, in the tensor's dtype.
pub(crate) fn decoded_mean(codec: &SliceCodec, parts: &EncodedParts) -> Result<Vec<u8>, JobError> {
    check_parts(codec, parts)?;
    let mut all = vec![0; codec.elements * codec.dtype.element_bytes()];
    let mut mean = Vec::new();
    for chunk in codec.chunks() {
        mean_of_chunk(codec, parts, &chunk, &mut mean)?;
        codec.write_values(&mut all, &chunk, &mean);
    }
    Ok(all)
}

/// Computes `to = decode(from)`, in the tensor's dtype.
pub(crate) fn decode(codec: &SliceCodec, from: &[u8], to: &mut [u8]) -> Result<(), JobError> {
    codec.check_memory(Some(to))?;
    codec.check_encoding(from)?;
    let mut values = Vec::new();
    for chunk in codec.chunks() {
        values.resize(chunk.elements.len(), 0.0);
        codec.codec.decode(codec.encoded_chunk(from, &chunk)?, &mut values)?;
        codec.write_values(to, &chunk, &values);
    }
    Ok(())
}

fn check_parts(codec: &SliceCodec, parts: &EncodedParts) -> Result<(), JobError> {
    if parts.inputs.is_empty() || parts.divisor == 0 {
        return Err(JobError::NoRanks);
    }
    parts.inputs.iter().try_for_each(|encoded| codec.check_encoding(encoded))
}

fn mean_of_chunk(
    codec: &SliceCodec,
    parts: &EncodedParts,
    chunk: &Chunk,
    mean: &mut Vec<f32>,
) -> Result<(), JobError> {
    mean.resize(chunk.elements.len(), 0.0);
    for (index, encoded) in parts.inputs.iter().enumerate() {
        let encoded = codec.encoded_chunk(encoded, chunk)?;
        match index {
            0 => codec.codec.decode(encoded, mean)?,
            _ => codec.codec.decode_add(encoded, mean)?,
        }
    }
    divide(mean, parts.divisor, parts.absent);
    Ok(())
}

/// Turns sums into means; where a rank contributed nothing, its zeros are added first.
fn divide(sums: &mut [f32], divisor: u32, absent: bool) {
    #[allow(clippy::cast_precision_loss, reason = "there are fewer ranks than 2^24")]
    let divisor = divisor as f32;
    // Adding a negative zero changes nothing.
    let zero = if absent { 0.0 } else { -0.0 };
    for value in sums {
        *value = (*value + zero) / divisor;
    }
}

/// Fills a residual that does not exist yet with zeros.
pub(crate) fn fit_residual(residual: &mut Vec<f32>, expected: usize) -> Result<(), JobError> {
    if residual.is_empty() {
        residual.resize(expected, 0.0);
    }
    if residual.len() == expected {
        return Ok(());
    }
    Err(JobError::ResidualLength { found: residual.len(), expected })
}
