//! The ring: a slice's sum grows from rank to rank, and its mean goes round once more.
//!
//! The sum of a slice begins on the rank after its owner with that rank's gradient, gets one more
//! contribution at each hop, and ends on the owner, which divides by N; the mean then goes from the
//! owner to all others in N - 1 more hops. A slice is passed on whole; since the slices begin on
//! different ranks, all links carry as much, at the same time. The additions are
//! `((g[o+1] + g[o+2]) + …) + g[o]`, indices modulo N and o the owner: rank order, turned. In step 0 the
//! values start from rank 0, and nothing is added.
//!
//! A sum may also be encoded (`quantized`): each hop decodes, adds and encodes, or codes are added up
//! as integers after a lap of scales. The mean goes round as the owner encoded it.
//!
//! Slices are passed on from buffers, so that no rank reads a tensor that is ready; only a rank whose
//! gradient begins a sum sends from gradient memory. So a gradient is whole until its mean is: when
//! ranks are lost and training goes on, servers add up anew what has no mean (`session::interrupted_step`). A
//! frame is believed only from the rank before this one, at the hop at which this rank gets its slice.

mod quantized;
mod scales;
mod slice;

use crate::aggregator::Aggregator;
use crate::api::{violation, BufferRef, Job, Memory, Operation, PayloadDest, Region, Validated};
use crate::cx::Cx;
use crate::jobs::{Arriving, Contribution, Done, RingTask, RingWritten, Running, Then, Written};
use crate::plan::{Plan, Scheme};
use crate::rank_set::RankSet;
use crate::transmit::{Body, Message, OrderKey, PendingEncode};
use crate::worker::Arrived;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use alloc::{format, vec};
use gradlane_units::{Rank, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};
use slice::{
    adds_codes, bytes_of, ends_here, form_of, on_last, own_gradient, topology, Received, RingSlice,
    Topology,
};

#[derive(Debug)]
pub(crate) struct Ring {
    /// By slice; empty where no tensor goes round.
    slices: Vec<RingSlice>,
    /// Buffers whose last frame is not yet with the kernel.
    sending: BTreeMap<(SliceId, Step, FrameKind), BufferRef>,
}

impl Ring {
    pub(crate) fn new(plan: &Plan) -> Ring {
        let used = plan.tensors.iter().any(|tensor| tensor.scheme == Scheme::Ring);
        let slices = if used { plan.slices.len() } else { 0 };
        Ring { slices: vec![RingSlice::new(Step(1)); slices], sending: BTreeMap::new() }
    }

    /// Goes on as if this step were complete.
    pub(crate) fn fast_forward(&mut self, step: Step) {
        self.slices.iter_mut().for_each(|slice| slice.step = step.next());
    }

    /// Starts a job that the driver has asked for.
    pub(crate) fn start(&mut self, cx: &mut Cx, slice: SliceId, step: Step, task: RingTask) -> Job {
        match task {
            RingTask::AddSum(received) if form_of(cx, slice, received) == PayloadForm::Encoded => {
                quantized::start_sum(cx, slice, step, received)
            }
            RingTask::AddSum(received) => start_sum(cx, slice, step, received),
            RingTask::MaxScales(received) => quantized::start_scales(cx, slice, step, received),
            RingTask::BeginCodes(received) => quantized::start_codes(cx, slice, step, received),
        }
    }

    /// The driver has done a job.
    pub(crate) fn job_done(&mut self, cx: &mut Cx, done: Done, written: RingWritten) {
        match written {
            RingWritten::Sum(form) => self.sum_done(cx, done, form),
            RingWritten::Scales => self.send_scales(cx, done.slice, done.step, Some(done.output)),
        }
    }
}

impl Aggregator for Ring {
    fn takes(&self, kind: FrameKind) -> bool {
        kind.is_ring()
    }

    /// Begins sums, or adds to those that are here.
    fn contribute(&mut self, cx: &mut Cx, tensor: TensorId) {
        let step = cx.step();
        let topology = topology(cx);
        for slice in cx.plan().slices_of(tensor) {
            if step.is_initial() || topology.ranks == 1 {
                self.contribute_values(cx, slice, step);
            } else if adds_codes(cx, slice) {
                self.contribute_scales(cx, slice);
            } else if topology.sum_begins(cx.plan(), slice) == cx.rank() {
                self.begin_sum(cx, slice, step);
            } else {
                self.slices[slice.index()].contributed = true;
                self.add_when_both(cx, slice);
            }
        }
    }

    /// The sender is the neighbour, and the hop is this rank's.
    fn check(&self, cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<()> {
        let what = || cx.describe(header);
        let topology = topology(cx);
        let before = topology.before();
        if from != before {
            return violation(format!("{}, but {before} is before this rank in the ring", what()));
        }
        if header.kind != FrameKind::RingBroadcast && header.step.is_initial() {
            return violation(format!("{}, in which nothing is added", what()));
        }
        let begins = topology.begins(cx.plan(), header.kind, header.slice, header.step);
        let (found, right) = (header.hop, topology.hops_from(begins));
        if right == 0 {
            return violation(format!("{} at hop {found}, which begins on this rank", what()));
        }
        if found != right {
            let text = format!("{} at hop {found}, this rank gets it at hop {right}", what());
            return violation(text);
        }
        let has_body = !header.flags.contains(FrameFlags::ABSENT);
        cx.check_form(header, has_body)?;
        let is_scales = header.kind == FrameKind::RingScale;
        let shares = cx.plan().scale_bytes(header.slice).is_some() && !header.step.is_initial();
        let encoded = header.form == PayloadForm::Encoded;
        if is_scales && !(shares && encoded == has_body) {
            return violation(format!("{}, whose ranks share no scales", what()));
        }
        let bytes = if has_body { bytes_of(cx.plan(), header) } else { 0 };
        cx.check_extent(header, bytes)
    }

    fn land(&mut self, cx: &mut Cx, _from: Rank, header: &FrameHeader) -> Validated<PayloadDest> {
        match header.kind {
            FrameKind::RingBroadcast => self.land_result(cx, header),
            _ => self.land_sum(cx, header),
        }
    }

    fn take(&mut self, cx: &mut Cx, _from: Rank, header: &FrameHeader) {
        match header.kind {
            FrameKind::RingBroadcast => self.take_result(cx, header),
            _ => self.take_sum(cx, header),
        }
    }

    fn read(&mut self, cx: &mut Cx, _to: Rank, header: &FrameHeader) {
        let FrameHeader { kind, slice, step, .. } = *header;
        if kind == FrameKind::RingReduce {
            // Makes room for the next one to be encoded.
            cx.encoded_sent(slice, step);
        }
        if let Some(buffer) = self.sending.remove(&(slice, step, kind)) {
            cx.release(buffer);
        } else if step != cx.step() {
            // Word that there is nothing was passed on; the slice is done.
        } else if kind == FrameKind::RingReduce {
            cx.push_sent(slice);
        } else if step.is_initial() && ends_here(cx, slice, step) {
            cx.slice_done(slice, !header.flags.contains(FrameFlags::ABSENT));
        }
    }

    /// The gradient with which a sum begins is encoded.
    fn encoded(&mut self, cx: &mut Cx, pending: PendingEncode, key: OrderKey, output: BufferRef) {
        let PendingEncode { slice, step } = pending;
        cx.mark_push_sent(slice);
        cx.note_encoded(pending, key, topology(cx).next(), output);
        cx.retain(output);
        let from = Some((output.whole(), PayloadForm::Encoded));
        self.send(cx, FrameKind::RingReduce, slice, step, from);
        cx.install_if_open(slice);
    }

    /// Ranks whose missing contribution would explain most of the missing slices. A rank sees its
    /// neighbour only: of a sum that does not come any rank between its beginning and this one
    /// may be missing, of a result any between this one and the owner. Sums of different slices
    /// begin on different ranks, so one rank that is missing is the only one in all of these.
    fn missing(&self, cx: &Cx) -> RankSet {
        let step = cx.step();
        let topology = topology(cx);
        let (own, size) = (cx.rank().0, topology.ranks);
        let mut votes = vec![0_u32; size as usize];
        for (slice, state) in (0..).map(SliceId).zip(&self.slices) {
            let tensor = cx.plan().slice(slice).tensor;
            let is_ring = cx.plan().tensor(tensor).scheme == Scheme::Ring;
            if !is_ring || cx.worker().is_done(slice) || !cx.plan().takes_part(tensor, step) {
                continue;
            }
            let sum_begins = topology.sum_begins(cx.plan(), slice).0;
            let (first, end) = match step.is_initial() {
                true if own > 0 => (0, 1),
                true => (1, 2),
                // The sum waits for ranks that have not passed on this rank's scales.
                false if state.step == step && state.scaled => (own + 1, sum_begins + 1),
                false if state.step == step && adds_codes(cx, slice) => {
                    (topology.scales_begin(cx.plan(), slice).0, own)
                }
                false if state.step == step => (sum_begins, own),
                false => (own + 1, cx.plan().slice(slice).owner.0 + 1),
            };
            let count = (end % size + size - first % size) % size;
            (0..count).for_each(|hop| votes[((first + hop) % size) as usize] += 1);
        }
        let most = votes.iter().copied().max().unwrap_or(0);
        let mut missing = RankSet::empty(size);
        let named = (0..).map(Rank).zip(votes).filter(|&(_, count)| count == most && most > 0);
        named.filter(|&(rank, _)| rank != cx.rank()).for_each(|(rank, _)| {
            missing.insert(rank);
        });
        missing
    }
}

/// Sums.
impl Ring {
    /// Where nothing is added: rank 0's values in step 0, and a rank alone.
    fn contribute_values(&mut self, cx: &mut Cx, slice: SliceId, step: Step) {
        let own = own_gradient(cx, slice);
        if topology(cx).ranks == 1 {
            cx.mark_push_sent(slice);
            cx.slice_done(slice, own.is_some());
        } else if cx.rank() == Rank(0) && own.is_some() && cx.keeps_results() {
            // They are sent from a copy, which stays for ranks that may lack them.
            cx.queue_job(slice, step, RingTask::AddSum(Contribution::Absent));
        } else if cx.rank() == Rank(0) {
            // The slice is ready when its values have left.
            let own = own.map(|region| (region, PayloadForm::Raw));
            self.send(cx, FrameKind::RingBroadcast, slice, step, own);
        } else {
            cx.push_sent(slice);
        }
    }

    /// This rank's gradient begins a sum.
    fn begin_sum(&mut self, cx: &mut Cx, slice: SliceId, step: Step) {
        self.slices[slice.index()].step = step.next();
        let own = own_gradient(cx, slice);
        if own.is_some() && cx.own_form(slice) == PayloadForm::Encoded {
            let priority = cx.priority(step, slice);
            let key = cx.slice_key(step, priority, slice);
            return cx.queue_encode(topology(cx).next(), key, PendingEncode { slice, step });
        }
        let own = own.map(|region| (region, PayloadForm::Raw));
        self.send(cx, FrameKind::RingReduce, slice, step, own);
    }

    /// Adds this rank's contribution to a sum, or passes on that there is nothing.
    fn add_when_both(&mut self, cx: &mut Cx, slice: SliceId) {
        let state = self.slices[slice.index()];
        let (true, Received::Whole(received)) = (state.contributed, state.received) else {
            return;
        };
        let step = state.step;
        debug_assert_eq!(step, cx.step(), "a rank adds in the step that it is in");
        if self.is_mixed(cx, slice, received) {
            let name = cx.plan().name_of(slice);
            return cx.abort(format!(
                "the rank before this one in the ring sent {name:?} in {step} encoded and this one \
                 has it as it is, or the other way: all ranks have to do the same"
            ));
        }
        if state.kind == FrameKind::RingScale {
            return self.scales_when_both(cx, slice, step, received);
        }
        self.slices[slice.index()] = RingSlice::new(step.next());
        if self.passes_on(cx, slice, step, received) {
            return;
        }
        if received != Contribution::Absent || !cx.worker().has_nothing(cx.plan(), slice) {
            return cx.queue_job(slice, step, RingTask::AddSum(received));
        }
        cx.mark_push_sent(slice);
        if ends_here(cx, slice, step) {
            self.send(cx, FrameKind::RingBroadcast, slice, step, None);
            cx.slice_done(slice, false);
        } else {
            self.send(cx, FrameKind::RingReduce, slice, step, None);
        }
    }

    /// Whether the rank before sent a slice in another way than this rank would.
    fn is_mixed(&self, cx: &Cx, slice: SliceId, received: Contribution) -> bool {
        let state = &self.slices[slice.index()];
        let scales_first = adds_codes(cx, slice) && !state.scaled;
        let expected = if scales_first { FrameKind::RingScale } else { FrameKind::RingReduce };
        let other_form = !cx.worker().has_nothing(cx.plan(), slice)
            && form_of(cx, slice, received) != cx.own_form(slice);
        state.kind != expected || other_form
    }

    /// Passes on an encoded sum as it is, if this rank has no gradient: decoding and encoding again
    /// would only lose precision. Returns whether it did.
    fn passes_on(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        step: Step,
        received: Contribution,
    ) -> bool {
        let Contribution::Encoded(buffer) = received else {
            return false;
        };
        let nothing = cx.worker().has_nothing(cx.plan(), slice);
        if ends_here(cx, slice, step) || !nothing || adds_codes(cx, slice) {
            return false;
        }
        cx.mark_push_sent(slice);
        let from = Some((buffer.whole(), PayloadForm::Encoded));
        self.send(cx, FrameKind::RingReduce, slice, step, from);
        true
    }

    /// A sum has this rank's contribution: it goes on, or, on the owner, the mean goes out.
    fn sum_done(&mut self, cx: &mut Cx, done: Done, form: PayloadForm) {
        let Done { slice, step, output } = done;
        let kind = if ends_here(cx, slice, step) {
            cx.keep_result(slice, output, form);
            cx.slice_done(slice, true);
            FrameKind::RingBroadcast
        } else {
            cx.mark_push_sent(slice);
            FrameKind::RingReduce
        };
        self.send(cx, kind, slice, step, Some((output.whole(), form)));
    }

    /// Sends a slice to the next rank, or word that there is nothing of it.
    fn send(
        &mut self,
        cx: &mut Cx,
        kind: FrameKind,
        slice: SliceId,
        step: Step,
        from: Option<(Region, PayloadForm)>,
    ) {
        let topology = topology(cx);
        let priority = cx.priority(step, slice);
        let mut header = cx.slice_header(kind, step, slice, priority);
        header.hop = topology.hops_from(topology.begins(cx.plan(), kind, slice, step)) + 1;
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
            self.sending.insert((slice, step, kind), buffer);
        }
        let key = match kind {
            FrameKind::RingBroadcast => cx.result_key(step, priority, slice),
            _ => cx.slice_key(step, priority, slice),
        };
        cx.send(topology.next(), key, Message { header, body });
    }

    fn land_sum(&mut self, cx: &mut Cx, header: &FrameHeader) -> Validated<PayloadDest> {
        let what = || cx.describe(header);
        let state = &mut self.slices[header.slice.index()];
        quantized::check_lap(cx, state, header)?;
        if state.step != header.step {
            return violation(format!("{}, but this rank adds to {}", what(), state.step));
        }
        let arriving = match state.received {
            Received::Nothing => None,
            Received::Arriving(arriving) => Some(arriving),
            Received::Whole(_) => return violation(format!("{} a second time", what())),
        };
        let arrived = arriving.map_or(0, |it| it.received_bytes);
        if arrived != header.offset {
            let offset = header.offset;
            return violation(format!("{} at offset {offset} after {arrived} bytes", what()));
        }
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        let bytes = bytes_of(cx.plan(), header);
        let arriving =
            arriving.unwrap_or_else(|| Arriving { buffer: cx.acquire(bytes), received_bytes: 0 });
        state.received = Received::Arriving(arriving);
        (state.kind, state.form) = (header.kind, header.form);
        Ok(PayloadDest::Region(arriving.buffer.whole().part(header.offset, header.length)))
    }

    fn take_sum(&mut self, cx: &mut Cx, header: &FrameHeader) {
        let state = &mut self.slices[header.slice.index()];
        if let Received::Arriving(arriving) = &mut state.received {
            arriving.received_bytes += u64::from(header.length);
        }
        if !header.flags.contains(FrameFlags::LAST) {
            return;
        }
        state.kind = header.kind;
        state.received = Received::Whole(match state.received {
            Received::Arriving(arriving) => Contribution::arrived(arriving, header.form),
            _ => Contribution::Absent,
        });
        self.add_when_both(cx, header.slice);
    }
}

/// The addition of one hop; on the owner, the mean, which goes into place in the same pass.
fn start_sum(cx: &mut Cx, slice: SliceId, step: Step, received: Contribution) -> Job {
    let own = own_gradient(cx, slice);
    let (buffer, sum) = match received {
        Contribution::Buffer(buffer) => (buffer, Some(buffer.whole())),
        _ => (cx.acquire(cx.plan().slice_bytes(slice)), None),
    };
    let mut inputs: Vec<Region> = sum.into_iter().chain(own).collect();
    let topology = topology(cx);
    let begins = topology.sum_begins(cx.plan(), slice);
    if topology.hops_from(begins) == 1 && cx.rank() < begins {
        // Of the first two gradients that of the lower rank is first, as on a server.
        inputs.reverse();
    }
    let last = on_last(cx, slice, step);
    let operation = Operation::Reduce {
        absent: inputs.len() < 2 && !step.is_initial(),
        inputs,
        divisor: last.divisor,
        output: buffer.whole(),
        copy_to: last.copy_to,
    };
    let then = Then::Wrote(buffer, Written::Ring(RingWritten::Sum(PayloadForm::Raw)));
    cx.start(operation, Running { slice, step, spent: Vec::new(), then })
}

/// Results.
impl Ring {
    fn land_result(&mut self, cx: &mut Cx, header: &FrameHeader) -> Validated<PayloadDest> {
        let what = || cx.describe(header);
        let FrameHeader { slice, step, .. } = *header;
        let current = cx.step();
        if step != current {
            return violation(format!("{}, but this rank is in {current}", what()));
        }
        if !step.is_initial() && self.slices[slice.index()].step == step {
            return violation(format!("{} without a contribution of this rank", what()));
        }
        cx.worker().check_result(header, what)?;
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        let goes_on = goes_on(cx, slice, step);
        Ok(PayloadDest::Region(cx.place_result(header, goes_on)))
    }

    fn take_result(&mut self, cx: &mut Cx, header: &FrameHeader) {
        let FrameHeader { slice, step, .. } = *header;
        let goes_on = goes_on(cx, slice, step);
        match cx.receive_result(header) {
            Arrived::Part => {}
            Arrived::Buffered(buffer, form) => {
                if goes_on {
                    cx.retain(buffer);
                    let from = Some((buffer.whole(), form));
                    self.send(cx, FrameKind::RingBroadcast, slice, step, from);
                }
                cx.install_if_open(slice);
            }
            Arrived::InPlace => cx.slice_done(slice, true),
            Arrived::Empty => {
                if goes_on {
                    self.send(cx, FrameKind::RingBroadcast, slice, step, None);
                }
                cx.slice_done(slice, false);
            }
        }
    }
}

/// Whether a result goes on from this rank.
fn goes_on(cx: &Cx, slice: SliceId, step: Step) -> bool {
    topology(cx).next() != Topology::result_begins(cx.plan(), slice, step)
}
