//! The schemes: how the slices of a tensor are aggregated. Each is a component with private state; all
//! else that it may touch is in [`Cx`].

use crate::api::{BufferRef, PayloadDest};
use crate::cx::Cx;
use crate::gather::Gather;
use crate::plan::{Plan, Scheme};
use crate::ps::ParameterServer;
use crate::rank_set::RankSet;
use crate::ring::Ring;
use crate::transmit::{OrderKey, PendingEncode};
use crate::violation::Validated;
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

    /// The last frame of a message to a peer is with the kernel.
    fn sent(&mut self, cx: &mut Cx, to: Rank, header: &FrameHeader);

    /// This rank's contribution to a slice is encoded: its gradient is read no longer.
    fn encoded(&mut self, cx: &mut Cx, pending: PendingEncode, key: OrderKey, output: BufferRef);

    /// Ranks that hold up the current step.
    fn missing(&self, cx: &Cx) -> RankSet;
}

#[derive(Debug)]
pub(crate) struct Schemes {
    pub(crate) ps: ParameterServer,
    pub(crate) ring: Ring,
    pub(crate) gather: Gather,
}

impl Schemes {
    pub(crate) fn new(plan: &Plan, rank: Rank) -> Schemes {
        Schemes {
            ps: ParameterServer::new(plan, rank),
            ring: Ring::new(plan),
            gather: Gather::default(),
        }
    }

    pub(crate) fn of(&mut self, scheme: Scheme) -> &mut dyn Aggregator {
        match scheme {
            Scheme::Ps => &mut self.ps,
            Scheme::Ring => &mut self.ring,
            Scheme::AllGather | Scheme::GatherToRoot => &mut self.gather,
        }
    }

    /// Ranks that hold up the current step, whatever the scheme of what is missing.
    pub(crate) fn missing(&self, cx: &Cx) -> RankSet {
        let mut missing = RankSet::empty(cx.plan.world_size);
        let all: [&dyn Aggregator; 3] = [&self.ps, &self.ring, &self.gather];
        for scheme in all {
            scheme.missing(cx).iter().for_each(|rank| {
                missing.insert(rank);
            });
        }
        missing
    }
}
