//! The state of a group on one rank: it takes calls, frames and time, and gives frames and ended works. It
//! knows no sockets and no threads.

use super::call::{Call, Operation};
use super::error::{violation, Failure, GroupError, GroupErrorKind};
use super::frame::{self, FramePurpose};
use super::limits::Limits;
use super::memory;
use super::peers::{is_collective, message_range, Peers, Presence, Sent};
use super::points::{Message, Points};
use super::running::Collectives;
use super::work::{Begun, Work};
use crate::io::{Fault, FrameSink, OutgoingPayload, PayloadTarget};
use crate::memory::{Span, UserMemory, WriteSpan};
use gradlane_wire::{escaped, FrameHeader, FrameKind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause between heartbeats while nothing is waited for.
const HEARTBEAT_IDLE: Duration = Duration::from_secs(2);
/// Pause while something is: they tell which ranks have begun it.
const HEARTBEAT_WAITING: Duration = Duration::from_millis(250);
/// Longest reason of another rank in an error.
const REASON_BYTES_MAX: usize = 2_000;
/// Longest payload of a frame that tells a reason.
const PAYLOAD_BYTES_MAX: u32 = 64 << 10;

/// Everything that a group knows.
#[derive(Debug)]
pub(super) struct GroupState {
    name: String,
    pub(super) peers: Peers,
    collectives: Collectives,
    points: Points,
    failure: Option<GroupError>,
    silence: Duration,
    beat_at: Instant,
    looked_at: Instant,
    /// Works that have ended and were not reported.
    ended: Vec<(Arc<Work>, Result<u32, GroupError>)>,
}

impl GroupState {
    pub(super) fn new(
        name: String,
        rank: u32,
        size: u32,
        generation: u32,
        silence: Duration,
        limits: Limits,
        now: Instant,
    ) -> GroupState {
        GroupState {
            name,
            peers: Peers::new(rank, size, generation, limits, now),
            collectives: Collectives::new(size),
            points: Points::new(size),
            failure: None,
            silence,
            beat_at: now + HEARTBEAT_WAITING,
            looked_at: now,
            ended: Vec::new(),
        }
    }

    /// Number of collectives that this rank has begun.
    pub(super) fn begun(&self) -> u64 {
        self.collectives.begun()
    }

    /// Why the group has ended, if it has.
    pub(super) fn failure(&self) -> Option<&GroupError> {
        self.failure.as_ref()
    }

    /// Whether a message of so many bytes goes without asking, as a rule.
    pub(super) fn is_short(&self, bytes: usize) -> bool {
        bytes <= self.peers.limits.eager
    }

    /// Whether no call runs.
    pub(super) fn is_idle(&self) -> bool {
        self.collectives.is_idle() && self.points.is_idle()
    }

    /// Returns the works that have ended since the last call, with their results.
    pub(super) fn take_ended(&mut self) -> Vec<(Arc<Work>, Result<u32, GroupError>)> {
        std::mem::take(&mut self.ended)
    }

    /// Begins a collective. An error is this rank's own mistake, or that of a group that has ended.
    pub(super) fn begin(&mut self, call: &Call, begun: Begun) -> Result<(), GroupError> {
        self.check()?;
        if let Some(mistake) = call.mistake(self.peers.rank, self.peers.size()) {
            return Err(self.argument(&mistake));
        }
        self.note_call(begun.at);
        let mut ended = Vec::new();
        let outcome = self.collectives.begin(&mut self.peers, call, begun, &mut ended);
        self.settle(outcome, ended);
        self.check()
    }

    /// Begins a send or a receive; `peer` is `None` for a receive from any rank.
    pub(super) fn begin_message(
        &mut self,
        operation: Operation,
        peer: Option<u32>,
        tag: u32,
        memory: UserMemory,
        begun: Begun,
    ) -> Result<(), GroupError> {
        self.check()?;
        let (name, size, own) = (operation.name(), self.peers.size(), self.peers.rank);
        if let Some(peer) = peer.filter(|it| *it >= size || *it == own) {
            return Err(self.argument(&format!(
                "{name} with rank {peer} on rank {own} of {size}: give another rank of the group"
            )));
        }
        if memory.is_null() || memory.bytes() > u32::MAX as usize {
            let bytes = memory.bytes();
            return Err(self.argument(&format!(
                "{name} of {bytes} bytes: give memory of at most {} bytes, and split larger tensors",
                u32::MAX
            )));
        }
        self.note_call(begun.at);
        let message = Message { tag, span: memory::user_span(memory) };
        let (mut ended, mut received) = (Vec::new(), Vec::new());
        let (points, peers) = (&mut self.points, &mut self.peers);
        let outcome = match (operation, peer) {
            (Operation::Send, Some(to)) => points.send(peers, to, message, begun, &mut ended),
            (Operation::Receive, from) => {
                points.receive(peers, from, message, begun, &mut received)
            }
            _ => return Err(self.argument(&format!("{name} needs a rank"))),
        };
        self.settle_received(received);
        self.settle(outcome, ended);
        // A call that has failed at once is nowhere noted, and nobody would end its work.
        self.check()
    }

    /// A call after an idle time is followed by heartbeats soon.
    fn note_call(&mut self, now: Instant) {
        self.beat_at = self.beat_at.min(now + HEARTBEAT_WAITING);
    }

    fn check(&self) -> Result<(), GroupError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn argument(&self, what: &str) -> GroupError {
        let message = format!("group {:?}: {what}", self.name);
        GroupError::new(GroupErrorKind::Argument, message, Vec::new())
    }

    fn settle(&mut self, outcome: Result<(), Failure>, ended: Vec<Arc<Work>>) {
        let own = self.peers.rank;
        self.ended.extend(ended.into_iter().map(|work| (work, Ok(own))));
        if let Err(failure) = outcome {
            self.fail(failure);
        }
    }

    fn settle_received(&mut self, received: Vec<(Arc<Work>, u32)>) {
        self.ended.extend(received.into_iter().map(|(work, from)| (work, Ok(from))));
    }

    /// Ends the group, once: queues the reason for all other ranks. The caller ends all borrows of
    /// memory, and then calls [`GroupState::release`].
    pub(super) fn fail(&mut self, failure: Failure) {
        if self.failure.is_some() {
            return;
        }
        let own = self.peers.rank;
        let message = format!("rank {own}, group {:?}: {}", self.name, failure.what);
        for peer in self.peers.others() {
            self.peers.get_mut(peer).outbox.clear();
            if self.peers.get(peer).presence == Presence::Live {
                let header = frame::plain(FrameKind::Abort, own);
                let mut reason = message.clone().into_bytes();
                reason.truncate(PAYLOAD_BYTES_MAX as usize);
                let reason = OutgoingPayload::Owned(reason);
                self.peers.push(peer, header, reason, Sent::Nothing);
            }
        }
        self.failure = Some(GroupError::new(failure.kind, message, failure.ranks));
    }

    /// Ends the works of a group that has ended. No memory of theirs is in use any more.
    pub(super) fn release(&mut self) {
        let Some(failure) = &self.failure else {
            return;
        };
        let works = self.collectives.clear().into_iter().chain(self.points.clear());
        self.ended.extend(works.map(|work| (work, Err(failure.clone()))));
    }

    /// Ends the group in good order on this rank.
    pub(super) fn close(&mut self) {
        if self.failure.is_some() {
            return;
        }
        let own = self.peers.rank;
        for peer in self.peers.others() {
            if self.peers.get(peer).presence == Presence::Live {
                self.peers.push_control(peer, frame::plain(FrameKind::Goodbye, own));
            }
        }
        let message = format!("rank {own}, group {:?}: the group was closed here", self.name);
        self.failure = Some(GroupError::new(GroupErrorKind::Closed, message, Vec::new()));
    }

    /// Whether a peer's end of the stream is expected.
    pub(super) fn has_left(&self, peer: u32) -> bool {
        self.peers.get(peer).presence == Presence::Left
    }

    /// Notes that a connection cannot go on.
    pub(super) fn lost(&mut self, peer: u32, fault: &Fault) {
        let waiting = self.collectives.waiting().or_else(|| self.points.waiting());
        let during = waiting.map_or_else(String::new, |it| format!(" during {it}"));
        let (kind, what) = match fault {
            Fault::Lost(reason) => (
                GroupErrorKind::Lost,
                format!("rank {peer} is lost{during}: {reason}; look at its output"),
            ),
            Fault::ProtocolViolation(what) => {
                (GroupErrorKind::Protocol, format!("rank {peer} {what}{during}"))
            }
            Fault::Internal(what) => (GroupErrorKind::Protocol, format!("{what}{during}")),
        };
        self.fail(Failure { kind, what, ranks: vec![peer] });
    }

    /// Notes that the kernel has a frame.
    pub(super) fn sent(&mut self, to: u32, sent: Sent) {
        let mut ended = Vec::new();
        let outcome = match sent {
            Sent::Nothing => return,
            Sent::Collective(number, strand) => {
                self.collectives.through(&mut self.peers, number, strand, &mut ended)
            }
            Sent::Point(number) => {
                self.points.sent(to, number, &mut ended);
                Ok(())
            }
        };
        self.settle(outcome, ended);
    }

    /// Notes the time: heartbeats, silent peers, calls that are out of time.
    pub(super) fn tick(&mut self, now: Instant) {
        if self.failure.is_some() {
            return;
        }
        // A process that stood still hears what waits in its sockets before it takes others for lost.
        let stood = now.saturating_duration_since(self.looked_at) > HEARTBEAT_IDLE * 2;
        self.looked_at = now;
        if stood {
            self.peers.others().for_each(|it| self.peers.get_mut(it).heard = now);
        }
        if now >= self.beat_at {
            let is_idle = self.is_idle();
            self.beat_at = now + if is_idle { HEARTBEAT_IDLE } else { HEARTBEAT_WAITING };
            let (begun, oldest) = (self.begun(), self.collectives.oldest());
            for peer in self.peers.others() {
                // Bytes that wait for the peer say as much, later.
                if self.peers.get(peer).presence == Presence::Live
                    && self.peers.get(peer).outbox.is_empty()
                {
                    let header = frame::heartbeat(self.peers.rank, begun, oldest);
                    self.peers.push_control(peer, header);
                }
            }
        }
        let outcome = self
            .check_silence(now)
            .and_then(|()| self.collectives.check_deadlines(&self.peers, now))
            .and_then(|()| self.points.check_deadlines(now));
        self.settle(outcome, Vec::new());
    }

    fn check_silence(&self, now: Instant) -> Result<(), Failure> {
        let is_silent = |peer: &u32| {
            let peer = self.peers.get(*peer);
            let silent = now.saturating_duration_since(peer.heard);
            peer.presence == Presence::Live && silent > self.silence
        };
        let Some(peer) = self.peers.others().find(is_silent) else {
            return Ok(());
        };
        let seconds = self.silence.as_secs_f64();
        Err(Failure {
            kind: GroupErrorKind::Lost,
            what: format!("rank {peer} is lost: nothing came from it for {seconds} s"),
            ranks: vec![peer],
        })
    }

    /// Time until something is to be done without a frame.
    pub(super) fn next_tick(&self, now: Instant) -> Duration {
        if self.failure.is_some() {
            return HEARTBEAT_IDLE;
        }
        let deadlines = [self.collectives.deadline(), self.points.deadline()];
        let next = deadlines.into_iter().flatten().fold(self.beat_at, Instant::min);
        next.saturating_duration_since(now)
    }

    /// Returns what takes the frames of a peer.
    pub(super) fn sink(&mut self, from: u32) -> GroupSink<'_> {
        GroupSink { state: self, from }
    }

    fn place(&mut self, from: u32, header: &FrameHeader) -> Result<Option<Span>, Failure> {
        let (total, start) = message_range(header);
        let length = header.length as usize;
        let key = (header.step.0, header.tensor.0);
        let description =
            frame::description_of(header).ok_or_else(|| violation(from, "an unknown operation"))?;
        if !is_collective(&description) {
            return self.points.place(&mut self.peers, from, key, total, start, length);
        }
        self.note_begun(from, header);
        self.collectives.check(&self.peers, from, key.0, description)?;
        self.collectives.place(&mut self.peers, from, key, total, start, length)
    }

    fn note_begun(&mut self, from: u32, header: &FrameHeader) {
        let peer = self.peers.get_mut(from);
        peer.begun = peer.begun.max(header.step.0.saturating_add(1));
    }

    fn take_data(&mut self, from: u32, header: &FrameHeader, early: Option<&[u8]>) {
        let key = (header.step.0, header.tensor.0);
        let length = header.length as usize;
        let is_message = frame::description_of(header).is_none_or(|it| !is_collective(&it));
        if is_message {
            let mut received = Vec::new();
            let peers = &mut self.peers;
            let outcome = self.points.take(peers, from, key, length, early, &mut received);
            self.settle_received(received);
            self.settle(outcome, Vec::new());
            return;
        }
        let mut ended = Vec::new();
        let peers = &mut self.peers;
        let outcome = self.collectives.take(peers, from, key, length, early, &mut ended);
        self.settle(outcome, ended);
    }

    fn take_control(&mut self, from: u32, header: &FrameHeader) -> Result<(), Failure> {
        let key = (header.step.0, header.tensor.0);
        let purpose =
            FramePurpose::of(header).ok_or_else(|| violation(from, "an unknown frame"))?;
        if purpose == FramePurpose::Credit {
            return if self.peers.note_credit(from, frame::elements_of(header)) {
                Ok(())
            } else {
                Err(violation(from, "a report of more bytes than it was sent"))
            };
        }
        let description =
            frame::description_of(header).ok_or_else(|| violation(from, "an unknown operation"))?;
        let (is_grant, (total, _)) = (purpose == FramePurpose::Grant, message_range(header));
        if is_collective(&description) {
            self.note_begun(from, header);
            self.collectives.check(&self.peers, from, key.0, description)?;
            return if is_grant {
                self.collectives.granted(&mut self.peers, from, key, total)
            } else {
                self.collectives.offered(&mut self.peers, from, key, total)
            };
        }
        if is_grant {
            return self.points.granted(&mut self.peers, from, key.0);
        }
        self.points.offered(&mut self.peers, from, key.0, key.1, total)
    }

    fn take_heartbeat(&mut self, from: u32, header: &FrameHeader) -> Result<(), Failure> {
        let peer = self.peers.get_mut(from);
        peer.begun = peer.begun.max(header.step.0);
        match frame::description_of(header) {
            Some(description) if is_collective(&description) => {
                self.collectives.check(&self.peers, from, header.offset, description)
            }
            _ => Ok(()),
        }
    }

    fn take_goodbye(&mut self, from: u32) -> Result<(), Failure> {
        self.peers.get_mut(from).presence = Presence::Left;
        self.collectives.left(from)?;
        self.points.left(&self.peers, from)
    }
}

/// Takes the frames of one peer.
pub(super) struct GroupSink<'a> {
    state: &'a mut GroupState,
    from: u32,
}

impl FrameSink for GroupSink<'_> {
    fn on_header(&mut self, header: &FrameHeader) -> Result<PayloadTarget, Fault> {
        let is_data = header.kind == FrameKind::Collective
            && FramePurpose::of(header) == Some(FramePurpose::Data);
        let own = self.state.peers.generation;
        if header.generation != own {
            let what = format!("sent a frame of generation {} to {own}", header.generation);
            return Err(Fault::ProtocolViolation(what));
        }
        let is_reason = header.kind == FrameKind::Abort && header.length <= PAYLOAD_BYTES_MAX;
        if !is_data && header.length > 0 && !is_reason {
            let (bytes, kind) = (header.length, header.kind.name());
            let what = format!("sent {bytes} bytes in a frame of kind {kind}");
            return Err(Fault::ProtocolViolation(what));
        }
        if !is_data || self.state.failure.is_some() {
            return Ok(PayloadTarget::Control);
        }
        match self.state.place(self.from, header) {
            Ok(Some(_)) if header.length == 0 => Ok(PayloadTarget::Memory(WriteSpan::empty())),
            Ok(Some(span)) => Ok(PayloadTarget::Memory(memory::write(span))),
            Ok(None) => Ok(PayloadTarget::Control),
            Err(failure) => {
                self.state.fail(failure);
                Ok(PayloadTarget::Control)
            }
        }
    }

    fn on_frame(&mut self, header: &FrameHeader, control: Option<&[u8]>) -> Result<(), Fault> {
        let from = self.from;
        let state = &mut *self.state;
        if state.failure.is_some() {
            if header.kind == FrameKind::Goodbye {
                state.peers.get_mut(from).presence = Presence::Left;
            }
            return Ok(());
        }
        let outcome = match header.kind {
            FrameKind::Collective if FramePurpose::of(header) == Some(FramePurpose::Data) => {
                state.take_data(from, header, control);
                Ok(())
            }
            FrameKind::Collective => state.take_control(from, header),
            FrameKind::Heartbeat => state.take_heartbeat(from, header),
            FrameKind::Goodbye => state.take_goodbye(from),
            FrameKind::Abort => Err(Failure {
                kind: GroupErrorKind::Lost,
                what: format!(
                    "rank {from} has ended the group: {}",
                    escaped(control.unwrap_or_default(), REASON_BYTES_MAX)
                ),
                ranks: vec![from],
            }),
            kind => Err(violation(from, &format!("a frame of kind {}", kind.name()))),
        };
        state.settle(outcome, Vec::new());
        Ok(())
    }

    fn describe(&self, header: &FrameHeader) -> String {
        format!("{} {} of {} bytes", header.kind.name(), header.step.0, header.length)
    }
}
