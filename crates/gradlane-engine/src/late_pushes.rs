//! What comes at another time than a step's own, under the synchrony `BackupWorkers`: pushes of ranks that a step
//! went on without, which land in buffers and are dropped, and results of steps that this rank's
//! worker has not come to, which wait in buffers until it begins them.

use crate::contribution_set::Arriving;
use crate::engine::Engine;
use crate::io::{BufferRef, Memory, PayloadDest};
use crate::receive::{range, Validated};
use alloc::format;
use gradlane_units::{Rank, SliceId, Step};
use gradlane_wire::{FrameFlags, FrameHeader, PayloadForm};

/// A result of a step that this rank's worker has not come to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EarlyResult {
    /// None where no rank had a gradient, or of an empty slice.
    pub(crate) buffer: Option<BufferRef>,
    pub(crate) form: PayloadForm,
    pub(crate) received_bytes: u64,
    pub(crate) is_whole: bool,
    pub(crate) has_value: bool,
}

impl Engine {
    /// Whether a push is one that nobody waits for any more.
    fn is_late(&self, header: &FrameHeader) -> bool {
        let owned = self.server.owned.get(&header.slice);
        self.drops_stragglers(header.step)
            && owned
                .is_some_and(|it| header.step < it.step || (header.step == it.step && it.reducing))
    }

    /// Where a push that is late goes; none for others.
    pub(crate) fn land_late(
        &mut self,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<Option<PayloadDest>> {
        if !self.is_late(header) {
            return Ok(None);
        }
        let key = (header.slice, from);
        let bytes = self.plan.bytes_as(header.slice, header.form);
        let was_in = self.contributors.set(header.step).is_some_and(|set| set.contains(from));
        let under_way = self.contributors.late.get(&key).filter(|(step, _)| *step == header.step);
        let arrived = under_way.map_or(0, |(_, arriving)| arriving.received_bytes);
        if was_in || arrived != header.offset {
            let what = self.describe(header);
            return Err(format!("{what} at offset {} after {arrived} bytes", header.offset));
        }
        if header.length == 0 {
            return Ok(Some(PayloadDest::Nothing));
        }
        let buffer = match under_way {
            Some((_, arriving)) if arriving.buffer.bytes != bytes => {
                return Err(format!("{} in another form than before", self.describe(header)));
            }
            Some((_, arriving)) => arriving.buffer,
            None if self.contributors.late.contains_key(&key) => {
                return Err(format!("{} in the middle of another push", self.describe(header)));
            }
            None => {
                let arriving = Arriving { buffer: self.buffers.acquire(bytes), received_bytes: 0 };
                self.contributors.late.insert(key, (header.step, arriving));
                arriving.buffer
            }
        };
        Ok(Some(PayloadDest::Region(range(Memory::Buffer(buffer), header.offset, header.length))))
    }

    /// A frame of a push has arrived; true where it was late, and is dropped.
    pub(crate) fn take_late(&mut self, from: Rank, header: &FrameHeader) -> bool {
        if !self.is_late(header) {
            return false;
        }
        let key = (header.slice, from);
        if let Some((_, arriving)) = self.contributors.late.get_mut(&key) {
            arriving.received_bytes += u64::from(header.length);
            if header.flags.contains(FrameFlags::LAST) {
                let buffer = arriving.buffer;
                self.contributors.late.remove(&key);
                self.buffers.release(buffer, &mut self.events);
            }
        }
        true
    }

    /// Whether a result is of a step that this rank has not come to.
    fn is_ahead(&self, step: Step) -> bool {
        self.drops_stragglers(step) && step > self.worker.step
    }

    /// Where a result goes whose step this rank has not come to; none for others.
    pub(crate) fn land_ahead(
        &mut self,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<Option<PayloadDest>> {
        if !self.is_ahead(header.step) {
            return Ok(None);
        }
        let furthest = self.plan.strategy.synchrony.stragglers().map_or(0, |rule| rule.ahead_steps);
        let known = self.contributors.ahead.get(&(header.step, header.slice));
        let arrived = known.map_or(0, |ahead| ahead.received_bytes);
        let is_over = known.is_some_and(|ahead| ahead.is_whole);
        let is_other = known.is_some_and(|ahead| ahead.form != header.form);
        let too_far = header.step.0 > self.worker.step.0 + u64::from(furthest);
        if too_far || is_over || is_other || arrived != header.offset || from == self.rank() {
            return Err(format!(
                "{} at offset {} after {arrived} bytes; this rank is in {}",
                self.describe(header),
                header.offset,
                self.worker.step
            ));
        }
        if header.length == 0 {
            return Ok(Some(PayloadDest::Nothing));
        }
        let buffer = match known.and_then(|ahead| ahead.buffer) {
            Some(buffer) => buffer,
            None => self.buffers.acquire(self.plan.bytes_as(header.slice, header.form)),
        };
        let ahead = EarlyResult {
            buffer: Some(buffer),
            form: header.form,
            received_bytes: arrived,
            is_whole: false,
            has_value: true,
        };
        self.contributors.ahead.insert((header.step, header.slice), ahead);
        Ok(Some(PayloadDest::Region(range(Memory::Buffer(buffer), header.offset, header.length))))
    }

    /// A frame of a result has arrived; true where its step is still to come.
    pub(crate) fn take_ahead(&mut self, header: &FrameHeader) -> bool {
        if !self.is_ahead(header.step) {
            return false;
        }
        let has_value = !header.flags.contains(FrameFlags::ABSENT);
        let form = header.form;
        let nothing =
            EarlyResult { buffer: None, form, received_bytes: 0, is_whole: false, has_value };
        let key = (header.step, header.slice);
        let ahead = self.contributors.ahead.entry(key).or_insert(nothing);
        ahead.received_bytes += u64::from(header.length);
        ahead.is_whole = header.flags.contains(FrameFlags::LAST);
        if let Some(buffer) = ahead.buffer.as_mut().filter(|_| ahead.is_whole) {
            buffer.bytes = ahead.received_bytes;
        }
        true
    }

    /// This rank's own result of a step that its worker has not come to; false for others.
    pub(crate) fn keep_ahead(
        &mut self,
        slice: SliceId,
        step: Step,
        buffer: Option<BufferRef>,
        form: PayloadForm,
    ) -> bool {
        if !self.is_ahead(step) {
            return false;
        }
        if let Some(buffer) = buffer {
            self.buffers.retain(buffer);
        }
        let received_bytes = buffer.map_or(0, |buffer| buffer.bytes);
        let has_value = buffer.is_some();
        let ahead = EarlyResult { buffer, form, received_bytes, is_whole: true, has_value };
        self.contributors.ahead.insert((step, slice), ahead);
        true
    }
}
