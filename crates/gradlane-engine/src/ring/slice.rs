//! One slice of the ring as this rank sees it.

use crate::api::Region;
use crate::cx::Cx;
use crate::jobs::{Arriving, Contribution};
use crate::plan::Plan;
use gradlane_units::{Rank, SliceId, Step};
use gradlane_wire::{FrameHeader, FrameKind, PayloadForm};

/// The sum of a slice as it comes from the rank before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Received {
    /// Nothing has come.
    #[default]
    Nothing,
    /// Some of it has.
    Arriving(Arriving),
    /// All of it, or word that no rank before had a gradient.
    Whole(Contribution),
}

/// A slice on its way to its owner, as this rank sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingSlice {
    /// The first step whose sum this rank has not added to. A sum of it may come while this rank
    /// is still in the step before.
    pub(super) step: Step,
    pub(super) received: Received,
    /// Of the received or arriving slice: sums, or scales.
    pub(super) kind: FrameKind,
    /// Of the arriving slice.
    pub(super) form: PayloadForm,
    /// Whether this rank's own contribution to that step is there.
    pub(super) contributed: bool,
    /// Whether that step's scales have this rank's, where scales go round first.
    pub(super) scaled: bool,
}

impl RingSlice {
    pub(super) fn new(step: Step) -> RingSlice {
        let received = Received::Nothing;
        let (kind, form) = (FrameKind::RingReduce, PayloadForm::Raw);
        RingSlice { step, received, kind, form, contributed: false, scaled: false }
    }

    /// Whether a frame does not continue the arriving slice.
    pub(super) fn is_arriving_unlike(&self, header: &FrameHeader) -> bool {
        let arriving = matches!(self.received, Received::Arriving(_));
        arriving && (self.kind, self.form) != (header.kind, header.form)
    }
}

pub(super) fn topology(cx: &Cx) -> Topology {
    Topology::new(cx.plan(), cx.rank())
}

/// Whether a slice's sum ends on this rank; in step 0, whether its values come from here.
pub(super) fn ends_here(cx: &Cx, slice: SliceId, step: Step) -> bool {
    Topology::result_begins(cx.plan(), slice, step) == cx.rank()
}

/// This rank's gradient of a slice, if it has one.
pub(super) fn own_gradient(cx: &Cx, slice: SliceId) -> Option<Region> {
    (!cx.worker().has_nothing(cx.plan(), slice)).then(|| cx.gradient_region(slice))
}

/// The form of a sum with this rank's gradient: that of the sum so far, if there is one.
pub(super) fn form_of(cx: &Cx, slice: SliceId, received: Contribution) -> PayloadForm {
    received.form().unwrap_or_else(|| cx.own_form(slice))
}

/// Whether codes of a slice are added up as integers in the current step.
pub(super) fn adds_codes(cx: &Cx, slice: SliceId) -> bool {
    cx.plan().scale_bytes(slice).is_some() && cx.own_form(slice) == PayloadForm::Encoded
}

/// The most bytes of the message that a frame belongs to.
pub(super) fn bytes_of(plan: &Plan, header: &FrameHeader) -> u64 {
    match header.kind {
        FrameKind::RingScale => plan.scale_bytes(header.slice).unwrap_or(0),
        _ => plan.bytes_as(header.slice, header.form),
    }
}

/// The owner divides the sum, and copies the mean into the tensor in the same pass.
pub(super) struct LastHop {
    pub(super) divisor: u32,
    pub(super) copy_to: Option<Region>,
}

pub(super) fn on_last(cx: &mut Cx, slice: SliceId, step: Step) -> LastHop {
    if !ends_here(cx, slice, step) {
        return LastHop { divisor: 1, copy_to: None };
    }
    // The gradient is read by this job alone, which may also write there.
    cx.mark_push_sent(slice);
    cx.forget_kept(slice);
    LastHop { divisor: cx.plan().contributors(step), copy_to: cx.open_region(slice) }
}

// Which ranks of the ring a slice passes, and in which order. Rank r hears from r - 1 and speaks to r + 1
// alone.

/// One rank's place in the ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Topology {
    pub(super) rank: Rank,
    pub(super) ranks: u32,
}

impl Topology {
    pub(super) fn new(plan: &Plan, rank: Rank) -> Topology {
        Topology { rank, ranks: plan.workers() }
    }

    fn after(self, rank: Rank) -> Rank {
        Rank((rank.0 + 1) % self.ranks)
    }

    /// The rank that this one speaks to.
    pub(super) fn next(self) -> Rank {
        self.after(self.rank)
    }

    /// The rank that this one hears from.
    pub(super) fn before(self) -> Rank {
        Rank((self.rank.0 + self.ranks - 1) % self.ranks)
    }

    /// Hops from a rank to this one.
    pub(super) fn hops_from(self, rank: Rank) -> u16 {
        let size = u64::from(self.ranks);
        ((u64::from(self.rank.0) + size - u64::from(rank.0)) % size) as u16
    }

    /// The rank on which a slice's sum begins: the one after its owner.
    pub(super) fn sum_begins(self, plan: &Plan, slice: SliceId) -> Rank {
        self.after(plan.slice(slice).owner)
    }

    /// The rank from which a slice's scales go out, so that they end where its sum begins.
    pub(super) fn scales_begin(self, plan: &Plan, slice: SliceId) -> Rank {
        self.after(self.sum_begins(plan, slice))
    }

    /// The rank from which a slice's result goes out: its owner, or rank 0 in step 0.
    pub(super) fn result_begins(plan: &Plan, slice: SliceId, step: Step) -> Rank {
        if step.is_initial() {
            Rank(0)
        } else {
            plan.slice(slice).owner
        }
    }

    /// The rank from which frames of a kind about a slice go out.
    pub(super) fn begins(self, plan: &Plan, kind: FrameKind, slice: SliceId, step: Step) -> Rank {
        match kind {
            FrameKind::RingScale => self.scales_begin(plan, slice),
            FrameKind::RingReduce => self.sum_begins(plan, slice),
            _ => Topology::result_begins(plan, slice, step),
        }
    }
}
