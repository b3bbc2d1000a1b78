//! The lap of scales, before a sum of codes.

use super::slice::{topology, Received, RingSlice};
use super::Ring;
use crate::api::BufferRef;
use crate::cx::Cx;
use crate::jobs::{Contribution, RingTask};
use gradlane_units::{SliceId, Step};
use gradlane_wire::{FrameKind, PayloadForm};

impl Ring {
    /// This rank's contribution to a slice whose scales go round first.
    pub(super) fn contribute_scales(&mut self, cx: &mut Cx, slice: SliceId) {
        let begins = topology(cx).scales_begin(cx.plan(), slice) == cx.rank();
        let state = &mut self.slices[slice.index()];
        state.contributed = true;
        if begins && matches!(state.received, Received::Nothing) {
            state.received = Received::Whole(Contribution::Absent);
            state.kind = FrameKind::RingScale;
        }
        self.add_when_both(cx, slice);
    }

    /// Scales of the ranks before are here, and so is this rank's gradient, if it has one.
    pub(super) fn scales_when_both(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        step: Step,
        received: Contribution,
    ) {
        let nothing = cx.worker().has_nothing(cx.plan(), slice);
        if topology(cx).sum_begins(cx.plan(), slice) == cx.rank() {
            self.slices[slice.index()] = RingSlice::new(step.next());
            if nothing && received == Contribution::Absent {
                self.send(cx, FrameKind::RingReduce, slice, step, None);
            } else {
                cx.queue_job(slice, step, RingTask::BeginCodes(received));
            }
            return;
        }
        let state = &mut self.slices[slice.index()];
        (state.received, state.scaled) = (Received::Nothing, true);
        if nothing {
            self.send_scales(cx, slice, step, received.buffer());
        } else {
            cx.queue_job(slice, step, RingTask::MaxScales(received));
        }
    }

    /// Scales go on to the next rank.
    pub(super) fn send_scales(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        step: Step,
        scales: Option<BufferRef>,
    ) {
        let from = scales.map(|buffer| (buffer.whole(), PayloadForm::Encoded));
        self.send(cx, FrameKind::RingScale, slice, step, from);
    }
}
