//! Keeps the kernel's send buffer as short as the path allows.
//!
//! What the kernel holds is sent in the order in which it came, whatever becomes urgent later. It is
//! also what competes for the port of a receiver: with long buffers the flows of several senders
//! overflow the port's queue and take uneven shares of it, and a slice is reduced only when its
//! slowest push is there. With just enough bytes in flight the shares are even and nothing is lost.
//! Enough is twice the bandwidth-delay product, without queues, plus a little.

use crate::syscall::{self, PathEstimate};
use std::io;
use std::os::fd::BorrowedFd;

/// In flight on any path, however short. The kernel doubles it for its own bookkeeping.
const FLOOR_BYTES: u64 = 64 << 10;
/// In flight to all peers together at least: few connections fill a port only if each of them has
/// more, since acknowledgements wait behind the bytes that go the other way.
const PORT_FLOOR_BYTES: u64 = 3 * FLOOR_BYTES;
/// In flight on any path, however long.
const CEILING_BYTES: u64 = 64 << 20;
/// Bytes sent between two looks at the path.
const INTERVAL_BYTES: usize = 512 << 10;

/// The send buffer of one connection.
#[derive(Debug)]
pub(crate) struct SendBuffer {
    adapts: bool,
    floor_bytes: u64,
    bytes: u64,
    sent_bytes: usize,
}

impl SendBuffer {
    /// The buffer of a new connection, one of `peers`: of a fixed size, or (for 0) one that adapts
    /// to the path.
    ///
    /// # Errors
    /// When the kernel refuses the size.
    pub(crate) fn new(
        socket: BorrowedFd<'_>,
        fixed_bytes: u32,
        peers: usize,
    ) -> io::Result<SendBuffer> {
        let adapts = fixed_bytes == 0;
        let floor_bytes = floor_bytes(peers);
        let bytes = if adapts { floor_bytes } else { u64::from(fixed_bytes) };
        syscall::set_send_buffer(socket, bytes)?;
        Ok(SendBuffer { adapts, floor_bytes, bytes, sent_bytes: 0 })
    }

    /// Notes bytes given to the kernel, and from time to time fits the buffer to the path.
    ///
    /// # Errors
    /// When the kernel refuses the new size.
    pub(crate) fn sent(&mut self, socket: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
        self.sent_bytes += bytes;
        if !self.adapts || self.sent_bytes < INTERVAL_BYTES {
            return Ok(());
        }
        self.sent_bytes = 0;
        let target = target_bytes(syscall::path_estimate(socket)?, self.floor_bytes);
        // Small changes are noise of the estimate.
        if target > self.bytes + self.bytes / 4 || target < self.bytes - self.bytes / 4 {
            self.bytes = target;
            syscall::set_send_buffer(socket, target)?;
        }
        Ok(())
    }
}

/// What a connection may hold on the shortest path.
fn floor_bytes(peers: usize) -> u64 {
    FLOOR_BYTES.max(PORT_FLOOR_BYTES / (peers.max(1) as u64))
}

/// Twice the bandwidth-delay product plus the floor. While the buffer itself limits the rate, the
/// product grows with the buffer, until a queue builds up and the smallest round-trip time is passed.
fn target_bytes(path: PathEstimate, floor_bytes: u64) -> u64 {
    let product = u128::from(path.delivery_bytes_per_s) * u128::from(path.min_rtt_us) / 1_000_000;
    let product = u64::try_from(product).unwrap_or(CEILING_BYTES);
    product.saturating_mul(2).saturating_add(floor_bytes).min(CEILING_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_paths_get_the_floor_and_long_ones_twice_their_product() {
        let path = |delivery_bytes_per_s, min_rtt_us| PathEstimate {
            delivery_bytes_per_s,
            min_rtt_us,
            acknowledged_bytes: 0,
        };
        let target = |path| target_bytes(path, FLOOR_BYTES);
        assert_eq!(target(path(16_000_000, 50)), FLOOR_BYTES + 1_600);
        assert_eq!(target(path(1_250_000_000, 200)), FLOOR_BYTES + 500_000);
        assert_eq!(target(path(125_000_000, 40_000)), FLOOR_BYTES + 10_000_000);
        assert_eq!(target(path(u64::MAX, u32::MAX)), CEILING_BYTES);
    }

    #[test]
    fn few_connections_hold_more_each() {
        let floors: Vec<u64> = [1, 2, 3, 4, 100].map(floor_bytes).to_vec();
        assert_eq!(floors, [192 << 10, 96 << 10, 64 << 10, 64 << 10, 64 << 10]);
    }

    #[test]
    fn a_real_connection_is_measured_and_keeps_its_floor() {
        use std::io::{Read, Write};
        use std::os::fd::AsFd;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let mut sender = std::net::TcpStream::connect(listener.local_addr().expect("an address"))
            .expect("a stream");
        let (mut receiver, _) = listener.accept().expect("a caller");
        let mut buffer = SendBuffer::new(sender.as_fd(), 0, 3).expect("a buffer");
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            receiver.read_to_end(&mut bytes).map(|count| count as u64)
        });
        for _ in 0..64 {
            sender.write_all(&[7; 64 << 10]).expect("sent");
            buffer.sent(sender.as_fd(), 64 << 10).expect("adapted");
        }
        let path = syscall::path_estimate(sender.as_fd()).expect("an estimate");
        assert!(path.min_rtt_us < 1_000_000 && path.delivery_bytes_per_s > 0, "{path:?}");
        assert!((FLOOR_BYTES..CEILING_BYTES).contains(&buffer.bytes), "{}", buffer.bytes);
        drop(sender);
        assert_eq!(reader.join().expect("no panic").expect("read"), 64 * (64 << 10));
    }
}
