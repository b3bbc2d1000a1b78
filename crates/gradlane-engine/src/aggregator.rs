//! The interface of a scheme: a component with private state; all else that it may touch is in [`Cx`].

use crate::api::{BufferRef, PayloadDest, Validated};
use crate::cx::Cx;
use crate::rank_set::RankSet;
use crate::transmit::{OrderKey, PendingEncode};
use gradlane_units::{Rank, TensorId};
use gradlane_wire::{FrameHeader, FrameKind};

pub(crate) trait Aggregator {
    /// Whether frames of this kind belong to the scheme.
    fn takes(&self, kind: FrameKind) -> bool;

    /// This rank has submitted a tensor: sends its contributions.
    fn contribute(&mut self, cx: &mut Cx, tensor: TensorId);

    /// Checks the route, the form and the extent of a peer's frame.
    fn check(&self, cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<()>;

    /// Chooses where the payload of a checked frame goes, if the frame is one that may come now.
    fn land(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) -> Validated<PayloadDest>;

    /// Takes a frame whose payload is in place.
    fn take(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader);

    /// Nobody reads the memory of a message to a peer any more.
    fn read(&mut self, cx: &mut Cx, to: Rank, header: &FrameHeader);

    /// This rank's contribution to a slice is encoded: its gradient is read no longer.
    fn encoded(&mut self, cx: &mut Cx, pending: PendingEncode, key: OrderKey, output: BufferRef);

    /// Ranks that hold up the current step.
    fn missing(&self, cx: &Cx) -> RankSet;
}
