//! The I/O threads: they tell the engine what happens and do what it asks for.
//!
//! `core` is the engine with all that its decisions are carried out with, one for all threads and
//! behind a lock. Each thread (`io_thread`) has the connections of its part of the peers, and does
//! by itself what takes time: system calls, copies, checksums. What the application asks for is in
//! `commands`, what peers' sockets take and give in `sockets`, their signs of life in `silence`.

mod commands;
mod core;
mod io_thread;
mod moderation;
mod silence;
mod sockets;

use crate::arrivals::Arrivals;
use crate::connection::Connection;
use crate::descriptors::Tracked;
use crate::ending::Finished;
use crate::executor::Executor;
use crate::frame_size::FrameSize;
use crate::memory::MemoryTable;
use crate::options::ChannelOptions;
use crate::pacing::Pacing;
use crate::ready::lock;
use crate::send_buffer::SendBuffer;
use crate::shared::Shared;
use crate::uptime::Uptime;
use crate::works::Works;
use gradlane_engine::{EngineOptions, Failure, JournaledEngine, Plan};
use gradlane_units::{Rank, Time};
use io_thread::{IoThread, Link};
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ScopedJoinHandle;

pub(crate) use core::{Core, Peer};
pub(crate) use io_thread::Links;

/// How a session ends, as the I/O threads find it.
#[derive(Debug)]
pub(crate) enum Ending {
    Closed,
    Failed(Failure),
    /// A mistake of this program; the text of the panic.
    Panicked(String),
}

/// The engine and the connections that the I/O threads begin with.
#[derive(Debug)]
pub(crate) struct Driver {
    core: Mutex<Core>,
    /// By I/O thread.
    links: Vec<Links>,
}

impl Driver {
    /// A driver with all connections, before step 0, and with a thread for each of the pollers.
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
            job_depth: options.work_depth,
            encoded_ahead: options.encoded_ahead,
            progress_timeout: options.progress_timeout(),
            generation: options.generation,
        };
        let mut engine = JournaledEngine::new(engine_options, Arc::clone(plan), options.journal);
        let sent_to = plan.peers_sent_to(Rank(options.rank)) as usize;
        let local = |stream: &Tracked<TcpStream>| {
            stream.get().peer_addr().is_ok_and(|it| it.ip().is_loopback())
        };
        let paced = options.pacing && sent_to > 1 && !streams.iter().flatten().all(local);
        let threads = shared.pollers.len();
        let mut links: Vec<Links> = (0..threads).map(|_| Vec::new()).collect();
        let mut peers = Vec::with_capacity(streams.len());
        for (rank, stream) in streams.into_iter().enumerate() {
            links.iter_mut().for_each(|links| links.push(None));
            let Some(socket) = stream.map(Arc::new) else {
                peers.push(None);
                continue;
            };
            let thread = peers.iter().flatten().count() % threads;
            shared.pollers[thread].add(socket.as_fd(), rank as u64, false)?;
            engine.handle_writable(Rank(rank as u32), true);
            let send_buffer = SendBuffer::new(
                socket.as_fd(),
                options.send_buffer_bytes,
                options.low_water_bytes,
                options.frame_bytes,
                sent_to,
            )?;
            peers.push(Some(Peer::new(thread, Arc::clone(&socket))));
            links[thread][rank] = Some(Link::new(
                Connection::new(socket),
                send_buffer,
                FrameSize::new(options.frame_bytes),
            ));
        }
        let executor = Executor::start(&shared, options.work_threads)?;
        let works = Works::new(executor, plan, Rank(options.rank), options.seed)
            .map_err(io::Error::other)?;
        let core = Core {
            engine,
            peers,
            memory: MemoryTable::new(plan.tensors.len()),
            works,
            shared,
            arrivals: Arrivals::new(plan, Rank(options.rank)),
            pacing: paced.then(|| Pacing::new(sent_to, options.frame_bytes)),
            uptime: Uptime::new(options.silence_timeout()),
            options,
            now: Time::ZERO,
            connected_at: None,
            commands: Vec::new(),
            chosen: vec![Vec::new(); threads],
            ending: None,
        };
        Ok(Driver { core: Mutex::new(core), links })
    }

    /// Runs until the session ends, on this thread and as many more as there are other pollers.
    /// Afterwards no thread uses a connection.
    pub(crate) fn run(self) -> Finished {
        let Driver { core, links } = self;
        let mut threads = links.into_iter().enumerate();
        let merged = std::thread::scope(|scope| {
            let first = threads.next().map(|(index, links)| IoThread::new(index, &core, links));
            let others: Vec<ScopedJoinHandle<'_, Links>> = threads
                .filter_map(|(index, links)| {
                    let thread = IoThread::new(index, &core, links);
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
                // Their turns are guarded: the threads themselves do not panic.
                for (slot, link) in merged.iter_mut().zip(handle.join().unwrap_or_default()) {
                    if link.is_some() {
                        *slot = link;
                    }
                }
            }
            merged
        });
        let core = core.into_inner().unwrap_or_else(PoisonError::into_inner);
        Finished::new(core, merged)
    }
}
