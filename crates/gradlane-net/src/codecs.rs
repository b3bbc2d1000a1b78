//! The codec of each tensor of a plan, checked against the sizes that the plan says.

use gradlane_codec::{Codec, IntegerSums, TensorCodec};
use gradlane_engine::{CodecPlan, CodecSizes, Plan, RingBytes, Scheme, TensorKind};
use gradlane_units::{Dtype, SliceId};
use std::sync::Arc;

/// A tensor's codec.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) codec: Arc<dyn Codec>,
    /// Where a ring adds up its codes as integers.
    pub(crate) sums: Option<IntegerSums>,
}

/// The codec of each tensor of a plan that has one.
pub(crate) fn of_plan(plan: &Plan) -> Result<Vec<Option<Planned>>, String> {
    let mut codecs = Vec::with_capacity(plan.tensors.len());
    for tensor in &plan.tensors {
        let Some(encoding) = &tensor.codec else {
            codecs.push(None);
            continue;
        };
        let name = &tensor.spec.name;
        let refuse = |text: String| Err(format!("tensor {name:?}: {text}"));
        let short = matches!(tensor.spec.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
        if tensor.spec.kind != TensorKind::Parameter || !short {
            return refuse(format!("{} cannot be encoded", tensor.spec.dtype));
        }
        let found = TensorCodec::parse(&encoding.name, tensor.spec.dtype, &encoding.sizes);
        let codec = match found {
            Ok(Some(codec)) => codec,
            Ok(None) => return refuse(format!("codec {:?} changes nothing", encoding.name)),
            Err(error) => return refuse(error.to_string()),
        };
        let same = codec.name() == encoding.name
            && codec.granule_elems() == encoding.granule_elems
            && codec.is_fixed() == encoding.fixed
            && codec.residual_width() == encoding.residual_width;
        if !same {
            return refuse(format!("{:?} is not as {:?} says", encoding.name, codec.name()));
        }
        for slice in tensor.slices.clone().map(SliceId) {
            let slice = plan.slice(slice);
            if let Err(text) = check_bytes(&codec, encoding, tensor.scheme, slice.length, plan) {
                return refuse(text);
            }
            if !slice.start.is_multiple_of(codec.granule_elems().max(1)) {
                return refuse(format!("a slice of {:?} begins at {}", codec.name(), slice.start));
            }
        }
        let sums = match encoding.scales.is_empty() {
            true => None,
            false => IntegerSums::new(codec.codec().spec(), plan.workers())?,
        };
        codecs.push(Some(Planned { codec: Arc::clone(codec.codec()), sums }));
    }
    Ok(codecs)
}

/// The plan's sizes of a slice of so many elements must be the codec's.
fn check_bytes(
    codec: &TensorCodec,
    encoding: &CodecPlan,
    scheme: Scheme,
    elements: u64,
    plan: &Plan,
) -> Result<(), String> {
    let on_ring = match scheme {
        Scheme::Ring => codec.ring_bytes(elements, plan.workers())?,
        _ => None,
    };
    let (scales, bytes) = match on_ring {
        Some(RingBytes { scales, sums }) => (Some(scales), sums),
        None => (None, codec.bytes_max(elements)),
    };
    if encoding.bytes_max(elements) != Some(bytes) || encoding.scale_bytes(elements) != scales {
        return Err(format!("{elements} elements are encoded in {bytes} bytes"));
    }
    Ok(())
}
