//! Frames from one peer, between its connection and the engine.

use super::core::Core;
use super::frame_sink::{Fault, FrameSink, PayloadTarget};
use crate::memory::WriteSpan;
use gradlane_engine::{PayloadDest, ProtocolError};
use gradlane_units::Rank;
use gradlane_wire::{FrameHeader, FrameKind};

/// The frames that one connection receives.
pub(super) struct ReceivedFrames<'a> {
    pub(super) core: &'a mut Core,
    pub(super) peer: Rank,
    pub(super) heard_goodbye: &'a mut bool,
}

fn violation(error: &ProtocolError) -> Fault {
    Fault::ProtocolViolation(format!("broke the protocol: {}", error.what))
}

impl FrameSink for ReceivedFrames<'_> {
    fn on_header(&mut self, header: &FrameHeader) -> Result<PayloadTarget, Fault> {
        self.core.inbox().trace.announced(self.peer);
        let dest = self.core.engine.handle_header(self.peer, header);
        let located = match dest.map_err(|error| violation(&error))? {
            PayloadDest::Control => return Ok(PayloadTarget::Control),
            PayloadDest::Nothing => return Ok(PayloadTarget::Memory(WriteSpan::empty())),
            PayloadDest::Region(region) => self.core.memory.locate(region),
        };
        match located {
            // SAFETY: the engine lends this region to this frame until `handle_frame`, or until the
            // session ends; the reader drops the borrow before either.
            Ok(span) => Ok(PayloadTarget::Memory(unsafe { span.write() })),
            Err(error) => {
                let frame = self.describe(header);
                Err(Fault::Internal(format!("cannot receive {frame}: {error}")))
            }
        }
    }

    fn on_frame(&mut self, header: &FrameHeader, control: Option<&[u8]>) -> Result<(), Fault> {
        self.core.inbox().trace.received(self.peer, header);
        *self.heard_goodbye |= header.kind == FrameKind::Goodbye;
        self.core.frame_arrived(self.peer, header, control).map_err(|error| violation(&error))
    }

    fn describe(&self, header: &FrameHeader) -> String {
        let plan = self.core.engine.plan();
        let name = plan.tensors.get(header.tensor.index()).map_or("", |it| it.spec.name.as_str());
        let FrameHeader { kind, slice, step, offset, length, .. } = header;
        let end = offset.saturating_add(u64::from(*length));
        format!("{kind:?} of tensor {name:?}, {slice}, bytes {offset} to {end}, in {step}")
    }
}
