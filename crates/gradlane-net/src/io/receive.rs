//! Frames from one peer, between its connection and the engine.

use super::connection::Fault;
use super::core::Core;
use super::frame_reader::{FrameSink, PayloadTarget};
use crate::channel::shared::Shared;
use crate::memory::Span;
use crate::sys::lock;
use gradlane_engine::{Landing, ProtocolError};
use gradlane_units::Rank;
use gradlane_wire::{FrameHeader, FrameKind};
use std::sync::Mutex;

/// What receiving needs of its thread.
pub(crate) struct ReceivedFrames<'a> {
    pub(crate) core: &'a Mutex<Core>,
    pub(crate) shared: &'a Shared,
    pub(crate) peer: Rank,
    pub(crate) heard_goodbye: &'a mut bool,
}

fn broken(error: &ProtocolError) -> Fault {
    Fault::Broken(format!("broke the protocol: {}", error.what))
}

impl FrameSink for ReceivedFrames<'_> {
    fn on_header(&mut self, header: &FrameHeader) -> Result<PayloadTarget, Fault> {
        self.shared.trace.announced(self.peer);
        let located = {
            let mut core = lock(self.core);
            let landing = core.engine.handle_header(self.peer, header);
            match landing.map_err(|error| broken(&error))? {
                Landing::Control => return Ok(PayloadTarget::Control),
                Landing::Nothing => return Ok(PayloadTarget::Span(Span::EMPTY)),
                Landing::Region(region) => core.memory.locate(region),
            }
        };
        located.map(PayloadTarget::Span).map_err(|error| {
            Fault::Internal(format!("cannot receive {}: {error}", self.describe(header)))
        })
    }

    fn on_frame(&mut self, header: &FrameHeader, control: Option<&[u8]>) -> Result<(), Fault> {
        self.shared.trace.received(self.peer, header);
        *self.heard_goodbye |= header.kind == FrameKind::Goodbye;
        lock(self.core).frame_arrived(self.peer, header, control).map_err(|error| broken(&error))
    }

    fn describe(&self, header: &FrameHeader) -> String {
        let core = lock(self.core);
        let plan = core.engine.plan();
        let name = plan.tensors.get(header.tensor.index()).map_or("", |it| it.spec.name.as_str());
        let FrameHeader { kind, slice, step, offset, length, .. } = header;
        let end = offset.saturating_add(u64::from(*length));
        format!("{kind:?} of tensor {name:?}, {slice}, bytes {offset} to {end}, in {step}")
    }
}
