//! The ring: a slice's sum grows from rank to rank, and its mean goes round once more.
//!
//! Rank r hears from r - 1 and speaks to r + 1 alone. The sum of a slice begins on the rank after
//! its owner with that rank's gradient, gets one more contribution at each hop, and ends on the owner,
//! which divides by N; the mean then goes from the owner to all others in N - 1 more hops. A slice is
//! passed on whole; since the slices begin on different ranks, all links carry as much, at the
//! same time. The additions are `((g[o+1] + g[o+2]) + …) + g[o]`, indices modulo N and o the
//! owner: rank order, turned. In step 0 the values start from rank 0, and nothing is added.
//!
//! A sum may also be encoded (`ring_encoded`): then each hop decodes, adds and encodes, or codes are added up as
//! integers after a lap of scales. The mean goes round as the owner encoded it.
//!
//! What goes on is sent from a buffer, so that a tensor that is ready is read by nobody; only a rank
//! whose gradient begins a sum sends that from gradient memory. A frame is believed only from the rank
//! before this one, at the hop at which this rank gets its slice.

use crate::contribution_set::Arriving;
use crate::engine::Engine;
use crate::io::{BufferRef, Job, Memory, Operation, PayloadDest, Region};
use crate::jobs::{Pending, Running};
use crate::plan::Plan;
use crate::receive::{range, Validated};
use crate::scheduler::{Body, Message};
use crate::scheme::Scheme;
use crate::server::Contribution;
use crate::worker::{Phase, Submission};
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

/// The sum of a slice as it comes from the rank before.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Received {
    /// Nothing has come.
    #[default]
    Nothing,
    /// Some of it has.
    Arriving(Arriving),
    /// All of it, or that no rank before had a gradient.
    Whole(Contribution),
}

/// A slice on its way to its owner, as this rank sees it.
#[derive(Clone, Debug)]
pub(crate) struct RoundSlice {
    /// The first step whose sum this rank has not added to. A sum of it may come while this rank
    /// is still in the step before.
    pub(crate) step: Step,
    pub(crate) received: Received,
    /// Of what was received, or is arriving: sums, or scales.
    pub(crate) kind: FrameKind,
    /// Of what is arriving.
    form: PayloadForm,
    /// Whether this rank's own contribution to that step is there.
    pub(crate) contributed: bool,
    /// Whether that step's scales have this rank's, where scales go round first.
    pub(crate) scaled: bool,
}

impl RoundSlice {
    pub(crate) fn new(step: Step) -> RoundSlice {
        let received = Received::Nothing;
        let (kind, form) = (FrameKind::RingReduce, PayloadForm::Raw);
        RoundSlice { step, received, kind, form, contributed: false, scaled: false }
    }

    /// Whether a frame cannot go on with what is arriving.
    pub(crate) fn is_arriving_unlike(&self, header: &FrameHeader) -> bool {
        let arriving = matches!(self.received, Received::Arriving(_));
        arriving && (self.kind, self.form) != (header.kind, header.form)
    }
}

/// This rank's place in the ring.
#[derive(Debug)]
pub(crate) struct Ring {
    /// By slice; empty where no tensor goes round.
    pub(crate) slices: Vec<RoundSlice>,
    /// Buffers whose last frame is not yet with the kernel.
    sending: BTreeMap<(SliceId, Step, FrameKind), BufferRef>,
}

impl Ring {
    pub(crate) fn new(plan: &Plan) -> Ring {
        let used = plan.tensors.iter().any(|tensor| tensor.scheme == Scheme::Ring);
        let slices = if used { plan.slices.len() } else { 0 };
        Ring { slices: vec![RoundSlice::new(Step(1)); slices], sending: BTreeMap::new() }
    }
}

impl Engine {
    pub(crate) fn next_round(&self) -> Rank {
        Rank((self.rank().0 + 1) % self.plan.workers())
    }

    /// The rank on which a slice's sum begins: the one after its owner.
    pub(crate) fn sum_begins(&self, slice: SliceId) -> Rank {
        Rank((self.plan.slice(slice).owner.0 + 1) % self.plan.workers())
    }

    /// The rank from which a slice's result goes out: its owner, or rank 0 in step 0.
    pub(crate) fn result_begins(&self, slice: SliceId, step: Step) -> Rank {
        if step.0 == 0 {
            Rank(0)
        } else {
            self.plan.slice(slice).owner
        }
    }

    /// Hops from a rank to this one.
    pub(crate) fn hops_from(&self, rank: Rank) -> u16 {
        let size = u64::from(self.plan.workers());
        ((u64::from(self.rank().0) + size - u64::from(rank.0)) % size) as u16
    }

    /// A tensor's contribution of this rank is there: begins sums, or adds to those that are here.
    pub(crate) fn contribute_round(&mut self, tensor: TensorId) {
        let step = self.worker.step;
        for slice in self.plan.slices_of(tensor) {
            if step.0 == 0 || self.plan.workers() == 1 {
                self.contribute_values(slice, step);
            } else if self.adds_codes(slice) {
                self.contribute_scales(slice);
            } else if self.sum_begins(slice) == self.rank() {
                self.ring.slices[slice.index()].step = step.next();
                if self.own_form(slice) == PayloadForm::Encoded && !self.has_nothing(slice) {
                    self.encode_first_round(slice, step);
                    continue;
                }
                let own = (!self.has_nothing(slice)).then(|| self.gradient_region(slice));
                let own = own.map(|region| (region, PayloadForm::Raw));
                self.send_round(FrameKind::RingReduce, slice, step, own);
            } else {
                self.ring.slices[slice.index()].contributed = true;
                self.add_when_both(slice);
            }
        }
    }

    /// Whether this rank has no gradient for a slice in the current step, or the slice no elements.
    pub(crate) fn has_nothing(&self, slice: SliceId) -> bool {
        let Submission::Absent = self.worker.tensor(self.plan.slice(slice).tensor).submission
        else {
            return self.plan.slice_bytes(slice) == 0;
        };
        true
    }

    /// Where nothing is added: rank 0's values in step 0, and a rank alone.
    fn contribute_values(&mut self, slice: SliceId, step: Step) {
        let absent = self.has_nothing(slice);
        if self.plan.workers() == 1 {
            self.worker.slice_mut(slice).push_sent = true;
            self.slice_done(slice, !absent);
        } else if self.rank() == Rank(0) {
            // The slice is ready when its values have left.
            let own = (!absent).then(|| (self.gradient_region(slice), PayloadForm::Raw));
            self.send_round(FrameKind::RingBroadcast, slice, step, own);
        } else {
            self.worker.slice_mut(slice).push_sent = true;
            self.install_if_open(slice);
        }
    }

    /// The rank from which frames of a kind about a slice go out.
    fn begins(&self, kind: FrameKind, slice: SliceId, step: Step) -> Rank {
        match kind {
            FrameKind::RingScale => self.scales_begin(slice),
            FrameKind::RingReduce => self.sum_begins(slice),
            _ => self.result_begins(slice, step),
        }
    }

    /// Sends a slice to the next rank, or that there is nothing of it.
    pub(crate) fn send_round(
        &mut self,
        kind: FrameKind,
        slice: SliceId,
        step: Step,
        from: Option<(Region, PayloadForm)>,
    ) {
        let priority = self.priorities.priority(step, self.plan.slice(slice).tensor);
        let mut header = self.slice_header(kind, step, slice, priority);
        header.hop = self.hops_from(self.begins(kind, slice, step)) + 1;
        let body = match from {
            Some((region, form)) => {
                header.form = form;
                Body::Region(region)
            }
            None => {
                header.flags = FrameFlags::ABSENT;
                Body::Empty
            }
        };
        if let Some((Region { memory: Memory::Buffer(buffer), .. }, _)) = from {
            self.ring.sending.insert((slice, step, kind), buffer);
        }
        let key = self.slice_key(step, priority, slice);
        let next = self.next_round();
        self.scheduler.push(next, key, Message { header, body });
    }

    /// The last frame of what was sent on is with the kernel.
    pub(crate) fn sent_round(&mut self, header: &FrameHeader) {
        let FrameHeader { kind, slice, step, .. } = *header;
        if kind == FrameKind::RingReduce {
            // Makes room for the next one to be encoded; the buffer is the one that is sent.
            let _ = self.encodes.note_sent(slice, step);
        }
        if let Some(buffer) = self.ring.sending.remove(&(slice, step, kind)) {
            self.buffers.release(buffer, &mut self.events);
        } else if step != self.worker.step {
            // That there is nothing was passed on; the slice is done.
        } else if kind == FrameKind::RingReduce {
            self.worker.slice_mut(slice).push_sent = true;
            self.install_if_open(slice);
        } else if self.result_begins(slice, step) == self.rank() && step.0 == 0 {
            self.slice_done(slice, !header.flags.contains(FrameFlags::ABSENT));
        }
    }

    /// Adds this rank's contribution to a sum, or passes on that there is nothing.
    pub(crate) fn add_when_both(&mut self, slice: SliceId) {
        let state = self.ring.slices[slice.index()].clone();
        let (true, Received::Whole(received)) = (state.contributed, state.received) else {
            return;
        };
        let step = state.step;
        debug_assert_eq!(step, self.worker.step, "a rank adds in the step that it is in");
        if self.is_mixed(slice, &state, received) {
            self.abort_mixed(slice, step);
            return;
        }
        if state.kind == FrameKind::RingScale {
            self.scales_when_both(slice, step, received);
            return;
        }
        self.ring.slices[slice.index()] = RoundSlice::new(step.next());
        if self.passes_on(slice, received) {
            return;
        }
        if received != Contribution::Absent || !self.has_nothing(slice) {
            let priority = self.priorities.priority(step, self.plan.slice(slice).tensor);
            let key = self.slice_key(step, priority, slice);
            self.jobs.push(key, Pending::AddRound { slice, step, received });
            return;
        }
        self.worker.slice_mut(slice).push_sent = true;
        if self.plan.slice(slice).owner == self.rank() {
            self.send_round(FrameKind::RingBroadcast, slice, step, None);
            self.slice_done(slice, false);
        } else {
            self.send_round(FrameKind::RingReduce, slice, step, None);
        }
    }

    /// The addition of one hop; on the owner, the mean, which goes into place in the same pass.
    pub(crate) fn start_round(
        &mut self,
        slice: SliceId,
        step: Step,
        received: Contribution,
    ) -> Job {
        if self.form_of(slice, received) == PayloadForm::Encoded {
            return self.start_encoded_round(slice, step, received);
        }
        let own = (!self.has_nothing(slice)).then(|| self.gradient_region(slice));
        let (output, sum) = match received {
            Contribution::Buffer(buffer) => (buffer, Some(buffer.whole())),
            _ => (self.buffers.acquire(self.plan.slice_bytes(slice)), None),
        };
        let mut inputs: Vec<Region> = sum.into_iter().chain(own).collect();
        let begins = self.sum_begins(slice);
        if self.hops_from(begins) == 1 && self.rank() < begins {
            // Of the first two gradients that of the lower rank is first, as on a server.
            inputs.reverse();
        }
        let is_last = self.plan.slice(slice).owner == self.rank();
        if is_last {
            // The gradient is read by this job alone, which may also write there.
            self.worker.slice_mut(slice).push_sent = true;
        }
        let operation = Operation::Reduce {
            absent: inputs.len() < 2,
            inputs,
            divisor: if is_last { self.plan.workers() } else { 1 },
            output: output.whole(),
            copy_to: if is_last { self.open_region(slice) } else { None },
        };
        let running = Running::AddRound { slice, step, output, spent: None, encoded: false };
        self.hand_out(slice, step, operation, running)
    }

    /// A sum has this rank's contribution: it goes on, or, on the owner, the mean goes out.
    pub(crate) fn ring_sum_done(
        &mut self,
        slice: SliceId,
        step: Step,
        output: BufferRef,
        form: PayloadForm,
    ) {
        let kind = if self.plan.slice(slice).owner == self.rank() {
            self.slice_done(slice, true);
            FrameKind::RingBroadcast
        } else {
            self.worker.slice_mut(slice).push_sent = true;
            FrameKind::RingReduce
        };
        self.send_round(kind, slice, step, Some((output.whole(), form)));
    }

    /// What a frame round the ring must satisfy: the neighbour and the hop.
    pub(crate) fn check_round(&self, from: Rank, header: &FrameHeader) -> Validated<()> {
        let what = || self.describe(header);
        let size = self.plan.workers();
        let before = Rank((self.rank().0 + size - 1) % size);
        if from != before {
            return Err(format!("{}, but {before} is before this rank in the ring", what()));
        }
        if header.kind != FrameKind::RingBroadcast && header.step.0 == 0 {
            return Err(format!("{}, in which nothing is added", what()));
        }
        let begins = self.begins(header.kind, header.slice, header.step);
        let (found, right) = (header.hop, self.hops_from(begins));
        if right == 0 {
            return Err(format!("{} at hop {found}, which begins on this rank", what()));
        }
        if found != right {
            return Err(format!("{} at hop {found}, this rank gets it at hop {right}", what()));
        }
        Ok(())
    }

    pub(crate) fn land_round(&mut self, header: &FrameHeader) -> Validated<PayloadDest> {
        let what = self.describe(header);
        let bytes = self.bytes_of(header);
        self.check_lap(header)?;
        let state = &mut self.ring.slices[header.slice.index()];
        if state.step != header.step {
            return Err(format!("{what}, but this rank adds to {}", state.step));
        }
        let arrived = match state.received {
            Received::Nothing => 0,
            Received::Arriving(arriving) => arriving.received_bytes,
            Received::Whole(_) => return Err(format!("{what} a second time")),
        };
        if arrived != header.offset {
            return Err(format!("{what} at offset {} after {arrived} bytes", header.offset));
        }
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        let arriving = match state.received {
            Received::Arriving(arriving) => arriving,
            _ => Arriving { buffer: self.buffers.acquire(bytes), received_bytes: 0 },
        };
        state.received = Received::Arriving(arriving);
        (state.kind, state.form) = (header.kind, header.form);
        Ok(PayloadDest::Region(range(
            Memory::Buffer(arriving.buffer),
            header.offset,
            header.length,
        )))
    }

    pub(crate) fn take_round(&mut self, header: &FrameHeader) {
        let state = &mut self.ring.slices[header.slice.index()];
        if let Received::Arriving(arriving) = &mut state.received {
            arriving.received_bytes += u64::from(header.length);
        }
        if !header.flags.contains(FrameFlags::LAST) {
            return;
        }
        state.kind = header.kind;
        state.received = Received::Whole(match state.received {
            Received::Arriving(Arriving { buffer, received_bytes: bytes }) => match header.form {
                PayloadForm::Raw => Contribution::Buffer(buffer),
                PayloadForm::Encoded => Contribution::Encoded(BufferRef { bytes, ..buffer }),
            },
            _ => Contribution::Absent,
        });
        self.add_when_both(header.slice);
    }

    pub(crate) fn land_result_round(&mut self, header: &FrameHeader) -> Validated<PayloadDest> {
        let (what, slice) = (self.describe(header), header.slice);
        if header.step != self.worker.step {
            return Err(format!("{what}, but this rank is in {}", self.worker.step));
        }
        let adds = header.step.0 > 0 && self.ring.slices[slice.index()].step == header.step;
        if adds {
            return Err(format!("{what} without a contribution of this rank"));
        }
        let state = *self.worker.slice(slice);
        let fresh = matches!(state.phase, Phase::Waiting | Phase::Receiving | Phase::Buffering(_));
        if !fresh || state.received_bytes != header.offset {
            let arrived = state.received_bytes;
            return Err(format!("{what} at offset {} after {arrived} bytes", header.offset));
        }
        if state.phase != Phase::Waiting && state.form != header.form {
            return Err(format!("{what} as {:?} after {:?}", header.form, state.form));
        }
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        if self.goes_on(slice, header.step) && state.phase == Phase::Waiting {
            let buffer = self.buffers.acquire(self.plan.bytes_as(slice, header.form));
            let state = self.worker.slice_mut(slice);
            (state.phase, state.form) = (Phase::Buffering(buffer), header.form);
        }
        Ok(PayloadDest::Region(self.place_broadcast(header)))
    }

    /// Whether a result goes on from this rank.
    fn goes_on(&self, slice: SliceId, step: Step) -> bool {
        self.next_round() != self.result_begins(slice, step)
    }

    pub(crate) fn take_result_round(&mut self, header: &FrameHeader) {
        let FrameHeader { slice, step, .. } = *header;
        let goes_on = self.goes_on(slice, step);
        let state = self.worker.slice_mut(slice);
        state.received_bytes += u64::from(header.length);
        if !header.flags.contains(FrameFlags::LAST) {
            return;
        }
        match state.phase {
            Phase::Buffering(buffer) => {
                let buffer = BufferRef { bytes: state.received_bytes, ..buffer };
                state.phase = Phase::Buffered(buffer);
                let form = state.form;
                if goes_on {
                    self.buffers.retain(buffer);
                    let from = Some((buffer.whole(), form));
                    self.send_round(FrameKind::RingBroadcast, slice, step, from);
                }
                self.install_if_open(slice);
            }
            Phase::Receiving => self.slice_done(slice, true),
            _ => {
                if goes_on {
                    self.send_round(FrameKind::RingBroadcast, slice, step, None);
                }
                self.slice_done(slice, false);
            }
        }
    }

    /// Ranks whose missing contribution would explain most of what does not come round. A rank sees
    /// its neighbour only: of a sum that does not come any rank between its beginning and this one
    /// may be missing, of a result any between this one and the owner. Sums of different slices
    /// begin on different ranks, so one rank that is missing is the only one in all of these.
    pub(crate) fn suspects_round(&self) -> Vec<Rank> {
        let step = self.worker.step;
        let size = self.plan.workers();
        let mut votes = vec![0_u32; size as usize];
        for (index, state) in self.ring.slices.iter().enumerate() {
            let slice = SliceId(index as u32);
            let tensor = self.plan.slice(slice).tensor;
            let is_round = self.plan.tensor(tensor).scheme == Scheme::Ring;
            let done = self.worker.slice(slice).phase == Phase::Done;
            if !is_round || done || !self.plan.takes_part(tensor, step) {
                continue;
            }
            let own = self.rank().0;
            let (first, end) = match step.0 {
                0 if own > 0 => (0, 1),
                0 => (1, 2),
                // The sum waits for what has not had this rank's scales yet.
                _ if state.step == step && state.scaled => (own + 1, self.sum_begins(slice).0 + 1),
                _ if state.step == step && self.adds_codes(slice) => {
                    (self.scales_begin(slice).0, own)
                }
                _ if state.step == step => (self.sum_begins(slice).0, own),
                _ => (own + 1, self.plan.slice(slice).owner.0 + 1),
            };
            let count = (end % size + size - first % size) % size;
            (0..count).for_each(|hop| votes[((first + hop) % size) as usize] += 1);
        }
        let most = votes.iter().copied().max().unwrap_or(0);
        let named = votes.iter().enumerate().filter(|&(_, &count)| count == most && most > 0);
        named.map(|(rank, _)| Rank(rank as u32)).filter(|&rank| rank != self.rank()).collect()
    }
}
