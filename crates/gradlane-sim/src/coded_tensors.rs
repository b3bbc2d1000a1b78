//! Codecs in scenarios: their sizes, for plans. No value is ever encoded here.

use crate::error::SimError;
use gradlane_codec::TensorCodec;
use gradlane_engine::{CodecSizes, TensorSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The codec of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CodedTensor {
    /// Such as `qsgd:bits=4`.
    pub codec: String,
    /// Sizes of the tensor's dimensions in the order of its storage; none: a vector.
    #[serde(default)]
    pub sizes: Vec<u64>,
}

/// A tensor and its codec, as plans are built of.
pub(crate) type Row = (TensorSpec, Option<Box<dyn CodecSizes>>);

/// Tensors with their codecs.
///
/// # Errors
/// [`SimError::Argument`] for a text that is no codec, and for names of no tensor.
pub(crate) fn rows(
    specs: Vec<TensorSpec>,
    codecs: &BTreeMap<String, CodedTensor>,
) -> Result<Vec<Row>, SimError> {
    if let Some(name) = codecs.keys().find(|name| !specs.iter().any(|it| it.name == **name)) {
        return Err(SimError::Argument(format!("codecs: the profile has no tensor {name:?}")));
    }
    let row = |spec: TensorSpec| {
        let Some(coded) = codecs.get(&spec.name) else {
            return Ok((spec, None));
        };
        let sizes = if coded.sizes.is_empty() { vec![spec.numel] } else { coded.sizes.clone() };
        let codec = TensorCodec::parse(&coded.codec, spec.dtype, &sizes)
            .map_err(|error| SimError::Argument(format!("codecs[{:?}]: {error}", spec.name)))?;
        Ok((spec, codec.map(|codec| -> Box<dyn CodecSizes> { Box::new(codec) })))
    };
    specs.into_iter().map(row).collect()
}
