//! Keeps the kernel's send buffer as short as the path allows.
//!
//! What the kernel holds is sent in the order in which it came, whatever becomes urgent later. It is
//! also what competes for the port of a receiver: with long buffers the flows of several senders
//! overflow the port's queue and take uneven shares of it, and a slice is reduced only when its
//! slowest push is there. With just enough bytes in flight the shares are even and nothing is lost.
//! Enough is twice the bandwidth-delay product, without queues, plus what is sent while this thread
//! is busy or waits for a processor. That is a time, so fast connections hold more bytes.

use crate::sys::socket::Socket;
use crate::sys::syscall::PathEstimate;
use std::io;
use std::time::Duration;

/// In flight on any path, however short. The kernel doubles it for its own bookkeeping, and then two
/// frames fit whole: the second one is not cut in two (decision 43).
const FLOOR_BYTES: u64 = 72 << 10;
/// In flight to all peers together at least: few connections fill a port only if each of them has
/// more, since acknowledgements wait behind the bytes that go the other way.
const PORT_FLOOR_BYTES: u64 = 3 * FLOOR_BYTES;
/// In flight on any path, however long.
const CEILING_BYTES: u64 = 64 << 20;
/// What a connection holds lasts so long at its rate, without the path's own delay.
const HELD_TIME_US: u64 = 3_000;
/// And what of it is not sent yet.
const UNSENT_TIME_US: u64 = 1_000;
/// In flight on a connection that the I/O thread paces, in quarters of frames. It gives the kernel one
/// frame a turn, which is acknowledged up to three turns later: it has to pass two ports, the peer's
/// thread reads in turns as well, and the acknowledgement comes back through two ports. Doubled by
/// the kernel this is three frames and a half, and the fourth is taken whole.
const PACED_QUARTER_FRAMES: u64 = 7;
/// Bytes sent between two looks at the path.
const INTERVAL_BYTES: usize = 512 << 10;

/// The send buffer of one connection.
#[derive(Debug)]
pub(crate) struct SendBuffer {
    adapts: bool,
    floor: Sizes,
    /// GatheredBlock at least while the I/O thread paces the connection.
    paced_bytes: u64,
    by_thread: bool,
    sizes: Sizes,
    sent_bytes: usize,
    /// Of the path, from time to time; 0: not known yet.
    delivery_bytes_per_s: u64,
    /// At the last look.
    unsent_bytes: u64,
}

/// How much the kernel may hold of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sizes {
    /// In flight or not sent yet.
    held_bytes: u64,
    /// Not sent yet; 0: no bound.
    unsent_bytes: u64,
}

impl SendBuffer {
    /// The buffer of a new connection, one of `peers`: of a fixed size, or (for 0) one that adapts
    /// to the path and to frames of so many bytes. `low_water_bytes` may wait unsent, or more where
    /// it adapts; 0: no bound.
    ///
    /// # Errors
    /// When the kernel refuses the size.
    pub(crate) fn new(
        socket: &dyn Socket,
        fixed_bytes: u32,
        low_water_bytes: u32,
        frame_bytes: u32,
        peers: usize,
    ) -> io::Result<SendBuffer> {
        let adapts = fixed_bytes == 0;
        let held_bytes = if adapts { floor_bytes(peers) } else { u64::from(fixed_bytes) };
        let floor = Sizes { held_bytes, unsent_bytes: u64::from(low_water_bytes) };
        socket.set_send_buffer(floor.held_bytes)?;
        if floor.unsent_bytes > 0 {
            socket.set_unsent_low_water(floor.unsent_bytes)?;
        }
        Ok(SendBuffer {
            adapts,
            floor,
            paced_bytes: u64::from(frame_bytes) * PACED_QUARTER_FRAMES / 4,
            by_thread: false,
            sizes: floor,
            sent_bytes: 0,
            delivery_bytes_per_s: 0,
            unsent_bytes: 0,
        })
    }

    /// Notes bytes given to the kernel; from time to time looks at the path, says what it saw, and
    /// fits a buffer to it that adapts.
    ///
    /// # Errors
    /// When the kernel refuses the new size.
    pub(crate) fn sent(
        &mut self,
        socket: &dyn Socket,
        bytes: usize,
    ) -> io::Result<Option<PathEstimate>> {
        self.sent_bytes += bytes;
        if self.sent_bytes < INTERVAL_BYTES {
            return Ok(None);
        }
        self.sent_bytes = 0;
        let path = socket.path_estimate()?;
        self.delivery_bytes_per_s = path.delivery_bytes_per_s;
        if !self.adapts {
            return Ok(Some(path));
        }
        let target = self.floor_now().fitted_to(path);
        if differ(self.sizes.held_bytes, target.held_bytes) {
            self.sizes.held_bytes = target.held_bytes;
            socket.set_send_buffer(target.held_bytes)?;
        }
        if differ(self.sizes.unsent_bytes, target.unsent_bytes) {
            self.sizes.unsent_bytes = target.unsent_bytes;
            socket.set_unsent_low_water(target.unsent_bytes)?;
        }
        Ok(Some(path))
    }

    /// Notes whether the I/O thread paces the connection.
    pub(crate) fn paced_by_thread(&mut self, by_thread: bool) {
        self.by_thread = by_thread;
    }

    fn floor_now(&self) -> Sizes {
        let paced_bytes = if self.by_thread { self.paced_bytes } else { 0 };
        Sizes { held_bytes: self.floor.held_bytes.max(paced_bytes), ..self.floor }
    }

    /// Looks at what waits unsent, where that decides when more is given: not where the I/O thread
    /// paces the connection.
    pub(crate) fn sample_unsent(&mut self, socket: &dyn Socket) {
        self.unsent_bytes = if self.by_thread { 0 } else { socket.unsent_bytes().unwrap_or(0) };
    }

    /// Whether as much waited unsent at the last look as may.
    pub(crate) fn is_full(&self) -> bool {
        let most = self.sizes.unsent_bytes;
        most > 0 && self.unsent_bytes >= most
    }

    /// How long it takes to send what waited unsent at the last look; nothing where the path's rate
    /// is not known.
    pub(crate) fn drain_time(&self) -> Duration {
        if self.delivery_bytes_per_s == 0 {
            return Duration::ZERO;
        }
        let nanos = u128::from(self.unsent_bytes) * 1_000_000_000;
        let nanos = nanos / u128::from(self.delivery_bytes_per_s);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

impl Sizes {
    /// Twice the bandwidth-delay product, and the floor or what lasts for some time. While the buffer
    /// itself limits the rate, both grow with the buffer, until a queue builds up and the smallest
    /// round-trip time is passed.
    fn fitted_to(self, path: PathEstimate) -> Sizes {
        let in_time = |time_us: u64| {
            let bytes = u128::from(path.delivery_bytes_per_s) * u128::from(time_us) / 1_000_000;
            u64::try_from(bytes).unwrap_or(CEILING_BYTES).min(CEILING_BYTES)
        };
        let product = 2 * in_time(u64::from(path.min_rtt_us));
        let held_bytes = product + self.held_bytes.max(in_time(HELD_TIME_US));
        let unsent_bytes = match self.unsent_bytes {
            0 => 0,
            floor => floor.max(in_time(UNSENT_TIME_US)),
        };
        Sizes { held_bytes: held_bytes.min(CEILING_BYTES), unsent_bytes }
    }
}

/// Whether a size is another by more than the noise of estimates.
fn differ(old_bytes: u64, new_bytes: u64) -> bool {
    old_bytes.abs_diff(new_bytes) > old_bytes / 4
}

/// What a connection may hold on the shortest path.
fn floor_bytes(peers: usize) -> u64 {
    FLOOR_BYTES.max(PORT_FLOOR_BYTES / (peers.max(1) as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::descriptors::ForkTracked;

    #[test]
    fn short_slow_paths_get_the_floor_and_long_ones_twice_their_product() {
        let path = |delivery_bytes_per_s, min_rtt_us| PathEstimate {
            delivery_bytes_per_s,
            min_rtt_us,
            acknowledged_bytes: 0,
        };
        let floor = Sizes { held_bytes: FLOOR_BYTES, unsent_bytes: 65_536 };
        let target = |path| floor.fitted_to(path).held_bytes;
        assert_eq!(target(path(16_000_000, 50)), FLOOR_BYTES + 1_600);
        assert_eq!(target(path(16_000_000, 40_000)), FLOOR_BYTES + 1_280_000);
        assert_eq!(target(path(u64::MAX, u32::MAX)), CEILING_BYTES);
    }

    #[test]
    fn fast_connections_hold_what_lasts_for_a_while() {
        let path = PathEstimate {
            delivery_bytes_per_s: 500_000_000,
            min_rtt_us: 100,
            acknowledged_bytes: 0,
        };
        let floor = Sizes { held_bytes: FLOOR_BYTES, unsent_bytes: 65_536 };
        let held_bytes = 100_000 + 1_500_000;
        assert_eq!(floor.fitted_to(path), Sizes { held_bytes, unsent_bytes: 500_000 });
        let unbounded = Sizes { unsent_bytes: 0, ..floor };
        assert_eq!(unbounded.fitted_to(path), Sizes { held_bytes, unsent_bytes: 0 });
    }

    #[test]
    fn what_waits_lasts_as_long_as_the_path_takes_for_it() {
        let buffer = |delivery_bytes_per_s, unsent_bytes| SendBuffer {
            adapts: true,
            floor: Sizes { held_bytes: FLOOR_BYTES, unsent_bytes: 65_536 },
            paced_bytes: 0,
            by_thread: false,
            sizes: Sizes { held_bytes: FLOOR_BYTES, unsent_bytes: 65_536 },
            sent_bytes: 0,
            delivery_bytes_per_s,
            unsent_bytes,
        };
        assert_eq!(buffer(20_000_000, 100_000).drain_time(), Duration::from_millis(5));
        assert_eq!(buffer(20_000_000, 0).drain_time(), Duration::ZERO);
        assert_eq!(buffer(0, 100_000).drain_time(), Duration::ZERO, "a rate that is not known yet");
        assert_eq!(buffer(1, u64::MAX).drain_time(), Duration::from_nanos(u64::MAX));
    }

    #[test]
    fn a_connection_that_the_thread_paces_holds_three_frames_and_a_half() {
        let (sender, _receiver) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let socket = ForkTracked::new(sender);
        let mut buffer = SendBuffer::new(&socket, 0, 0, 65_096, 3).expect("a buffer");
        assert_eq!(buffer.floor_now().held_bytes, FLOOR_BYTES);
        buffer.paced_by_thread(true);
        // The kernel doubles it.
        assert_eq!(2 * buffer.floor_now().held_bytes, 65_096 * 7 / 2);
        buffer.paced_by_thread(false);
        assert_eq!(buffer.floor_now().held_bytes, FLOOR_BYTES);
    }

    #[test]
    fn few_connections_hold_more_each() {
        let floors: Vec<u64> = [1, 2, 3, 4, 100].map(floor_bytes).to_vec();
        assert_eq!(floors, [216 << 10, 108 << 10, 72 << 10, 72 << 10, 72 << 10]);
    }

    #[test]
    fn a_real_connection_is_measured_and_keeps_its_floor() {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let sender = std::net::TcpStream::connect(listener.local_addr().expect("an address"))
            .expect("a stream");
        let sender = ForkTracked::new(sender);
        let (mut receiver, _) = listener.accept().expect("a caller");
        let mut buffer = SendBuffer::new(&sender, 0, 65_536, 65_096, 3).expect("a buffer");
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            receiver.read_to_end(&mut bytes).map(|count| count as u64)
        });
        for _ in 0..64 {
            sender.get().write_all(&[7; 64 << 10]).expect("sent");
            buffer.sent(&sender, 64 << 10).expect("adapted");
        }
        let path = sender.path_estimate().expect("an estimate");
        assert!(path.min_rtt_us < 1_000_000 && path.delivery_bytes_per_s > 0, "{path:?}");
        let Sizes { held_bytes, unsent_bytes } = buffer.sizes;
        assert!((FLOOR_BYTES..=CEILING_BYTES).contains(&held_bytes), "{held_bytes}");
        assert!((65_536..=CEILING_BYTES).contains(&unsent_bytes), "{unsent_bytes}");
        assert!(buffer.delivery_bytes_per_s > 0, "{buffer:?}");
        drop(sender);
        assert_eq!(reader.join().expect("no panic").expect("read"), 64 * (64 << 10));
    }
}
