//! Pushes of ranks that a step went on without: they land in buffers and are dropped.

use crate::api::PayloadDest;
use crate::contribution::Arriving;
use crate::cx::Cx;
use crate::violation::{violation, Validated};
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, Step};
use gradlane_wire::{FrameFlags, FrameHeader};

#[derive(Debug, Default)]
pub(super) struct DroppedPushes {
    /// By slice and sender.
    arriving: BTreeMap<(SliceId, Rank), (Step, Arriving)>,
}

impl DroppedPushes {
    pub(super) fn expect(&mut self, slice: SliceId, step: Step, arriving: Vec<(Rank, Arriving)>) {
        for (rank, arriving) in arriving {
            self.arriving.insert((slice, rank), (step, arriving));
        }
    }

    /// Where the payload of a late push goes; a push that counts is no late one.
    pub(super) fn land(
        &mut self,
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
        counts: bool,
    ) -> Validated<PayloadDest> {
        let what = || cx.describe(header);
        let key = (header.slice, from);
        let other = self.arriving.get(&key).copied();
        let under_way = other.filter(|(step, _)| *step == header.step).map(|(_, it)| it);
        let arrived = under_way.map_or(0, |arriving| arriving.received_bytes);
        if counts || arrived != header.offset {
            let offset = header.offset;
            return violation(format!("{} at offset {offset} after {arrived} bytes", what()));
        }
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        let bytes = cx.plan().bytes_as(header.slice, header.form);
        let buffer = match under_way {
            Some(arriving) if arriving.buffer.bytes != bytes => {
                return violation(format!("{} in another form than before", what()));
            }
            Some(arriving) => arriving.buffer,
            None if other.is_some() => {
                return violation(format!("{} in the middle of another push", what()));
            }
            None => {
                let arriving = Arriving { buffer: cx.acquire(bytes), received_bytes: 0 };
                self.arriving.insert(key, (header.step, arriving));
                arriving.buffer
            }
        };
        Ok(PayloadDest::Region(buffer.whole().part(header.offset, header.length)))
    }

    /// Takes a frame of a late push; with the last one the push is dropped.
    pub(super) fn take(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) {
        let key = (header.slice, from);
        if let Some((_, arriving)) = self.arriving.get_mut(&key) {
            arriving.received_bytes += u64::from(header.length);
            if header.flags.contains(FrameFlags::LAST) {
                let buffer = arriving.buffer;
                self.arriving.remove(&key);
                cx.release(buffer);
            }
        }
    }
}
