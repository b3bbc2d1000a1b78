//! One slice of the current step: how far its result is on this rank. Every transition is here.

use crate::api::BufferRef;
use gradlane_wire::{FrameFlags, FrameHeader, PayloadForm};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// Nothing has arrived.
    #[default]
    Waiting,
    /// Arriving in the tensor's memory.
    Receiving,
    /// Arriving in scratch.
    Buffering(BufferRef),
    /// Whole in scratch; the tensor's memory is not open.
    Buffered(BufferRef),
    /// Whole, without bytes, before this rank's own push was sent.
    Empty { has_value: bool },
    /// Being copied from scratch into the tensor's memory.
    Installing,
    /// In place, or known not to exist.
    Done,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    phase: Phase,
    /// Bytes of the result that have arrived.
    received_bytes: u64,
    /// Whether this rank's own push, if it owes one, is with the kernel or encoded.
    push_sent: bool,
    /// The form of the result, once it is known.
    form: Option<PayloadForm>,
}

/// The effect of a frame of a result.
pub(crate) enum Arrived {
    /// More of it is to come.
    Part,
    /// It is whole, in a buffer.
    Buffered(BufferRef, PayloadForm),
    /// It is whole, in the tensor's memory.
    InPlace,
    /// It is whole, without bytes.
    Empty,
}

/// The next action on a result that waits.
pub(crate) enum Install {
    Nothing,
    /// Copy this buffer into the tensor's memory.
    Copy(BufferRef),
    /// There are no bytes to copy.
    Finish {
        has_value: bool,
    },
}

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

impl Slot {
    pub(super) fn is_done(&self) -> bool {
        self.phase == Phase::Done
    }

    pub(super) fn is_whole(&self) -> bool {
        matches!(self.phase, Phase::Done | Phase::Buffered(_) | Phase::Installing)
    }

    pub(super) fn push_sent(&self) -> bool {
        self.push_sent
    }

    pub(super) fn form(&self) -> Option<PayloadForm> {
        self.form
    }

    pub(super) fn received_bytes(&self) -> u64 {
        self.received_bytes
    }

    /// Whether bytes from this offset on are the next ones.
    pub(super) fn accepts(&self, offset: u64) -> bool {
        let arrives = matches!(self.phase, Phase::Waiting | Phase::Receiving | Phase::Buffering(_));
        arrives && self.received_bytes == offset
    }

    /// Chooses where a result that begins to arrive goes; the buffer, where it goes into one.
    pub(super) fn place(
        &mut self,
        form: PayloadForm,
        in_place: bool,
        acquire: impl FnOnce() -> BufferRef,
    ) -> Option<BufferRef> {
        if self.phase == Phase::Waiting {
            self.phase = if in_place { Phase::Receiving } else { Phase::Buffering(acquire()) };
            self.form = Some(form);
        }
        match self.phase {
            Phase::Buffering(buffer) => Some(buffer),
            _ => None,
        }
    }

    pub(super) fn receive(&mut self, header: &FrameHeader) -> Arrived {
        self.received_bytes += u64::from(header.length);
        if !header.flags.contains(FrameFlags::LAST) {
            return Arrived::Part;
        }
        match self.phase {
            Phase::Buffering(buffer) => {
                let buffer = BufferRef { bytes: self.received_bytes, ..buffer };
                self.phase = Phase::Buffered(buffer);
                Arrived::Buffered(buffer, self.form.unwrap_or(header.form))
            }
            Phase::Receiving => Arrived::InPlace,
            _ => Arrived::Empty,
        }
    }

    pub(super) fn hold(&mut self, buffer: BufferRef, form: PayloadForm) {
        self.phase = Phase::Buffered(buffer);
        self.form = Some(form);
    }

    pub(super) fn hold_empty(&mut self, has_value: bool) {
        self.phase = Phase::Empty { has_value };
    }

    pub(super) fn take_early(&mut self, early: &EarlyResult) -> bool {
        self.received_bytes = early.received_bytes;
        self.form = Some(early.form);
        match early.buffer {
            Some(buffer) if early.is_whole => self.phase = Phase::Buffered(buffer),
            Some(buffer) => self.phase = Phase::Buffering(buffer),
            None => return false,
        }
        true
    }

    pub(super) fn mark_push_sent(&mut self) {
        self.push_sent = true;
    }

    pub(super) fn install(&mut self, is_open: bool) -> Install {
        match self.phase {
            Phase::Buffered(buffer) if is_open => {
                self.phase = Phase::Installing;
                Install::Copy(buffer)
            }
            Phase::Empty { has_value } if self.push_sent => Install::Finish { has_value },
            _ => Install::Nothing,
        }
    }

    pub(super) fn finish(&mut self) {
        self.phase = Phase::Done;
    }
}
