//! The handle of a group, and the threads that drive it.
//!
//! A thread that waits for a call drives: it reads and writes the sockets itself, so that an answer reaches it
//! without a detour. While none waits, a thread of the group does. That one rests while another thread drives, and
//! between calls that are waited for: each message would wake both. It looks after some milliseconds, or
//! when it is called, whether it is needed again.

use super::call::{Call, Operation, RANKS_MAX};
use super::error::{GroupError, GroupErrorKind};
use super::limits::Limits;
use super::links::{Link, Links};
use super::state::GroupState;
use super::work::{Begun, Work};
use crate::connect::{self, digest, Acceptor, Identity, Listener, MeshStream, INTERRUPT_EVERY};
use crate::error::ChannelError;
use crate::io::{FrameReader, FrameWriter};
use crate::memory::UserMemory;
use crate::options::ChannelOptions;
use crate::sys::lock;
use crate::sys::poller::Poller;
use crate::sys::socket::Socket;
use gradlane_units::Rank;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest sleep of the group's thread: a group that is closed ends within it.
const SLEEP_MAX: Duration = Duration::from_millis(250);
/// Pause after which the group's thread looks whether a thread still waits.
const REST: Duration = Duration::from_millis(10);
/// Time for the other ranks to read what was sent before a closed group's connections end.
const LINGER: Duration = Duration::from_secs(2);

/// Settings of a group.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// The group's name, the same on every rank.
    pub name: String,
    /// The job, the same on every rank.
    pub job: String,
    /// This rank in the group.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Number of the membership, the same on every rank; frames of another one are refused.
    pub generation: u32,
    /// Whether all that ranks send each other is encrypted and authenticated; needs a secret.
    pub seal: bool,
    /// Time for all ranks to be connected.
    pub connect_timeout: Duration,
    /// A rank that sends nothing for this long is lost.
    pub silence_timeout: Duration,
    /// Time for which a waiting thread asks again and again before it sleeps.
    pub spin: Duration,
}

/// A running group of ranks.
pub struct Group {
    shared: Arc<Shared>,
    driver: Mutex<Option<JoinHandle<()>>>,
    process_id: u32,
}

struct Shared {
    links: Mutex<Links>,
    poller: Poller,
    spin: Duration,
    /// Whether a waiting thread drives.
    is_driven: AtomicBool,
    /// Number of waits that have begun.
    waits: AtomicU64,
    /// Whether the group's thread rests.
    rests: AtomicBool,
    rest: Mutex<()>,
    wanted: Condvar,
    /// Threads that wait while another one drives.
    waiters: Mutex<usize>,
    ended: Condvar,
    /// Watched works that have ended, and when.
    reports: Mutex<VecDeque<(Instant, Arc<Work>)>>,
    reported: Condvar,
    is_closed: AtomicBool,
}

impl Group {
    /// Connects all ranks and starts. `peers[rank]` is the `host:port` of each rank. `interrupt` is called every
    /// 50 ms and returns whether to give up.
    ///
    /// # Errors
    /// As [`crate::Channel::connect`].
    pub fn connect(
        listener: Listener,
        options: &GroupOptions,
        peers: &[String],
        secret: &[u8],
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<Group, ChannelError> {
        let GroupOptions { rank, size, generation, .. } = *options;
        if rank >= size || size > RANKS_MAX || peers.len() != size as usize {
            return Err(ChannelError::Argument(format!(
                "rank {rank} of {size} with {} addresses: a group has 1 to {RANKS_MAX} ranks and the \
                 address of each",
                peers.len()
            )));
        }
        if options.seal && secret.is_empty() {
            let text = "seal is set without a secret: give one to every rank, or leave seal off";
            return Err(ChannelError::Argument(text.to_owned()));
        }
        let identity = Identity {
            rank: Rank(rank),
            world_size: size,
            generation,
            lanes: 1,
            job_digest: digest(options.job.as_bytes()),
            table_digest: digest(format!("collectives {}", options.name).as_bytes()),
            secret: secret.to_vec(),
            published: peers.to_vec(),
            seals: options.seal,
        };
        let settings = ChannelOptions {
            connect_timeout_s: options.connect_timeout.as_secs_f64(),
            ..ChannelOptions::new(rank, size)
        };
        settings.validate()?;
        let counters = Arc::default();
        let mut mesh =
            connect::assemble(listener, identity, peers, &settings, &counters, interrupt)?;
        let system = |error| ChannelError::system("cannot start a group", &error);
        let poller = Poller::new().map_err(system)?;
        let link = |MeshStream { stream, seals }| {
            let socket: Arc<dyn Socket> = Arc::new(stream);
            let (sealer, opener) =
                seals.map_or((None, None), |it| (Some(it.sealer), Some(it.opener)));
            Link::new(socket, FrameReader::new(opener), FrameWriter::new(sealer))
        };
        let streams = mesh.streams.pop().unwrap_or_default();
        let links = streams.into_iter().map(|stream| stream.map(link)).collect();
        let (name, silence) = (options.name.clone(), options.silence_timeout);
        let state =
            GroupState::new(name, rank, size, generation, silence, Limits::USUAL, Instant::now());
        let shared = Arc::new(Shared {
            links: Mutex::new(Links::new(state, links, &poller).map_err(system)?),
            poller,
            spin: options.spin,
            is_driven: AtomicBool::new(false),
            waits: AtomicU64::new(0),
            rests: AtomicBool::new(false),
            rest: Mutex::new(()),
            wanted: Condvar::new(),
            waiters: Mutex::new(0),
            ended: Condvar::new(),
            reports: Mutex::default(),
            reported: Condvar::new(),
            is_closed: AtomicBool::new(false),
        });
        let acceptor = mesh.acceptor;
        let driver = std::thread::Builder::new()
            .name("gradlane-group".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.drive_alone(acceptor)
            })
            .map_err(system)?;
        let driver = Mutex::new(Some(driver));
        Ok(Group { shared, driver, process_id: std::process::id() })
    }

    /// Begins a collective. The memory of the call is the group's until the work is done.
    ///
    /// # Errors
    /// An `Argument` for a call that makes no sense, after which the group goes on; the failure of a group that has
    /// ended.
    pub fn begin(
        &self,
        call: &Call,
        timeout: Option<Duration>,
        is_waited_for: bool,
    ) -> Result<Arc<Work>, GroupError> {
        let work = Arc::new(Work::default());
        let mut links = self.links()?;
        let begun = links.state.begin(call, Begun::new(&work, timeout, Instant::now()));
        self.shared.flush(links, is_waited_for && begun.is_ok());
        begun.map(|()| work)
    }

    /// Begins a send or a receive; `peer` is `None` for a receive from any rank.
    ///
    /// # Errors
    /// As [`Group::begin`].
    pub fn begin_message(
        &self,
        operation: Operation,
        peer: Option<u32>,
        tag: u32,
        memory: UserMemory,
        timeout: Option<Duration>,
    ) -> Result<Arc<Work>, GroupError> {
        let work = Arc::new(Work::default());
        let mut links = self.links()?;
        let begun = Begun::new(&work, timeout, Instant::now());
        let begun = links.state.begin_message(operation, peer, tag, memory, begun);
        // A short message needs no answer: until the group's thread looks, or a caller waits or asks, it stays in
        // the kernel. Most receives are waited for at once.
        let may_stay = operation == Operation::Receive && links.state.is_short(memory.bytes());
        self.shared.flush(links, may_stay && begun.is_ok());
        begun.map(|()| work)
    }

    /// Waits until a work is done and returns its result. `interrupt` is called every 50 ms and returns whether to
    /// stop waiting.
    ///
    /// # Errors
    /// The work's failure; `TimedOut` when `timeout` is over and `Interrupted`, after which the work goes on.
    pub fn wait(
        &self,
        work: &Work,
        timeout: Option<Duration>,
        interrupt: &mut dyn FnMut() -> bool,
    ) -> Result<u32, GroupError> {
        self.shared.waits.fetch_add(1, Ordering::SeqCst);
        let until = timeout.map(|it| Instant::now() + it);
        loop {
            if let Some(result) = work.result() {
                return result.clone();
            }
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) {
                let seconds = timeout.unwrap_or_default().as_secs_f64();
                let message =
                    format!("the call is not done after a wait of {seconds} s; it goes on");
                return Err(GroupError::new(GroupErrorKind::TimedOut, message, Vec::new()));
            }
            let slice = until.map_or(INTERRUPT_EVERY, |it| INTERRUPT_EVERY.min(it - now));
            self.shared.wait_for(work, now + slice);
            if !work.is_done() && interrupt() {
                let message = "interrupted while waiting".to_owned();
                return Err(GroupError::new(GroupErrorKind::Interrupted, message, Vec::new()));
            }
        }
    }

    /// Serves the sockets once without waiting, unless another thread does. Returns whether a work is done.
    pub fn poll(&self, work: &Work) -> bool {
        if !work.is_done() && self.process_id == std::process::id() {
            self.shared.poll();
        }
        work.is_done()
    }

    /// Asks that a work is among those that [`Group::next_ended`] returns.
    pub fn watch(&self, work: &Arc<Work>) {
        if work.watch() {
            self.shared.report(vec![Arc::clone(work)]);
        } else {
            self.shared.call_driver();
        }
    }

    /// Returns the oldest watched work that has ended and that nobody has taken for `age`, as soon as there is one;
    /// `None` when the group is closed and all were returned. Several threads may wait.
    pub fn next_ended(&self, age: Duration) -> Option<Arc<Work>> {
        let mut reports = lock(&self.shared.reports);
        loop {
            let waited_for = reports.front().map(|(since, _)| since.elapsed());
            reports = match waited_for {
                Some(waited) if waited >= age => return reports.pop_front().map(|(_, work)| work),
                Some(waited) => {
                    let waited =
                        self.shared.reported.wait_timeout(reports, age.saturating_sub(waited));
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None if self.shared.is_closed.load(Ordering::SeqCst) => return None,
                None => {
                    let waited = self.shared.reported.wait(reports);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
    }

    /// Number of collectives that this rank has begun.
    #[must_use]
    pub fn begun(&self) -> u64 {
        lock(&self.shared.links).state.begun()
    }

    /// Leaves the group in good order: calls that run fail, the other ranks are told. Returns at once; the
    /// connections end when all that was sent has been read, or after two seconds.
    pub fn close(&self) {
        if self.process_id != std::process::id() {
            return;
        }
        let mut links = lock(&self.shared.links);
        links.state.close();
        self.shared.flush(links, false);
        // Under the lock, or a thread that has just looked would wait for ever.
        let reports = lock(&self.shared.reports);
        self.shared.is_closed.store(true, Ordering::SeqCst);
        self.shared.reported.notify_all();
        drop(reports);
        self.shared.poller.wake_one_of_several();
        self.shared.call_driver();
    }

    /// Waits until the threads of a closed group have ended.
    pub fn join(&self) {
        let driver = lock(&self.driver).take();
        if self.process_id != std::process::id() {
            // There is no such thread in a forked child.
            std::mem::forget(driver);
        } else if let Some(driver) = driver {
            // It has printed its own panic.
            let _ = driver.join();
        }
    }

    fn links(&self) -> Result<MutexGuard<'_, Links>, GroupError> {
        if self.process_id != std::process::id() {
            let text = "this group belongs to the parent process; a forked child cannot use it";
            return Err(GroupError::new(GroupErrorKind::Closed, text.to_owned(), Vec::new()));
        }
        Ok(lock(&self.shared.links))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.close();
        if self.process_id != std::process::id() {
            self.join();
        }
    }
}

impl Shared {
    /// Sends what a call has queued. `is_waited_for`: the caller drives soon.
    fn flush(&self, mut links: MutexGuard<'_, Links>, is_waited_for: bool) {
        let watched = links.flush(&self.poller);
        let needs_driver = !(is_waited_for || links.is_idle());
        drop(links);
        self.report(watched);
        if needs_driver {
            self.call_driver();
        }
    }

    /// Waits for a work until a time at the latest.
    fn wait_for(&self, work: &Work, until: Instant) {
        let order = (Ordering::SeqCst, Ordering::SeqCst);
        if self.is_driven.compare_exchange(false, true, order.0, order.1).is_ok() {
            self.drive_for(work, until);
            self.is_driven.store(false, Ordering::SeqCst);
            self.hand_over();
            return;
        }
        let mut waiters = lock(&self.waiters);
        *waiters += 1;
        while !work.is_done() && self.is_driven.load(Ordering::SeqCst) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.ended.wait_timeout(waiters, left);
            waiters = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *waiters -= 1;
    }

    fn poll(&self) {
        let order = (Ordering::SeqCst, Ordering::SeqCst);
        if self.is_driven.compare_exchange(false, true, order.0, order.1).is_ok() {
            self.turn(Duration::ZERO, || false);
            self.is_driven.store(false, Ordering::SeqCst);
            self.hand_over();
        }
    }

    fn drive_for(&self, work: &Work, until: Instant) {
        let spin_until = Instant::now() + self.spin;
        while !work.is_done() {
            let now = Instant::now();
            if now >= until {
                return;
            }
            let sleep = if now < spin_until { Duration::ZERO } else { until - now };
            self.turn(sleep, || !work.is_done());
        }
    }

    /// After a thread has stopped to drive: another one that waits goes on, or the group's thread.
    fn hand_over(&self) {
        if *lock(&self.waiters) > 0 {
            self.ended.notify_all();
            return;
        }
        if !lock(&self.links).is_idle() {
            self.call_driver();
        }
    }

    /// Ends the rest of the group's thread.
    fn call_driver(&self) {
        if self.rests.load(Ordering::SeqCst) {
            let _rest = lock(&self.rest);
            self.wanted.notify_all();
        }
    }

    /// Rests once where there is reason to, until the group's thread is called, `REST` at most.
    fn rest_while(&self, may_rest: impl FnOnce() -> bool) {
        let rest = lock(&self.rest);
        self.rests.store(true, Ordering::SeqCst);
        // Asked now: a call that begins from here on finds this thread at rest, and calls it.
        if may_rest() {
            let rested = self.wanted.wait_timeout(rest, REST);
            drop(rested.unwrap_or_else(PoisonError::into_inner));
        }
        self.rests.store(false, Ordering::SeqCst);
    }

    /// Waits for sockets and serves them. `sleeps` as `is_idle` of [`Poller::wait`].
    fn turn(&self, sleep: Duration, sleeps: impl FnOnce() -> bool) {
        let mut reports = Vec::new();
        let sleep = if sleep.is_zero() {
            sleep
        } else {
            sleep.min(lock(&self.links).state.next_tick(Instant::now()))
        };
        if let Err(error) = self.poller.wait(Some(sleep), sleeps, &mut reports) {
            log::error!("a group cannot wait for its sockets: {error}");
            std::thread::sleep(INTERRUPT_EVERY);
            return;
        }
        let mut links = lock(&self.links);
        let now = Instant::now();
        for report in reports.iter().filter(|it| it.readable) {
            links.receive(report.key as u32, &self.poller, now);
        }
        links.state.tick(now);
        let watched = links.flush(&self.poller);
        drop(links);
        self.report(watched);
    }

    fn report(&self, works: Vec<Arc<Work>>) {
        if !works.is_empty() {
            let now = Instant::now();
            lock(&self.reports).extend(works.into_iter().map(|work| (now, work)));
            self.reported.notify_all();
        }
        if *lock(&self.waiters) > 0 {
            self.ended.notify_all();
        }
    }

    /// The group's thread, until the group is closed. Late callers are refused as long.
    fn drive_alone(&self, acceptor: Acceptor) {
        let running = || !self.is_closed.load(Ordering::SeqCst);
        let is_driven = || self.is_driven.load(Ordering::SeqCst);
        let mut waits = 0;
        while running() {
            let before = std::mem::replace(&mut waits, self.waits.load(Ordering::SeqCst));
            self.rest_while(|| is_driven() || waits > before && lock(&self.links).is_idle());
            if is_driven() {
                continue;
            }
            let is_called = waits == before || !lock(&self.links).is_idle();
            let sleep = if is_called { SLEEP_MAX } else { Duration::ZERO };
            self.turn(sleep, || running() && !is_driven());
            if is_driven() {
                // What this turn has ended may be what the thread that drives sleeps for.
                self.poller.wake_one_of_several();
            }
        }
        drop(acceptor);
        self.linger();
    }

    /// Sends the rest, and reads until the other ranks have closed as well.
    fn linger(&self) {
        let until = Instant::now() + LINGER;
        let mut has_ended = false;
        while Instant::now() < until {
            let links = lock(&self.links);
            if links.is_over() {
                return;
            }
            if !has_ended && links.is_flushed() {
                links.end_streams();
                has_ended = true;
            }
            drop(links);
            self.turn(INTERRUPT_EVERY, || true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collectives::{Element, Reduction};

    #[test]
    fn the_groups_thread_rests_between_calls_that_are_waited_for() {
        let listener = Listener::bind("127.0.0.1", 0..=0).expect("a listener");
        let peers = [listener.address().to_string()];
        let second = Duration::from_secs(1);
        let options = GroupOptions {
            name: "alone".to_owned(),
            job: "tests".to_owned(),
            rank: 0,
            size: 1,
            generation: 0,
            seal: false,
            connect_timeout: second * 60,
            silence_timeout: second * 60,
            spin: Duration::ZERO,
        };
        let group =
            Group::connect(listener, &options, &peers, b"secret", &mut || false).expect("a group");
        let call = Call {
            operation: Operation::Barrier,
            element: Element::Bytes,
            reduction: Reduction::Sum,
            root: 0,
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        let until = Instant::now() + second * 60;
        while !group.shared.rests.load(Ordering::SeqCst) {
            assert!(Instant::now() < until, "it waits for sockets beside a thread that calls");
            let work = group.begin(&call, None, true).expect("begun");
            assert_eq!(group.wait(&work, None, &mut || false), Ok(0));
            assert!(group.poll(&work));
        }
        group.close();
        group.join();
    }
}
