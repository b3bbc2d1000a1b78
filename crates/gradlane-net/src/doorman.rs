//! The thread that answers callers, from before the ranks are connected until the channel ends.
//!
//! A caller gets five seconds in a short-lived thread of its own; strangers, mismatches and second
//! joiners are refused with the reason while training goes on.

use crate::descriptors::Tracked;
use crate::handshake::{self, HandshakeError, Identity};
use crate::metrics::Metrics;
use crate::poller::Poller;
use crate::ready::lock;
use crate::syscall::EpollEvents;
use gradlane_units::Rank;
use gradlane_wire::{Reject, RejectReason};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time for the handshake of one caller.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Callers answered at once; more are turned away.
const CALLERS_MAX: usize = 64;

/// Connections as they come to be.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    /// Connected streams that were not taken yet, by rank.
    pub(crate) streams: Vec<Option<Tracked<TcpStream>>>,
    /// Ranks that are connected or about to be.
    pub(crate) taken: Vec<bool>,
    /// Errors that end the attempt to connect, and the last reason of each attempt that goes on.
    pub(crate) fatal: Option<(Rank, HandshakeError)>,
    pub(crate) last_errors: Vec<Option<String>>,
}

/// Shared by the doorman, the connecting threads and who waits for them.
pub(crate) struct Lobby {
    pub(crate) identity: Identity,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) arrivals: Mutex<Arrivals>,
    pub(crate) changed: Condvar,
    pub(crate) cancelled: AtomicBool,
    callers: AtomicUsize,
    poller: Poller,
}

impl Lobby {
    /// A lobby in which nobody has arrived.
    pub(crate) fn new(identity: Identity, metrics: Arc<Metrics>) -> io::Result<Lobby> {
        let world_size = identity.world_size as usize;
        let arrivals = Arrivals {
            streams: (0..world_size).map(|_| None).collect(),
            taken: vec![false; world_size],
            fatal: None,
            last_errors: vec![None; world_size],
        };
        Ok(Lobby {
            identity,
            metrics,
            arrivals: Mutex::new(arrivals),
            changed: Condvar::new(),
            cancelled: AtomicBool::new(false),
            callers: AtomicUsize::new(0),
            poller: Poller::new()?,
        })
    }

    /// Puts a connected stream where it is waited for.
    pub(crate) fn deposit(&self, rank: Rank, stream: Tracked<TcpStream>) {
        let mut arrivals = lock(&self.arrivals);
        arrivals.taken[rank.index()] = true;
        arrivals.streams[rank.index()] = Some(stream);
        self.changed.notify_all();
    }

    fn reserve(self: &Arc<Lobby>, caller: Rank) -> Result<Reservation, Reject> {
        let own = self.identity.rank;
        let taken = |text| Err(Reject { reason: RejectReason::RankTaken, text });
        if caller == own {
            return taken(format!("{caller} is this rank itself: two processes have one rank"));
        }
        if caller < own {
            return taken(format!("{own} connects to {caller} itself: who calls is a second one"));
        }
        let mut arrivals = lock(&self.arrivals);
        if arrivals.taken[caller.index()] {
            return taken(format!("{caller} is connected to {own} already"));
        }
        arrivals.taken[caller.index()] = true;
        Ok(Reservation { lobby: Arc::clone(self), rank: caller, kept: false })
    }

    fn answer(self: &Arc<Lobby>, stream: TcpStream, address: &str) {
        let stream = Tracked::new(stream);
        let deadline = Instant::now() + HANDSHAKE_TIMEOUT;
        let result = (|| {
            stream.get().set_nonblocking(false).map_err(HandshakeError::System)?;
            let reserve = |caller| self.reserve(caller);
            handshake::answer(stream.get(), &self.identity, deadline, &self.cancelled, reserve)
        })();
        match result {
            Ok((rank, mut reservation)) => {
                reservation.kept = true;
                self.deposit(rank, stream);
            }
            Err(HandshakeError::Cancelled) => {}
            Err(HandshakeError::RefusedByPeer(reject)) => {
                let reason = format!("it refused this rank: {}", reject.text);
                self.metrics.refuse(self.identity.rank, address, &reason);
            }
            Err(error) => self.metrics.refuse(self.identity.rank, address, &error.to_string()),
        }
    }
}

/// A rank held for a caller; free again unless the connection was kept.
struct Reservation {
    lobby: Arc<Lobby>,
    rank: Rank,
    kept: bool,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.kept {
            lock(&self.lobby.arrivals).taken[self.rank.index()] = false;
        }
    }
}

/// The thread, until it is dropped.
pub(crate) struct Doorman {
    lobby: Arc<Lobby>,
    thread: Option<JoinHandle<()>>,
}

impl Doorman {
    /// Starts to answer callers.
    pub(crate) fn start(lobby: &Arc<Lobby>, listener: Tracked<TcpListener>) -> io::Result<Doorman> {
        lobby.poller.add(listener.as_fd(), 0, false)?;
        let thread = std::thread::Builder::new().name("gradlane-door".to_owned()).spawn({
            let lobby = Arc::clone(lobby);
            move || stand_at_the_door(&lobby, &listener)
        })?;
        Ok(Doorman { lobby: Arc::clone(lobby), thread: Some(thread) })
    }

    /// Leaves the thread alone: in a forked child it does not exist.
    pub(crate) fn forget(mut self) {
        std::mem::forget(self.thread.take());
        std::mem::forget(self);
    }
}

impl Drop for Doorman {
    fn drop(&mut self) {
        self.lobby.cancelled.store(true, Ordering::SeqCst);
        self.lobby.poller.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed by itself, and it held nothing that is needed.
            let _ = thread.join();
        }
    }
}

fn stand_at_the_door(lobby: &Arc<Lobby>, listener: &Tracked<TcpListener>) {
    let _count = lobby.metrics.count_this_thread("doorman");
    let mut events = EpollEvents::new();
    let mut reports = Vec::new();
    let on_duty = || !lobby.cancelled.load(Ordering::SeqCst);
    while on_duty() {
        if lobby.poller.wait(&mut events, None, on_duty, &mut reports).is_err() {
            break;
        }
        loop {
            match listener.get().accept() {
                Ok((stream, address)) => receive_caller(lobby, stream, &address.to_string()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // The caller is gone already, or descriptors have run out for a while.
                    std::thread::sleep(Duration::from_millis(20));
                    break;
                }
            }
        }
    }
    // Handshakes see the flag within a tenth of a second.
    while lobby.callers.load(Ordering::SeqCst) > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn receive_caller(lobby: &Arc<Lobby>, stream: TcpStream, address: &str) {
    if lobby.callers.fetch_add(1, Ordering::SeqCst) >= CALLERS_MAX {
        lobby.callers.fetch_sub(1, Ordering::SeqCst);
        lobby.metrics.refuse(lobby.identity.rank, address, "too many callers at once");
        return;
    }
    let spawned = std::thread::Builder::new()
        .name("gradlane-hello".to_owned())
        .stack_size(256 << 10)
        .spawn({
            let (lobby, address) = (Arc::clone(lobby), address.to_owned());
            move || {
                let _leave = Leave(&lobby.callers);
                lobby.answer(stream, &address);
            }
        });
    if let Err(error) = spawned {
        lobby.callers.fetch_sub(1, Ordering::SeqCst);
        lobby.metrics.refuse(lobby.identity.rank, address, &format!("no thread for it: {error}"));
    }
}

/// Counts a caller out, also when its thread panics.
struct Leave<'a>(&'a AtomicUsize);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
