//! Codecs as plans have them: the sizes that the engine plans with, and the codec of each tensor of a
//! plan, checked against the sizes that the plan says.

use gradlane_codec::{build, Codec, CodecSpec, Method, TensorShape};
use gradlane_engine::{Coding, Plan, Role};
use gradlane_units::{Dtype, SliceId};
use std::sync::Arc;

/// Why a text is no codec for a tensor.
pub use gradlane_codec::CodecSpecError;

/// A codec for one tensor, as [`Plan::build`] takes it.
#[derive(Debug)]
pub struct TensorCodec {
    codec: Arc<dyn Codec>,
    sizes: Vec<u64>,
}

impl TensorCodec {
    /// Reads the text of a codec, such as `qsgd:bits=4`, for a tensor with dimensions of these
    /// sizes, in the order of its storage. None where it would change nothing: `f32`, and the
    /// tensor's own dtype.
    ///
    /// # Errors
    /// [`CodecSpecError`] says what is wrong with the text.
    pub fn parse(
        text: &str,
        dtype: Dtype,
        sizes: &[u64],
    ) -> Result<Option<TensorCodec>, CodecSpecError> {
        let spec: CodecSpec = text.parse()?;
        let same = matches!(
            (&spec.method, dtype),
            (Method::F32, _) | (Method::F16, Dtype::F16) | (Method::Bf16, Dtype::Bf16)
        );
        if same {
            return Ok(None);
        }
        let codec = build(&spec, &TensorShape::new(sizes));
        Ok(Some(TensorCodec { codec, sizes: sizes.to_vec() }))
    }

    /// Whether the expectation of what is decoded is what was encoded.
    #[must_use]
    pub fn is_unbiased(&self) -> bool {
        self.codec.is_unbiased()
    }
}

impl Coding for TensorCodec {
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

/// The codec of each tensor of a plan that has one.
pub(crate) fn of_plan(plan: &Plan) -> Result<Vec<Option<Arc<dyn Codec>>>, String> {
    let mut codecs = Vec::with_capacity(plan.tensors.len());
    for tensor in &plan.tensors {
        let Some(encoding) = &tensor.encoding else {
            codecs.push(None);
            continue;
        };
        let name = &tensor.spec.name;
        let refuse = |text: String| Err(format!("tensor {name:?}: {text}"));
        let short = matches!(tensor.spec.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
        if tensor.spec.role != Role::Parameter || !short {
            return refuse(format!("{} cannot be encoded", tensor.spec.dtype));
        }
        let found = TensorCodec::parse(&encoding.codec, tensor.spec.dtype, &encoding.sizes);
        let codec = match found {
            Ok(Some(codec)) => codec,
            Ok(None) => return refuse(format!("codec {:?} changes nothing", encoding.codec)),
            Err(error) => return refuse(error.to_string()),
        };
        let same = codec.name() == encoding.codec
            && codec.granule_elems() == encoding.granule_elems
            && codec.is_fixed() == encoding.fixed
            && codec.residual_width() == encoding.residual_width;
        if !same {
            return refuse(format!("{:?} is not as {:?} says", encoding.codec, codec.name()));
        }
        for slice in tensor.slices.clone().map(SliceId) {
            let slice = plan.slice(slice);
            let bytes = codec.bytes_max(slice.length);
            if encoding.bytes_max(slice.length) != Some(bytes) {
                return refuse(format!("{} elements are encoded in {bytes} bytes", slice.length));
            }
            if !slice.start.is_multiple_of(codec.granule_elems().max(1)) {
                return refuse(format!("a slice of {:?} begins at {}", codec.name(), slice.start));
            }
        }
        codecs.push(Some(codec.codec));
    }
    Ok(codecs)
}
