//! Encoded sums on a ring. With any codec each hop decodes the sum so far, adds this rank's gradient
//! and encodes that: one job a hop, and error feedback on each rank of what it encodes. The owner
//! does not encode a sum but the mean, once.
//!
//! Where codes are added up as integers, the scales of a slice's buckets go round first, from the
//! second rank after the owner to the first one after it. That rank knows the largest scale of all and begins the
//! sum; the others add their codes to it. So a slice takes N - 1 hops more, and is rounded once a rank.
//!
//! A rank without a gradient passes on what came, where that is the same.

use crate::encoding::PendingEncode;
use crate::engine::Engine;
use crate::io::{BufferRef, Job, Operation};
use crate::jobs::{Pending, Running};
use crate::receive::Validated;
use crate::ring::{Received, RoundSlice};
use crate::scheduler::OrderKey;
use crate::scheme::Scheme;
use crate::server::Contribution;
use alloc::format;
use gradlane_units::{Rank, SliceId, Step};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

impl Contribution {
    fn buffer(self) -> Option<BufferRef> {
        match self {
            Contribution::Buffer(buffer) | Contribution::Encoded(buffer) => Some(buffer),
            Contribution::Own | Contribution::Absent => None,
        }
    }
}

impl Engine {
    pub(crate) fn uses_ring(&self, slice: SliceId) -> bool {
        self.plan.tensor(self.plan.slice(slice).tensor).scheme == Scheme::Ring
    }

    /// Whether codes of a slice are added up as integers in the current step.
    pub(crate) fn adds_codes(&self, slice: SliceId) -> bool {
        self.plan.scale_bytes(slice).is_some() && self.own_form(slice) == PayloadForm::Encoded
    }

    /// The rank from which a slice's scales go out: so that they end where its sum begins.
    pub(crate) fn scales_begin(&self, slice: SliceId) -> Rank {
        Rank((self.sum_begins(slice).0 + 1) % self.plan.workers())
    }

    /// The most bytes of what a frame is a part of.
    pub(crate) fn bytes_of(&self, header: &FrameHeader) -> u64 {
        match header.kind {
            FrameKind::RingScale => self.plan.scale_bytes(header.slice).unwrap_or(0),
            _ => self.plan.bytes_as(header.slice, header.form),
        }
    }

    /// The form of a sum with this rank's gradient, by what came.
    pub(crate) fn form_of(&self, slice: SliceId, received: Contribution) -> PayloadForm {
        match received {
            Contribution::Buffer(_) => PayloadForm::Raw,
            Contribution::Encoded(_) => PayloadForm::Encoded,
            Contribution::Own | Contribution::Absent => self.own_form(slice),
        }
    }

    /// Whether the rank before sent a slice in another way than this rank would.
    pub(crate) fn is_mixed(
        &self,
        slice: SliceId,
        state: &RoundSlice,
        received: Contribution,
    ) -> bool {
        let scales_first = self.adds_codes(slice) && !state.scaled;
        let expected = if scales_first { FrameKind::RingScale } else { FrameKind::RingReduce };
        let other_form =
            !self.has_nothing(slice) && self.form_of(slice, received) != self.own_form(slice);
        state.kind != expected || other_form
    }

    pub(crate) fn abort_mixed(&mut self, slice: SliceId, step: Step) {
        let name = &self.plan.tensor(self.plan.slice(slice).tensor).spec.name;
        let reason = format!(
            "the rank before this one in the ring sent {name:?} in {step} encoded and this one has it \
             as it is, or the other way: all ranks have to do the same"
        );
        self.abort(&reason);
    }

    /// The gradient with which a sum begins takes its turn to be encoded.
    pub(crate) fn encode_first_round(&mut self, slice: SliceId, step: Step) {
        let priority = self.priorities.priority(step, self.plan.slice(slice).tensor);
        let key = self.slice_key(step, priority, slice);
        let next = self.next_round();
        self.encodes.push(next, key, PendingEncode { slice, step });
    }

    /// It is encoded: from now on its gradient memory may be written.
    pub(crate) fn encoded_round(
        &mut self,
        waiting: PendingEncode,
        key: OrderKey,
        output: BufferRef,
    ) {
        let PendingEncode { slice, step } = waiting;
        self.worker.slice_mut(slice).push_sent = true;
        let next = self.next_round();
        self.encodes.note_encoded(waiting, key, next, output);
        let from = Some((output.whole(), PayloadForm::Encoded));
        self.send_round(FrameKind::RingReduce, slice, step, from);
        self.install_if_open(slice);
    }

    /// What came needs nothing done here: this rank has no gradient, and decoding and encoding again
    /// would only lose something.
    pub(crate) fn passes_on(&mut self, slice: SliceId, received: Contribution) -> bool {
        let Contribution::Encoded(buffer) = received else {
            return false;
        };
        let is_last = self.plan.slice(slice).owner == self.rank();
        if is_last || !self.has_nothing(slice) || self.adds_codes(slice) {
            return false;
        }
        self.worker.slice_mut(slice).push_sent = true;
        let step = self.worker.step;
        let from = Some((buffer.whole(), PayloadForm::Encoded));
        self.send_round(FrameKind::RingReduce, slice, step, from);
        true
    }

    /// One hop of an encoded sum; on the owner, the mean, which goes into place in the same pass.
    pub(crate) fn start_encoded_round(
        &mut self,
        slice: SliceId,
        step: Step,
        received: Contribution,
    ) -> Job {
        let own = (!self.has_nothing(slice)).then(|| self.gradient_region(slice));
        let is_last = self.plan.slice(slice).owner == self.rank();
        if is_last {
            // The gradient is read by this job alone, which may also write there.
            self.worker.slice_mut(slice).push_sent = true;
        }
        let copy_to = if is_last { self.open_region(slice) } else { None };
        let came = received.buffer();
        let (operation, output, spent) = match came {
            Some(sums) if self.adds_codes(slice) => {
                (Operation::RingAddCodes { sums: sums.whole(), own, copy_to }, sums, None)
            }
            _ => {
                let output = self.buffers.acquire(self.plan.bytes_as(slice, PayloadForm::Encoded));
                let operation = Operation::RingEncode {
                    received: came.map(BufferRef::whole),
                    own,
                    divisor: if is_last { self.plan.workers() } else { 1 },
                    output: output.whole(),
                    copy_to,
                };
                (operation, output, came)
            }
        };
        let running = Running::AddRound { slice, step, output, spent, encoded: true };
        self.hand_out(slice, step, operation, running)
    }

    /// This rank's contribution to a slice whose scales go round first.
    pub(crate) fn contribute_scales(&mut self, slice: SliceId) {
        let begins = self.scales_begin(slice) == self.rank();
        let state = &mut self.ring.slices[slice.index()];
        state.contributed = true;
        if begins && matches!(state.received, Received::Nothing) {
            (state.received, state.kind) =
                (Received::Whole(Contribution::Absent), FrameKind::RingScale);
        }
        self.add_when_both(slice);
    }

    /// Scales of the ranks before are here, and so is this rank's gradient, if it has one.
    pub(crate) fn scales_when_both(&mut self, slice: SliceId, step: Step, received: Contribution) {
        let nothing = self.has_nothing(slice);
        let priority = self.priorities.priority(step, self.plan.slice(slice).tensor);
        let key = self.slice_key(step, priority, slice);
        if self.sum_begins(slice) == self.rank() {
            self.ring.slices[slice.index()] = RoundSlice::new(step.next());
            if nothing && received == Contribution::Absent {
                self.send_round(FrameKind::RingReduce, slice, step, None);
            } else {
                self.jobs.push(key, Pending::BeginRound { slice, step, received });
            }
            return;
        }
        let state = &mut self.ring.slices[slice.index()];
        (state.received, state.scaled) = (Received::Nothing, true);
        if nothing {
            self.send_scales(slice, step, received.buffer());
        } else {
            self.jobs.push(key, Pending::ScaleRound { slice, step, received });
        }
    }

    /// Makes scales the larger of what came and this rank's.
    pub(crate) fn start_scales(
        &mut self,
        slice: SliceId,
        step: Step,
        received: Contribution,
    ) -> Job {
        let came = received.buffer();
        let bytes = self.plan.scale_bytes(slice).expect("a slice whose scales go round");
        let output = came.unwrap_or_else(|| self.buffers.acquire(bytes));
        let operation = Operation::RingMaxScales {
            received: came.map(BufferRef::whole),
            own: self.gradient_region(slice),
            output: output.whole(),
        };
        self.hand_out(slice, step, operation, Running::ScaleRound { slice, step, output })
    }

    /// Scales go on to the next rank.
    pub(crate) fn send_scales(&mut self, slice: SliceId, step: Step, scales: Option<BufferRef>) {
        let from = scales.map(|buffer| (buffer.whole(), PayloadForm::Encoded));
        self.send_round(FrameKind::RingScale, slice, step, from);
    }

    /// Begins a sum of codes: this rank knows the scales of all.
    pub(crate) fn start_codes(
        &mut self,
        slice: SliceId,
        step: Step,
        received: Contribution,
    ) -> Job {
        let own = (!self.has_nothing(slice)).then(|| self.gradient_region(slice));
        let spent = received.buffer();
        let output = self.buffers.acquire(self.plan.bytes_as(slice, PayloadForm::Encoded));
        let scales = spent.map(BufferRef::whole);
        let operation = Operation::RingBeginCodes { scales, own, output: output.whole() };
        let running = Running::AddRound { slice, step, output, spent, encoded: true };
        self.hand_out(slice, step, operation, running)
    }

    /// Scales come before sums, and what comes in several frames in one form.
    pub(crate) fn check_lap(&self, header: &FrameHeader) -> Validated<()> {
        let what = || self.describe(header);
        let state = &self.ring.slices[header.slice.index()];
        let is_scales = header.kind == FrameKind::RingScale;
        if is_scales && state.scaled {
            return Err(format!("{} a second time", what()));
        }
        let shares = self.plan.scale_bytes(header.slice).is_some();
        if !is_scales && shares && header.form == PayloadForm::Encoded && !state.scaled {
            return Err(format!("{} before its scales had this rank's", what()));
        }
        let absent = header.flags.contains(FrameFlags::ABSENT);
        if !is_scales && state.scaled && absent && !self.has_nothing(header.slice) {
            return Err(format!("{} with nothing, though this rank has a gradient", what()));
        }
        if state.is_arriving_unlike(header) {
            return Err(format!("{} as {:?} after another", what(), header.form));
        }
        Ok(())
    }
}
