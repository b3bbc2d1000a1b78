//! The sizes of codecs in plans: how long an encoded slice is at most. Its contents are the driver's.

use crate::api::PlanError;
use crate::plan::{Plan, Update};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use gradlane_units::{CodecSizes, RingBytes, SliceId, Step, TensorId};
use gradlane_wire::{FrameKind, PayloadForm};
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

impl Plan {
    /// The most bytes of a slice in one form or the other.
    ///
    /// # Panics
    /// When the tensor has no encoding and is asked for as encoded.
    #[must_use]
    pub fn bytes_as(&self, slice: SliceId, form: PayloadForm) -> u64 {
        match form {
            PayloadForm::Raw => self.slice_bytes(slice),
            PayloadForm::Encoded => {
                let Some(encoding) = self.codec(slice) else {
                    unreachable!("{slice} is of a tensor without an encoding");
                };
                let elements = self.slice(slice).length;
                encoding.bytes_max(elements).expect("a plan has the size of each of its slices")
            }
        }
    }

    /// Bytes of the scales of a slice whose codes a ring adds up as integers; none where it does not.
    #[must_use]
    pub fn scale_bytes(&self, slice: SliceId) -> Option<u64> {
        self.codec(slice)?.scale_bytes(self.slice(slice).length)
    }

    /// Numbers a value in the residual of a tensor.
    #[must_use]
    pub fn residual_width(&self, tensor: TensorId) -> usize {
        let encoding = self.tensor(tensor).codec.as_ref();
        encoding.map_or(0, |encoding| encoding.residual_width as usize)
    }

    /// Whether the codec of a slice keeps what it has not sent.
    pub(crate) fn keeps_residual(&self, slice: SliceId) -> bool {
        self.codec(slice).is_some_and(|codec| codec.residual_width > 0)
    }

    /// The encoding of the tensor that a slice is part of.
    #[must_use]
    pub fn codec(&self, slice: SliceId) -> Option<&CodecPlan> {
        self.tensor(self.slice(slice).tensor).codec.as_ref()
    }

    /// Whether a frame of this kind may carry a slice as encoded bytes. Step 0 spreads exact values,
    /// and parameters that were updated on a server are exact as well.
    #[must_use]
    pub fn may_be_encoded(&self, kind: FrameKind, slice: SliceId, step: Step) -> bool {
        let carries = match kind {
            FrameKind::Push | FrameKind::RingReduce | FrameKind::RingBroadcast => true,
            FrameKind::RingScale => self.scale_bytes(slice).is_some(),
            FrameKind::Broadcast => self.update == Update::Worker,
            _ => false,
        };
        carries && !step.is_initial() && self.codec(slice).is_some()
    }
}
