//! Codecs that cut a slice into buckets and encode each on its own: what they share.
//!
//! Encodings of buckets follow each other without gaps. Every bucket has the same number of elements,
//! but for the last one of a tensor.

use std::fmt::Debug;

use super::{check_arguments, check_length, Codec, CodecSpec, DecodeError, Place};
use crate::Variant;

/// How one bucket is encoded.
pub(super) trait Quantizer: Copy + Debug + Send + Sync {
    /// Whether the expectation of what is decoded is the value, up to rounding.
    const IS_UNBIASED: bool;

    /// Bytes of the encoding of a bucket of so many elements, at least one.
    fn bucket_bytes(self, elements: usize) -> usize;

    /// Encodes a bucket of at least one value, as the definition says. `place` is that of the bucket.
    fn encode_plainly(
        self,
        place: &Place,
        values: &[f32],
        residual: Option<&mut [f32]>,
        out: &mut [u8],
    );

    /// Decodes a bucket, as the definition says, and gives every value with its slot to `set`.
    fn decode_plainly(self, bytes: &[u8], out: &mut [f32], set: fn(&mut f32, f32));
}

/// A codec of buckets.
#[derive(Debug)]
pub(super) struct Bucketed<Q> {
    spec: CodecSpec,
    /// Elements of a bucket.
    bucket: usize,
    quantizer: Q,
}

impl<Q: Quantizer> Bucketed<Q> {
    pub(super) fn new(_variant: Variant, spec: &CodecSpec, bucket: u64, quantizer: Q) -> Self {
        let bucket = usize::try_from(bucket).expect("a bucket fits into memory");
        Bucketed { spec: spec.clone(), bucket, quantizer }
    }

    fn decode_with(&self, encoded: &[u8], out: &mut [f32], set: fn(&mut f32, f32)) {
        let chunks = encoded.chunks(self.quantizer.bucket_bytes(self.bucket));
        for (out, bytes) in out.chunks_mut(self.bucket).zip(chunks) {
            self.quantizer.decode_plainly(bytes, out, set);
        }
    }
}

impl<Q: Quantizer> Codec for Bucketed<Q> {
    fn spec(&self) -> &CodecSpec {
        &self.spec
    }

    fn granule(&self) -> u64 {
        self.bucket as u64
    }

    fn is_fixed_size(&self) -> bool {
        true
    }

    fn is_unbiased(&self) -> bool {
        Q::IS_UNBIASED
    }

    fn max_wire_bytes(&self, elements: usize) -> usize {
        let whole = elements / self.bucket;
        let rest = elements % self.bucket;
        let last = if rest == 0 { 0 } else { self.quantizer.bucket_bytes(rest) };
        // A slice shorter than a bucket does not ask for the size of a whole one.
        let each = if whole == 0 { 0 } else { self.quantizer.bucket_bytes(self.bucket) };
        whole * each + last
    }

    fn encode(
        &self,
        place: &Place,
        values: &[f32],
        mut residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) -> usize {
        check_arguments(self, place, values, residual.as_deref(), out);
        let chunks = out.chunks_mut(self.quantizer.bucket_bytes(self.bucket));
        for (index, (values, bytes)) in values.chunks(self.bucket).zip(chunks).enumerate() {
            let start = index * self.bucket;
            let first_element = place.first_element + start as u64;
            let place = Place { first_element, ..*place };
            let residual = residual.as_deref_mut().map(|all| &mut all[start..][..values.len()]);
            let length = self.quantizer.bucket_bytes(values.len());
            self.quantizer.encode_plainly(&place, values, residual, &mut bytes[..length]);
        }
        self.max_wire_bytes(values.len())
    }

    fn decode(&self, encoded: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
        check_length(self, encoded, out.len())?;
        self.decode_with(encoded, out, |slot, value| *slot = value);
        Ok(())
    }

    fn decode_add(&self, encoded: &[u8], sum: &mut [f32]) -> Result<(), DecodeError> {
        check_length(self, encoded, sum.len())?;
        self.decode_with(encoded, sum, |slot, value| *slot += value);
        Ok(())
    }
}

/// What is to be sent of element `index`: the value and what was kept of it before.
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
