//! The codec of each tensor of a plan, checked against the plan's sizes.

use gradlane_codec::{Codec, CodecSpecError, IntegerSums, TensorCodec};
use gradlane_engine::{CodecPlan, CodecSizes, Plan, RingBytes, Scheme, TensorKind, TensorPlan};
use gradlane_units::{Dtype, SliceId};
use std::sync::Arc;

/// A tensor's codec.
#[derive(Clone, Debug)]
pub(crate) struct PlannedCodec {
    pub(crate) codec: Arc<dyn Codec>,
    /// Where a ring adds up its codes as integers.
    pub(crate) sums: Option<IntegerSums>,
}

/// A plan whose codec does not fit its tensor.
#[derive(Debug, thiserror::Error)]
#[error("tensor {tensor:?}: {reason}")]
pub(crate) struct CodecPlanError {
    tensor: String,
    reason: Mismatch,
}

#[derive(Debug, thiserror::Error)]
enum Mismatch {
    #[error("{0} cannot be encoded")]
    Dtype(Dtype),
    #[error("codec {0:?} changes nothing")]
    NoOp(String),
    #[error(transparent)]
    Spec(#[from] CodecSpecError),
    #[error("{planned:?} is not as {found:?} says")]
    Facts { planned: String, found: String },
    #[error("{elements} elements are encoded in {bytes} bytes")]
    Bytes { elements: u64, bytes: u64 },
    #[error("a slice of {codec:?} begins at {start}")]
    Start { codec: String, start: u64 },
    #[error("{0}")]
    Ring(String),
}

/// Builds the codec of each tensor of a plan that has one.
pub(crate) fn of_plan(plan: &Plan) -> Result<Vec<Option<PlannedCodec>>, CodecPlanError> {
    let codec = |tensor: &TensorPlan| {
        let Some(encoding) = &tensor.codec else {
            return Ok(None);
        };
        of_tensor(plan, tensor, encoding)
            .map(Some)
            .map_err(|reason| CodecPlanError { tensor: tensor.spec.name.clone(), reason })
    };
    plan.tensors.iter().map(codec).collect()
}

fn of_tensor(
    plan: &Plan,
    tensor: &TensorPlan,
    encoding: &CodecPlan,
) -> Result<PlannedCodec, Mismatch> {
    let dtype = tensor.spec.dtype;
    let short = matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
    if tensor.spec.kind != TensorKind::Parameter || !short {
        return Err(Mismatch::Dtype(dtype));
    }
    let codec = TensorCodec::parse(&encoding.name, dtype, &encoding.sizes)?
        .ok_or_else(|| Mismatch::NoOp(encoding.name.clone()))?;
    let same = codec.name() == encoding.name
        && codec.granule_elems() == encoding.granule_elems
        && codec.is_fixed() == encoding.fixed
        && codec.residual_width() == encoding.residual_width;
    if !same {
        return Err(Mismatch::Facts { planned: encoding.name.clone(), found: codec.name() });
    }
    for slice in tensor.slices.clone().map(SliceId) {
        let slice = plan.slice(slice);
        check_bytes(&codec, encoding, tensor.scheme, slice.length, plan)?;
        if !slice.start.is_multiple_of(codec.granule_elems().max(1)) {
            return Err(Mismatch::Start { codec: codec.name(), start: slice.start });
        }
    }
    let sums = match encoding.scales.is_empty() {
        true => None,
        false => IntegerSums::new(codec.codec().spec(), plan.workers()).map_err(Mismatch::Ring)?,
    };
    Ok(PlannedCodec { codec: Arc::clone(codec.codec()), sums })
}

/// Checks the plan's sizes of a slice of `elements` elements.
fn check_bytes(
    codec: &TensorCodec,
    encoding: &CodecPlan,
    scheme: Scheme,
    elements: u64,
    plan: &Plan,
) -> Result<(), Mismatch> {
    let on_ring = match scheme {
        Scheme::Ring => codec.ring_bytes(elements, plan.workers()).map_err(Mismatch::Ring)?,
        _ => None,
    };
    let (scales, bytes) = match on_ring {
        Some(RingBytes { scales, sums }) => (Some(scales), sums),
        None => (None, codec.bytes_max(elements)),
    };
    if encoding.bytes_max(elements) != Some(bytes) || encoding.scale_bytes(elements) != scales {
        return Err(Mismatch::Bytes { elements, bytes });
    }
    Ok(())
}
