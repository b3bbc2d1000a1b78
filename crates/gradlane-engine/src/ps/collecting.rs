//! Contributions to owned slices: where pushes land, and the reduction of all that count.

use super::async_owner::lacks_initial;
use super::owner::ReductionInput;
use super::ParameterServer;
use crate::api::{BufferRef, Job, Operation, PayloadDest, Region};
use crate::contribution::Contribution;
use crate::cx::Cx;
use crate::jobs::{Done, PsTask, PsWritten, Running, Then, Written};
use crate::plan::Synchrony;
use crate::violation::{violation, Validated};
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step};
use gradlane_wire::{FrameFlags, FrameHeader, PayloadForm};

/// Pushes.
impl ParameterServer {
    pub(super) fn land_push(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<PayloadDest> {
        if self.owner.is_late(cx.plan(), header) {
            return self.stragglers.land_late_push(cx, from, header);
        }
        self.commands.check_push(cx, from, header)?;
        let contributes = self.contributes(cx, from, header.step);
        let expected = self.expected_step(cx, from, header)?;
        let has_body = !header.flags.contains(FrameFlags::ABSENT);
        let what = || cx.describe(header);
        // A push that is applied alone is like no other.
        let is_async = cx.plan().is_async(header.step);
        let owned = self.owner.get_mut(header.slice).ok_or("not owned")?;
        if expected != header.step || owned.is_reducing() || !contributes {
            let state = if owned.is_reducing() { "reduces" } else { "collects for" };
            return violation(format!("{}, but this rank {state} {expected}", what()));
        }
        let arrived = owned.contributions().received_bytes(from);
        if owned.contributions().has(from) || arrived != header.offset {
            let offset = header.offset;
            return violation(format!("{} at offset {offset} after {arrived} bytes", what()));
        }
        if has_body && !is_async && !owned.accepts_form(header.form) {
            let form = header.form;
            return violation(format!("{} as {form:?}, unlike other contributions", what()));
        }
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        let bytes = cx.plan().bytes_as(header.slice, header.form);
        let buffer = owned.contributions_mut().landing(from, || cx.acquire(bytes));
        Ok(PayloadDest::Region(buffer.whole().part(header.offset, header.length)))
    }

    /// The step that a push of this rank may be for now.
    fn expected_step(&self, cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<Step> {
        let owned = self.owner.get(header.slice).ok_or("not owned")?;
        let absent = header.flags.contains(FrameFlags::ABSENT);
        if lacks_initial(cx.plan(), header.step, from, absent) {
            return violation(format!("{} without a value to start from", cx.describe(header)));
        }
        if !cx.plan().is_async(owned.step()) {
            return Ok(owned.step());
        }
        let expected = self.async_owners.expected(header.slice, from);
        expected.or_else(|reason| violation(format!("{}: {}", cx.describe(header), reason.0)))
    }

    pub(super) fn take_push(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) {
        if self.owner.is_late(cx.plan(), header) {
            return self.stragglers.take_late_push(cx, from, header);
        }
        let contributions = self.owner.owned(header.slice).contributions_mut();
        contributions.receive(from, header.length);
        if header.flags.contains(FrameFlags::LAST) {
            let whole = match contributions.take_arrived(from) {
                Some(arriving) => Contribution::arrived(arriving, header.form),
                None => Contribution::Absent,
            };
            self.add_contribution(cx, header.slice, from, whole, header.priority);
        }
    }
}

/// Reductions.
impl ParameterServer {
    /// A rank's contribution to an owned slice is whole.
    pub(super) fn add_contribution(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        rank: Rank,
        contribution: Contribution,
        priority: Priority,
    ) {
        let owned = self.owner.owned(slice);
        let step = owned.step();
        if cx.plan().is_async(step) {
            return self.async_owners.push(cx, slice, rank, contribution, priority);
        }
        if !owned.add(rank, contribution, priority) {
            let name = cx.plan().name_of(slice);
            return cx.abort(format!(
                "some ranks sent {name:?} encoded in {step} and others as it is: all ranks have to \
                 do the same"
            ));
        }
        if cx.plan().drops_stragglers(step) {
            self.reduce_if_decided(cx, slice);
        } else if let Some(all) = owned.take_all(cx.plan().contributors(step) as usize) {
            self.reduce(cx, slice, all);
        }
    }

    /// Reduces a slice once its contributors are known and all of them have contributed.
    pub(super) fn reduce_if_decided(&mut self, cx: &mut Cx, slice: SliceId) {
        let owned = self.owner.owned(slice);
        let step = owned.step();
        let Some(mut all) = self.stragglers.set(step).and_then(|set| owned.take_decided(set))
        else {
            return;
        };
        self.stragglers.expect_late_pushes(slice, step, core::mem::take(&mut all.arriving));
        for (_, dropped) in core::mem::take(&mut all.dropped) {
            if let Some(buffer) = dropped.buffer() {
                cx.release(buffer);
            }
        }
        self.reduce(cx, slice, all);
    }

    /// All contributions to a slice that count are here.
    fn reduce(&mut self, cx: &mut Cx, slice: SliceId, all: ReductionInput) {
        let ReductionInput { step, priority, counted, .. } = all;
        // The mean over one rank is its gradient, which is in place already, unless it is encoded. In a step
        // whose contributions travel raw the driver may put state in the place of the mean.
        let is_result = cx.others().is_empty()
            && counted.iter().all(|&(_, it)| it.form() != Some(PayloadForm::Encoded))
            && !cx.worker().sends_raw()
            && !cx.plan().updates_on_server(step, cx.plan().slice(slice).tensor)
            && cx.plan().strategy.synchrony != Synchrony::Async;
        if counted.iter().all(|&(_, it)| it == Contribution::Absent) {
            self.deliver(cx, slice, step, None, PayloadForm::Raw, false);
        } else if is_result {
            self.deliver(cx, slice, step, None, PayloadForm::Raw, true);
        } else {
            cx.queue_job_at(priority, slice, step, PsTask::Reduce(counted));
        }
    }

    /// Starts a job that the driver has asked for.
    pub(crate) fn start(&mut self, cx: &mut Cx, slice: SliceId, step: Step, task: PsTask) -> Job {
        match task {
            PsTask::Reduce(counted) => {
                let parameters = self.commands.parameters(cx, slice);
                start_reduce(cx, (slice, step), &counted, parameters)
            }
            PsTask::Apply(push) => self.async_owners.start(cx, slice, push),
        }
    }

    /// The driver has done a job.
    pub(crate) fn job_done(&mut self, cx: &mut Cx, done: Done, written: PsWritten) {
        let Done { slice, step, output } = done;
        match written {
            PsWritten::Result { form, in_place } => {
                self.deliver(cx, slice, step, Some(output), form, in_place);
            }
            PsWritten::State(push) => self.async_owners.applied(cx, slice, push, output),
        }
    }
}

/// The reduction of contributions: raw ones are added up into one of their buffers, encoded ones are
/// decoded, added up and encoded into another. With updates on the server the mean is applied.
fn start_reduce(
    cx: &mut Cx,
    (slice, step): (SliceId, Step),
    counted: &[(Rank, Contribution)],
    parameters: Region,
) -> Job {
    let region = |&(_, it): &(Rank, Contribution)| match it {
        Contribution::Own => Some(cx.gradient_region(slice)),
        Contribution::Buffer(buffer) | Contribution::Encoded(buffer) => Some(buffer.whole()),
        Contribution::Absent => None,
    };
    let inputs: Vec<Region> = counted.iter().filter_map(region).collect();
    let (absent, divisor) = (inputs.len() < counted.len(), counted.len() as u32);
    let mut spent: Vec<BufferRef> = counted.iter().filter_map(|(_, it)| it.buffer()).collect();
    let encoded = counted.iter().any(|(_, it)| it.form() == Some(PayloadForm::Encoded));
    let apply = cx.plan().updates_on_server(step, cx.plan().slice(slice).tensor);
    let form = if encoded && !apply { PayloadForm::Encoded } else { PayloadForm::Raw };
    cx.forget_kept(slice);
    let reused = !encoded && !spent.is_empty();
    let buffer = if reused { spent.remove(0) } else { cx.acquire(cx.plan().bytes_as(slice, form)) };
    let output = buffer.whole();
    let is_current = step == cx.step();
    let copy_to = cx.open_region(slice).filter(|_| is_current && !apply);
    let written = PsWritten::Result { form, in_place: copy_to.is_some() };
    let operation = match (encoded, apply) {
        (false, false) => Operation::Reduce { inputs, absent, divisor, output, copy_to },
        (false, true) => Operation::ReduceApply { inputs, absent, divisor, parameters, output },
        (true, false) => Operation::DecodeReduceEncode { inputs, absent, divisor, output, copy_to },
        (true, true) => {
            Operation::DecodeReduceApply { inputs, absent, divisor, parameters, output }
        }
    };
    let then = Then::Wrote(buffer, Written::Ps(written));
    cx.start(operation, Running { slice, step, spent, then })
}
