//! The engine of a lane with everything that its decisions are carried out with, but for the connections.

use super::frame_reader::{Fault, FrameReader, FrameSink, PayloadTarget};
use super::frame_writer::{FrameWriter, OutgoingFrame, OutgoingPayload};
use crate::channel::completion::MembershipEvent;
use crate::channel::shared::{take_out, Command, LaneInbox, Shared, StopCause};
use crate::compute::jobs::JobRunner;
use crate::compute::server_command::ServerCommand;
use crate::connect::FrameSeals;
use crate::flow::{ConnectionFlow, Pacer, PortPacing};
use crate::memory::{MemoryTable, WriteSpan};
use crate::metrics::count;
use crate::metrics::straggler_stats::ContributionTimes;
use crate::options::{ChannelOptions, GoingOnOptions};
use crate::sys::lock;
use crate::sys::poller::Interest;
use crate::sys::socket::Socket;
use crate::sys::suspend_aware_clock::SuspendAwareClock;
use gradlane_engine::{
    Engine, EngineOptions, Event, Failure, Input, Payload, PayloadDest, Refusal, Region, Synchrony,
    Transmit,
};
use gradlane_units::{Rank, Step, TensorId, Time};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for another rank to report that it hears a silent peer.
const SUSPECT_REPLY_TIMEOUT: Duration = Duration::from_secs(1);

/// The state of a peer.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) socket: Arc<dyn Socket>,
    pub(super) pacer: Pacer,
    /// Whether bytes can still arrive.
    open: bool,
    /// Whether the engine may choose frames for it.
    pub(super) writable: bool,
    pub(super) said_goodbye: bool,
    /// When bytes arrived last; `None` before the first ones.
    pub(super) last_received: Option<Time>,
    /// Deadline for other ranks to report that they hear this silent peer.
    pub(super) suspected_until: Option<Time>,
    /// Frames that the engine has chosen and its connection has not taken.
    outbox: VecDeque<OutgoingFrame>,
}

impl Peer {
    /// Makes a peer with a new connection.
    pub(super) fn new(socket: Arc<dyn Socket>) -> Peer {
        Peer {
            socket,
            pacer: Pacer::default(),
            open: true,
            writable: true,
            said_goodbye: false,
            last_received: None,
            suspected_until: None,
            outbox: VecDeque::new(),
        }
    }
}

/// The state of a lane.
#[derive(Debug)]
pub(super) struct Core {
    /// The lane's number.
    pub(super) lane: usize,
    pub(super) engine: Engine,
    /// By rank; `None` for this rank itself.
    pub(super) peers: Vec<Option<Peer>>,
    pub(super) memory: MemoryTable,
    pub(super) jobs: JobRunner,
    pub(super) shared: Arc<Shared>,
    pub(super) contribution_times: ContributionTimes,
    /// `None` with a single peer, with peers on this machine only, and when switched off.
    pub(super) pacing: Option<PortPacing>,
    pub(super) options: ChannelOptions,
    pub(super) clock: SuspendAwareClock,
    pub(super) now: Time,
    /// When all ranks were known to be connected to all.
    pub(super) connected_at: Option<Time>,
    pub(super) commands: Vec<Command>,
    /// On a dedicated server: the command that is carried out, its step and the rank that sent it first.
    pub(super) server_command: Option<(Step, Rank, ServerCommand)>,
    /// Peers with frames in their outbox, the most urgent first.
    pub(super) chosen: Vec<Rank>,
    /// Peers that the other ranks go on without, and whose connections are to be closed.
    pub(super) to_disconnect: Vec<Rank>,
    /// Whether all ranks have said goodbye in this lane, or it has failed.
    is_over: bool,
}

impl Core {
    /// Makes a lane's state before step 0, without peers.
    pub(super) fn new(
        lane: usize,
        options: ChannelOptions,
        paced_peers: Option<usize>,
        shared: Arc<Shared>,
    ) -> io::Result<Core> {
        let plan = Arc::clone(&shared.lanes[lane].plan);
        let engine_options = EngineOptions {
            rank: Rank(options.rank),
            frame_bytes: options.frame_bytes,
            credit_bytes: options.credit_bytes,
            job_depth: options.work_depth.div_ceil(shared.lanes.len()),
            encoded_ahead: options.encoded_ahead,
            progress_timeout: options.progress_timeout(),
            generation: options.generation,
            going_on: options.going_on.as_ref().map(GoingOnOptions::for_engine),
        };
        Ok(Core {
            lane,
            engine: if options.journal {
                Engine::journaled(engine_options, Arc::clone(&plan))
            } else {
                Engine::new(engine_options, Arc::clone(&plan))
            },
            peers: Vec::with_capacity(plan.world_size as usize),
            memory: MemoryTable::new(plan.tensors.len()),
            jobs: JobRunner::new(&shared, lane, &options)?,
            shared,
            contribution_times: ContributionTimes::new(&plan, Rank(options.rank)),
            pacing: paced_peers.map(|peers| PortPacing::new(peers, options.frame_bytes)),
            clock: SuspendAwareClock::new(Instant::now(), options.silence_timeout()),
            options,
            now: Time::ZERO,
            connected_at: None,
            commands: Vec::new(),
            server_command: None,
            chosen: Vec::new(),
            to_disconnect: Vec::new(),
            is_over: false,
        })
    }

    /// Carries out the engine's decisions until there are none. Frames to send lie in outboxes
    /// then.
    pub(super) fn pump(&mut self) {
        while !self.has_ended() {
            let mut progressed = self.run_jobs();
            while let Some(transmit) = self.engine.poll_transmit() {
                self.stage(transmit);
            }
            while let Some(event) = self.engine.poll_event() {
                progressed = true;
                self.on_event(event);
            }
            if !progressed {
                return;
            }
        }
    }

    /// What this lane shares with other threads.
    pub(super) fn inbox(&self) -> &LaneInbox {
        &self.shared.lanes[self.lane]
    }

    /// Whether the lane is over, or all stop.
    pub(super) fn has_ended(&self) -> bool {
        self.is_over || self.shared.is_stopping()
    }

    /// Whether the lane has nothing to do until a socket reports.
    pub(super) fn is_idle(&self) -> bool {
        !self.has_ended()
            && self.chosen.is_empty()
            && self.to_disconnect.is_empty()
            && lock(&self.inbox().commands).is_empty()
            && !self.jobs.has_finished()
    }

    /// Advances the time after a turn that slept for at most `sleep`.
    pub(super) fn read_clock(&mut self, now: Instant, sleep: Duration) {
        self.now = self.clock.advance(now, sleep);
        self.engine.tell(Input::Time(self.now));
    }

    /// Reports finished jobs and starts new ones.
    fn run_jobs(&mut self) -> bool {
        let result = self.jobs.advance(&mut self.engine, &mut self.memory);
        let gauge = &self.shared.metrics.lanes[self.lane].jobs_in_flight;
        gauge.store(self.jobs.in_flight(), Ordering::Relaxed);
        result.unwrap_or_else(|error| {
            self.engine.tell(Input::Abort(error.to_string()));
            true
        })
    }

    fn on_event(&mut self, event: Event) {
        let completion = &self.shared.completion;
        match event {
            Event::TensorReady { tensor, step, absent } => {
                completion.publish_tensor(tensor, step, absent);
            }
            Event::BlocksReady { tensor, step, blocks } => {
                self.store_blocks(tensor, step, &blocks);
            }
            Event::RootRequest { tensor, step, blocks } => {
                self.store_blocks(tensor, step, &blocks);
                self.shared.completion.publish_root_request(tensor, step);
            }
            Event::SquaresReady { step, sum } => completion.publish_squares(step, &sum),
            Event::StepComplete { step } => completion.publish_step(step),
            Event::Applied { rank, staleness, .. } => {
                lock(&self.shared.metrics.staleness).note(rank, staleness);
            }
            Event::ContributorsDecided { .. } | Event::LeftOut { .. } | Event::Late { .. } => {
                // The first lane has told the others before.
                let counts = self.lane == 0;
                if counts {
                    lock(&self.shared.metrics.participation).note(&event);
                }
                if let Event::ContributorsDecided { step, contributors } = event {
                    if !contributors.contains(&self.engine.rank()) {
                        self.jobs.state.left_out(step);
                    }
                    if counts {
                        completion.publish_contributors(step);
                    }
                }
            }
            Event::PlanSwitched { version, .. } => {
                let current = &self.shared.metrics.lanes[self.lane].plan_version;
                current.store(u64::from(version), Ordering::Relaxed);
            }
            Event::BufferFree(buffer) => {
                self.memory.free(buffer);
                let scratch = &self.shared.metrics.lanes[self.lane].scratch_bytes;
                scratch.store(self.memory.scratch_bytes(), Ordering::Relaxed);
            }
            Event::Suspected { by, suspect } => {
                if self.heard_recently(suspect) {
                    self.engine.tell(Input::BlameLink(by, suspect));
                }
            }
            Event::Disconnect(rank) => self.to_disconnect.push(rank),
            Event::TellLead(news) => self.shared.tell_first(Command::Engine(Input::Told(news))),
            Event::TellLanes(news) => {
                let others = self.shared.lanes.iter().skip(1);
                others.for_each(|it| it.command(Command::Engine(Input::Told(news.clone()))));
            }
            Event::ClaimNeeded { generation, value } => {
                let claim = MembershipEvent::ClaimNeeded { generation, value };
                completion.publish_change(self.lane, claim);
            }
            Event::MembersChanged { generation, members, step, reason } => {
                let changed = MembershipEvent::Changed { generation, members, step, reason };
                completion.publish_change(self.lane, changed);
            }
            Event::Closed => self.is_over = true,
            Event::Failed(failure) => {
                self.is_over = true;
                self.shared.stop(StopCause::Failed(self.with_own_standstill(failure)));
            }
        }
    }

    /// Names this rank in a failure that it meets as it goes on after a stop, in which the others have lost it.
    fn with_own_standstill(&self, failure: Failure) -> Failure {
        let silence = self.options.silence_timeout();
        let Some(stood) = self.clock.stood_still().filter(|&stood| stood >= silence / 2) else {
            return failure;
        };
        let own = self.engine.rank();
        let reason = format!(
            "{own} stood still for {:.1} s (its process was stopped, or its machine was suspended), and others \
             lose a rank that is silent for {} s (silence_timeout_s): {}",
            stood.as_secs_f64(),
            silence.as_secs_f64(),
            failure.reason
        );
        Failure { peer: Some(own), reason, ..failure }
    }

    /// Stores gathered blocks until the application takes them.
    fn store_blocks(&mut self, tensor: TensorId, step: Step, blocks: &[Option<Region>]) {
        match take_out(&mut self.memory, self.engine.rank(), blocks) {
            Ok(held) => {
                lock(&self.shared.blocks).insert((tensor, step), held);
            }
            Err(error) => self.engine.tell(Input::Abort(error.to_string())),
        }
    }

    /// Puts a chosen frame into the outbox of its peer.
    pub(super) fn stage(&mut self, transmit: Transmit) {
        let (rank, header) = (transmit.peer, transmit.header);
        let payload = match transmit.payload {
            Payload::None => Ok(OutgoingPayload::Owned(Vec::new())),
            Payload::Inline(bytes) => Ok(OutgoingPayload::Owned(bytes)),
            // SAFETY: the engine lends this region to this frame until `Input::Read`, or until the session
            // ends; the writer drops the borrow before either.
            Payload::Region(region) => self
                .memory
                .locate(region)
                .map(|span| OutgoingPayload::Borrowed(unsafe { span.read() })),
        };
        let payload = match payload {
            Ok(payload) => payload,
            Err(error) => {
                return self.engine.tell(Input::Abort(format!("cannot send to {rank}: {error}")));
            }
        };
        if let Some(Some(peer)) = self.peers.get_mut(rank.index()) {
            peer.said_goodbye |= header.kind == FrameKind::Goodbye;
            self.inbox().trace.chosen(rank);
            count(&self.shared.metrics.outgoing_frames, 1);
            self.enqueue(rank, OutgoingFrame::new(header, payload, true));
        }
    }

    /// Puts a frame into the outbox of a peer.
    pub(super) fn enqueue(&mut self, rank: Rank, frame: OutgoingFrame) {
        if let Some(Some(peer)) = self.peers.get_mut(rank.index()) {
            peer.outbox.push_back(frame);
            if !self.chosen.contains(&rank) {
                self.chosen.push(rank);
            }
        }
    }

    /// Moves a peer's outbox to its connection.
    pub(super) fn take_chosen(&mut self, rank: Rank, connection: &mut Connection) {
        if let Some(Some(peer)) = self.peers.get_mut(rank.index()) {
            connection.writer.append(&mut peer.outbox);
        }
    }

    /// Notes frames that the kernel has, and `bytes` that it took since the last call.
    pub(super) fn sent(&mut self, rank: Rank, bytes: usize, frames: &mut Vec<(FrameHeader, bool)>) {
        for (header, is_engines) in frames.drain(..) {
            let metrics = &self.shared.metrics;
            metrics.sent(rank, &header);
            metrics.sent_message(self.engine.plan(), &header);
            if is_engines {
                metrics.outgoing_frames.fetch_sub(1, Ordering::Relaxed);
                self.copied(rank, header);
            }
        }
        if let Some(Some(peer)) = self.peers.get_mut(rank.index()) {
            peer.pacer.sent(self.now, bytes);
        }
    }

    /// The kernel has a copy of a frame: nobody reads the memory that it came from any more.
    pub(super) fn copied(&mut self, rank: Rank, header: FrameHeader) {
        self.engine.tell(Input::Sent(rank, header));
        self.engine.tell(Input::Read(rank, header));
    }

    /// Handles a verified frame; `control` has the payload that the engine reads itself.
    pub(super) fn frame_arrived(
        &mut self,
        from: Rank,
        header: &FrameHeader,
        control: Option<&[u8]>,
    ) -> Result<(), Refusal> {
        self.shared.metrics.received(from, header);
        match control {
            Some(payload) => {
                self.engine.handle(Input::Control(from, *header, payload.to_vec()))?;
                if header.kind == FrameKind::ServerCommand {
                    self.take_server_command(from, header.step, payload);
                }
            }
            None => drop(self.engine.handle(Input::Frame(from, *header))?),
        }
        if header.kind == FrameKind::Push && header.flags.contains(FrameFlags::LAST) {
            let FrameHeader { slice, step, .. } = *header;
            let stragglers = &self.shared.metrics.stragglers;
            self.contribution_times.arrived(slice, step, from, self.now, stragglers);
        }
        Ok(())
    }

    /// Tells the engine whether a peer's socket takes frames.
    pub(super) fn set_writable(&mut self, rank: Rank, writable: bool) {
        let Some(Some(peer)) = self.peers.get_mut(rank.index()) else {
            return;
        };
        if peer.writable != writable {
            peer.writable = writable;
            if !writable {
                peer.pacer.note_backlog();
            }
            self.engine.tell(Input::Writable(rank, writable));
        }
    }

    /// Whether bytes can still arrive from a peer.
    pub(super) fn is_open(&self, rank: Rank) -> bool {
        self.peers.get(rank.index()).and_then(Option::as_ref).is_some_and(|peer| peer.open)
    }

    /// Whether the engine may choose frames for a peer.
    pub(super) fn is_writable(&self, rank: Rank) -> bool {
        self.peers.get(rank.index()).and_then(Option::as_ref).is_some_and(|peer| peer.writable)
    }

    /// Returns the pacer of a peer's connection.
    pub(super) fn pacer(&self, rank: Rank) -> Option<&Pacer> {
        self.peers.get(rank.index())?.as_ref().map(|peer| &peer.pacer)
    }

    /// Whether the pacing of a peer allows the next frame now.
    pub(super) fn may_send(&self, rank: Rank) -> bool {
        self.pacer(rank).is_some_and(|pacer| pacer.may_send(self.now))
    }

    /// Whether training is asynchronous: then peers serve, and send heartbeats, after their goodbye
    /// too.
    pub(super) fn is_async(&self) -> bool {
        self.engine.plan().strategy.synchrony == Synchrony::Async
    }

    /// Notes that bytes arrived from a peer.
    pub(super) fn heard(&mut self, rank: Rank) {
        let now = self.now;
        if let Some(Some(peer)) = self.peers.get_mut(rank.index()) {
            peer.last_received = Some(now);
            peer.suspected_until = None;
        }
    }

    /// Whether a peer was heard recently: it sends something every quarter of the silence timeout.
    fn heard_recently(&self, rank: Rank) -> bool {
        let peer = self.peers.get(rank.index()).and_then(Option::as_ref);
        let last = peer.filter(|peer| peer.open).and_then(|peer| peer.last_received);
        last.is_some_and(|last| self.now.since(last) < self.options.silence_timeout() / 2)
    }

    /// Checks that no other rank hears a silent peer either, after asking. Otherwise returns when
    /// to check again.
    pub(super) fn confirm_silence(&mut self, rank: Rank) -> Result<(), Time> {
        let now = self.now;
        let Some(Some(peer)) = self.peers.get_mut(rank.index()) else {
            return Ok(());
        };
        match peer.suspected_until {
            Some(until) if now >= until => Ok(()),
            Some(until) => Err(until),
            None => {
                let until = now + SUSPECT_REPLY_TIMEOUT.min(self.options.silence_timeout() / 4);
                peer.suspected_until = Some(until);
                // Without a rank to ask, it is silent to all.
                self.engine.handle(Input::Suspect(rank)).map_or(Ok(()), |_| Err(until))
            }
        }
    }

    /// Whether the session goes on without peers that are lost.
    pub(super) fn goes_on(&self) -> bool {
        self.options.going_on.is_some()
    }

    /// Loses a peer: nothing can arrive from it any more. Where the session goes on, its connection was dropped
    /// with all borrows of memory.
    pub(super) fn lose(&mut self, rank: Rank, reason: &str) {
        let Some(Some(peer)) = self.peers.get_mut(rank.index()) else {
            return;
        };
        if !std::mem::replace(&mut peer.open, false) {
            return;
        }
        peer.writable = false;
        let dropped = peer.outbox.drain(..).filter(|frame| frame.is_engines()).count() as u64;
        self.shared.metrics.outgoing_frames.fetch_sub(dropped, Ordering::Relaxed);
        // The socket is closed later; an unwatched one is in order.
        let poller = &self.shared.lanes[self.lane].poller;
        let _ = peer.socket.watch(poller, u64::from(rank.0), Interest::End);
        self.engine.tell(Input::Writable(rank, false));
        self.engine.tell(Input::PeerLost(rank, reason.to_owned()));
    }

    /// Shares this rank's port out among its connections, at intervals.
    pub(super) fn pace(&mut self) {
        let now = self.now;
        let Some(pacing) = &mut self.pacing else {
            return;
        };
        let peers = self.peers.iter().flatten();
        if !pacing.rest(now, || peers.filter(|peer| peer.open).any(|peer| !peer.writable)) {
            return;
        }
        let (mut flows, mut sockets) = (Vec::new(), Vec::new());
        for peer in self.peers.iter_mut().flatten().filter(|peer| peer.open) {
            flows.push((sockets.len(), !peer.writable, &mut peer.pacer));
            sockets.push(&peer.socket);
        }
        let acknowledged = |socket: &&Arc<dyn Socket>| {
            socket.path_estimate().ok().map(|path| path.acknowledged_bytes)
        };
        pacing.sample(
            now,
            flows.into_iter(),
            || sockets.iter().map(acknowledged).sum(),
            // A rate that the kernel refuses leaves the last one in force.
            |index, rate| drop(sockets[index].set_pacing(rate)),
        );
    }
}

// One connection: its socket, both directions of frames, and the state that only its thread has.

/// A connection to one peer.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Arc<dyn Socket>,
    pub(super) writer: FrameWriter,
    pub(super) reader: FrameReader,
    pub(super) flow: ConnectionFlow,
    /// Whether the poller reports it as writable.
    pub(super) armed: bool,
    pub(super) last_sent: Time,
    pub(super) heard_goodbye: bool,
}

impl Connection {
    /// Makes a connection after the handshake; without seals, frames go in the clear.
    pub(super) fn new(
        socket: Arc<dyn Socket>,
        seals: Option<FrameSeals>,
        flow: ConnectionFlow,
    ) -> Connection {
        let (sealer, opener) = seals.map(|it| (it.sealer, it.opener)).unzip();
        Connection {
            socket,
            writer: FrameWriter::new(sealer),
            reader: FrameReader::new(opener),
            flow,
            armed: false,
            last_sent: Time::ZERO,
            heard_goodbye: false,
        }
    }
}

/// Connections by rank; `None` for those of other threads, and for this rank itself.
pub(super) type Connections = Vec<Option<Connection>>;

// Frames from one peer, between its connection and the engine.

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
