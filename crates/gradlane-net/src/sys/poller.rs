//! Waits for many sockets at once, with wake-ups by other threads.
//!
//! A wait is one system call: registrations are level-triggered and stay. A wake-up costs a system
//! call only while the waiting thread really sleeps.

use crate::sys::descriptors::ForkTrackedFd;
use crate::sys::syscall::{self, EpollChange, EpollEvents, EpollReport};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The key of wake-ups, which no registration may have.
const WAKE_KEY: u64 = u64::MAX;

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
        let epoll = ForkTrackedFd::new(syscall::epoll_create()?);
        let wake = ForkTrackedFd::new(syscall::eventfd_create()?);
        let add = EpollChange::Add;
        syscall::epoll_control(epoll.as_fd(), add, wake.as_fd(), WAKE_KEY, false)?;
        Ok(Poller { epoll, wake, asleep: AtomicBool::new(false) })
    }

    /// Reports a descriptor under `key` from now on, or stops.
    pub(crate) fn watch(
        &self,
        descriptor: BorrowedFd<'_>,
        key: u64,
        interest: Interest,
    ) -> io::Result<()> {
        let (change, writable) = match interest {
            Interest::Begin => (EpollChange::Add, false),
            Interest::Readable => (EpollChange::Modify, false),
            Interest::Writable => (EpollChange::Modify, true),
            Interest::End => (EpollChange::Delete, false),
        };
        syscall::epoll_control(self.epoll.as_fd(), change, descriptor, key, writable)
    }

    /// Waits for reports, a wake-up or the timeout. `is_idle` is called after `asleep` is visible to
    /// other threads; when it returns `false`, the wait does not sleep.
    pub(crate) fn wait(
        &self,
        events: &mut EpollEvents,
        timeout: Option<Duration>,
        is_idle: impl FnOnce() -> bool,
        reports: &mut Vec<EpollReport>,
    ) -> io::Result<()> {
        reports.clear();
        let result = self.asleep_for(|| {
            let timeout = if is_idle() { timeout } else { Some(Duration::ZERO) };
            events.wait(self.epoll.as_fd(), timeout)
        });
        for report in result? {
            if report.key == WAKE_KEY {
                syscall::eventfd_clear(self.wake.as_fd());
            } else {
                reports.push(report);
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
        self.asleep_for(|| {
            let pause = if is_idle() { pause } else { Duration::ZERO };
            syscall::eventfd_wait(self.wake.as_fd(), pause)
        })
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
            syscall::eventfd_signal(self.wake.as_fd());
        }
    }

    /// Ends the wait of one thread where several wait, or prevents the next one. The kernel tells one of
    /// them alone of a socket, and `wake` knows of the last to fall asleep alone.
    pub(crate) fn wake_one_of_several(&self) {
        syscall::eventfd_signal(self.wake.as_fd());
    }
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
        poller.watch(there.as_fd(), 7, Interest::Begin).expect("added");
        here.write_all(b"x").expect("written");
        let pause = Duration::from_micros(2_500);
        let began = Instant::now();
        poller.rest(pause, || true).expect("rested");
        assert!(began.elapsed() >= pause, "{:?}", began.elapsed());
        let (mut events, mut reports) = (EpollEvents::new(), Vec::new());
        poller.wait(&mut events, Some(LONG), || true, &mut reports).expect("waited");
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
        let (mut events, mut reports) = (EpollEvents::new(), Vec::new());
        poller.wait(&mut events, Some(LONG), || true, &mut reports).expect("waited");
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
