//! How long a slice of a plan is in each form, and which frames may carry it encoded.

use crate::plan::{CodecPlan, Plan, Update};
use gradlane_units::{SliceId, Step, TensorId};
use gradlane_wire::{FrameKind, PayloadForm};

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
