//! JobRunner on encoded slices: a contribution becomes an encoding, encodings become a mean, an encoding
//! becomes values.
//!
//! Where all encodings of a codec are equally long, everything is done in blocks that stay in cache:
//! the encoding of a slice is that of its blocks one after another. What other ranks sent is only
//! read; whatever its bytes are, it decodes to values or is an error.

use crate::memory::Span;
use gradlane_codec::{narrow, widen, Codec, IntegerSums, Place};
use std::ops::Range;
use std::sync::Arc;

/// Elements of a block: two blocks of f32 stay in the first cache.
const CHUNK_ELEMS: usize = 4096;

/// The codec of one slice and all that its encoding depends on beside the values.
#[derive(Clone, Debug)]
pub(crate) struct SliceCodec {
    pub(crate) codec: Arc<dyn Codec>,
    /// Where codes are added up as integers, what adds them up.
    pub(crate) sums: Option<IntegerSums>,
    pub(crate) place: Place,
    pub(crate) elements: usize,
    pub(crate) dtype: gradlane_codec::Dtype,
}

/// Encoded contributions in rank order and how they are averaged.
#[derive(Debug)]
pub(crate) struct EncodedParts {
    pub(crate) inputs: Vec<Span>,
    pub(crate) absent: bool,
    pub(crate) divisor: u32,
}

/// One hop of a sum round a ring.
#[derive(Debug)]
pub(crate) struct Hop {
    /// The encoded sum of the ranks before.
    pub(crate) received: Option<Span>,
    /// This rank's gradient.
    pub(crate) own: Option<Span>,
    /// On the last rank the number of ranks, else 1.
    pub(crate) divisor: u32,
}

/// A block: its elements, and its bytes in the encoding of the slice.
pub(crate) struct Chunk {
    pub(crate) elements: Range<usize>,
    pub(crate) bytes: Range<usize>,
}

impl SliceCodec {
    /// Blocks of the slice; one where encodings differ in length.
    fn chunks(&self) -> Vec<Chunk> {
        self.chunks_by(|elements| self.codec.max_wire_bytes(elements))
    }

    /// The same where so many elements take another number of bytes.
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

    /// Where the residual of a block is in that of the slice.
    fn residual_range(&self, chunk: &Chunk) -> Range<usize> {
        let width = self.codec.residual_width();
        chunk.elements.start * width..chunk.elements.end * width
    }

    pub(crate) fn place_of(&self, chunk: &Chunk) -> Place {
        let first_element = self.place.first_element + chunk.elements.start as u64;
        Place { first_element, ..self.place }
    }

    /// The bytes of a block in an encoding that arrived.
    fn chunk_bytes<'a>(&self, encoded: &'a [u8], chunk: &Chunk) -> Result<&'a [u8], String> {
        if !self.codec.is_fixed_size() {
            return Ok(encoded);
        }
        encoded.get(chunk.bytes.clone()).ok_or_else(|| {
            format!("an encoding of {} bytes ends before {}", encoded.len(), chunk.bytes.end)
        })
    }

    fn check_length(&self, encoded: &[u8]) -> Result<(), String> {
        let expected = self.codec.max_wire_bytes(self.elements);
        let found = encoded.len();
        if found == expected || (!self.codec.is_fixed_size() && found < expected) {
            return Ok(());
        }
        Err(format!("an encoding of {found} bytes where {expected} are expected"))
    }
}

/// Encodes values of the tensor's dtype; the bytes of the encoding. The residual, where one is kept,
/// takes what is not sent.
pub(crate) fn encode(
    slice_codec: &SliceCodec,
    from: Span,
    mut residual: Option<&mut Vec<f32>>,
    output: Span,
) -> Result<u64, String> {
    check_tensor_bytes(from, slice_codec)?;
    if let Some(residual) = &mut residual {
        fit_residual(residual, slice_codec.elements * slice_codec.codec.residual_width())?;
    }
    // SAFETY: both spans are registered; the engine lends the gradient to this work to read, and the
    // output to it alone.
    let (values, out) = unsafe { (from.bytes(), output.bytes_mut()) };
    let mut wide = Vec::new();
    let mut used = 0;
    for chunk in slice_codec.chunks() {
        let values = as_f32(slice_codec, values, &chunk, &mut wide);
        let residual =
            residual.as_deref_mut().map(|it| &mut it[slice_codec.residual_range(&chunk)]);
        let room = out.get_mut(used..).unwrap_or_default();
        used += slice_codec.codec.encode(&slice_codec.place_of(&chunk), values, residual, room);
    }
    Ok(used as u64)
}

/// `output = encode((decode(inputs[0]) + …) / divisor)`; what `output` decodes to also goes to
/// `copy_to`. The bytes of the encoding.
pub(crate) fn decode_reduce_encode(
    slice_codec: &SliceCodec,
    from: &EncodedParts,
    mut residual: Option<&mut Vec<f32>>,
    output: Span,
    copy_to: Option<Span>,
) -> Result<u64, String> {
    if let Some(residual) = &mut residual {
        fit_residual(residual, slice_codec.elements * slice_codec.codec.residual_width())?;
    }
    if let Some(copy) = copy_to {
        check_tensor_bytes(copy, slice_codec)?;
    }
    let inputs = checked_inputs(slice_codec, from)?;
    // SAFETY: the output is this work's alone, and apart from its inputs.
    let out = unsafe { output.bytes_mut() };
    let mut mean = Vec::new();
    let mut used = 0;
    for chunk in slice_codec.chunks() {
        mean_of_chunk(slice_codec, from, &inputs, &chunk, &mut mean)?;
        let residual =
            residual.as_deref_mut().map(|it| &mut it[slice_codec.residual_range(&chunk)]);
        let room = out.get_mut(used..).unwrap_or_default();
        used += encode_chunk(slice_codec, &chunk, &mut mean, residual, room, copy_to)?;
    }
    Ok(used as u64)
}

/// `output = encode((decode(received) + own) / divisor)`; what `output` decodes to also goes to
/// `copy_to`. The bytes of the encoding. `late` is what is to be sent with it and has no later turn.
pub(crate) fn hop(
    slice_codec: &SliceCodec,
    from: &Hop,
    late: &[f32],
    mut residual: Option<&mut Vec<f32>>,
    output: Span,
    copy_to: Option<Span>,
) -> Result<u64, String> {
    if let Some(residual) = &mut residual {
        fit_residual(residual, slice_codec.elements * slice_codec.codec.residual_width())?;
    }
    for memory in from.own.iter().chain(&copy_to) {
        check_tensor_bytes(*memory, slice_codec)?;
    }
    if !late.is_empty() && late.len() != slice_codec.elements {
        return Err(format!("{} numbers kept of {} elements", late.len(), slice_codec.elements));
    }
    // SAFETY: the spans are registered; nobody writes to an encoding that has arrived, and the engine
    // lends the gradient to this work.
    let received = from.received.map(|span| unsafe { span.bytes() });
    if let Some(encoded) = received {
        slice_codec.check_length(encoded)?;
    }
    // SAFETY: the output is this work's alone, and apart from its inputs.
    let out = unsafe { output.bytes_mut() };
    let absent = from.received.is_none() || from.own.is_none();
    let (mut sum, mut wide) = (Vec::new(), Vec::new());
    let mut used = 0;
    for chunk in slice_codec.chunks() {
        sum.resize(chunk.elements.len(), 0.0);
        match received {
            Some(encoded) => {
                let chunk_bytes = slice_codec.chunk_bytes(encoded, &chunk)?;
                slice_codec
                    .codec
                    .decode(chunk_bytes, &mut sum)
                    .map_err(|error| error.to_string())?;
            }
            // Adding to a negative zero changes nothing.
            None => sum.fill(-0.0),
        }
        if let Some(own) = from.own {
            // SAFETY: as above; where the result goes into the same memory, this block is read first.
            let values = as_f32(slice_codec, unsafe { own.bytes() }, &chunk, &mut wide);
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        if !late.is_empty() {
            let late = &late[chunk.elements.clone()];
            sum.iter_mut().zip(late).for_each(|(sum, value)| *sum += value);
        }
        if from.divisor > 1 {
            divide(&mut sum, from.divisor, absent);
        }
        let residual =
            residual.as_deref_mut().map(|it| &mut it[slice_codec.residual_range(&chunk)]);
        let room = out.get_mut(used..).unwrap_or_default();
        used += encode_chunk(slice_codec, &chunk, &mut sum, residual, room, copy_to)?;
    }
    Ok(used as u64)
}

/// Encodes the values of a block, and writes what they then decode to. The bytes of the encoding.
fn encode_chunk(
    slice_codec: &SliceCodec,
    chunk: &Chunk,
    values: &mut [f32],
    residual: Option<&mut [f32]>,
    room: &mut [u8],
    copy_to: Option<Span>,
) -> Result<usize, String> {
    let length = slice_codec.codec.encode(&slice_codec.place_of(chunk), values, residual, room);
    if let Some(copy) = copy_to {
        // All ranks use what they can decode, the owner as well.
        slice_codec.codec.decode(&room[..length], values).map_err(|error| error.to_string())?;
        write_chunk(slice_codec, copy, chunk, values);
    }
    Ok(length)
}

/// The mean of encoded contributions, in the tensor's dtype.
pub(crate) fn decoded_mean(
    slice_codec: &SliceCodec,
    from: &EncodedParts,
) -> Result<Vec<u8>, String> {
    let inputs = checked_inputs(slice_codec, from)?;
    let width = slice_codec.dtype.element_bytes();
    let mut all = vec![0; slice_codec.elements * width];
    let mut mean = Vec::new();
    for chunk in slice_codec.chunks() {
        mean_of_chunk(slice_codec, from, &inputs, &chunk, &mut mean)?;
        let range = chunk.elements.start * width..chunk.elements.end * width;
        narrow(slice_codec.dtype, &mean, &mut all[range]);
    }
    Ok(all)
}

/// `to = decode(from)`, in the tensor's dtype.
pub(crate) fn decode(slice_codec: &SliceCodec, from: Span, to: Span) -> Result<(), String> {
    check_tensor_bytes(to, slice_codec)?;
    // SAFETY: the span is registered and nobody writes to an encoding that has arrived.
    let encoded = unsafe { from.bytes() };
    slice_codec.check_length(encoded)?;
    let mut values = Vec::new();
    for chunk in slice_codec.chunks() {
        values.resize(chunk.elements.len(), 0.0);
        let chunk_bytes = slice_codec.chunk_bytes(encoded, &chunk)?;
        slice_codec.codec.decode(chunk_bytes, &mut values).map_err(|error| error.to_string())?;
        write_chunk(slice_codec, to, &chunk, &values);
    }
    Ok(())
}

fn checked_inputs<'a>(
    slice_codec: &SliceCodec,
    from: &'a EncodedParts,
) -> Result<Vec<&'a [u8]>, String> {
    if from.inputs.is_empty() || from.divisor == 0 {
        return Err("a mean over no ranks".to_owned());
    }
    let inputs = from.inputs.iter().map(|span| {
        // SAFETY: the span is registered and nobody writes to an encoding that has arrived.
        let encoded = unsafe { span.bytes() };
        slice_codec.check_length(encoded).map(|()| encoded)
    });
    inputs.collect()
}

fn mean_of_chunk(
    slice_codec: &SliceCodec,
    from: &EncodedParts,
    inputs: &[&[u8]],
    chunk: &Chunk,
    mean: &mut Vec<f32>,
) -> Result<(), String> {
    mean.resize(chunk.elements.len(), 0.0);
    for (index, encoded) in inputs.iter().enumerate() {
        let chunk_bytes = slice_codec.chunk_bytes(encoded, chunk)?;
        let done = match index {
            0 => slice_codec.codec.decode(chunk_bytes, mean),
            _ => slice_codec.codec.decode_add(chunk_bytes, mean),
        };
        done.map_err(|error| error.to_string())?;
    }
    divide(mean, from.divisor, from.absent);
    Ok(())
}

/// Sums become means; where a rank contributed nothing, zeros of it are added before.
fn divide(sums: &mut [f32], divisor: u32, absent: bool) {
    #[allow(clippy::cast_precision_loss, reason = "there are fewer ranks than 2^24")]
    let divisor = divisor as f32;
    // Adding a negative zero changes nothing.
    let zero = if absent { 0.0 } else { -0.0 };
    for value in sums {
        *value = (*value + zero) / divisor;
    }
}

/// A block of a tensor as f32: where it lies, or widened.
pub(crate) fn as_f32<'a>(
    slice_codec: &SliceCodec,
    elements: &'a [u8],
    chunk: &Chunk,
    wide: &'a mut Vec<f32>,
) -> &'a [f32] {
    let width = slice_codec.dtype.element_bytes();
    let bytes = &elements[chunk.elements.start * width..chunk.elements.end * width];
    if slice_codec.dtype == gradlane_codec::Dtype::F32 && bytes.as_ptr().cast::<f32>().is_aligned()
    {
        let pointer = bytes.as_ptr().cast::<f32>();
        // SAFETY: these bytes are aligned f32 values, lent for as long as `bytes` are.
        return unsafe { std::slice::from_raw_parts(pointer, chunk.elements.len()) };
    }
    wide.resize(chunk.elements.len(), 0.0);
    widen(slice_codec.dtype, bytes, wide);
    wide
}

pub(crate) fn write_chunk(slice_codec: &SliceCodec, to: Span, chunk: &Chunk, values: &[f32]) {
    let width = slice_codec.dtype.element_bytes();
    let target = to.from(chunk.elements.start * width).first(chunk.elements.len() * width);
    // SAFETY: the engine lends this memory to one work at a time.
    narrow(slice_codec.dtype, values, unsafe { target.bytes_mut() });
}

/// A tensor's memory must have the elements of the slice.
pub(crate) fn check_tensor_bytes(memory: Span, slice_codec: &SliceCodec) -> Result<(), String> {
    let expected = slice_codec.elements * slice_codec.dtype.element_bytes();
    if memory.length() == expected {
        return Ok(());
    }
    Err(format!("memory of {} bytes for a slice of {expected}", memory.length()))
}

/// A residual that is not there yet is zero.
pub(crate) fn fit_residual(residual: &mut Vec<f32>, length: usize) -> Result<(), String> {
    if residual.is_empty() {
        residual.resize(length, 0.0);
    }
    if residual.len() == length {
        return Ok(());
    }
    Err(format!("a residual of {} numbers where the slice has {length}", residual.len()))
}
