//! The seam between connections and the operating system: everything that the I/O threads ask of a
//! socket. Tests put sockets in memory behind it.

use super::descriptors::ForkTracked;
use super::poller::{Interest, Poller};
use super::syscall::{self, PathEstimate};
use rustix::net::{
    recvmsg, sendmsg, shutdown, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags,
    Shutdown,
};
use std::fmt::Debug;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::AsFd;

/// A connected, non-blocking stream.
pub(crate) trait Socket: Debug + Send + Sync {
    /// Hands as many bytes as possible to the kernel and returns their number.
    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Takes what has arrived and returns the number of bytes, 0 at the end of the stream.
    fn receive(&self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// Tells the peer that no more bytes follow.
    fn end_stream(&self) -> io::Result<()>;

    /// Makes a poller report this socket under `key`, or stops it.
    fn watch(&self, poller: &Poller, key: u64, interest: Interest) -> io::Result<()>;

    /// Returns the bytes that the kernel holds and has not sent yet.
    fn unsent_bytes(&self) -> io::Result<u64>;

    /// Returns the kernel's measurements of the path.
    fn path_estimate(&self) -> io::Result<PathEstimate>;

    /// Sets the size of the kernel's send buffer.
    fn set_send_buffer(&self, bytes: u64) -> io::Result<()>;

    /// Bounds the bytes that the kernel holds and has not sent yet.
    fn set_unsent_low_water(&self, bytes: u64) -> io::Result<()>;

    /// Sets the rate at which the kernel paces the connection, or `None` to stop pacing.
    fn set_pacing(&self, bytes_per_s: Option<u64>) -> io::Result<()>;
}

impl<T: AsFd + Debug + Send + Sync> Socket for ForkTracked<T> {
    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        Ok(sendmsg(self, pieces, &mut SendAncillaryBuffer::default(), flags)?)
    }

    fn receive(&self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut control = RecvAncillaryBuffer::default();
        Ok(recvmsg(self, pieces, &mut control, RecvFlags::DONTWAIT)?.bytes)
    }

    fn end_stream(&self) -> io::Result<()> {
        Ok(shutdown(self, Shutdown::Write)?)
    }

    fn watch(&self, poller: &Poller, key: u64, interest: Interest) -> io::Result<()> {
        poller.watch(self.as_fd(), key, interest)
    }

    fn unsent_bytes(&self) -> io::Result<u64> {
        syscall::unsent_bytes(self.as_fd())
    }

    fn path_estimate(&self) -> io::Result<PathEstimate> {
        syscall::path_estimate(self.as_fd())
    }

    fn set_send_buffer(&self, bytes: u64) -> io::Result<()> {
        syscall::set_send_buffer(self.as_fd(), bytes)
    }

    fn set_unsent_low_water(&self, bytes: u64) -> io::Result<()> {
        syscall::set_unsent_low_water(self.as_fd(), bytes)
    }

    fn set_pacing(&self, bytes_per_s: Option<u64>) -> io::Result<()> {
        syscall::set_pacing(self.as_fd(), bytes_per_s)
    }
}
