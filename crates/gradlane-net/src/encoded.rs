//! Works on encoded slices: a contribution becomes an encoding, encodings become a mean, an encoding
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
const BLOCK_ELEMS: usize = 4096;

/// The codec of one slice and all that its encoding depends on beside the values.
#[derive(Clone, Debug)]
pub(crate) struct Coder {
    pub(crate) codec: Arc<dyn Codec>,
    /// Where codes are added up as integers, what adds them up.
    pub(crate) sums: Option<IntegerSums>,
    pub(crate) place: Place,
    pub(crate) elements: usize,
    pub(crate) dtype: gradlane_codec::FloatDtype,
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
pub(crate) struct Block {
    pub(crate) elements: Range<usize>,
    pub(crate) bytes: Range<usize>,
}

impl Coder {
    /// Blocks of the slice; one where encodings differ in length.
    fn blocks(&self) -> Vec<Block> {
        self.blocks_by(|elements| self.codec.max_wire_bytes(elements))
    }

    /// The same where so many elements take another number of bytes.
    pub(crate) fn blocks_by(&self, bytes_of: impl Fn(usize) -> usize) -> Vec<Block> {
        let granule = usize::try_from(self.codec.granule()).unwrap_or(usize::MAX).max(1);
        let step = if self.codec.is_fixed_size() {
            (BLOCK_ELEMS / granule).max(1).saturating_mul(granule)
        } else {
            self.elements.max(1)
        };
        let mut blocks = Vec::with_capacity(self.elements.div_ceil(step));
        let (mut start, mut at) = (0, 0);
        while start < self.elements {
            let end = start.saturating_add(step).min(self.elements);
            let length = bytes_of(end - start);
            blocks.push(Block { elements: start..end, bytes: at..at + length });
            (start, at) = (end, at + length);
        }
        blocks
    }

    /// Where the residual of a block is in that of the slice.
    fn kept(&self, block: &Block) -> Range<usize> {
        let width = self.codec.residual_width();
        block.elements.start * width..block.elements.end * width
    }

    pub(crate) fn place_of(&self, block: &Block) -> Place {
        let first_element = self.place.first_element + block.elements.start as u64;
        Place { first_element, ..self.place }
    }

    /// The bytes of a block in an encoding that arrived.
    fn part<'a>(&self, encoded: &'a [u8], block: &Block) -> Result<&'a [u8], String> {
        if !self.codec.is_fixed_size() {
            return Ok(encoded);
        }
        encoded.get(block.bytes.clone()).ok_or_else(|| {
            format!("an encoding of {} bytes ends before {}", encoded.len(), block.bytes.end)
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
    coder: &Coder,
    from: Span,
    mut residual: Option<&mut Vec<f32>>,
    output: Span,
) -> Result<u64, String> {
    same_bytes(from, coder)?;
    if let Some(residual) = &mut residual {
        fit(residual, coder.elements * coder.codec.residual_width())?;
    }
    // SAFETY: both spans are registered; the engine lends the gradient to this work to read, and the
    // output to it alone.
    let (values, out) = unsafe { (from.bytes(), output.bytes_mut()) };
    let mut wide = Vec::new();
    let mut used = 0;
    for block in coder.blocks() {
        let values = as_f32(coder, values, &block, &mut wide);
        let residual = residual.as_deref_mut().map(|it| &mut it[coder.kept(&block)]);
        let room = out.get_mut(used..).unwrap_or_default();
        used += coder.codec.encode(&coder.place_of(&block), values, residual, room);
    }
    Ok(used as u64)
}

/// `output = encode((decode(inputs[0]) + …) / divisor)`; what `output` decodes to also goes to
/// `copy_to`. The bytes of the encoding.
pub(crate) fn recode(
    coder: &Coder,
    from: &EncodedParts,
    mut residual: Option<&mut Vec<f32>>,
    output: Span,
    copy_to: Option<Span>,
) -> Result<u64, String> {
    if let Some(residual) = &mut residual {
        fit(residual, coder.elements * coder.codec.residual_width())?;
    }
    if let Some(copy) = copy_to {
        same_bytes(copy, coder)?;
    }
    let inputs = checked_inputs(coder, from)?;
    // SAFETY: the output is this work's alone, and apart from its inputs.
    let out = unsafe { output.bytes_mut() };
    let mut mean = Vec::new();
    let mut used = 0;
    for block in coder.blocks() {
        mean_of_block(coder, from, &inputs, &block, &mut mean)?;
        let residual = residual.as_deref_mut().map(|it| &mut it[coder.kept(&block)]);
        let room = out.get_mut(used..).unwrap_or_default();
        used += encode_block(coder, &block, &mut mean, residual, room, copy_to)?;
    }
    Ok(used as u64)
}

/// `output = encode((decode(received) + own) / divisor)`; what `output` decodes to also goes to
/// `copy_to`. The bytes of the encoding. `late` is what is to be sent with it and has no later turn.
pub(crate) fn hop(
    coder: &Coder,
    from: &Hop,
    late: &[f32],
    mut residual: Option<&mut Vec<f32>>,
    output: Span,
    copy_to: Option<Span>,
) -> Result<u64, String> {
    if let Some(residual) = &mut residual {
        fit(residual, coder.elements * coder.codec.residual_width())?;
    }
    for memory in from.own.iter().chain(&copy_to) {
        same_bytes(*memory, coder)?;
    }
    if !late.is_empty() && late.len() != coder.elements {
        return Err(format!("{} numbers kept of {} elements", late.len(), coder.elements));
    }
    // SAFETY: the spans are registered; nobody writes to an encoding that has arrived, and the engine
    // lends the gradient to this work.
    let received = from.received.map(|span| unsafe { span.bytes() });
    if let Some(encoded) = received {
        coder.check_length(encoded)?;
    }
    // SAFETY: the output is this work's alone, and apart from its inputs.
    let out = unsafe { output.bytes_mut() };
    let absent = from.received.is_none() || from.own.is_none();
    let (mut sum, mut wide) = (Vec::new(), Vec::new());
    let mut used = 0;
    for block in coder.blocks() {
        sum.resize(block.elements.len(), 0.0);
        match received {
            Some(encoded) => {
                let part = coder.part(encoded, &block)?;
                coder.codec.decode(part, &mut sum).map_err(|error| error.to_string())?;
            }
            // Adding to a negative zero changes nothing.
            None => sum.fill(-0.0),
        }
        if let Some(own) = from.own {
            // SAFETY: as above; where the result goes into the same memory, this block is read first.
            let values = as_f32(coder, unsafe { own.bytes() }, &block, &mut wide);
            sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        if !late.is_empty() {
            let late = &late[block.elements.clone()];
            sum.iter_mut().zip(late).for_each(|(sum, value)| *sum += value);
        }
        if from.divisor > 1 {
            divide(&mut sum, from.divisor, absent);
        }
        let residual = residual.as_deref_mut().map(|it| &mut it[coder.kept(&block)]);
        let room = out.get_mut(used..).unwrap_or_default();
        used += encode_block(coder, &block, &mut sum, residual, room, copy_to)?;
    }
    Ok(used as u64)
}

/// Encodes the values of a block, and writes what they then decode to. The bytes of the encoding.
fn encode_block(
    coder: &Coder,
    block: &Block,
    values: &mut [f32],
    residual: Option<&mut [f32]>,
    room: &mut [u8],
    copy_to: Option<Span>,
) -> Result<usize, String> {
    let length = coder.codec.encode(&coder.place_of(block), values, residual, room);
    if let Some(copy) = copy_to {
        // All ranks use what they can decode, the owner as well.
        coder.codec.decode(&room[..length], values).map_err(|error| error.to_string())?;
        write_block(coder, copy, block, values);
    }
    Ok(length)
}

/// The mean of encoded contributions, in the tensor's dtype.
pub(crate) fn decoded_mean(coder: &Coder, from: &EncodedParts) -> Result<Vec<u8>, String> {
    let inputs = checked_inputs(coder, from)?;
    let width = coder.dtype.element_bytes();
    let mut all = vec![0; coder.elements * width];
    let mut mean = Vec::new();
    for block in coder.blocks() {
        mean_of_block(coder, from, &inputs, &block, &mut mean)?;
        let range = block.elements.start * width..block.elements.end * width;
        narrow(coder.dtype, &mean, &mut all[range]);
    }
    Ok(all)
}

/// `to = decode(from)`, in the tensor's dtype.
pub(crate) fn decode(coder: &Coder, from: Span, to: Span) -> Result<(), String> {
    same_bytes(to, coder)?;
    // SAFETY: the span is registered and nobody writes to an encoding that has arrived.
    let encoded = unsafe { from.bytes() };
    coder.check_length(encoded)?;
    let mut values = Vec::new();
    for block in coder.blocks() {
        values.resize(block.elements.len(), 0.0);
        let part = coder.part(encoded, &block)?;
        coder.codec.decode(part, &mut values).map_err(|error| error.to_string())?;
        write_block(coder, to, &block, &values);
    }
    Ok(())
}

fn checked_inputs<'a>(coder: &Coder, from: &'a EncodedParts) -> Result<Vec<&'a [u8]>, String> {
    if from.inputs.is_empty() || from.divisor == 0 {
        return Err("a mean over no ranks".to_owned());
    }
    let inputs = from.inputs.iter().map(|span| {
        // SAFETY: the span is registered and nobody writes to an encoding that has arrived.
        let encoded = unsafe { span.bytes() };
        coder.check_length(encoded).map(|()| encoded)
    });
    inputs.collect()
}

fn mean_of_block(
    coder: &Coder,
    from: &EncodedParts,
    inputs: &[&[u8]],
    block: &Block,
    mean: &mut Vec<f32>,
) -> Result<(), String> {
    mean.resize(block.elements.len(), 0.0);
    for (index, encoded) in inputs.iter().enumerate() {
        let part = coder.part(encoded, block)?;
        let done = match index {
            0 => coder.codec.decode(part, mean),
            _ => coder.codec.decode_add(part, mean),
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
    coder: &Coder,
    elements: &'a [u8],
    block: &Block,
    wide: &'a mut Vec<f32>,
) -> &'a [f32] {
    let width = coder.dtype.element_bytes();
    let bytes = &elements[block.elements.start * width..block.elements.end * width];
    if coder.dtype == gradlane_codec::FloatDtype::F32 && bytes.as_ptr().cast::<f32>().is_aligned() {
        let pointer = bytes.as_ptr().cast::<f32>();
        // SAFETY: these bytes are aligned f32 values, lent for as long as `bytes` are.
        return unsafe { std::slice::from_raw_parts(pointer, block.elements.len()) };
    }
    wide.resize(block.elements.len(), 0.0);
    widen(coder.dtype, bytes, wide);
    wide
}

pub(crate) fn write_block(coder: &Coder, to: Span, block: &Block, values: &[f32]) {
    let width = coder.dtype.element_bytes();
    let target = to.from(block.elements.start * width).first(block.elements.len() * width);
    // SAFETY: the engine lends this memory to one work at a time.
    narrow(coder.dtype, values, unsafe { target.bytes_mut() });
}

/// A tensor's memory must have the elements of the slice.
pub(crate) fn same_bytes(memory: Span, coder: &Coder) -> Result<(), String> {
    let expected = coder.elements * coder.dtype.element_bytes();
    if memory.length() == expected {
        return Ok(());
    }
    Err(format!("memory of {} bytes for a slice of {expected}", memory.length()))
}

/// A residual that is not there yet is zero.
pub(crate) fn fit(residual: &mut Vec<f32>, length: usize) -> Result<(), String> {
    if residual.is_empty() {
        residual.resize(length, 0.0);
    }
    if residual.len() == length {
        return Ok(());
    }
    Err(format!("a residual of {} numbers where the slice has {length}", residual.len()))
}
