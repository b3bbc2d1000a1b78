//! The I/O thread: tells the engine what happens and does what it asks for.
//!
//! One turn of the loop handles commands, finished works and socket events, and after each of them
//! asks the engine for works, frames and events until it has none. A frame is chosen only when its
//! socket can take it; nothing here blocks but the wait for the next event. What the application asks
//! for is in `commands`, what peers' sockets take and give in `sockets`, their signs of life in `silence`.

mod commands;
mod silence;
mod sockets;

use crate::arrivals::Arrivals;
use crate::blocks;
use crate::connection::{Connection, OutgoingPayload};
use crate::descriptors::Tracked;
use crate::executor::Executor;
use crate::memory::MemoryTable;
use crate::metrics::count;
use crate::options::ChannelOptions;
use crate::pacing::{PacedFlow, Pacing};
use crate::ready::lock;
use crate::send_buffer::SendBuffer;
use crate::shared::{Command, Shared};
use crate::syscall::EpollEvents;
use crate::uptime::Uptime;
use crate::works::Works;
use gradlane_engine::{
    EngineOptions, Event, Failure, JournaledEngine, Payload, Plan, Region, Transmit,
};
use gradlane_units::{Rank, Step, TensorId, Time};
use gradlane_wire::FrameKind;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Duration;

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
    flow: PacedFlow,
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
    /// None where there is one peer only, where peers are on this machine, and where it is not wanted.
    pacing: Option<Pacing>,
    options: ChannelOptions,
    uptime: Uptime,
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
        let peers = plan.peers_sent_to(Rank(options.rank)) as usize;
        let local = |stream: &Tracked<TcpStream>| {
            stream.get().peer_addr().is_ok_and(|it| it.ip().is_loopback())
        };
        let paced = options.pacing && peers > 1 && !streams.iter().flatten().all(local);
        let mut links = Vec::with_capacity(streams.len());
        for (rank, stream) in streams.into_iter().enumerate() {
            links.push(match stream {
                None => None,
                Some(socket) => {
                    shared.poller.add(socket.as_fd(), rank as u64, false)?;
                    engine.handle_writable(Rank(rank as u32), true);
                    let (fixed, low_water) = (options.send_buffer_bytes, options.low_water_bytes);
                    Some(Link {
                        send_buffer: SendBuffer::new(socket.as_fd(), fixed, low_water, peers)?,
                        flow: PacedFlow::default(),
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
            pacing: paced.then(|| Pacing::new(peers)),
            uptime: Uptime::new(options.silence_timeout()),
            options,
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
            self.pace();
            let timeout = if hurry { Duration::ZERO } else { self.time_to_next() };
            let (shared, works) = (Arc::clone(&self.shared), &self.works);
            let idle = || lock(&shared.commands).is_empty() && !works.has_done();
            if let Err(error) = shared.poller.wait(&mut events, Some(timeout), idle, &mut reports) {
                self.engine.abort(&format!("cannot wait for sockets: {error}"));
            }
            self.read_clock(timeout);
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

    /// After a turn that was to sleep for at most `asked`.
    fn read_clock(&mut self, asked: Duration) {
        self.now = self.uptime.read(asked);
        self.engine.handle_time(self.now);
    }

    fn time_to_next(&self) -> Duration {
        let next = self.engine.poll_timeout().map_or(self.next_watch, |it| it.min(self.next_watch));
        next.since(self.now)
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
                if let Event::Decided { step, contributors } = event {
                    if !contributors.contains(&self.engine.rank()) {
                        self.works.left_out(step);
                    }
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
}
