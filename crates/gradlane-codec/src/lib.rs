//! Kernels that turn gradient bytes into averaged gradients or new parameters.
//!
//! A kernel is told where its inputs, outputs and state lie and does arithmetic on them; it holds
//! no memory between calls, starts no thread and knows neither ranks nor frames. What always holds:
//! the bits of a result depend on the values, their rank order and the divisor alone, never on the
//! arrival order, the slice length, the alignment or the instruction set.
//!
//! # The promise about bits
//!
//! - A mean is `(((x0 + x1) + x2) + ...) / divisor`: summed in the order of the inputs, each
//!   operation rounded on its own, no fused multiply-add, no reassociation. f16 and bf16 are
//!   widened to f32, and the result is rounded to nearest even once, at the end.
//! - A NaN result is a NaN in every variant; its sign and payload may be anything. f16 and bf16
//!   results that are NaN are quiet. A single input with divisor 1 is copied bit for bit, NaN
//!   payloads included.
//! - The promise is for the default floating-point environment (round to nearest, subnormals kept).
//!   A thread inherits that environment from the thread that starts it.
//!
//! # Structure
//!
//! [`FloatDtype`] names what the bytes are; [`InstructionSet`] names the instruction set, chosen once at run
//! time. [`reduce_mean`], [`reduce_sgd`] and [`reduce_adam`] are the kernels: one generic loop,
//! instantiated for each register type, beside a scalar oracle that shares none of it. A further
//! optimizer is one more update of that loop, as in `sgd.rs` and `adam.rs`. Encodings are [`Codec`]s,
//! built from a [`CodecSpec`] for the same [`InstructionSet`]s; all lie in `encode`, each with an oracle of
//! its own.

mod adam;
mod element;
mod encode;
mod float_dtype;
mod instruction_set;
mod reduce;
mod sgd;
mod squares;
mod tensor_codec;

pub use adam::{
    reduce_adam, reduce_adam_slices, reduce_adam_with, AdamError, AdamMemory, AdamOptions,
    AdamSlices, AdamStep,
};
pub use encode::{
    build, build_with, narrow, widen, Bucket, Codec, CodecSpec, CodecSpecError, DecodeError,
    DgcOptions, DrawKey, Fp8Format, IntegerSums, Levels, Method, Norm, Packing, QsgdOptions,
    RingSums, SentShares, SparseError, TensorShape, TopkOptions,
};
pub use float_dtype::FloatDtype;
pub use instruction_set::{InstructionSet, InstructionSetError};
pub use reduce::{reduce_mean, reduce_mean_slices, reduce_mean_with, Buffer, Mean, ReduceError};
pub use sgd::{
    reduce_sgd, reduce_sgd_slices, reduce_sgd_with, SgdError, SgdMemory, SgdOptions, SgdSlices,
    SgdStep,
};
pub use squares::square_sum;
pub use tensor_codec::TensorCodec;
