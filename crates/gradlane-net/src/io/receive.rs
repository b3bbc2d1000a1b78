//! Frames from one peer, between its connection and the engine.

use super::core::Core;
use super::frame_sink::{Fault, FrameSink, PayloadTarget};
use crate::memory::WriteSpan;
use gradlane_engine::{Input, PayloadDest, Refusal};
use gradlane_units::Rank;
use gradlane_wire::{FrameHeader, FrameKind};

/// The frames that one connection receives.
pub(super) struct ReceivedFrames<'a> {
    pub(super) core: &'a mut Core,
    pub(super) peer: Rank,
    pub(super) heard_goodbye: &'a mut bool,
}

fn violation(refusal: Refusal) -> Fault {
    match refusal {
        Refusal::Protocol(error) => {
            Fault::ProtocolViolation(format!("broke the protocol: {}", error.what))
        }
        Refusal::Usage(error) => Fault::Internal(error.to_string()),
    }
}

impl FrameSink for ReceivedFrames<'_> {
    fn on_header(&mut self, header: &FrameHeader) -> Result<PayloadTarget, Fault> {
        self.core.inbox().trace.announced(self.peer);
        let dest = self.core.engine.handle(Input::Header(self.peer, *header));
        let located = match dest.map_err(violation)? {
            PayloadDest::Control => return Ok(PayloadTarget::Control),
            PayloadDest::Nothing => return Ok(PayloadTarget::Memory(WriteSpan::empty())),
            PayloadDest::Region(region) => self.core.memory.locate(region),
        };
        match located {
            // SAFETY: the engine lends this region to this frame until `Input::Frame`, or until the
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
        self.core.frame_arrived(self.peer, header, control).map_err(violation)
    }

    fn describe(&self, header: &FrameHeader) -> String {
        let plan = self.core.engine.plan();
        let name = plan.tensors.get(header.tensor.index()).map_or("", |it| it.spec.name.as_str());
        let FrameHeader { kind, slice, step, offset, length, .. } = header;
        let end = offset.saturating_add(u64::from(*length));
        format!("{kind:?} of tensor {name:?}, {slice}, bytes {offset} to {end}, in {step}")
    }
}
