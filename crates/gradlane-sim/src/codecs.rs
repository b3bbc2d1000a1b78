//! Codecs in scenarios: what a plan needs to know of them. No value is ever encoded here.

use crate::error::SimError;
use gradlane_codec::{build, Codec, CodecSpec, TensorShape};
use gradlane_engine::{Coding, TensorSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

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

#[derive(Debug)]
struct SizedCodec {
    codec: Arc<dyn Codec>,
    sizes: Vec<u64>,
}

impl Coding for SizedCodec {
    fn name(&self) -> String {
        self.codec.spec().to_string()
    }

    fn sizes(&self) -> Vec<u64> {
        self.sizes.clone()
    }

    fn granule_elems(&self) -> u64 {
        self.codec.granule()
    }

    fn bytes_max(&self, elements: u64) -> u64 {
        usize::try_from(elements).map_or(u64::MAX, |it| self.codec.max_wire_bytes(it) as u64)
    }

    fn is_fixed(&self) -> bool {
        self.codec.is_fixed_size()
    }

    fn residual_width(&self) -> u32 {
        let width = if self.codec.keeps_residual() { self.codec.residual_width() } else { 0 };
        u32::try_from(width).unwrap_or(u32::MAX)
    }
}

/// A tensor and its codec, as plans are built of.
pub(crate) type Row = (TensorSpec, Option<Box<dyn Coding>>);

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
        let parsed: CodecSpec = coded
            .codec
            .parse()
            .map_err(|error| SimError::Argument(format!("codecs[{:?}]: {error}", spec.name)))?;
        let sizes = if coded.sizes.is_empty() { vec![spec.numel] } else { coded.sizes.clone() };
        let codec = build(&parsed, &TensorShape::new(&sizes));
        let coding: Box<dyn Coding> = Box::new(SizedCodec { codec, sizes });
        Ok((spec, Some(coding)))
    };
    specs.into_iter().map(row).collect()
}
