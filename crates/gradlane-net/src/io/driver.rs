//! Starts the I/O threads with their connections and waits for them.

use super::connection::{Connection, Connections};
use super::core::{Core, Peer};
use super::io_thread::IoThread;
use super::shutdown::SessionShutdown;
use crate::channel::shared::Shared;
use crate::compute::job_runner::JobRunner;
use crate::connect::FrameSeals;
use crate::flow::{ConnectionFlow, PortPacing};
use crate::memory::MemoryTable;
use crate::metrics::straggler_stats::ContributionTimes;
use crate::options::{ChannelOptions, GoingOnOptions};
use crate::sys::lock;
use crate::sys::poller::Interest;
use crate::sys::socket::Socket;
use crate::sys::suspend_aware_clock::SuspendAwareClock;
use gradlane_engine::{EngineOptions, Failure, JournaledEngine, Plan};
use gradlane_units::{Rank, Time};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ScopedJoinHandle;
use std::time::Instant;

/// Why a session ends, as the I/O threads find it.
#[derive(Debug)]
pub(super) enum ShutdownCause {
    Closed,
    Failed(Failure),
    /// A bug in this program, with the text of the panic.
    Panicked(String),
}

/// A connected peer.
#[derive(Debug)]
pub(crate) struct PeerLink {
    pub(crate) socket: Arc<dyn Socket>,
    /// `None` where frames are not sealed.
    pub(crate) seals: Option<FrameSeals>,
}

/// The engine and the connections at the start of the I/O threads.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(super) core: Mutex<Core>,
    /// By I/O thread.
    pub(super) connections: Vec<Connections>,
}

impl Driver {
    /// Makes a driver with all connections, before step 0, and with a thread for each poller.
    /// `is_local` tells whether all peers are on this machine, where ports are not paced.
    pub(crate) fn new(
        options: ChannelOptions,
        plan: &Arc<Plan>,
        links: Vec<Option<PeerLink>>,
        is_local: bool,
        shared: Arc<Shared>,
    ) -> io::Result<Driver> {
        let engine_options = EngineOptions {
            rank: Rank(options.rank),
            frame_bytes: options.frame_bytes,
            credit_bytes: options.credit_bytes,
            job_depth: options.work_depth,
            encoded_ahead: options.encoded_ahead,
            progress_timeout: options.progress_timeout(),
            generation: options.generation,
            going_on: options.going_on.as_ref().map(GoingOnOptions::for_engine),
        };
        let mut engine = JournaledEngine::new(engine_options, Arc::clone(plan), options.journal);
        let sent_to = plan.peers_sent_to(Rank(options.rank)) as usize;
        let paced = options.pacing && sent_to > 1 && !is_local;
        let threads = shared.pollers.len();
        let mut connections: Vec<Connections> = (0..threads).map(|_| Vec::new()).collect();
        let mut peers = Vec::with_capacity(links.len());
        for (rank, link) in links.into_iter().enumerate() {
            connections.iter_mut().for_each(|connections| connections.push(None));
            let Some(PeerLink { socket, seals }) = link else {
                peers.push(None);
                continue;
            };
            let thread = peers.iter().flatten().count() % threads;
            socket.watch(&shared.pollers[thread], rank as u64, Interest::Begin)?;
            engine.handle_writable(Rank(rank as u32), true);
            let flow = ConnectionFlow::new(&*socket, &options, sent_to)?;
            peers.push(Some(Peer::new(thread, Arc::clone(&socket))));
            connections[thread][rank] = Some(Connection::new(socket, seals, flow));
        }
        let jobs = JobRunner::new(&shared, plan, &options)?;
        let core = Core {
            engine,
            peers,
            memory: MemoryTable::new(plan.tensors.len()),
            jobs,
            shared,
            contribution_times: ContributionTimes::new(plan, Rank(options.rank)),
            pacing: paced.then(|| PortPacing::new(sent_to, options.frame_bytes)),
            clock: SuspendAwareClock::new(Instant::now(), options.silence_timeout()),
            options,
            now: Time::ZERO,
            connected_at: None,
            commands: Vec::new(),
            server_command: None,
            chosen: vec![Vec::new(); threads],
            to_disconnect: Vec::new(),
            shutdown: None,
        };
        Ok(Driver { core: Mutex::new(core), connections })
    }

    /// Runs the session until its end, also the exchange of reasons after a failure, on this thread and
    /// one for each other poller.
    pub(crate) fn run(self) {
        self.run_threads().run();
    }

    /// Runs all I/O threads. Afterwards no thread uses a connection.
    fn run_threads(self) -> SessionShutdown {
        let Driver { core, connections } = self;
        let mut threads = connections.into_iter().enumerate();
        let merged = std::thread::scope(|scope| {
            let first =
                threads.next().map(|(index, connections)| IoThread::new(index, &core, connections));
            let others: Vec<ScopedJoinHandle<'_, Connections>> = threads
                .filter_map(|(index, connections)| {
                    let thread = IoThread::new(index, &core, connections);
                    let builder = std::thread::Builder::new().name("gradlane-io".to_owned());
                    let spawned = builder.spawn_scoped(scope, move || thread.run());
                    let refused = |error| {
                        let mut core = lock(&core);
                        core.engine.abort(&format!("cannot start I/O thread {index}: {error}"));
                    };
                    spawned.map_err(refused).ok()
                })
                .collect();
            let mut merged = first.map_or_else(Vec::new, IoThread::run);
            for handle in others {
                // Their loops are guarded: the threads themselves do not panic.
                for (slot, connection) in merged.iter_mut().zip(handle.join().unwrap_or_default()) {
                    if connection.is_some() {
                        *slot = connection;
                    }
                }
            }
            merged
        });
        let core = core.into_inner().unwrap_or_else(PoisonError::into_inner);
        SessionShutdown::new(core, merged)
    }
}
