//! `f32`, `bf16` and `f16`: every value on its own, rounded to nearest even, little-endian.

use half::{bf16, f16};

use super::{check_arguments, check_length, Codec, CodecSpec, DecodeError, Method, Place};
use crate::Variant;

/// A plain change of type.
#[derive(Debug)]
pub(super) struct Cast {
    spec: CodecSpec,
    element_bytes: usize,
}

impl Cast {
    pub(super) fn new(_variant: Variant, spec: &CodecSpec) -> Cast {
        let element_bytes = if spec.method == Method::F32 { 4 } else { 2 };
        Cast { spec: spec.clone(), element_bytes }
    }

    fn each(&self, encoded: &[u8], out: &mut [f32], place: impl Fn(&mut f32, f32)) {
        for (value, bytes) in out.iter_mut().zip(encoded.chunks_exact(self.element_bytes)) {
            let decoded = match (&self.spec.method, bytes) {
                (Method::F16, &[low, high]) => f16::from_le_bytes([low, high]).to_f32(),
                (_, &[low, high]) => bf16::from_le_bytes([low, high]).to_f32(),
                (_, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
                _ => unreachable!("an element has two or four bytes"),
            };
            place(value, decoded);
        }
    }
}

impl Codec for Cast {
    fn spec(&self) -> &CodecSpec {
        &self.spec
    }

    fn granule(&self) -> u64 {
        1
    }

    fn is_fixed_size(&self) -> bool {
        true
    }

    fn is_unbiased(&self) -> bool {
        self.spec.is_lossless()
    }

    fn max_wire_bytes(&self, elements: usize) -> usize {
        elements * self.element_bytes
    }

    fn encode(
        &self,
        place: &Place,
        values: &[f32],
        mut residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) -> usize {
        check_arguments(self, place, values, residual.as_deref(), out);
        let chunks = out.chunks_exact_mut(self.element_bytes);
        for (index, (value, bytes)) in values.iter().zip(chunks).enumerate() {
            let value = residual.as_deref().map_or(*value, |residual| *value + residual[index]);
            let sent = match &self.spec.method {
                Method::F16 => {
                    let narrow = f16::from_f32(value);
                    bytes.copy_from_slice(&narrow.to_le_bytes());
                    narrow.to_f32()
                }
                Method::Bf16 => {
                    let narrow = bf16::from_f32(value);
                    bytes.copy_from_slice(&narrow.to_le_bytes());
                    narrow.to_f32()
                }
                _ => {
                    bytes.copy_from_slice(&value.to_le_bytes());
                    value
                }
            };
            if let Some(residual) = residual.as_deref_mut() {
                if sent.is_finite() {
                    residual[index] = value - sent;
                }
            }
        }
        self.max_wire_bytes(values.len())
    }

    fn decode(&self, encoded: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
        check_length(self, encoded, out.len())?;
        self.each(encoded, out, |value, decoded| *value = decoded);
        Ok(())
    }

    fn decode_add(&self, encoded: &[u8], sum: &mut [f32]) -> Result<(), DecodeError> {
        check_length(self, encoded, sum.len())?;
        self.each(encoded, sum, |value, decoded| *value += decoded);
        Ok(())
    }
}
