//! The I/O thread: tells the engine what happens and does what it asks for.
//!
//! One turn of the loop handles commands, finished works and socket events, and after each of them
//! asks the engine for works, frames and events until it has none. A frame is chosen only when its
//! socket can take it; nothing here blocks but the wait for the next event.

use crate::arrivals::Arrivals;
use crate::blocks;
use crate::connection::{Connection, Fault, Flushed, OutgoingPayload};
use crate::descriptors::Tracked;
use crate::executor::Executor;
use crate::inbound::Inbound;
use crate::memory::MemoryTable;
use crate::metrics::count;
use crate::options::ChannelOptions;
use crate::ready::lock;
use crate::send_buffer::SendBuffer;
use crate::shared::{Command, Shared};
use crate::syscall::{self, EpollEvents};
use crate::works::Works;
use gradlane_engine::{
    EngineOptions, Event, Failure, JournaledEngine, Payload, Plan, ReadyRule, Region, Transmit,
};
use gradlane_units::{Rank, Step, TensorId, Time};
use gradlane_wire::{Codec, FrameFlags, FrameHeader, FrameKind};
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes read from one connection before others get their turn.
const RECEIVE_TURN_BYTES: usize = 512 << 10;
/// Bytes sent before sockets are looked at again.
const SEND_TURN_BYTES: usize = 1 << 20;

/// How a session ends, as the loop finds it.
#[derive(Debug)]
pub(crate) enum Ending {
    Closed,
    Failed(Failure),
}

/// A connection and what the driver knows of it.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    send_buffer: SendBuffer,
    /// Whether bytes can still come.
    pub(crate) open: bool,
    /// Whether the engine was told that it can take frames.
    writable: bool,
    /// Whether the poller reports it as writable.
    armed: bool,
    last_sent: Time,
    last_received: Time,
    heard: bool,
    said_goodbye: bool,
    pub(crate) heard_goodbye: bool,
}

/// Everything that the I/O thread owns.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) engine: JournaledEngine,
    /// By rank; none for this rank itself.
    pub(crate) links: Vec<Option<Link>>,
    pub(crate) memory: MemoryTable,
    pub(crate) works: Works,
    pub(crate) shared: Arc<Shared>,
    arrivals: Arrivals,
    options: ChannelOptions,
    origin: Instant,
    now: Time,
    /// When silence is looked at next.
    next_watch: Time,
    commands: Vec<Command>,
    dirty: Vec<Rank>,
    ending: Option<Ending>,
}

impl Driver {
    /// A driver with all connections, before step 0.
    pub(crate) fn new(
        options: ChannelOptions,
        plan: &Arc<Plan>,
        streams: Vec<Option<Tracked<TcpStream>>>,
        shared: Arc<Shared>,
    ) -> io::Result<Driver> {
        let engine_options = EngineOptions {
            rank: Rank(options.rank),
            frame_bytes: options.frame_bytes,
            credit_bytes: options.credit_bytes,
            work_depth: options.work_depth,
            encoded_ahead: options.encoded_ahead,
            progress_timeout: options.progress_timeout(),
            generation: options.generation,
        };
        let mut engine = JournaledEngine::new(engine_options, Arc::clone(plan), options.journal);
        let peers = plan.peers_sent_to() as usize;
        let mut links = Vec::with_capacity(streams.len());
        for (rank, stream) in streams.into_iter().enumerate() {
            links.push(match stream {
                None => None,
                Some(socket) => {
                    shared.poller.add(socket.as_fd(), rank as u64, false)?;
                    engine.handle_writable(Rank(rank as u32), true);
                    let fixed_bytes = options.send_buffer_bytes;
                    Some(Link {
                        send_buffer: SendBuffer::new(socket.as_fd(), fixed_bytes, peers)?,
                        connection: Connection::new(socket),
                        open: true,
                        writable: true,
                        armed: false,
                        last_sent: Time::ZERO,
                        last_received: Time::ZERO,
                        heard: false,
                        said_goodbye: false,
                        heard_goodbye: false,
                    })
                }
            });
        }
        let executor = Executor::start(&shared, options.work_threads)?;
        let works = Works::new(executor, plan, Rank(options.rank), options.seed)
            .map_err(io::Error::other)?;
        Ok(Driver {
            engine,
            links,
            memory: MemoryTable::new(plan.tensors.len()),
            works,
            shared,
            arrivals: Arrivals::new(plan, Rank(options.rank)),
            options,
            origin: Instant::now(),
            now: Time::ZERO,
            next_watch: Time::ZERO,
            commands: Vec::new(),
            dirty: Vec::new(),
            ending: None,
        })
    }

    /// Runs until the session ends.
    pub(crate) fn run(&mut self) -> Ending {
        let mut events = EpollEvents::new();
        let mut reports = Vec::new();
        let mut hurry = false;
        loop {
            self.watch_silence();
            hurry |= self.pump();
            if let Some(ending) = self.ending.take() {
                return ending;
            }
            let timeout = if hurry { Duration::ZERO } else { self.time_to_next() };
            let (shared, works) = (Arc::clone(&self.shared), &self.works);
            let idle = || lock(&shared.commands).is_empty() && !works.has_done();
            if let Err(error) = shared.poller.wait(&mut events, Some(timeout), idle, &mut reports) {
                self.engine.abort(&format!("cannot wait for sockets: {error}"));
            }
            self.read_clock();
            // What the application said before a peer's frame came is heard before it.
            self.handle_commands();
            hurry = false;
            for report in &reports {
                let rank = Rank(report.key as u32);
                if report.readable {
                    self.receive(rank);
                }
                if report.writable {
                    self.on_writable(rank);
                }
                hurry |= self.pump();
            }
            count(&self.shared.metrics.turns, 1);
        }
    }

    fn read_clock(&mut self) {
        let nanos = self.origin.elapsed().as_nanos();
        self.now = Time(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.engine.handle_time(self.now);
    }

    fn time_to_next(&self) -> Duration {
        let next = self.engine.poll_timeout().map_or(self.next_watch, |it| it.min(self.next_watch));
        next.since(self.now)
    }

    fn handle_commands(&mut self) {
        std::mem::swap(&mut self.commands, &mut *lock(&self.shared.commands));
        let mut commands = std::mem::take(&mut self.commands);
        for command in commands.drain(..) {
            let result = match command {
                Command::StepBegin(step) => {
                    self.works.begin_step();
                    self.engine.step_begin(step)
                }
                Command::StepPass(step) => {
                    self.works.begin_step();
                    self.engine.step_pass(step)
                }
                Command::SendRaw(step) => self.engine.send_raw(step),
                Command::GradientReady(tensor, step, memory) => {
                    self.memory.set_gradient(tensor, memory);
                    self.note_own(tensor, step);
                    self.engine.gradient_ready(tensor, step)
                }
                Command::TensorAbsent(tensor, step, memory) => {
                    self.memory.set_gradient(tensor, memory);
                    self.note_own(tensor, step);
                    self.engine.tensor_absent(tensor, step)
                }
                Command::BlockReady(tensor, step, memory) => {
                    self.memory.set_gradient(tensor, memory);
                    self.engine.block_ready(tensor, step, memory.bytes() as u64)
                }
                Command::BlockAbsent(tensor, step) => self.engine.tensor_absent(tensor, step),
                Command::AnswerReady(tensor, step, memory) => {
                    // The owner's own block goes nowhere: the answer takes its place.
                    self.memory.set_gradient(tensor, memory);
                    self.engine.answer_ready(tensor, step, memory.bytes() as u64)
                }
                Command::ReleaseBlocks(tensor, step, scratch) => {
                    scratch.into_iter().for_each(|block| self.memory.give_back(block));
                    self.engine.release_blocks(tensor, step)
                }
                Command::SetParameter(tensor, memory) => {
                    self.memory.set_parameter(tensor, memory);
                    Ok(())
                }
                Command::SetOptimizer(rows) => {
                    self.works.set_optimizer(rows);
                    self.engine.updates_ready();
                    Ok(())
                }
                Command::ReadState(read, step) => {
                    self.works.read_state(read);
                    self.engine.updates_paused();
                    if self.engine.plan().strategy.ready == ReadyRule::Each {
                        // It is asked for between steps there, and nothing is ever encoded.
                        Ok(())
                    } else {
                        // State is exact: owners broadcast it as it is.
                        self.engine.send_raw(step)
                    }
                }
                Command::WorkerResidual(tensor, reply) => {
                    // Who asked may have been interrupted.
                    let _ = reply.send(self.works.worker_residual(tensor));
                    Ok(())
                }
                Command::ClearState => {
                    self.works.clear_state();
                    Ok(())
                }
                Command::LoadState(kind, slices) => {
                    self.works.load_state(kind, slices);
                    Ok(())
                }
                Command::StepEnd(step) => self.engine.step_end(step),
                Command::Needed(tensors, step) => {
                    // Need is a wish: what became ready in the meantime needs nothing.
                    for tensor in tensors {
                        let _ = self.engine.tensor_needed(tensor, step);
                    }
                    Ok(())
                }
                Command::SwitchPriorities(priorities) => self.engine.switch_priorities(priorities),
                Command::ReportDepths => {
                    self.shared.metrics.depths.answer(self.engine.queue_depths());
                    Ok(())
                }
                Command::Finish => {
                    self.engine.finish();
                    Ok(())
                }
                Command::Abort(reason) => {
                    self.engine.abort(&reason);
                    Ok(())
                }
            };
            if let Err(error) = result {
                self.shared.note_usage(error);
            }
        }
        self.commands = commands;
    }

    fn note_own(&mut self, tensor: TensorId, step: Step) {
        let lateness = &self.shared.metrics.lateness;
        self.arrivals.own(self.engine.plan(), tensor, step, self.now, lateness);
    }

    /// Does what the engine asks for until it asks for nothing; `true` when it stopped early so
    /// that sockets get their turn.
    fn pump(&mut self) -> bool {
        let mut sent_bytes = 0;
        while self.ending.is_none() {
            let mut progressed = self.run_works();
            while let Some(transmit) = self.engine.poll_transmit() {
                self.stage(transmit);
            }
            // In the order of choice: the most urgent frame reaches its socket first.
            for rank in std::mem::take(&mut self.dirty) {
                progressed = true;
                sent_bytes += self.flush(rank);
            }
            while let Some(event) = self.engine.poll_event() {
                progressed = true;
                self.on_event(event);
            }
            if !progressed {
                return false;
            }
            if sent_bytes >= SEND_TURN_BYTES {
                return true;
            }
        }
        false
    }

    /// Reports finished works and starts new ones.
    fn run_works(&mut self) -> bool {
        let result = self.works.advance(&mut self.engine, &mut self.memory);
        self.shared.metrics.works_in_flight.store(self.works.in_flight(), Ordering::Relaxed);
        result.unwrap_or_else(|error| {
            self.engine.abort(&error);
            true
        })
    }

    fn on_event(&mut self, event: Event) {
        let ready = &self.shared.ready;
        match event {
            Event::TensorReady { tensor, step, absent } => {
                ready.publish_tensor(tensor, step, absent);
            }
            Event::BlocksReady { tensor, step, blocks } => {
                self.hold_blocks(tensor, step, &blocks);
            }
            Event::BlocksCollected { tensor, step, blocks } => {
                self.hold_blocks(tensor, step, &blocks);
                self.shared.ready.publish_question(tensor, step);
            }
            Event::StepComplete { step } => ready.publish_step(step),
            Event::Applied { rank, staleness, .. } => {
                lock(&self.shared.metrics.staleness).note(rank, staleness);
            }
            Event::Decided { .. } | Event::LeftOut { .. } | Event::Late { .. } => {
                lock(&self.shared.metrics.attendance).note(&event);
                if let Event::Decided { step, .. } = event {
                    ready.publish_decided(step);
                }
            }
            Event::PlanSwitched { version, .. } => {
                let current = &self.shared.metrics.plan_version;
                current.store(u64::from(version), Ordering::Relaxed);
            }
            Event::BufferFree(buffer) => {
                self.memory.free(buffer);
                let scratch = &self.shared.metrics.scratch_bytes;
                scratch.store(self.memory.scratch_bytes(), Ordering::Relaxed);
            }
            Event::Closed => self.ending = Some(Ending::Closed),
            Event::Failed(failure) => self.ending = Some(Ending::Failed(failure)),
        }
    }

    /// Keeps gathered blocks for the application to take.
    fn hold_blocks(&mut self, tensor: TensorId, step: Step, blocks: &[Option<Region>]) {
        match blocks::hold(&mut self.memory, self.engine.rank(), blocks) {
            Ok(held) => {
                lock(&self.shared.blocks).insert((tensor, step), held);
            }
            Err(error) => self.engine.abort(&error),
        }
    }

    /// Puts a frame that the engine has chosen in front of its socket.
    pub(crate) fn stage(&mut self, transmit: Transmit) {
        let (peer, header) = (transmit.peer, transmit.header);
        let payload = match &transmit.payload {
            Payload::None => Ok(OutgoingPayload::Owned(Vec::new())),
            Payload::Inline(bytes) => Ok(OutgoingPayload::Owned(bytes.clone())),
            Payload::Region(region) => self.memory.locate(*region).map(OutgoingPayload::Span),
        };
        let payload = match payload {
            Ok(payload) => payload,
            Err(error) => {
                return self.engine.abort(&format!("cannot send to {peer}: {error}"));
            }
        };
        if let Some(Some(link)) = self.links.get_mut(peer.index()) {
            link.said_goodbye |= header.kind == FrameKind::Goodbye;
            self.shared.trace.chosen(peer);
            link.connection.sender.push(header, payload, Some(transmit));
            count(&self.shared.metrics.outgoing_frames, 1);
            if !self.dirty.contains(&peer) {
                self.dirty.push(peer);
            }
        }
    }

    /// Gives a socket what waits for it; the bytes that it took.
    pub(crate) fn flush(&mut self, rank: Rank) -> usize {
        let Some(Some(link)) = self.links.get_mut(rank.index()) else {
            return 0;
        };
        let (engine, shared) = (&mut self.engine, &self.shared);
        let counters = &shared.metrics.peers[rank.index()];
        let result = link.connection.flush(|header, transmit| {
            shared.metrics.sent(rank, header);
            shared.metrics.sent_message(engine.plan(), header);
            shared.trace.sent(rank, header);
            if let Some(transmit) = transmit {
                shared.metrics.outgoing_frames.fetch_sub(1, Ordering::Relaxed);
                engine.handle_sent(&transmit);
            }
        });
        match result {
            Ok((bytes, flushed)) => {
                if bytes > 0 {
                    link.last_sent = self.now;
                    count(&counters.sent_bytes, bytes as u64);
                    // A size that the kernel refuses leaves the last one in force.
                    let _ = link.send_buffer.sent(link.connection.socket.as_fd(), bytes);
                }
                let low_water = u64::from(self.options.low_water_bytes);
                let full = |socket| {
                    low_water > 0
                        && syscall::not_sent_bytes(socket).is_ok_and(|waiting| waiting >= low_water)
                };
                let writable = flushed == Flushed::All && !full(link.connection.socket.as_fd());
                self.set_writable(rank, writable);
                bytes
            }
            Err(error) => {
                self.on_send_error(rank, &error);
                0
            }
        }
    }

    /// A peer that gives up says why and closes: its last words may be here although sending fails.
    fn on_send_error(&mut self, rank: Rank, error: &io::Error) {
        while self.is_open(rank) && self.receive(rank) > 0 {}
        self.lose(rank, &format!("connection failed: {error}"));
    }

    fn is_open(&self, rank: Rank) -> bool {
        self.links.get(rank.index()).and_then(Option::as_ref).is_some_and(|link| link.open)
    }

    fn set_writable(&mut self, rank: Rank, writable: bool) {
        let Some(Some(link)) = self.links.get_mut(rank.index()) else {
            return;
        };
        if link.writable != writable {
            link.writable = writable;
            self.engine.handle_writable(rank, writable);
        }
        if !writable && !link.armed && link.open {
            self.arm(rank, true);
        }
    }

    /// Asks the poller to report when the socket takes more. Once asked, it stays so while there is
    /// more to send, and is taken back only when a report finds nothing to do.
    fn arm(&mut self, rank: Rank, armed: bool) {
        if let Some(Some(link)) = self.links.get_mut(rank.index()) {
            link.armed = armed;
            let socket = link.connection.socket.as_fd();
            if let Err(error) = self.shared.poller.modify(socket, u64::from(rank.0), armed) {
                self.engine.abort(&format!("cannot wait for the socket of {rank}: {error}"));
            }
        }
    }

    fn on_writable(&mut self, rank: Rank) {
        let Some(Some(link)) = self.links.get(rank.index()) else {
            return;
        };
        if !link.open {
            return;
        }
        if link.writable {
            if link.armed {
                self.arm(rank, false);
            }
        } else if link.connection.sender.is_empty() {
            self.set_writable(rank, true);
        } else {
            self.flush(rank);
        }
    }

    /// Reads from a socket; the bytes that came.
    fn receive(&mut self, rank: Rank) -> usize {
        let Some(Some(link)) = self.links.get_mut(rank.index()) else {
            return 0;
        };
        if !link.open {
            return 0;
        }
        let mut inbound = Inbound {
            engine: &mut self.engine,
            memory: &mut self.memory,
            shared: &self.shared,
            arrivals: &mut self.arrivals,
            now: self.now,
            peer: rank,
            heard_goodbye: &mut link.heard_goodbye,
        };
        let (bytes, result) = link.connection.receive(RECEIVE_TURN_BYTES, &mut inbound);
        if bytes > 0 {
            link.last_received = self.now;
            link.heard = true;
            count(&self.shared.metrics.peers[rank.index()].received_bytes, bytes as u64);
        }
        match result {
            Ok(()) => {}
            Err(Fault::Lost(reason)) => self.lose(rank, &reason),
            Err(Fault::Broken(what)) => self.engine.reject_peer(rank, &format!("{rank} {what}")),
            Err(Fault::Internal(what)) => self.engine.abort(&what),
        }
        bytes
    }

    /// Nothing can come from a peer any more.
    pub(crate) fn lose(&mut self, rank: Rank, reason: &str) {
        let Some(Some(link)) = self.links.get_mut(rank.index()) else {
            return;
        };
        if !std::mem::replace(&mut link.open, false) {
            return;
        }
        link.writable = false;
        // The socket is closed later; that it cannot be watched any more is in order.
        let _ = self.shared.poller.delete(link.connection.socket.as_fd());
        self.engine.handle_writable(rank, false);
        self.engine.handle_peer_lost(rank, reason);
    }

    /// Sends signs of life, and loses peers that give none.
    fn watch_silence(&mut self) {
        if self.now < self.next_watch {
            return;
        }
        let silence = self.options.silence_timeout();
        // Who applies pushes one by one is needed, and gives signs of life, after its goodbye too.
        let serves = self.engine.plan().strategy.ready == ReadyRule::Each;
        let mut next = self.now + silence;
        for index in 0..self.links.len() {
            let rank = Rank(index as u32);
            let Some(link) = self.links[index].as_mut().filter(|link| link.open) else {
                continue;
            };
            if !link.said_goodbye || serves {
                if self.now >= link.last_sent + silence / 4 && link.connection.sender.is_empty() {
                    let header = heartbeat(&self.options);
                    let nothing = OutgoingPayload::Owned(Vec::new());
                    link.connection.sender.push(header, nothing, None);
                    link.last_sent = self.now;
                    self.dirty.push(rank);
                }
                next = next.min(link.last_sent.max(self.now) + silence / 4);
            }
            if !link.heard_goodbye || serves {
                // Until its first byte a peer may still be waiting for others to connect.
                let grace =
                    if link.heard { Duration::ZERO } else { self.options.connect_timeout() };
                let limit = link.last_received + silence + grace;
                if self.now >= limit {
                    let silent_s = self.now.since(link.last_received).as_secs_f64();
                    self.lose(rank, &format!("silent for {silent_s:.1} s"));
                } else {
                    next = next.min(limit);
                }
            }
        }
        // Never twice in one millisecond: the poller counts in these.
        self.next_watch = next.max(self.now + Duration::from_millis(1));
    }
}

fn heartbeat(options: &ChannelOptions) -> FrameHeader {
    FrameHeader {
        kind: FrameKind::Heartbeat,
        codec: Codec::Raw,
        flags: FrameFlags::NONE,
        step: Step(0),
        generation: options.generation,
        plan_version: 0,
        tensor: gradlane_units::TensorId(0),
        slice: gradlane_units::SliceId(0),
        priority: gradlane_units::Priority(0),
        sender: Rank(options.rank),
        offset: 0,
        length: 0,
        block_bytes: 0,
        hop: 0,
        payload_crc: 0,
    }
}
