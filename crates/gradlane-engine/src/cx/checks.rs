//! Checks of every frame about a slice, whatever the scheme: the slice, its step, its priorities, the form and the
//! extent of the payload. Every field is checked against the plan and the state before a byte of the payload is
//! accepted; a frame that does not fit is a typed error that names peer, tensor and bytes, and changes nothing.

use super::Cx;
use crate::violation::{violation, Validated};
use alloc::format;
use gradlane_units::Rank;
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

impl Cx {
    /// Checks the sender and the generation of any frame.
    pub(crate) fn check_sender(&self, from: Rank, header: &FrameHeader) -> Validated<()> {
        if header.sender != from {
            return violation(format!("a frame in the name of {}", header.sender));
        }
        if header.generation != self.generation {
            let (found, own) = (header.generation, self.generation);
            return violation(format!("a frame of generation {found}, this rank is in {own}"));
        }
        Ok(())
    }

    /// Whether a rank may send a result after its goodbye.
    pub(crate) fn serves_to_the_end(&self, header: &FrameHeader, from: Rank) -> bool {
        let sends_again =
            header.step == self.step() && self.sources.get(&header.slice) == Some(&from);
        header.kind == FrameKind::Broadcast && (self.plan.is_async(header.step) || sends_again)
    }

    /// Checks that a frame is about a slice of the plan, in a step and under priorities that it may
    /// come in, and that its sender may send it to this rank.
    pub(crate) fn check_slice(&self, from: Rank, header: &FrameHeader) -> Validated<()> {
        let Some(slice) = self.plan.slices.get(header.slice.index()) else {
            let count = self.plan.slices.len();
            return violation(format!("{}, but there are {count} slices", header.slice));
        };
        if slice.tensor != header.tensor {
            let (found, right) = (header.tensor, slice.tensor);
            return violation(format!("{} as part of {found}; it is of {right}", header.slice));
        }
        if !self.plan.takes_part(slice.tensor, header.step) {
            let what = self.describe(header);
            return violation(format!("{what}, a tensor that is not trained"));
        }
        self.check_version(header)?;
        if !self.may_send(header.kind, from) {
            let (what, own) = (self.describe(header), self.rank);
            return violation(format!("{what} from {from} to {own}, of which one only serves"));
        }
        Ok(())
    }

    /// Checks the version of the priorities that a frame about a slice was sent under.
    fn check_version(&self, header: &FrameHeader) -> Validated<()> {
        let version = self.priorities.version(header.step);
        let independent = self.plan.switches_independently() && !header.step.is_initial();
        if header.plan_version == version || independent {
            return Ok(());
        }
        let found = header.plan_version;
        let what = self.describe(header);
        violation(format!("{what} under plan version {found}, this rank has {version}"))
    }

    /// Whether a frame of this kind may go from one rank to another: dedicated servers push, pull and
    /// pass on nothing, and get no results.
    fn may_send(&self, kind: FrameKind, from: Rank) -> bool {
        let (sender, receiver) = (self.plan.trains(from), !self.is_dedicated_server());
        match kind {
            FrameKind::Push | FrameKind::Pull => sender,
            FrameKind::Broadcast | FrameKind::Notify => receiver,
            _ => sender && receiver,
        }
    }

    /// Checks that only a payload that may be encoded is.
    pub(crate) fn check_form(&self, header: &FrameHeader, has_body: bool) -> Validated<()> {
        let FrameHeader { kind, slice, step, .. } = *header;
        let may_be_encoded = has_body && self.plan.may_be_encoded(kind, slice, step);
        if header.form == PayloadForm::Encoded && !may_be_encoded {
            return violation(format!("{} as encoded bytes", self.describe(header)));
        }
        Ok(())
    }

    /// Checks that a frame's bytes lie within a message of at most this many, and that the last one
    /// says so.
    pub(crate) fn check_extent(&self, header: &FrameHeader, bytes: u64) -> Validated<()> {
        // Where encodings differ in length, the last frame says how long this one is.
        let varies = header.kind != FrameKind::RingScale
            && header.form == PayloadForm::Encoded
            && self.plan.codec(header.slice).is_some_and(|codec| !codec.fixed);
        let end = header.offset.checked_add(u64::from(header.length));
        let last = header.flags.contains(FrameFlags::LAST);
        let fits = end.is_some_and(|end| end <= bytes && (varies || last == (end == bytes)));
        let moves = header.length > 0 || last;
        if fits && moves {
            return Ok(());
        }
        violation(format!(
            "{} with {} bytes at offset {} of {bytes}, last: {last}",
            self.describe(header),
            header.length,
            header.offset
        ))
    }
}
