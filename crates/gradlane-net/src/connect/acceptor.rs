//! The thread that accepts callers, from before the ranks are connected until the channel ends.
//!
//! A caller gets five seconds in a short-lived thread of its own. Strangers, mismatches and second
//! joiners are refused with the reason while training goes on. Where many call at once, callers from
//! the addresses of ranks go before strangers, and places are shared between the networks that they
//! call from, so that one network cannot keep another out.

use crate::connect::handshake::{self, FrameSeals, HandshakeError, Identity, Link};
use crate::metrics::HostCounters;
use crate::sys::descriptors::ForkTracked;
use crate::sys::lock;
use crate::sys::poller::{Interest, Poller};
use gradlane_units::Rank;
use gradlane_wire::{Reject, RejectReason};
use std::io;
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time for the handshake of one caller.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Handshakes at once.
const CALLERS_MAX: usize = 64;
/// After this time a caller may be evicted for another one.
const EVICT_AFTER: Duration = Duration::from_secs(1);
/// Threads of callers, including those that were evicted and are about to end.
const CALLER_THREADS_MAX: usize = 2 * CALLERS_MAX;

/// A stream after the handshake.
#[derive(Debug)]
pub(crate) struct MeshStream {
    pub(crate) stream: ForkTracked<TcpStream>,
    /// `None` where frames are not sealed.
    pub(crate) seals: Option<FrameSeals>,
}

/// The connections made so far.
#[derive(Debug, Default)]
pub(crate) struct MeshState {
    /// By lane and rank, until the mesh takes them.
    pub(crate) streams: Vec<Vec<Option<MeshStream>>>,
    /// By lane and rank: whether it is connected or about to be.
    pub(crate) taken: Vec<Vec<bool>>,
    /// A refusal that ends the attempt to connect.
    pub(crate) fatal: Option<(Rank, Reject)>,
    /// By rank: the last error of an attempt that goes on.
    pub(crate) last_errors: Vec<Option<String>>,
}

/// A mesh that is being connected. The acceptor, the calling threads and the waiting thread share
/// it.
pub(crate) struct PendingMesh {
    pub(crate) identity: Identity,
    pub(crate) counters: Arc<HostCounters>,
    pub(crate) state: Mutex<MeshState>,
    pub(crate) changed: Condvar,
    pub(crate) cancelled: AtomicBool,
    /// Threads of callers.
    threads: AtomicUsize,
    callers: Mutex<Callers>,
    /// Networks of the ranks' addresses.
    peer_networks: Vec<IpAddr>,
    poller: Poller,
}

/// Callers whose handshake runs, in the order of their calls.
#[derive(Default)]
struct Callers {
    last_number: u64,
    active: Vec<Caller>,
}

struct Caller {
    number: u64,
    network: IpAddr,
    since: Instant,
    stream: Arc<ForkTracked<TcpStream>>,
}

impl Callers {
    /// Admits a caller, and evicts another one where there are many. Returns `None` to turn it
    /// away.
    fn admit(
        &mut self,
        stream: TcpStream,
        from: IpAddr,
        peer_networks: &[IpAddr],
    ) -> Option<(Caller, Option<Caller>)> {
        let (network, since) = (network_of(from), Instant::now());
        let mut evicted = None;
        if self.active.len() >= CALLERS_MAX {
            let active: Vec<_> = self.active.iter().map(|it| (it.network, it.since)).collect();
            let index = caller_to_evict(&active, network, since, peer_networks)?;
            evicted = Some(self.active.remove(index));
        }
        self.last_number += 1;
        let stream = Arc::new(ForkTracked::new(stream));
        let number = self.last_number;
        let caller = || Caller { number, network, since, stream: Arc::clone(&stream) };
        self.active.push(caller());
        Some((caller(), evicted))
    }

    /// Removes a caller. Returns whether it was still active.
    fn remove(&mut self, number: u64) -> bool {
        let position = self.active.iter().position(|it| it.number == number);
        position.map(|it| self.active.remove(it)).is_some()
    }
}

/// Returns the index of the caller to evict for one from `network`, of active callers in order of
/// age. A stranger gives way to a caller from a peer's network, and never the other way round; among
/// equals it is the first of the largest network, if that has at least two more, else one that is slow.
fn caller_to_evict(
    active: &[(IpAddr, Instant)],
    network: IpAddr,
    now: Instant,
    peer_networks: &[IpAddr],
) -> Option<usize> {
    let is_peer = |network: IpAddr| peer_networks.contains(&network);
    let has_strangers = active.iter().any(|it| !is_peer(it.0));
    let may_go = |it: &(IpAddr, Instant)| !has_strangers || !is_peer(it.0);
    if !has_strangers && !is_peer(network) {
        return None;
    }
    let count = |of: IpAddr| active.iter().filter(|it| it.0 == of).count();
    let most = active.iter().filter(|it| may_go(it)).map(|it| it.0).max_by_key(|&it| count(it))?;
    if is_peer(network) != is_peer(most) || count(most) > count(network) + 1 {
        return active.iter().position(|it| it.0 == most);
    }
    let is_slow = |it: &(IpAddr, Instant)| now.saturating_duration_since(it.1) >= EVICT_AFTER;
    active.iter().position(|it| may_go(it) && is_slow(it))
}

/// Returns the network whose callers are counted together: an IPv4 address, or the half of an IPv6
/// address that a host cannot choose.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

impl PendingMesh {
    /// Makes a mesh without connections.
    pub(crate) fn new(
        identity: Identity,
        peers: &[String],
        counters: Arc<HostCounters>,
    ) -> io::Result<PendingMesh> {
        let (world_size, lanes) = (identity.world_size as usize, usize::from(identity.lanes));
        let state = MeshState {
            streams: (0..lanes).map(|_| (0..world_size).map(|_| None).collect()).collect(),
            taken: vec![vec![false; world_size]; lanes],
            fatal: None,
            last_errors: vec![None; world_size],
        };
        Ok(PendingMesh {
            identity,
            counters,
            state: Mutex::new(state),
            changed: Condvar::new(),
            cancelled: AtomicBool::new(false),
            threads: AtomicUsize::new(0),
            callers: Mutex::default(),
            // A rank that is called by a name is a stranger until it has proved itself.
            peer_networks: peers
                .iter()
                .filter_map(|it| it.parse::<SocketAddr>().ok())
                .map(|it| network_of(it.ip()))
                .collect(),
            poller: Poller::new()?,
        })
    }

    /// Adds a connected stream.
    pub(crate) fn deposit(&self, link: Link, stream: MeshStream) {
        let mut state = lock(&self.state);
        state.taken[usize::from(link.lane)][link.rank.index()] = true;
        state.streams[usize::from(link.lane)][link.rank.index()] = Some(stream);
        self.changed.notify_all();
    }

    fn reserve(self: &Arc<PendingMesh>, link: Link) -> Result<Reservation, Reject> {
        let (own, caller) = (self.identity.rank, link.rank);
        let taken = |text| Err(Reject { reason: RejectReason::RankTaken, text });
        if caller == own {
            return taken(format!("{caller} is this rank itself: two processes have one rank"));
        }
        if caller < own {
            return taken(format!("{own} connects to {caller} itself: the caller is a second one"));
        }
        let mut state = lock(&self.state);
        let place = &mut state.taken[usize::from(link.lane)][caller.index()];
        if *place {
            return taken(format!("{caller} is connected to {own} already"));
        }
        *place = true;
        Ok(Reservation { pending: Arc::clone(self), link, kept: false })
    }

    fn accept_peer(self: &Arc<PendingMesh>, caller: Caller, address: &str) {
        let stream = caller.stream;
        let deadline = caller.since + HANDSHAKE_TIMEOUT;
        let result = (|| {
            stream.get().set_nonblocking(false).map_err(HandshakeError::System)?;
            let reserve = |link| self.reserve(link);
            handshake::accept(stream.get(), &self.identity, deadline, &self.cancelled, reserve)
        })();
        let was_active = lock(&self.callers).remove(caller.number);
        match (result, Arc::into_inner(stream)) {
            // An evicted caller was refused already.
            _ if !was_active => {}
            (Ok((link, mut reservation, seals)), Some(stream)) => {
                reservation.kept = true;
                self.deposit(link, MeshStream { stream, seals });
            }
            (Ok(_), None) => unreachable!("a removed caller's stream has no other holder"),
            (Err(HandshakeError::Cancelled), _) => {}
            (Err(error), _) => {
                let reason = error.to_string();
                self.refuse(address, &reason);
                if let HandshakeError::RefusedRank { rank, .. } = error {
                    // It is named when the time to connect is up.
                    if let Some(last) = lock(&self.state).last_errors.get_mut(rank.index()) {
                        *last = Some(reason);
                    }
                }
            }
        }
    }

    fn refuse(&self, address: &str, reason: &str) {
        self.counters.refuse(self.identity.rank, address, reason);
    }
}

/// A place that is reserved for a caller; free again unless the connection was kept.
struct Reservation {
    pending: Arc<PendingMesh>,
    link: Link,
    kept: bool,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.kept {
            let Link { rank, lane } = self.link;
            lock(&self.pending.state).taken[usize::from(lane)][rank.index()] = false;
        }
    }
}

/// The accepting thread, until it is dropped.
pub(crate) struct Acceptor {
    pending: Arc<PendingMesh>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Starts the thread.
    pub(crate) fn start(
        pending: &Arc<PendingMesh>,
        listener: ForkTracked<TcpListener>,
    ) -> io::Result<Acceptor> {
        pending.poller.watch(listener.as_fd(), 0, Interest::Begin)?;
        let thread = std::thread::Builder::new().name("gradlane-accept".to_owned()).spawn({
            let pending = Arc::clone(pending);
            move || accept_loop(&pending, &listener)
        })?;
        Ok(Acceptor { pending: Arc::clone(pending), thread: Some(thread) })
    }

    /// Forgets the thread, which does not exist in a forked child.
    pub(crate) fn forget(mut self) {
        std::mem::forget(self.thread.take());
        std::mem::forget(self);
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.pending.cancelled.store(true, Ordering::SeqCst);
        self.pending.poller.wake();
        if let Some(thread) = self.thread.take() {
            // The thread has printed its own panic, and holds nothing that is needed.
            let _ = thread.join();
        }
    }
}

fn accept_loop(pending: &Arc<PendingMesh>, listener: &ForkTracked<TcpListener>) {
    let _count = pending.counters.count_this_thread("acceptor");
    let mut reports = Vec::new();
    let running = || !pending.cancelled.load(Ordering::SeqCst);
    while running() {
        if pending.poller.wait(None, running, &mut reports).is_err() {
            break;
        }
        // Also under a flood of callers the flag is seen.
        while running() {
            match listener.get().accept() {
                Ok((stream, address)) => admit_caller(pending, stream, address),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    // The caller is gone, or descriptors have run out for a while.
                    std::thread::sleep(Duration::from_millis(20));
                    break;
                }
            }
        }
    }
    // Handshakes see the flag within a tenth of a second.
    while pending.threads.load(Ordering::SeqCst) > 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn admit_caller(pending: &Arc<PendingMesh>, stream: TcpStream, from: SocketAddr) {
    let address = from.to_string();
    let has_room = pending.threads.load(Ordering::SeqCst) < CALLER_THREADS_MAX;
    let admit = || lock(&pending.callers).admit(stream, from.ip(), &pending.peer_networks);
    let admitted = if has_room { admit() } else { None };
    let Some((caller, evicted)) = admitted else {
        pending.refuse(&address, "too many callers at once");
        return;
    };
    if let Some(evicted) = evicted {
        // This ends its thread.
        let _ = evicted.stream.get().shutdown(Shutdown::Both);
        pending.refuse(&evicted.network.to_string(), "it gave way to another caller");
    }
    let number = caller.number;
    pending.threads.fetch_add(1, Ordering::SeqCst);
    let spawned = std::thread::Builder::new()
        .name("gradlane-hello".to_owned())
        .stack_size(256 << 10)
        .spawn({
            let (pending, address) = (Arc::clone(pending), address.clone());
            move || {
                let _guard = CallerGuard(&pending.threads);
                pending.accept_peer(caller, &address);
            }
        });
    if let Err(error) = spawned {
        pending.threads.fetch_sub(1, Ordering::SeqCst);
        lock(&pending.callers).remove(number);
        pending.refuse(&address, &format!("no thread for it: {error}"));
    }
}

/// Counts a caller out, also when its thread panics.
struct CallerGuard<'a>(&'a AtomicUsize);

impl Drop for CallerGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_of_an_ipv6_host_are_counted_together() {
        let network = |text: &str| network_of(text.parse().expect("an address")).to_string();
        assert_eq!(network("10.0.0.1"), "10.0.0.1");
        assert_eq!(network("::ffff:10.0.0.1"), "10.0.0.1");
        assert_eq!(network("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
    }

    #[test]
    fn places_are_shared_between_networks() {
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        let now = Instant::now();
        let active = |counts: &[(u8, usize)], age: Duration| -> Vec<(IpAddr, Instant)> {
            let callers = counts.iter().flat_map(|&(last, count)| vec![address(last); count]);
            callers.map(|it| (it, now - age)).collect()
        };
        let young = Duration::from_millis(10);
        let to_evict = |active: &[_], last| caller_to_evict(active, address(last), now, &[]);
        // A network that has all places gives way to any other one, and not to itself.
        let one = active(&[(1, 64)], young);
        assert_eq!(to_evict(&one, 2), Some(0));
        assert_eq!(to_evict(&one, 1), None);
        let shared = active(&[(2, 10), (1, 54)], young);
        assert_eq!(to_evict(&shared, 2), Some(10));
        assert_eq!(to_evict(&shared, 3), Some(10));
        // A start of eight ranks on each of eight hosts evicts nobody.
        let fair = active(&[(1, 8), (2, 8), (3, 8), (4, 8), (5, 8), (6, 8), (7, 8), (8, 8)], young);
        assert_eq!(to_evict(&fair, 8), None);
        // Slow callers are evicted also for their own network.
        assert_eq!(to_evict(&active(&[(1, 64)], EVICT_AFTER), 1), Some(0));
        // Ranks go before strangers, however many there are of either and however slow.
        let peers = [address(1), address(2)];
        let to_evict = |active: &[_], last| caller_to_evict(active, address(last), now, &peers);
        let mixed = active(&[(1, 60), (9, 1), (8, 3)], EVICT_AFTER);
        assert_eq!(to_evict(&mixed, 1), Some(61));
        assert_eq!(to_evict(&mixed, 7), Some(61));
        assert_eq!(to_evict(&active(&[(1, 64)], EVICT_AFTER), 9), None);
        assert_eq!(to_evict(&one, 2), Some(0));
    }
}
