//! Encodings of gradients for the wire: fewer bytes, with what is lost known and, where asked for,
//! kept for the next step.
//!
//! What always holds:
//!
//! - An encoding depends on values, residual and [`DrawKey`] alone: the same bytes for any cut at
//!   multiples of [`Codec::granule`], any thread and any [`InstructionSet`].
//! - A bucket that holds NaN or infinity decodes to NaN in every element, never to noise, and its
//!   residual does not change.
//! - Decoding takes any bytes: a wrong length is an error, all other bytes decode to values.
//!
//! A new codec goes here: a folder with its arithmetic and its `oracle.rs`, a [`Method`] with its text
//! in `codec_text.rs`, and a line in [`build_with`]. `sparse` has those that send some of the values, the
//! others send all. Python's options of it: `training/options/codec_options.py`.
//!
//! Layouts and definitions, with the papers they follow, are in `docs/codecs.md`.

mod bucket_quantizer;
mod cast;
mod codec_text;
mod draw;
mod fp8;
mod int8;
mod lanes;
mod memory;
mod onebit;
mod qsgd;
mod source;
mod sparse;

use std::fmt::Debug;
use std::sync::Arc;

use thiserror::Error;

pub(crate) use codec_text::Options;
pub use codec_text::{
    Bucket, CodecSpec, CodecSpecError, Fp8Format, Levels, Method, Norm, Packing, QsgdOptions,
    RingSums,
};
pub use draw::DrawKey;
pub use memory::{narrow, widen};
pub use qsgd::IntegerSums;
pub use sparse::{DgcOptions, SentShares, SparseError, TopkOptions};

use crate::InstructionSet;
use bucket_quantizer::BucketQuantizer;
use sparse::{Dgc, Topk};

/// The sizes of a tensor's dimensions in the order of its storage, slowest first: torch's shape of a
/// contiguous tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorShape {
    sizes: Vec<u64>,
}

impl TensorShape {
    /// A shape by its sizes; no sizes are a single element.
    pub fn new(sizes: &[u64]) -> TensorShape {
        TensorShape { sizes: sizes.to_vec() }
    }

    /// Elements of the tensor.
    pub fn elements(&self) -> u64 {
        self.sizes.iter().product()
    }

    /// Elements of a column as CNTK cuts them: a run of consecutive values along its first
    /// dimension, which is the fastest in its storage and so torch's last. At least 1.
    pub fn column(&self) -> u64 {
        self.sizes.last().copied().unwrap_or(1).max(1)
    }
}

/// An encoding of f32 values.
///
/// A codec holds no state: its caller keeps the residual and knows the key. Values of other
/// dtypes go through [`widen`] and [`narrow`], in blocks of whole granules that stay in cache:
/// where [`Codec::is_fixed_size`], the encoding of a range is that of its parts one after another.
pub trait Codec: Send + Sync + Debug {
    /// Returns the spec that this codec was built from; its `Display` is the canonical text.
    fn spec(&self) -> &CodecSpec;

    /// Slices begin at multiples of this many elements of their tensor, and end at one or with the
    /// tensor.
    fn granule(&self) -> u64;

    /// Whether the length of an encoding depends on the number of elements alone.
    fn is_fixed_size(&self) -> bool;

    /// Whether the expectation of what is decoded is the value, up to rounding.
    fn is_unbiased(&self) -> bool;

    /// Whether callers keep a residual for [`Codec::encode`]: as the spec says.
    fn keeps_residual(&self) -> bool {
        self.spec().residual
    }

    /// f32 numbers that a residual has for each value; those of a value follow one another, so that
    /// the residual of a part is a part of the residual.
    fn residual_width(&self) -> usize {
        1
    }

    /// The most bytes that `elements` values take under any key; exact where the size is fixed.
    fn max_wire_bytes(&self, elements: usize) -> usize;

    /// The bytes that `elements` values take on average once all steps are alike: those of a rank's
    /// contribution, or of a mean that an owner sends.
    fn expected_wire_bytes(&self, elements: usize, is_mean: bool) -> usize {
        let _ = is_mean;
        self.max_wire_bytes(elements)
    }

    /// The most bytes that `elements` values take in this step and on this leg.
    fn max_wire_bytes_at(&self, key: &DrawKey, elements: usize) -> usize {
        let _ = key;
        self.max_wire_bytes(elements)
    }

    /// Encodes values and gives the number of bytes written to the front of `out`.
    ///
    /// The residual is added before encoding and replaced by what was not sent.
    ///
    /// # Panics
    ///
    /// When `out` is shorter than [`Codec::max_wire_bytes_at`], the residual has another length than
    /// [`Codec::residual_width`] times that of the values, or the key's first element is no multiple of the
    /// granule; never because of what the values are.
    fn encode(
        &self,
        key: &DrawKey,
        values: &[f32],
        residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) -> usize;

    /// Decodes into `out`, which has as many elements as were encoded.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] when the bytes are no encoding of that many elements; what `out` then holds
    /// is not said.
    fn decode(&self, encoded: &[u8], out: &mut [f32]) -> Result<(), DecodeError>;

    /// Decodes and adds to `sum`: each element is rounded once as a value and once as a sum.
    ///
    /// # Errors
    ///
    /// As for [`Codec::decode`].
    fn decode_add(&self, encoded: &[u8], sum: &mut [f32]) -> Result<(), DecodeError>;
}

/// Bytes that are no encoding.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// Another number of bytes than the elements ask for.
    #[error("{elements} elements in {codec} take {expected_bytes} bytes, not {found_bytes}")]
    Length {
        /// The codec's name.
        codec: &'static str,
        /// Elements to decode.
        elements: usize,
        /// Bytes that they take.
        expected_bytes: usize,
        /// Bytes that came.
        found_bytes: usize,
    },
    /// A scale that ranks share is none, or below that of a rank's own values.
    #[error(
        "the scale that all ranks share of bucket {bucket} is below that of this rank's values"
    )]
    Scale {
        /// The bucket in the slice.
        bucket: usize,
    },
    /// Bytes that are no sparse values.
    #[error(transparent)]
    Sparse(#[from] SparseError),
}

/// Builds the codec of a spec for a tensor, with [`InstructionSet::active`] kernels.
pub fn build(spec: &CodecSpec, shape: &TensorShape) -> Arc<dyn Codec> {
    build_with(InstructionSet::active(), spec, shape)
}

/// [`build`] with the kernels for a given instruction set: the bits are the same.
pub fn build_with(
    instruction_set: InstructionSet,
    spec: &CodecSpec,
    shape: &TensorShape,
) -> Arc<dyn Codec> {
    match &spec.method {
        Method::F32 | Method::Bf16 | Method::F16 => {
            Arc::new(cast::Cast::new(instruction_set, spec))
        }
        Method::OneBit(bucket, packing) => {
            let quantizer = onebit::OneBit::new(*packing);
            Arc::new(BucketQuantizer::new(instruction_set, spec, bucket.elements(shape), quantizer))
        }
        Method::Qsgd(options) if options.levels == Levels::Optimal => {
            let bucket = u64::from(options.bucket);
            let quantizer = qsgd::OptimalQsgd::new(*options);
            Arc::new(BucketQuantizer::new(instruction_set, spec, bucket, quantizer))
        }
        Method::Qsgd(options) => {
            let quantizer = qsgd::Qsgd::new(*options);
            Arc::new(BucketQuantizer::new(
                instruction_set,
                spec,
                u64::from(options.bucket),
                quantizer,
            ))
        }
        Method::Int8(bucket) => Arc::new(BucketQuantizer::new(
            instruction_set,
            spec,
            bucket.elements(shape),
            int8::Int8,
        )),
        Method::Fp8(format, bucket) => Arc::new(BucketQuantizer::new(
            instruction_set,
            spec,
            bucket.elements(shape),
            fp8::Fp8::new(*format),
        )),
        Method::Topk(options) => Arc::new(Topk::new(instruction_set, spec, *options)),
        Method::Dgc(options) => Arc::new(Dgc::new(instruction_set, spec, *options)),
    }
}

/// Checks what every `encode` asks of its arguments.
pub(crate) fn check_arguments(
    codec: &dyn Codec,
    key: &DrawKey,
    values: &[f32],
    residual: Option<&[f32]>,
    out: &[u8],
) {
    assert_eq!(
        key.first_element % codec.granule(),
        0,
        "a slice at element {} of tensor {} is encoded in granules of {}",
        key.first_element,
        key.tensor,
        codec.granule(),
    );
    if let Some(residual) = residual {
        let wanted = values.len() * codec.residual_width();
        assert_eq!(residual.len(), wanted, "numbers of the residual of {} values", values.len());
    }
    let needed = codec.max_wire_bytes_at(key, values.len());
    assert!(out.len() >= needed, "{needed} bytes are needed, {} are there", out.len());
}

/// Checks the length of an encoding of fixed size.
fn check_length(codec: &dyn Codec, encoded: &[u8], elements: usize) -> Result<(), DecodeError> {
    let expected_bytes = codec.max_wire_bytes(elements);
    if encoded.len() == expected_bytes {
        return Ok(());
    }
    let codec = codec.spec().method.name();
    Err(DecodeError::Length { codec, elements, expected_bytes, found_bytes: encoded.len() })
}
