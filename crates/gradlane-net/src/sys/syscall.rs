//! System calls that the standard library has no name for: vectored sends and receives without
//! blocking, epoll, eventfd, clocks of threads, random bytes.
//!
//! Every function is safe to call: descriptors and memory are borrowed.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Unsent bytes of a TCP socket (`linux/sockios.h`).
const SIOCOUTQNSD: libc::Ioctl = 0x894B;
/// Which buffers keep the size that they were given (`asm-generic/socket.h`, `linux/socket.h`).
const SO_BUF_LOCK: libc::c_int = 72;
const SOCK_SNDBUF_LOCK: libc::c_int = 1;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Sends without blocking and returns the number of bytes that the kernel took.
pub(crate) fn send(socket: BorrowedFd<'_>, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
    // SAFETY: all fields of a msghdr may be zero: no name, no control data, no flags.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut().cast();
    message.msg_iovlen = pieces.len() as _;
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: an `IoSlice` is an iovec; the kernel reads the list and the borrowed bytes.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives without blocking and returns the number of bytes, 0 at the end of the stream.
pub(crate) fn receive(socket: BorrowedFd<'_>, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    // SAFETY: as in `send`.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr().cast();
    message.msg_iovlen = pieces.len() as _;
    // SAFETY: an `IoSliceMut` is an iovec; the kernel reads the list and writes the borrowed bytes.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

/// Returns the bytes that the kernel holds and has not sent yet.
pub(crate) fn unsent_bytes(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request writes one int to the address given.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCOUTQNSD, &mut bytes) })?;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    let address = (&raw const value).cast();
    // SAFETY: the kernel reads `size` bytes, which is the size of `value`.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, address, size) })?;
    Ok(())
}

fn read_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut size = size_of::<libc::c_int>() as libc::socklen_t;
    let address = (&raw mut value).cast();
    // SAFETY: the kernel writes at most `size` bytes, which is the size of `value`.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, address, &raw mut size) })?;
    Ok(value)
}

/// Bounds the bytes that the kernel holds and has not sent yet (`TCP_NOTSENT_LOWAT`).
pub(crate) fn set_unsent_low_water(socket: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, value)
}

/// Sets the size of the kernel's send buffer (`SO_SNDBUF`), which ends its own sizing of it. Where
/// the kernel allows less (`net.core.wmem_max`), it is left to size the buffer itself, which it may
/// do up to the last number of `net.ipv4.tcp_wmem`; kernels before 5.14 keep the most they allow.
pub(crate) fn set_send_buffer(socket: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, value)?;
    // The kernel reports twice the size that it grants.
    let granted = read_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUF)? / 2;
    if granted < value {
        if let Ok(locks) = read_option(socket, libc::SOL_SOCKET, SO_BUF_LOCK) {
            set_option(socket, libc::SOL_SOCKET, SO_BUF_LOCK, locks & !SOCK_SNDBUF_LOCK)?;
        }
    }
    Ok(())
}

/// Limits the rate of a connection; `None` removes the limit.
pub(crate) fn set_pacing(socket: BorrowedFd<'_>, bytes_per_s: Option<u64>) -> io::Result<()> {
    let value =
        libc::c_ulong::try_from(bytes_per_s.unwrap_or(u64::MAX)).unwrap_or(libc::c_ulong::MAX);
    let size = size_of::<libc::c_ulong>() as libc::socklen_t;
    // SAFETY: the kernel takes an unsigned long, and `size` is the size of `value`.
    check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MAX_PACING_RATE,
            (&raw const value).cast(),
            size,
        )
    })?;
    Ok(())
}

/// The kernel's measurements of a connection's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PathEstimate {
    /// Recent rate of acknowledgements.
    pub(crate) delivery_bytes_per_s: u64,
    /// Smallest round-trip time of the last minutes, which is the path without queues.
    pub(crate) min_rtt_us: u32,
    /// Bytes acknowledged since the connection began.
    pub(crate) acknowledged_bytes: u64,
}

/// Offsets in the kernel's `struct tcp_info` (linux/tcp.h), which only ever grows.
const TCP_INFO_BYTES_ACKED: usize = 120;
const TCP_INFO_MIN_RTT: usize = 148;
const TCP_INFO_DELIVERY_RATE: usize = 160;
const TCP_INFO_BYTES: usize = 168;

/// Reads the kernel's estimate of a connection's path (`TCP_INFO`). Fields that an old kernel does not
/// know are zero.
pub(crate) fn path_estimate(socket: BorrowedFd<'_>) -> io::Result<PathEstimate> {
    let mut bytes = [0_u8; TCP_INFO_BYTES];
    let mut size = TCP_INFO_BYTES as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes to `bytes`, which is that long.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            bytes.as_mut_ptr().cast(),
            &mut size,
        )
    })?;
    let (mut rtt, mut rate, mut acknowledged) = ([0; 4], [0; 8], [0; 8]);
    rtt.copy_from_slice(&bytes[TCP_INFO_MIN_RTT..TCP_INFO_MIN_RTT + 4]);
    rate.copy_from_slice(&bytes[TCP_INFO_DELIVERY_RATE..TCP_INFO_DELIVERY_RATE + 8]);
    acknowledged.copy_from_slice(&bytes[TCP_INFO_BYTES_ACKED..TCP_INFO_BYTES_ACKED + 8]);
    Ok(PathEstimate {
        delivery_bytes_per_s: u64::from_ne_bytes(rate),
        min_rtt_us: u32::from_ne_bytes(rtt),
        acknowledged_bytes: u64::from_ne_bytes(acknowledged),
    })
}

/// Fills `bytes` with cryptographically secure random bytes.
pub(crate) fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let rest = &mut bytes[filled..];
        // SAFETY: the call writes at most `rest.len()` bytes to `rest`.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(got) {
            Ok(count) => filled += count,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Makes an epoll instance.
pub(crate) fn epoll_create() -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved.
    let descriptor = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
    // SAFETY: the descriptor is new and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// A change of a descriptor's registration.
#[derive(Clone, Copy)]
pub(crate) enum EpollChange {
    Add,
    Modify,
    Delete,
}

/// Changes what an epoll instance reports for a descriptor, always level-triggered.
pub(crate) fn epoll_control(
    epoll: BorrowedFd<'_>,
    change: EpollChange,
    descriptor: BorrowedFd<'_>,
    key: u64,
    writable: bool,
) -> io::Result<()> {
    let operation = match change {
        EpollChange::Add => libc::EPOLL_CTL_ADD,
        EpollChange::Modify => libc::EPOLL_CTL_MOD,
        EpollChange::Delete => libc::EPOLL_CTL_DEL,
    };
    let events = libc::EPOLLIN | if writable { libc::EPOLLOUT } else { 0 };
    let mut event = libc::epoll_event { events: events as u32, u64: key };
    // SAFETY: `event` lives through the call.
    check(unsafe {
        libc::epoll_ctl(epoll.as_raw_fd(), operation, descriptor.as_raw_fd(), &mut event)
    })?;
    Ok(())
}

/// One report of an epoll instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EpollReport {
    /// Key of the registration.
    pub(crate) key: u64,
    /// Bytes, an end of stream or an error can be read.
    pub(crate) readable: bool,
    /// The socket takes bytes, or reports an error when asked to.
    pub(crate) writable: bool,
}

/// Room for the reports of one wait.
pub(crate) struct EpollEvents([libc::epoll_event; EVENTS_MAX]);

const EVENTS_MAX: usize = 128;

impl EpollEvents {
    /// Makes empty room.
    pub(crate) fn new() -> EpollEvents {
        EpollEvents([libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX])
    }

    /// Waits at most `timeout` (`None`: forever) and returns the reports; none after a signal.
    pub(crate) fn wait(
        &mut self,
        epoll: BorrowedFd<'_>,
        timeout: Option<Duration>,
    ) -> io::Result<impl Iterator<Item = EpollReport> + '_> {
        let timeout_ms = timeout.map_or(-1, |span| {
            libc::c_int::try_from(span.as_nanos().div_ceil(1_000_000)).unwrap_or(libc::c_int::MAX)
        });
        let room = self.0.len() as libc::c_int;
        // SAFETY: the kernel writes at most `room` events to the array.
        let count = check(unsafe {
            libc::epoll_wait(epoll.as_raw_fd(), self.0.as_mut_ptr(), room, timeout_ms)
        });
        let count = match count {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            other => other?,
        };
        Ok(self.0[..count as usize].iter().map(|event| {
            let (bits, key) = (event.events as libc::c_int, event.u64);
            let failed = bits & (libc::EPOLLERR | libc::EPOLLHUP) != 0;
            EpollReport {
                key,
                readable: failed || bits & libc::EPOLLIN != 0,
                writable: failed || bits & libc::EPOLLOUT != 0,
            }
        }))
    }
}

/// Makes a non-blocking eventfd.
pub(crate) fn eventfd_create() -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved.
    let descriptor = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
    // SAFETY: the descriptor is new and owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Makes an eventfd readable.
pub(crate) fn eventfd_signal(eventfd: BorrowedFd<'_>) {
    let one = 1_u64;
    // SAFETY: eight bytes are read from `one`. A full counter is readable already.
    unsafe { libc::write(eventfd.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// Sleeps until an eventfd is readable or `timeout` has passed, to the nanosecond.
pub(crate) fn eventfd_wait(eventfd: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    let mut entry = libc::pollfd { fd: eventfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: the kernel reads one timespec, and reads and writes one entry.
    match check(unsafe { libc::ppoll(&raw mut entry, 1, &raw const timeout, std::ptr::null()) }) {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(()),
    }
}

/// Makes an eventfd unreadable.
pub(crate) fn eventfd_clear(eventfd: BorrowedFd<'_>) {
    let mut count = 0_u64;
    // SAFETY: eight bytes are written to `count`. An empty counter is unreadable already.
    unsafe { libc::read(eventfd.as_raw_fd(), (&raw mut count).cast(), 8) };
}

/// Closes a descriptor of a parent process in a forked child, where no owner will ever be dropped.
pub(crate) fn close_inherited(descriptor: RawFd) {
    // SAFETY: no memory is involved; the callers pass descriptors whose owners are out of use.
    unsafe { libc::close(descriptor) };
}

fn read_clock(clock: libc::clockid_t) -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec.
    check(unsafe { libc::clock_gettime(clock, &mut time) }).ok()?;
    Some(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// Reads the machine's monotonic clock in nanoseconds, the clock of Python's `time.monotonic_ns`.
pub(crate) fn monotonic_ns() -> u64 {
    read_clock(libc::CLOCK_MONOTONIC).unwrap_or(0)
}

/// The CPU clock of one thread, readable from every thread of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadClock(libc::clockid_t);

impl ThreadClock {
    /// Returns the clock of the calling thread.
    pub(crate) fn of_this_thread() -> Option<ThreadClock> {
        let mut clock: libc::clockid_t = 0;
        // SAFETY: the calling thread exists, and the call writes one clock id.
        let result = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut clock) };
        (result == 0).then_some(ThreadClock(clock))
    }

    /// Returns the CPU time in nanoseconds; `None` when the thread has ended.
    pub(crate) fn read_ns(self) -> Option<u64> {
        read_clock(self.0)
    }
}
