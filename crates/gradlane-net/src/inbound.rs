//! Frames from one peer, between its connection and the engine.

use crate::arrivals::Arrivals;
use crate::connection::{Fault, FrameSink, Target};
use crate::memory::{MemoryTable, Span};
use crate::shared::Shared;
use gradlane_engine::{JournaledEngine, Landing, ProtocolError};
use gradlane_units::{Rank, Time};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind};

/// What receiving needs of the driver.
pub(crate) struct Inbound<'a> {
    pub(crate) engine: &'a mut JournaledEngine,
    pub(crate) memory: &'a mut MemoryTable,
    pub(crate) shared: &'a Shared,
    pub(crate) arrivals: &'a mut Arrivals,
    pub(crate) now: Time,
    pub(crate) peer: Rank,
    pub(crate) heard_goodbye: &'a mut bool,
}

fn broken(error: &ProtocolError) -> Fault {
    Fault::Broken(format!("broke the protocol: {}", error.what))
}

impl FrameSink for Inbound<'_> {
    fn frame_announced(&mut self, header: &FrameHeader) -> Result<Target, Fault> {
        self.shared.trace.announced(self.peer);
        let landing = self.engine.handle_header(self.peer, header);
        match landing.map_err(|error| broken(&error))? {
            Landing::Control => Ok(Target::Control),
            Landing::Nothing => Ok(Target::Span(Span::EMPTY)),
            Landing::Region(region) => {
                self.memory.locate(region).map(Target::Span).map_err(|error| {
                    Fault::Internal(format!("cannot receive {}: {error}", self.describe(header)))
                })
            }
        }
    }

    fn frame_arrived(&mut self, header: &FrameHeader, control: Option<&[u8]>) -> Result<(), Fault> {
        let metrics = &self.shared.metrics;
        metrics.received(self.peer, header);
        self.shared.trace.received(self.peer, header);
        *self.heard_goodbye |= header.kind == FrameKind::Goodbye;
        let result = match control {
            Some(payload) => self.engine.handle_control(self.peer, header, payload),
            None => self.engine.handle_frame(self.peer, header),
        };
        result.map_err(|error| broken(&error))?;
        if header.kind == FrameKind::Push && header.flags.contains(FrameFlags::LAST) {
            let FrameHeader { slice, step, .. } = *header;
            self.arrivals.arrived(slice, step, self.peer, self.now, &metrics.lateness);
        }
        Ok(())
    }

    fn describe(&self, header: &FrameHeader) -> String {
        let plan = self.engine.plan();
        let name = plan.tensors.get(header.tensor.index()).map_or("", |it| it.spec.name.as_str());
        let FrameHeader { kind, slice, step, offset, length, .. } = header;
        let end = offset.saturating_add(u64::from(*length));
        format!("{kind:?} of tensor {name:?}, {slice}, bytes {offset} to {end}, in {step}")
    }
}
