//! The sizes of a codec in a plan: how long an encoded slice is at most. Its contents are the driver's.

use crate::api::PlanError;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use gradlane_units::{CodecSizes, RingBytes};
use serde::{Deserialize, Serialize};

/// How the slices of one tensor travel after step 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodecPlan {
    /// The codec, in the canonical text of `gradlane-codec`.
    #[serde(rename = "codec")]
    pub name: String,
    /// Sizes of the tensor's dimensions in the order of its storage, which some codecs go by.
    pub sizes: Vec<u64>,
    /// Slices begin at multiples of this many elements.
    pub granule_elems: u64,
    /// Whether every encoding of a slice is equally long.
    pub fixed: bool,
    /// Numbers a value in the residual (error feedback); 0: no residual.
    pub residual_width: u32,
    /// For each length of a slice, in elements, the most bytes of its encoding.
    pub bytes: Vec<(u64, u64)>,
    /// On a ring that adds up codes as integers: for each length of a slice the bytes of its scales,
    /// which go round first. Else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scales: Vec<(u64, u64)>,
}

impl CodecPlan {
    /// The most bytes of an encoded slice of this length, or `None` for a length of no slice.
    #[must_use]
    pub fn bytes_max(&self, elements: u64) -> Option<u64> {
        of_length(&self.bytes, elements)
    }

    /// Bytes of the scales of a slice of this length, where they go round first.
    #[must_use]
    pub fn scale_bytes(&self, elements: u64) -> Option<u64> {
        of_length(&self.scales, elements)
    }
}

impl CodecPlan {
    /// The same on a ring, where codes may be added up as integers.
    ///
    /// # Errors
    /// When the codec cannot go round a ring of this size.
    pub(crate) fn round_ring(
        mut self,
        tensor: &str,
        codec: &dyn CodecSizes,
        world_size: u32,
    ) -> Result<CodecPlan, PlanError> {
        for (length, bytes) in &mut self.bytes {
            let on_ring = codec.ring_bytes(*length, world_size).map_err(|why| {
                let codec = &self.name;
                PlanError::new(format!(
                    "tensor {tensor:?} has scheme ring and codec {codec:?}: {why}"
                ))
            })?;
            if let Some(RingBytes { scales, sums }) = on_ring {
                self.scales.push((*length, scales));
                *bytes = sums;
            }
        }
        Ok(self)
    }
}

fn of_length(sizes: &[(u64, u64)], elements: u64) -> Option<u64> {
    sizes.iter().find(|(length, _)| *length == elements).map(|&(_, bytes)| bytes)
}
