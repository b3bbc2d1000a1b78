//! Frames from peers. Every field is checked against the plan and the state before a byte of the
//! payload is accepted; what does not fit is a typed error that names peer, tensor and bytes, and
//! changes nothing.

use crate::engine::Engine;
use crate::error::ProtocolError;
use crate::io::{BufferRef, Memory, PayloadDest, Region};
use crate::plan::Plan;
use crate::server::Contribution;
use crate::strategy::{PullRule, Synchrony};
use crate::worker::{Phase, Submission};
use alloc::format;
use alloc::string::String;
use gradlane_units::{Rank, SliceId, Step};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

pub(crate) type Validated<T> = Result<T, String>;

impl Engine {
    /// A verified header has arrived from a peer: where does its payload go?
    ///
    /// # Errors
    /// When no correct peer would send this frame now. The session must end then.
    pub fn handle_header(
        &mut self,
        from: Rank,
        header: &FrameHeader,
    ) -> Result<PayloadDest, ProtocolError> {
        self.check_header(from, header)
            .and_then(|()| match header.kind {
                FrameKind::Push => self.land_push(from, header),
                FrameKind::Broadcast => self.land_broadcast(from, header),
                FrameKind::Notify => self.check_notify(from, header).map(|()| PayloadDest::Nothing),
                FrameKind::Pull => self.check_pull(from, header).map(|()| PayloadDest::Nothing),
                FrameKind::RingScale | FrameKind::RingReduce => self.land_round(header),
                FrameKind::RingBroadcast => self.land_result_round(header),
                FrameKind::Block => Ok(self.land_block(from, header)),
                FrameKind::PlanSwitch
                | FrameKind::PlanSwitchAck
                | FrameKind::Heartbeat
                | FrameKind::Goodbye
                | FrameKind::Abort
                | FrameKind::Suspect
                | FrameKind::StepBegun
                | FrameKind::GradientsQueued
                | FrameKind::Contributors => Ok(PayloadDest::Control),
            })
            .map_err(|what| ProtocolError { peer: from, what })
    }

    /// The payload of the frame announced last by this peer is in place and its checksum is right.
    ///
    /// # Errors
    /// When no correct peer would send this frame now.
    pub fn handle_frame(&mut self, from: Rank, header: &FrameHeader) -> Result<(), ProtocolError> {
        if self.lifecycle.has_ended() {
            return Ok(());
        }
        self.lifecycle.progressed();
        match header.kind {
            FrameKind::Push if self.take_late(from, header) => {}
            FrameKind::Push => self.take_push(from, header),
            FrameKind::Broadcast if self.take_ahead(header) => {}
            FrameKind::Broadcast => self.take_broadcast(header),
            FrameKind::Notify => self.announced(header.tensor),
            FrameKind::Pull => self.take_pull(from, header),
            FrameKind::RingScale | FrameKind::RingReduce => self.take_round(header),
            FrameKind::RingBroadcast => self.take_result_round(header),
            FrameKind::Block => self.take_block(from, header),
            _ => {
                let what = format!("{:?} is a control frame", header.kind);
                return Err(ProtocolError { peer: from, what });
            }
        }
        self.say_goodbye_when_done();
        Ok(())
    }

    /// A control frame and its payload have arrived.
    ///
    /// # Errors
    /// When the payload makes no sense.
    pub fn handle_control(
        &mut self,
        from: Rank,
        header: &FrameHeader,
        payload: &[u8],
    ) -> Result<(), ProtocolError> {
        let drops_stragglers = matches!(
            header.kind,
            FrameKind::StepBegun | FrameKind::GradientsQueued | FrameKind::Contributors
        );
        if drops_stragglers && self.lifecycle.has_ended() {
            return Ok(());
        }
        let taken = match header.kind {
            FrameKind::PlanSwitch => self.take_switch(from, header, payload),
            FrameKind::PlanSwitchAck => self.take_switch_ack(from, header),
            FrameKind::StepBegun => self.take_step_begun(from, header),
            FrameKind::GradientsQueued => self.take_step_given(from, header),
            FrameKind::Contributors => self.take_contributors(header, payload),
            FrameKind::Goodbye => {
                self.peer_said_goodbye(from, header.step);
                Ok(())
            }
            FrameKind::Abort => {
                self.peer_aborted(from, payload);
                Ok(())
            }
            FrameKind::Suspect => self.peer_suspects(from, payload),
            _ => Ok(()),
        };
        self.say_goodbye_when_done();
        taken.map_err(|what| ProtocolError { peer: from, what })
    }

    fn land_push(&mut self, from: Rank, header: &FrameHeader) -> Validated<PayloadDest> {
        if let Some(landing) = self.land_late(from, header)? {
            return Ok(landing);
        }
        let contributes = self.contributes(from, header.step);
        let contributions = self.collected_step(from, header)?;
        let bytes = self.plan.bytes_as(header.slice, header.form);
        let has_body = !header.flags.contains(FrameFlags::ABSENT);
        let plan = &self.plan;
        let what = || describe(plan, header);
        let owned = self.server.owned.get_mut(&header.slice).ok_or("not owned")?;
        if contributions != header.step || owned.reducing || !contributes {
            let state = if owned.reducing { "reduces" } else { "collects for" };
            return Err(format!("{}, but this rank {state} {contributions}", what()));
        }
        let arrived = owned.contributions.received_bytes(from);
        if owned.contributions.has(from) || arrived != header.offset {
            return Err(format!("{} at offset {} after {arrived} bytes", what(), header.offset));
        }
        if has_body && *owned.form.get_or_insert(header.form) != header.form {
            return Err(format!("{} as {:?}, unlike other contributions", what(), header.form));
        }
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        let buffers = &mut self.buffers;
        let buffer = owned.contributions.landing(from, || buffers.acquire(bytes));
        Ok(PayloadDest::Region(range(Memory::Buffer(buffer), header.offset, header.length)))
    }

    /// The step that a push of this rank may be for now.
    fn collected_step(&self, from: Rank, header: &FrameHeader) -> Validated<Step> {
        let owned = self.server.owned.get(&header.slice).ok_or("not owned")?;
        let absent = header.flags.contains(FrameFlags::ABSENT);
        if self.lacks_initial(header.step, from, absent) {
            return Err(format!("{} without a value to start from", self.describe(header)));
        }
        if self.plan.strategy.synchrony != Synchrony::Async || owned.step.0 == 0 {
            return Ok(owned.step);
        }
        let expected = self.async_owners.expected(header.slice, from);
        expected.map_err(|reason| format!("{}: {reason}", self.describe(header)))
    }

    fn take_push(&mut self, from: Rank, header: &FrameHeader) {
        let Some(owned) = self.server.owned.get_mut(&header.slice) else {
            return;
        };
        owned.contributions.receive(from, header.length);
        if !header.flags.contains(FrameFlags::LAST) {
            return;
        }
        let part = match owned.contributions.take_arrived(from) {
            Some(arriving) => {
                let buffer = BufferRef { bytes: arriving.received_bytes, ..arriving.buffer };
                match header.form {
                    PayloadForm::Raw => Contribution::Buffer(buffer),
                    PayloadForm::Encoded => Contribution::Encoded(buffer),
                }
            }
            None => Contribution::Absent,
        };
        self.add_part(header.slice, from, part, header.priority);
    }

    fn land_broadcast(&mut self, from: Rank, header: &FrameHeader) -> Validated<PayloadDest> {
        if let Some(landing) = self.land_ahead(from, header)? {
            return Ok(landing);
        }
        let what = || self.describe(header);
        if header.step != self.worker.step {
            return Err(format!("{}, but this rank is in {}", what(), self.worker.step));
        }
        let tensor = self.worker.tensor(header.tensor);
        // Who is late may not have heard yet that it is left out.
        let owes =
            self.contributes(self.rank(), header.step) && !self.drops_stragglers(header.step);
        if owes && tensor.submission == Submission::Missing {
            return Err(format!("{} without a contribution of this rank", what()));
        }
        if self.plan.strategy.pull != PullRule::Broadcast && header.step.0 > 0 && !tensor.pulled {
            return Err(format!("{} unasked", what()));
        }
        let state = *self.worker.slice(header.slice);
        let arriving = matches!(state.phase, Phase::Receiving | Phase::Buffering(_));
        let fresh = state.phase == Phase::Waiting;
        if state.received_bytes != header.offset || !(arriving || fresh) || from == self.rank() {
            let arrived = state.received_bytes;
            return Err(format!("{} at offset {} after {arrived} bytes", what(), header.offset));
        }
        if arriving && state.form != header.form {
            return Err(format!("{} as {:?} after {:?}", what(), header.form, state.form));
        }
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        Ok(PayloadDest::Region(self.place_broadcast(header)))
    }

    /// Where the bytes of a broadcast frame go: the choice is made with the slice's first frame.
    pub(crate) fn place_broadcast(&mut self, header: &FrameHeader) -> Region {
        let slice = header.slice;
        if self.worker.slice(slice).phase == Phase::Waiting {
            let form = header.form;
            let phase = if form == PayloadForm::Raw && self.open_region(slice).is_some() {
                Phase::Receiving
            } else {
                Phase::Buffering(self.buffers.acquire(self.plan.bytes_as(slice, form)))
            };
            let state = self.worker.slice_mut(slice);
            (state.phase, state.form) = (phase, form);
        }
        match (self.worker.slice(slice).phase, self.open_region(slice)) {
            (Phase::Buffering(buffer), _) => {
                range(Memory::Buffer(buffer), header.offset, header.length)
            }
            (_, Some(open)) => range(open.memory, open.offset + header.offset, header.length),
            (phase, None) => unreachable!("a slice in {phase:?} lands in memory that is open"),
        }
    }

    fn take_broadcast(&mut self, header: &FrameHeader) {
        let slice = self.worker.slice_mut(header.slice);
        slice.received_bytes += u64::from(header.length);
        if !header.flags.contains(FrameFlags::LAST) {
            return;
        }
        match slice.phase {
            Phase::Buffering(buffer) => {
                let bytes = slice.received_bytes;
                slice.phase = Phase::Buffered(BufferRef { bytes, ..buffer });
                self.install_if_open(header.slice);
            }
            Phase::Receiving => self.slice_done(header.slice, true),
            // An absent slice, or an empty one, has no bytes to land.
            _ => {
                let absent = header.flags.contains(FrameFlags::ABSENT);
                self.nothing_to_install(header.slice, !absent);
            }
        }
    }

    fn check_notify(&mut self, from: Rank, header: &FrameHeader) -> Validated<()> {
        let tensor = self.worker.tensor(header.tensor);
        let slices = self.plan.tensor(header.tensor).slices.len() as u32;
        let expected = self.plan.strategy.pull == PullRule::AfterNotice
            && header.step == self.worker.step
            && from != self.rank()
            && tensor.submission != Submission::Missing
            && tensor.announced < slices;
        expected.then_some(()).ok_or_else(|| {
            format!(
                "{}, which this rank does not expect in {}",
                self.describe(header),
                self.worker.step
            )
        })
    }

    fn check_pull(&self, from: Rank, header: &FrameHeader) -> Validated<()> {
        let owned = self.server.owned.get(&header.slice).ok_or("not owned")?;
        let kept = self.server.owed.get(&(header.slice, header.step));
        let ready = kept.is_some_and(|owed| owed.to_pull.contains(from));
        let early = self.plan.strategy.pull == PullRule::NextStep
            && owned.step == header.step
            && !owned.early_pulls.contains(&from);
        (ready || early)
            .then_some(())
            .ok_or_else(|| format!("{}, which is not to be pulled (again)", self.describe(header)))
    }

    fn take_pull(&mut self, from: Rank, header: &FrameHeader) {
        if self.server.owed.contains_key(&(header.slice, header.step)) {
            self.answer_pull(header.slice, header.step, from);
        } else if let Some(owned) = self.server.owned.get_mut(&header.slice) {
            owned.early_pulls.push(from);
        }
    }

    /// "Push of slice 7 of "fc.weight" in step 3".
    pub(crate) fn describe(&self, header: &FrameHeader) -> String {
        describe(&self.plan, header)
    }
}

fn describe(plan: &Plan, header: &FrameHeader) -> String {
    let name = plan.tensors.get(header.tensor.index()).map(|it| it.spec.name.as_str());
    let SliceId(slice) = header.slice;
    let name = name.unwrap_or("an unknown tensor");
    format!("{:?} of slice {slice} of {name:?} in {}", header.kind, header.step)
}

pub(crate) fn range(memory: Memory, offset: u64, length: u32) -> Region {
    Region { memory, offset, length: u64::from(length) }
}
