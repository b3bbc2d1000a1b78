//! System calls that no crate has a safe name for: options of TCP sockets, clocks of threads. `rustix` has
//! the others.
//!
//! Every function is safe to call: descriptors and memory are borrowed.

use rustix::ioctl::{ioctl, Getter};
use rustix::net::sockopt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// Unsent bytes of a TCP socket (`linux/sockios.h`).
const SIOCOUTQNSD: rustix::ioctl::Opcode = 0x894B;
/// Which buffers keep the size that they were given (`asm-generic/socket.h`, `linux/socket.h`).
const SO_BUF_LOCK: libc::c_int = 72;
const SOCK_SNDBUF_LOCK: libc::c_int = 1;

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Integers, and arrays of bytes: every pattern of bits is a value, and no byte is padding.
trait Plain: Copy {}
impl Plain for libc::c_int {}
impl Plain for libc::c_ulong {}
impl<const SIZE: usize> Plain for [u8; SIZE] {}

fn set_option<T: Plain>(
    socket: BorrowedFd<'_>,
    (level, option): (libc::c_int, libc::c_int),
    value: T,
) -> io::Result<()> {
    let (address, size) = ((&raw const value).cast(), size_of::<T>() as libc::socklen_t);
    // SAFETY: the kernel reads `size` bytes, which is the size of `value`.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, address, size) })
}

/// Reads an option; the kernel may write fewer bytes than `value` has.
fn read_option<T: Plain>(
    socket: BorrowedFd<'_>,
    (level, option): (libc::c_int, libc::c_int),
    mut value: T,
) -> io::Result<T> {
    let (address, mut size) = ((&raw mut value).cast(), size_of::<T>() as libc::socklen_t);
    // SAFETY: the kernel writes at most `size` bytes, which is the size of `value`.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), level, option, address, &raw mut size) })?;
    Ok(value)
}

/// Returns the bytes that the kernel holds and has not sent yet.
pub(crate) fn unsent_bytes(socket: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: the request writes one int.
    let bytes = unsafe { ioctl(socket, Getter::<SIOCOUTQNSD, libc::c_int>::new()) }?;
    Ok(u64::try_from(bytes).unwrap_or(0))
}

/// Bounds the bytes that the kernel holds and has not sent yet (`TCP_NOTSENT_LOWAT`).
pub(crate) fn set_unsent_low_water(socket: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_option(socket, (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT), value)
}

/// Sets the size of the kernel's send buffer (`SO_SNDBUF`), which ends its own sizing of it. Where
/// the kernel allows less (`net.core.wmem_max`), it is left to size the buffer itself, which it may
/// do up to the last number of `net.ipv4.tcp_wmem`; kernels before 5.14 keep the most they allow.
pub(crate) fn set_send_buffer(socket: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let value = usize::try_from(bytes).unwrap_or(usize::MAX).min(libc::c_int::MAX as usize);
    sockopt::set_socket_send_buffer_size(socket, value)?;
    // The kernel reports twice the size that it grants.
    if sockopt::socket_send_buffer_size(socket)? / 2 < value {
        let locked = (libc::SOL_SOCKET, SO_BUF_LOCK);
        if let Ok(locks) = read_option::<libc::c_int>(socket, locked, 0) {
            set_option(socket, locked, locks & !SOCK_SNDBUF_LOCK)?;
        }
    }
    Ok(())
}

/// Limits the rate of a connection; `None` removes the limit.
pub(crate) fn set_pacing(socket: BorrowedFd<'_>, bytes_per_s: Option<u64>) -> io::Result<()> {
    let value =
        libc::c_ulong::try_from(bytes_per_s.unwrap_or(u64::MAX)).unwrap_or(libc::c_ulong::MAX);
    set_option(socket, (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE), value)
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
    let bytes = [0_u8; TCP_INFO_BYTES];
    let bytes = read_option(socket, (libc::IPPROTO_TCP, libc::TCP_INFO), bytes)?;
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

/// Closes a descriptor of a parent process in a forked child, where no owner will ever be dropped.
pub(crate) fn close_inherited(descriptor: RawFd) {
    // SAFETY: the callers pass descriptors whose owners are out of use.
    unsafe { rustix::io::close(descriptor) };
}

/// The CPU clock of one thread, readable from every thread of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadClock(libc::clockid_t);

impl ThreadClock {
    /// Returns the clock of the calling thread.
    pub(crate) fn of_this_thread() -> Option<ThreadClock> {
        let mut clock: libc::clockid_t = 0;
        // SAFETY: the calling thread exists, and the call writes one clock id.
        let result = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut clock) };
        (result == 0).then_some(ThreadClock(clock))
    }

    /// Returns the CPU time in nanoseconds; `None` when the thread has ended.
    pub(crate) fn read_ns(self) -> Option<u64> {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the call writes one timespec.
        check(unsafe { libc::clock_gettime(self.0, &raw mut time) }).ok()?;
        let time = Duration::new(time.tv_sec as u64, time.tv_nsec as u32);
        u64::try_from(time.as_nanos()).ok()
    }
}
