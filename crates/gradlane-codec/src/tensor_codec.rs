//! Codecs as plans have them: the sizes that the engine plans with.

use crate::encode::{build, Codec, CodecSpec, CodecSpecError, IntegerSums, Method, TensorShape};
use gradlane_units::{CodecSizes, Dtype, RingBytes};
use std::sync::Arc;

/// A codec for one tensor, as plans are built of.
#[derive(Clone, Debug)]
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
    ///
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

    /// The codec itself.
    pub fn codec(&self) -> &Arc<dyn Codec> {
        &self.codec
    }

    /// Whether the expectation of what is decoded is what was encoded.
    pub fn is_unbiased(&self) -> bool {
        self.codec.is_unbiased()
    }
}

impl CodecSizes for TensorCodec {
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

    fn bytes_expected(&self, elements: u64, is_mean: bool) -> u64 {
        usize::try_from(elements)
            .map_or(u64::MAX, |it| self.codec.expected_wire_bytes(it, is_mean) as u64)
    }

    fn is_fixed(&self) -> bool {
        self.codec.is_fixed_size()
    }

    fn residual_width(&self) -> u32 {
        let width = if self.codec.keeps_residual() { self.codec.residual_width() } else { 0 };
        u32::try_from(width).unwrap_or(u32::MAX)
    }

    fn ring_bytes(&self, elements: u64, world_size: u32) -> Result<Option<RingBytes>, String> {
        if matches!(self.codec.spec().method, Method::Dgc(_)) {
            return Err(
                "it sends a rank's own momentum, and a hop of a ring encodes a sum of several \
                        ranks: use topk, or scheme ps"
                    .to_owned(),
            );
        }
        if matches!(&self.codec.spec().method, Method::Topk(options) if options.decay < 1.0) {
            return Err(
                "what decays is a rank's own residual, and a hop of a ring encodes a sum of \
                        several ranks: leave decay out, or use scheme ps"
                    .to_owned(),
            );
        }
        let Some(sums) = IntegerSums::new(self.codec.spec(), world_size)? else {
            return Ok(None);
        };
        let elements = usize::try_from(elements).map_err(|_| "too many elements".to_owned())?;
        let (scales, sums) = (sums.scale_bytes(elements), sums.sum_bytes(elements));
        Ok(Some(RingBytes { scales: scales as u64, sums: sums as u64 }))
    }
}
