//! Waits for many sockets at once, with wake-ups by other threads.
//!
//! A wait is one system call: registrations are level-triggered and stay. A wake-up costs a system
//! call only while the waiting thread really sleeps.

use crate::sys::descriptors::ForkTrackedFd;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{eventfd, poll, EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::time::Timespec;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The key of wake-ups, which no registration may have.
const WAKE_KEY: u64 = u64::MAX;

/// Reports of one wait; the others come with the next.
const REPORTS_MAX: usize = 128;

/// Longer sleeps would need a system call that kernels before 5.11 lack.
const SLEEP_MAX: Duration = Duration::from_secs(1_000_000);

/// Shorter pauses are not interruptible: a wake-up would save less than it costs.
const PAUSE_LONG: Duration = Duration::from_micros(500);

/// The states of a descriptor that a poller reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interest {
    /// Reports of a new descriptor: when it is readable.
    Begin,
    /// Of a known one: when it is readable.
    Readable,
    /// Of a known one: when it is readable or writable.
    Writable,
    /// None any more.
    End,
}

/// One report of a poller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Report {
    /// Key of the registration.
    pub(crate) key: u64,
    /// Bytes, an end of stream or an error can be read.
    pub(crate) readable: bool,
    /// The socket takes bytes, or reports an error when asked to.
    pub(crate) writable: bool,
}

/// One epoll instance with a wake-up.
#[derive(Debug)]
pub(crate) struct Poller {
    epoll: ForkTrackedFd,
    wake: ForkTrackedFd,
    asleep: AtomicBool,
}

impl Poller {
    /// Makes a poller without registrations.
    pub(crate) fn new() -> io::Result<Poller> {
        let epoll = ForkTrackedFd::new(epoll::create(CreateFlags::CLOEXEC)?);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = ForkTrackedFd::new(eventfd(0, flags)?);
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE_KEY), EventFlags::IN)?;
        Ok(Poller { epoll, wake, asleep: AtomicBool::new(false) })
    }

    /// Reports a descriptor under `key` from now on, or stops. Reports are level-triggered.
    pub(crate) fn watch(
        &self,
        descriptor: BorrowedFd<'_>,
        key: u64,
        interest: Interest,
    ) -> io::Result<()> {
        let key = EventData::new_u64(key);
        Ok(match interest {
            Interest::Begin => epoll::add(&self.epoll, descriptor, key, EventFlags::IN),
            Interest::Readable => epoll::modify(&self.epoll, descriptor, key, EventFlags::IN),
            Interest::Writable => {
                epoll::modify(&self.epoll, descriptor, key, EventFlags::IN | EventFlags::OUT)
            }
            Interest::End => epoll::delete(&self.epoll, descriptor),
        }?)
    }

    /// Waits for reports, a wake-up or the timeout. `is_idle` is called after `asleep` is visible to
    /// other threads; when it returns `false`, the wait does not sleep.
    pub(crate) fn wait(
        &self,
        timeout: Option<Duration>,
        is_idle: impl FnOnce() -> bool,
        reports: &mut Vec<Report>,
    ) -> io::Result<()> {
        reports.clear();
        let mut room = [const { MaybeUninit::<Event>::uninit() }; REPORTS_MAX];
        let result = self.asleep_for(|| {
            let timeout = if is_idle() { timeout } else { Some(Duration::ZERO) };
            let timeout = timeout.map(timespec);
            epoll::wait(&self.epoll, &mut room, timeout.as_ref())
        });
        let events = match result {
            // After a signal.
            Err(Errno::INTR) => return Ok(()),
            other => other?.0,
        };
        for event in events {
            let (key, flags) = (event.data.u64(), event.flags);
            if key == WAKE_KEY {
                // Eight bytes; an empty counter is unreadable already.
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            } else {
                let reports_one = |of| flags.intersects(of | EventFlags::ERR | EventFlags::HUP);
                let (readable, writable) =
                    (reports_one(EventFlags::IN), reports_one(EventFlags::OUT));
                reports.push(Report { key, readable, writable });
            }
        }
        Ok(())
    }

    /// Sleeps for `pause` and ignores sockets. A wake-up ends a long pause and the next wait. `is_idle` as for
    /// [`Poller::wait`].
    pub(crate) fn rest(&self, pause: Duration, is_idle: impl FnOnce() -> bool) -> io::Result<()> {
        if pause < PAUSE_LONG {
            std::thread::sleep(pause);
            return Ok(());
        }
        let mut wake = [PollFd::new(&self.wake, PollFlags::IN)];
        let result = self.asleep_for(|| {
            let pause = timespec(if is_idle() { pause } else { Duration::ZERO });
            poll(&mut wake, Some(&pause))
        });
        match result {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Runs `sleep` while other threads see that this one has to be woken.
    fn asleep_for<T>(&self, sleep: impl FnOnce() -> T) -> T {
        self.asleep.store(true, Ordering::SeqCst);
        let result = sleep();
        self.asleep.store(false, Ordering::SeqCst);
        result
    }

    /// Ends another thread's wait, or prevents the one that it is about to begin.
    pub(crate) fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.wake_one_of_several();
        }
    }

    /// Ends the wait of one thread where several wait, or prevents the next one. The kernel tells one of
    /// them alone of a socket, and `wake` knows of the last to fall asleep alone.
    pub(crate) fn wake_one_of_several(&self) {
        // A full counter is readable already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

fn timespec(sleep: Duration) -> Timespec {
    let sleep = sleep.min(SLEEP_MAX);
    Timespec { tv_sec: sleep.as_secs() as i64, tv_nsec: sleep.subsec_nanos().into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_rest_lasts_as_long_as_was_asked_whatever_is_readable() {
        use std::io::Write;
        let poller = Poller::new().expect("a poller");
        let (mut here, there) = std::os::unix::net::UnixStream::pair().expect("a pair");
        poller.watch(std::os::fd::AsFd::as_fd(&there), 7, Interest::Begin).expect("added");
        here.write_all(b"x").expect("written");
        let pause = Duration::from_micros(2_500);
        let began = Instant::now();
        poller.rest(pause, || true).expect("rested");
        assert!(began.elapsed() >= pause, "{:?}", began.elapsed());
        let mut reports = Vec::new();
        poller.wait(Some(LONG), || true, &mut reports).expect("waited");
        assert!(reports.iter().any(|it| it.key == 7 && it.readable), "{reports:?}");
    }

    #[test]
    fn a_wake_up_ends_a_rest_and_the_wait_after_it() {
        let poller = Poller::new().expect("a poller");
        let began = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !poller.asleep.load(Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                poller.wake();
            });
            poller.rest(LONG, || true).expect("rested");
        });
        let mut reports = Vec::new();
        poller.wait(Some(LONG), || true, &mut reports).expect("waited");
        assert!(reports.is_empty(), "{reports:?}");
        assert!(began.elapsed() < LONG, "neither slept");
    }

    #[test]
    fn there_is_no_rest_with_something_to_do() {
        let poller = Poller::new().expect("a poller");
        let began = Instant::now();
        poller.rest(LONG, || false).expect("asked");
        assert!(began.elapsed() < LONG);
    }
}
