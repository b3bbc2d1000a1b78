//! Results of steps that this rank's worker has not come to: they wait in buffers until it begins them.

use crate::api::{BufferRef, PayloadDest};
use crate::cx::Cx;
use crate::violation::{violation, Validated};
use crate::worker::EarlyResult;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, Step};
use gradlane_wire::{FrameFlags, FrameHeader, PayloadForm};

#[derive(Debug, Default)]
pub(super) struct EarlyResults {
    results: BTreeMap<(Step, SliceId), EarlyResult>,
}

/// Whether a result is of a step that this rank has not come to.
pub(in crate::ps) fn is_early(cx: &Cx, step: Step) -> bool {
    cx.plan().drops_stragglers(step) && step > cx.step()
}

impl EarlyResults {
    /// A step has begun: hands its results to the worker.
    pub(super) fn begin(&mut self, cx: &mut Cx, step: Step) {
        let here: Vec<(SliceId, EarlyResult)> = cx
            .plan()
            .slice_ids()
            .filter_map(|slice| Some((slice, self.results.remove(&(step, slice))?)))
            .collect();
        for (slice, early) in here {
            cx.take_early(slice, &early);
        }
    }

    /// Where the payload of an early result goes.
    pub(super) fn land(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<PayloadDest> {
        let current = cx.step();
        let furthest = cx.plan().strategy.synchrony.stragglers().map_or(0, |it| it.ahead_steps);
        let known = self.results.get(&(header.step, header.slice)).copied();
        let arrived = known.map_or(0, |early| early.received_bytes);
        let is_over = known.is_some_and(|early| early.is_whole);
        let is_other = known.is_some_and(|early| early.form != header.form);
        // Another lane of this rank may have begun the next step already.
        let lag = u32::from(cx.plan().other_lanes > 0);
        let too_far = header.step.0 > current.0 + u64::from(furthest + lag);
        if too_far || is_over || is_other || arrived != header.offset || from == cx.rank() {
            let (what, offset) = (cx.describe(header), header.offset);
            return violation(format!(
                "{what} at offset {offset} after {arrived} bytes; this rank is in {current}"
            ));
        }
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        let buffer = match known.and_then(|early| early.buffer) {
            Some(buffer) => buffer,
            None => cx.acquire(cx.plan().bytes_as(header.slice, header.form)),
        };
        let early = EarlyResult {
            buffer: Some(buffer),
            form: header.form,
            received_bytes: arrived,
            is_whole: false,
            has_value: true,
        };
        self.results.insert((header.step, header.slice), early);
        Ok(PayloadDest::Region(buffer.whole().part(header.offset, header.length)))
    }

    /// Takes a frame of an early result.
    pub(super) fn take(&mut self, header: &FrameHeader) {
        let has_value = !header.flags.contains(FrameFlags::ABSENT);
        let form = header.form;
        let early = self.results.entry((header.step, header.slice)).or_insert(EarlyResult {
            buffer: None,
            form,
            received_bytes: 0,
            is_whole: false,
            has_value,
        });
        early.received_bytes += u64::from(header.length);
        early.is_whole = header.flags.contains(FrameFlags::LAST);
        if let Some(buffer) = early.buffer.as_mut().filter(|_| early.is_whole) {
            buffer.bytes = early.received_bytes;
        }
    }

    /// Keeps this rank's own result.
    pub(super) fn keep(
        &mut self,
        cx: &mut Cx,
        slice: SliceId,
        step: Step,
        buffer: Option<BufferRef>,
        form: PayloadForm,
    ) {
        if let Some(buffer) = buffer {
            cx.retain(buffer);
        }
        let received_bytes = buffer.map_or(0, |buffer| buffer.bytes);
        let has_value = buffer.is_some();
        let early = EarlyResult { buffer, form, received_bytes, is_whole: true, has_value };
        self.results.insert((step, slice), early);
    }
}
