//! Connections between all ranks: each rank calls every lower rank, once a lane, and accepts every higher one.
//!
//! Peers may start late: calls are repeated until the timeout. A refusal by a rank of this job,
//! which proves that it knows the secret, ends the attempt at once, with its text. Any other answer
//! at a rank's address ends nothing: the address is called again, and named at the timeout.

use crate::connect::acceptor::{Acceptor, MeshStream, PendingMesh};
use crate::connect::handshake::{self, HandshakeError, Identity, Link, ADDRESS_BYTES_MAX};
use crate::connect::listener::Listener;
use crate::error::ChannelError;
use crate::metrics::HostCounters;
use crate::options::ChannelOptions;
use crate::sys::descriptors::ForkTracked;
use crate::sys::lock;
use gradlane_units::Rank;
use gradlane_wire::escaped;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait for one connection request.
const CONNECT_ATTEMPT: Duration = Duration::from_secs(3);
/// Pause between attempts: short at first, since ranks start at nearly the same time.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_LAST: Duration = Duration::from_millis(500);
/// Interval at which the caller's interrupt function is called.
pub(crate) const INTERRUPT_EVERY: Duration = Duration::from_millis(50);

/// All connections of a rank, and the acceptor that refuses late callers.
pub(crate) struct Mesh {
    /// By lane and rank; `None` for this rank itself. Non-blocking, with all options set.
    pub(crate) streams: Vec<Vec<Option<MeshStream>>>,
    /// Whether all peers are on this machine.
    pub(crate) is_local: bool,
    pub(crate) acceptor: Acceptor,
}

/// Connects all ranks. `interrupt` is called every 50 ms and returns whether to stop.
pub(crate) fn assemble(
    listener: Listener,
    identity: Identity,
    peers: &[String],
    options: &ChannelOptions,
    counters: &Arc<HostCounters>,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<Mesh, ChannelError> {
    let own = identity.rank;
    let deadline = Instant::now() + options.connect_timeout();
    let system = |error: io::Error| ChannelError::system("cannot start to connect", &error);
    let pending =
        Arc::new(PendingMesh::new(identity, peers, Arc::clone(counters)).map_err(system)?);
    let acceptor = Acceptor::start(&pending, listener.into_socket()).map_err(system)?;
    let mut call_threads = CallThreads { pending: Arc::clone(&pending), threads: Vec::new() };
    for (rank, address) in peers.iter().enumerate().take(own.index()) {
        let (pending, address) = (Arc::clone(&pending), address.clone());
        let rank = Rank(rank as u32);
        let thread = std::thread::Builder::new()
            .name("gradlane-call".to_owned())
            .stack_size(512 << 10)
            .spawn(move || {
                // One after the other: a rank that many call has not more callers at once with more lanes.
                for lane in 0..pending.identity.lanes {
                    call_until_connected(&pending, Link { rank, lane }, &address, deadline);
                }
            })
            .map_err(system)?;
        call_threads.threads.push(thread);
    }
    let result = wait_for_all(&pending, peers, options, deadline, interrupt);
    // On failure the flag ends the calls at once; on success they have ended already.
    if result.is_err() {
        pending.cancelled.store(true, Ordering::SeqCst);
    }
    drop(call_threads);
    result?;
    let streams = std::mem::take(&mut lock(&pending.state).streams);
    for (rank, stream) in streams.iter().flat_map(|lane| lane.iter().enumerate()) {
        if let Some(stream) = stream {
            set_options(stream.stream.get(), options).map_err(|error| {
                ChannelError::system(format!("options of the connection to rank {rank}"), &error)
            })?;
        }
    }
    let is_loopback =
        |stream: &MeshStream| stream.stream.get().peer_addr().is_ok_and(|it| it.ip().is_loopback());
    let is_local = streams.iter().flatten().flatten().all(is_loopback);
    Ok(Mesh { streams, is_local, acceptor })
}

/// Joins the calling threads on every way out.
struct CallThreads {
    pending: Arc<PendingMesh>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for CallThreads {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.pending.cancelled.store(true, Ordering::SeqCst);
        }
        for thread in self.threads.drain(..) {
            // The thread has printed its panic; its rank is then missing, which is an error.
            let _ = thread.join();
        }
    }
}

fn wait_for_all(
    pending: &PendingMesh,
    peers: &[String],
    options: &ChannelOptions,
    deadline: Instant,
    interrupt: &mut dyn FnMut() -> bool,
) -> Result<(), ChannelError> {
    let own = pending.identity.rank;
    let mut state = lock(&pending.state);
    loop {
        if let Some((peer, error)) = state.fatal.take() {
            let address = &peers[peer.index()];
            let message = format!("{peer} ({address}) refused {own}: {}", error.text);
            return Err(ChannelError::Refused { message, peer });
        }
        let missing: Vec<Rank> = (0..options.world_size)
            .map(Rank)
            .filter(|&rank| rank != own)
            .filter(|rank| state.streams.iter().any(|lane| lane[rank.index()].is_none()))
            .collect();
        let Some(&first) = missing.first() else {
            return Ok(());
        };
        if Instant::now() >= deadline {
            let named: Vec<String> = missing
                .iter()
                .take(8)
                .map(|&rank| match &state.last_errors[rank.index()] {
                    Some(error) => format!("{rank} at {}: {error}", peers[rank.index()]),
                    None if rank < own => format!("{rank} at {}: no answer", peers[rank.index()]),
                    None => format!("{rank}, which did not call"),
                })
                .collect();
            let message = format!(
                "{own} is not connected to {} of {} other ranks after {} s: {}; check that every \
                 rank runs and that its address and port can be reached",
                missing.len(),
                options.world_size - 1,
                options.connect_timeout_s,
                named.join("; ")
            );
            return Err(ChannelError::TimedOut { message, last_complete: None, peer: Some(first) });
        }
        let result = pending.changed.wait_timeout(state, INTERRUPT_EVERY);
        drop(result.unwrap_or_else(PoisonError::into_inner));
        if interrupt() {
            return Err(ChannelError::Interrupted);
        }
        state = lock(&pending.state);
    }
}

/// Calls a lower rank until a lane is connected.
fn call_until_connected(pending: &Arc<PendingMesh>, link: Link, address: &str, deadline: Instant) {
    let rank = link.rank;
    let mut pause = PAUSE_FIRST;
    let mut is_logged = false;
    while !pending.cancelled.load(Ordering::SeqCst) && Instant::now() < deadline {
        match call_once(pending, link, address, deadline) {
            Ok(stream) => {
                pending.deposit(link, stream);
                return;
            }
            Err(HandshakeError::Cancelled) => return,
            Err(HandshakeError::RefusedByPeer(reject)) => {
                lock(&pending.state).fatal.get_or_insert((rank, reject));
                pending.changed.notify_all();
                return;
            }
            Err(error) => {
                use HandshakeError::{NotGradlane, Refused, RefusedUnverified};
                let is_unverified =
                    matches!(error, NotGradlane | Refused(_) | RefusedUnverified(_));
                let text = match error {
                    HandshakeError::Refused(reject) => {
                        format!("the process there was refused: {}", reject.text)
                    }
                    error => error.to_string(),
                };
                if is_unverified && !std::mem::replace(&mut is_logged, true) {
                    // A mistake, such as another secret, is logged before the timeout.
                    log::warn!(
                        "{} calls {rank} at {}: {text}; it calls again until the time to connect \
                         is up",
                        pending.identity.rank,
                        escaped(address.as_bytes(), ADDRESS_BYTES_MAX)
                    );
                }
                lock(&pending.state).last_errors[rank.index()] = Some(text);
            }
        }
        std::thread::sleep(pause.min(deadline.saturating_duration_since(Instant::now())));
        pause = (pause * 2).min(PAUSE_LAST);
    }
}

fn call_once(
    pending: &PendingMesh,
    link: Link,
    address: &str,
    deadline: Instant,
) -> Result<MeshStream, HandshakeError> {
    let mut last_error = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for target in address.to_socket_addrs().map_err(HandshakeError::System)? {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(HandshakeError::TimedOut);
        }
        match TcpStream::connect_timeout(&target, left.min(CONNECT_ATTEMPT)) {
            Ok(stream) => {
                let stream = ForkTracked::new(stream);
                let (identity, cancelled) = (&pending.identity, &pending.cancelled);
                // A peer may listen long before it accepts: it has until the deadline.
                let seals = handshake::call(stream.get(), identity, link, deadline, cancelled)?;
                return Ok(MeshStream { stream, seals });
            }
            Err(error) => last_error = error,
        }
    }
    Err(HandshakeError::System(last_error))
}

fn set_options(stream: &TcpStream, options: &ChannelOptions) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    if options.receive_buffer_bytes > 0 {
        let bytes = options.receive_buffer_bytes as usize;
        rustix::net::sockopt::set_socket_recv_buffer_size(stream, bytes)?;
    }
    Ok(())
}
