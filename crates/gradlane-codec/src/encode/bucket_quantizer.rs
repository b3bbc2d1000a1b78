//! Codecs that cut a slice into buckets and encode each on its own: what they share.
//!
//! Encodings of buckets follow each other without gaps. Every bucket has the same number of elements,
//! but for the last one of a tensor.

use std::fmt::Debug;

use super::lanes::{dispatch, Lanes, Work};
use super::source::Source;
use super::{check_arguments, check_length, Codec, CodecSpec, DecodeError, DrawKey};
use crate::element::{Bf16, Storage, F16};
use crate::InstructionSet;

/// How one bucket is encoded.
pub(super) trait Quantizer: Copy + Debug + Send + Sync {
    /// Whether the expectation of what is decoded is the value, up to rounding.
    const IS_UNBIASED: bool;

    /// Bytes of the encoding of a bucket of this many elements, at least one.
    fn bucket_bytes(self, elements: usize) -> usize;

    /// Encodes a bucket of at least one value, as the definition says. `key` is that of the bucket.
    fn encode_plainly(
        self,
        key: &DrawKey,
        values: &[f32],
        residual: Option<&mut [f32]>,
        out: &mut [u8],
    );

    /// Decodes a bucket, as the definition says, and gives every value with its slot to `set`.
    fn decode_plainly(self, bytes: &[u8], out: &mut [f32], set: fn(&mut f32, f32));

    /// Encodes a bucket in wide registers. `key` is that of the bucket.
    ///
    /// # Safety
    ///
    /// Runs where the instructions of `R` are enabled; the source has `elements` elements, at least
    /// one.
    unsafe fn encode<R: Lanes, const N: usize, const KEEP: bool>(
        self,
        key: &DrawKey,
        source: Source<KEEP>,
        elements: usize,
        out: &mut [u8],
    );

    /// Decodes a bucket in wide registers into `out`, or adds it where `ADD`.
    ///
    /// # Safety
    ///
    /// Runs where the instructions of `R` are enabled.
    unsafe fn decode<R: Lanes, const N: usize, const ADD: bool>(
        self,
        bytes: &[u8],
        out: &mut [f32],
    );
}

/// A codec of buckets.
#[derive(Debug)]
pub(super) struct BucketQuantizer<Q> {
    spec: CodecSpec,
    instruction_set: InstructionSet,
    cut: Cut<Q>,
}

impl<Q: Quantizer> BucketQuantizer<Q> {
    pub(super) fn new(
        instruction_set: InstructionSet,
        spec: &CodecSpec,
        bucket: u64,
        quantizer: Q,
    ) -> Self {
        let bucket = usize::try_from(bucket).expect("a bucket fits into memory");
        BucketQuantizer { spec: spec.clone(), instruction_set, cut: Cut { bucket, quantizer } }
    }
}

/// How a slice is cut into buckets and what is done with each.
#[derive(Clone, Copy, Debug)]
struct Cut<Q> {
    /// Elements of a bucket.
    bucket: usize,
    quantizer: Q,
}

impl<Q: Quantizer> Cut<Q> {
    /// Bytes of this many elements that begin with a bucket.
    fn bytes(self, elements: usize) -> usize {
        let whole = elements / self.bucket;
        let rest = elements % self.bucket;
        let last = if rest == 0 { 0 } else { self.quantizer.bucket_bytes(rest) };
        // A slice shorter than a bucket does not ask for the size of a whole one.
        let each = if whole == 0 { 0 } else { self.quantizer.bucket_bytes(self.bucket) };
        whole * each + last
    }
}

/// The encoding of a slice; `out` has the bytes that it takes.
struct Encode<'a, Q> {
    cut: Cut<Q>,
    key: &'a DrawKey,
    values: &'a [f32],
    residual: Option<&'a mut [f32]>,
    out: &'a mut [u8],
}

impl<Q: Quantizer> Encode<'_, Q> {
    /// Gives every bucket with its key, values, residual and bytes to `encode`.
    #[inline(always)]
    fn each(self, mut encode: impl FnMut(Q, &DrawKey, &[f32], Option<&mut [f32]>, &mut [u8])) {
        let Encode { cut, key, values, mut residual, mut out } = self;
        for (index, values) in values.chunks(cut.bucket).enumerate() {
            let start = index * cut.bucket;
            let first_element = key.first_element + start as u64;
            let key = DrawKey { first_element, ..*key };
            let residual = residual.as_deref_mut().map(|all| &mut all[start..][..values.len()]);
            let (bytes, rest) = out.split_at_mut(cut.quantizer.bucket_bytes(values.len()));
            out = rest;
            encode(cut.quantizer, &key, values, residual, bytes);
        }
    }
}

impl<Q: Quantizer> Work for Encode<'_, Q> {
    type Output = ();

    fn run_plainly(self) {
        self.each(|quantizer, key, values, residual, bytes| {
            quantizer.encode_plainly(key, values, residual, bytes);
        });
    }

    #[inline(always)]
    unsafe fn run<R, const N: usize>(self)
    where
        R: Lanes,
        F16: Storage<R>,
        Bf16: Storage<R>,
    {
        self.each(
            #[inline(always)]
            |quantizer, key, values, residual, bytes| {
                let elements = values.len();
                // SAFETY: the caller enables the instructions; sources are of whole slices.
                unsafe {
                    match residual {
                        None => {
                            let source = Source::plain(values);
                            quantizer.encode::<R, N, false>(key, source, elements, bytes);
                        }
                        Some(residual) => {
                            let source = Source::keeping(values, residual);
                            quantizer.encode::<R, N, true>(key, source, elements, bytes);
                        }
                    }
                }
            },
        );
    }
}

/// The decoding of a slice whose length was checked; `ADD` adds it to what `out` holds.
struct Decode<'a, Q, const ADD: bool> {
    cut: Cut<Q>,
    encoded: &'a [u8],
    out: &'a mut [f32],
}

impl<Q: Quantizer, const ADD: bool> Decode<'_, Q, ADD> {
    /// Gives every bucket's bytes and values to `decode`.
    #[inline(always)]
    fn each(self, mut decode: impl FnMut(Q, &[u8], &mut [f32])) {
        let Decode { cut, mut encoded, out } = self;
        for out in out.chunks_mut(cut.bucket) {
            let (bytes, rest) = encoded.split_at(cut.quantizer.bucket_bytes(out.len()));
            encoded = rest;
            decode(cut.quantizer, bytes, out);
        }
    }
}

impl<Q: Quantizer, const ADD: bool> Work for Decode<'_, Q, ADD> {
    type Output = ();

    fn run_plainly(self) {
        let set: fn(&mut f32, f32) =
            if ADD { |slot, value| *slot += value } else { |slot, value| *slot = value };
        self.each(|quantizer, bytes, out| quantizer.decode_plainly(bytes, out, set));
    }

    #[inline(always)]
    unsafe fn run<R, const N: usize>(self)
    where
        R: Lanes,
        F16: Storage<R>,
        Bf16: Storage<R>,
    {
        self.each(
            #[inline(always)]
            |quantizer, bytes, out| {
                // SAFETY: the caller enables the instructions.
                unsafe { quantizer.decode::<R, N, ADD>(bytes, out) }
            },
        );
    }
}

impl<Q: Quantizer> Codec for BucketQuantizer<Q> {
    fn spec(&self) -> &CodecSpec {
        &self.spec
    }

    fn granule(&self) -> u64 {
        self.cut.bucket as u64
    }

    fn is_fixed_size(&self) -> bool {
        true
    }

    fn is_unbiased(&self) -> bool {
        Q::IS_UNBIASED
    }

    fn max_wire_bytes(&self, elements: usize) -> usize {
        self.cut.bytes(elements)
    }

    fn encode(
        &self,
        key: &DrawKey,
        values: &[f32],
        residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) -> usize {
        check_arguments(self, key, values, residual.as_deref(), out);
        let bytes = self.cut.bytes(values.len());
        let out = &mut out[..bytes];
        dispatch(self.instruction_set, Encode { cut: self.cut, key, values, residual, out });
        bytes
    }

    fn decode(&self, encoded: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
        check_length(self, encoded, out.len())?;
        dispatch(self.instruction_set, Decode::<Q, false> { cut: self.cut, encoded, out });
        Ok(())
    }

    fn decode_add(&self, encoded: &[u8], sum: &mut [f32]) -> Result<(), DecodeError> {
        check_length(self, encoded, sum.len())?;
        dispatch(self.instruction_set, Decode::<Q, true> { cut: self.cut, encoded, out: sum });
        Ok(())
    }
}

/// Returns value plus residual of element `index`.
pub(super) fn wanted(values: &[f32], residual: Option<&[f32]>, index: usize) -> f32 {
    residual.map_or(values[index], |residual| values[index] + residual[index])
}

/// Sixteen numbers added in pairs: each with the one eight further, the sums with those four further,
/// and so on.
pub(super) fn in_pairs<T: Copy + std::ops::AddAssign>(mut lanes: [T; 16]) -> T {
    for width in [8, 4, 2, 1] {
        for lane in 0..width {
            let other = lanes[lane + width];
            lanes[lane] += other;
        }
    }
    lanes[0]
}
