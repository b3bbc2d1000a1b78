//! Codecs in scenarios: their sizes, for plans. No value is ever encoded here.

use crate::error::SimError;
use gradlane_codec::TensorCodec;
use gradlane_engine::{CodecSizes, Job, JobResult, Operation, Plan, TensorSpec};
use gradlane_units::{SliceId, TensorId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};

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

/// The bytes that slices are expected to take where encodings differ in length; all others are as long
/// as a plan says.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExpectedSizes {
    /// Of a contribution and of a mean, by tensor and length in elements.
    by_length: HashMap<(TensorId, u64), [u64; 2]>,
}

impl ExpectedSizes {
    /// Those of a plan whose codecs are known.
    pub(crate) fn of(plan: &Plan) -> ExpectedSizes {
        let mut by_length = HashMap::new();
        for (index, tensor) in plan.tensors.iter().enumerate() {
            let Some(planned) = tensor.codec.as_ref().filter(|it| !it.fixed) else {
                continue;
            };
            let parsed = TensorCodec::parse(&planned.name, tensor.spec.dtype, &planned.sizes);
            let Ok(Some(codec)) = parsed else { continue };
            for &(length, most) in &planned.bytes {
                let bytes = [false, true].map(|mean| codec.bytes_expected(length, mean).min(most));
                by_length.insert((TensorId(index as u32), length), bytes);
            }
        }
        ExpectedSizes { by_length }
    }

    /// The bytes of a slice's contribution, or of its mean; `None`: as the plan says.
    pub(crate) fn bytes(&self, plan: &Plan, slice: SliceId, is_mean: bool) -> Option<u64> {
        let slice = plan.slice(slice);
        let bytes = self.by_length.get(&(slice.tensor, slice.length))?;
        Some(bytes[usize::from(is_mean)])
    }

    /// What comes of a job.
    pub(crate) fn result_of(&self, plan: &Plan, job: &Job) -> JobResult {
        let is_mean = match job.operation {
            Operation::Encode { .. } => false,
            Operation::DecodeReduceEncode { .. } => true,
            _ => return JobResult::Written,
        };
        self.bytes(plan, job.slice, is_mean).map_or(JobResult::Written, JobResult::Encoded)
    }
}
