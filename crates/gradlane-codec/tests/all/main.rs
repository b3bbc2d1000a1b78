//! Tests of the kernels and codecs through the public interface.

mod adam;
mod codec_statistics;
mod codec_variants;
mod codecs;
mod common;
mod integer_sums;
mod properties;
mod reduce;
mod sgd;
mod sgd_numbers;
mod sparse;
