//! The flow control of one connection that only its own thread needs: the size of its frames and the
//! kernel's send buffer.

use super::limits::{self, BufferSizes, Ends};
use super::rate::{RateEstimator, Smoothing};
use crate::options::ChannelOptions;
use crate::sys::socket::Socket;
use crate::sys::syscall::PathEstimate;
use gradlane_units::Time;
use std::io;
use std::time::Duration;

/// Frame size and send buffer of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionFlow {
    pub(crate) send_buffer: SendBuffer,
    frames: FrameSizer,
    /// The last sample of the path that the frame size has not seen.
    path: Option<PathEstimate>,
}

impl ConnectionFlow {
    /// Makes the flow control of a new connection.
    ///
    /// # Errors
    /// When the kernel refuses the size of the buffer.
    pub(crate) fn new(
        socket: &dyn Socket,
        options: &ChannelOptions,
        ends: Ends,
    ) -> io::Result<ConnectionFlow> {
        let send_buffer = SendBuffer::new(
            socket,
            options.send_buffer_bytes,
            options.low_water_bytes,
            options.frame_bytes,
            ends,
        )?;
        Ok(ConnectionFlow { send_buffer, frames: FrameSizer::new(options.frame_bytes), path: None })
    }

    /// Notes `bytes` that the kernel took and samples the socket.
    pub(crate) fn sent(&mut self, socket: &dyn Socket, bytes: usize) {
        if bytes > 0 {
            // A size that the kernel refuses leaves the last one in force.
            self.path = self.send_buffer.sent(socket, bytes).ok().flatten();
        }
        self.send_buffer.sample_unsent(socket);
    }

    /// Returns the size of frames from now on, if it changes.
    pub(crate) fn frame_bytes(&mut self, now: Time) -> Option<u32> {
        self.frames.sample(now, self.path.take()?.acknowledged_bytes)
    }
}

// Keeps the kernel's send buffer as short as the path allows.
//
// The kernel sends in the order of arrival, whatever becomes urgent later. Its buffers also compete for
// the port of a receiver: with long buffers the flows of several senders overflow the port's queue and
// take uneven shares of it, and a slice is reduced only when its slowest push has arrived. With just
// enough bytes in flight the shares are even and nothing is lost.

/// Bytes sent between two samples of the path.
const INTERVAL_BYTES: usize = 512 << 10;

/// The send buffer of one connection.
#[derive(Debug)]
pub(crate) struct SendBuffer {
    adapts: bool,
    ends: Ends,
    least: BufferSizes,
    /// Held at least while the I/O thread paces the connection.
    paced_bytes: u64,
    by_thread: bool,
    sizes: BufferSizes,
    sent_bytes: usize,
    /// The kernel's estimate for the path; 0: not known yet.
    delivery_bytes_per_s: u64,
    /// At the last sample.
    unsent_bytes: u64,
}

impl SendBuffer {
    /// Makes the buffer of a new connection: of a fixed size, or (for 0) one that adapts to the path and to
    /// frames of `frame_bytes`. `low_water_bytes` may wait unsent, or more where it adapts; 0: no bound.
    ///
    /// # Errors
    /// When the kernel refuses the size.
    fn new(
        socket: &dyn Socket,
        fixed_bytes: u32,
        low_water_bytes: u32,
        frame_bytes: u32,
        ends: Ends,
    ) -> io::Result<SendBuffer> {
        let adapts = fixed_bytes == 0;
        let held_bytes = if adapts { ends.held_min() } else { u64::from(fixed_bytes) };
        let least = BufferSizes { held_bytes, unsent_bytes: u64::from(low_water_bytes) };
        socket.set_send_buffer(least.held_bytes)?;
        if least.unsent_bytes > 0 {
            socket.set_unsent_low_water(least.unsent_bytes)?;
        }
        Ok(SendBuffer {
            adapts,
            ends,
            least,
            paced_bytes: limits::thread_held_min(frame_bytes),
            by_thread: false,
            sizes: least,
            sent_bytes: 0,
            delivery_bytes_per_s: 0,
            unsent_bytes: 0,
        })
    }

    /// Notes bytes given to the kernel. From time to time samples the path, fits a buffer that adapts to
    /// it, and returns the sample.
    ///
    /// # Errors
    /// When the kernel refuses the new size.
    fn sent(&mut self, socket: &dyn Socket, bytes: usize) -> io::Result<Option<PathEstimate>> {
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
        let target = limits::buffer_sizes(self.least_now(), path, self.ends);
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
    pub(crate) fn set_paced_by_thread(&mut self, by_thread: bool) {
        self.by_thread = by_thread;
    }

    fn least_now(&self) -> BufferSizes {
        let paced_bytes = if self.by_thread { self.paced_bytes } else { 0 };
        BufferSizes { held_bytes: self.least.held_bytes.max(paced_bytes), ..self.least }
    }

    /// Samples the unsent bytes, where they decide when the kernel gets more: not where the I/O thread
    /// paces the connection.
    fn sample_unsent(&mut self, socket: &dyn Socket) {
        self.unsent_bytes = if self.by_thread { 0 } else { socket.unsent_bytes().unwrap_or(0) };
    }

    /// Whether as many bytes waited unsent at the last sample as may.
    pub(crate) fn is_full(&self) -> bool {
        let most = self.sizes.unsent_bytes;
        most > 0 && self.unsent_bytes >= most
    }

    /// Time to send the bytes that waited unsent at the last sample; zero where the path's rate is not
    /// known.
    pub(crate) fn drain_time(&self) -> Duration {
        if self.delivery_bytes_per_s == 0 {
            return Duration::ZERO;
        }
        let nanos = u128::from(self.unsent_bytes) * 1_000_000_000;
        let nanos = nanos / u128::from(self.delivery_bytes_per_s);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// Whether two sizes differ by more than the noise of estimates.
fn differ(old_bytes: u64, new_bytes: u64) -> bool {
    old_bytes.abs_diff(new_bytes) > old_bytes / 4
}

// The size of frames: as large as was asked for, and up to three times as large on a connection so fast
// that an urgent slice hardly waits longer for them. The engine's scheduler cuts messages into them.

/// A window of the rate is at least this long: turns of the thread and bursts of acknowledgements must
/// be short beside it.
const WINDOW_MIN: Duration = Duration::from_millis(2);
/// A connection that had nothing to send for a while is no slower for it.
const SMOOTHING: Smoothing = Smoothing::DecayingMax { share: 0.125 };

/// The size of frames on one connection.
#[derive(Debug)]
struct FrameSizer {
    asked_bytes: u32,
    multiple: u32,
    /// The begin of the window and the bytes that were acknowledged by then.
    window: Option<(Time, u64)>,
    rate: RateEstimator,
}

impl FrameSizer {
    /// Makes the sizer of a new connection, whose rate is not known.
    fn new(asked_bytes: u32) -> FrameSizer {
        FrameSizer { asked_bytes, multiple: 1, window: None, rate: RateEstimator::new(SMOOTHING) }
    }

    /// Takes the bytes that were acknowledged since the connection began. Returns the size of frames from
    /// now on, if it changes.
    fn sample(&mut self, now: Time, acknowledged_bytes: u64) -> Option<u32> {
        let (began, before) = *self.window.get_or_insert((now, acknowledged_bytes));
        let elapsed = now.since(began);
        if elapsed < WINDOW_MIN {
            return None;
        }
        self.window = Some((now, acknowledged_bytes));
        self.rate.add(acknowledged_bytes.saturating_sub(before), elapsed);
        let bytes_per_s = self.rate.bytes_per_s().unwrap_or(0.0);
        let multiple = limits::frame_multiple(bytes_per_s, self.asked_bytes);
        if multiple == self.multiple {
            return None;
        }
        self.multiple = multiple;
        Some(self.asked_bytes.saturating_mul(multiple))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::limits::{HELD_MAX_BYTES, HELD_MIN_BYTES};
    use crate::sys::descriptors::ForkTracked;
    use gradlane_units::Rng;

    const EVEN: Ends = Ends { own: 3, busier: 3 };

    #[test]
    fn what_waits_lasts_as_long_as_the_path_takes_for_it() {
        let buffer = |delivery_bytes_per_s, unsent_bytes| SendBuffer {
            adapts: true,
            ends: EVEN,
            least: BufferSizes { held_bytes: HELD_MIN_BYTES, unsent_bytes: 65_536 },
            paced_bytes: 0,
            by_thread: false,
            sizes: BufferSizes { held_bytes: HELD_MIN_BYTES, unsent_bytes: 65_536 },
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
        let mut buffer = SendBuffer::new(&socket, 0, 0, 65_096, EVEN).expect("a buffer");
        assert_eq!(buffer.least_now().held_bytes, HELD_MIN_BYTES);
        buffer.set_paced_by_thread(true);
        // The kernel doubles it.
        assert_eq!(2 * buffer.least_now().held_bytes, 65_096 * 7 / 2);
        buffer.set_paced_by_thread(false);
        assert_eq!(buffer.least_now().held_bytes, HELD_MIN_BYTES);
    }

    #[test]
    fn a_real_connection_is_measured_and_keeps_its_floor() {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let sender = std::net::TcpStream::connect(listener.local_addr().expect("an address"))
            .expect("a stream");
        let sender = ForkTracked::new(sender);
        let (mut receiver, _) = listener.accept().expect("a caller");
        let mut buffer = SendBuffer::new(&sender, 0, 65_536, 65_096, EVEN).expect("a buffer");
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
        let BufferSizes { held_bytes, unsent_bytes } = buffer.sizes;
        assert!((HELD_MIN_BYTES..=HELD_MAX_BYTES).contains(&held_bytes), "{held_bytes}");
        assert!((65_536..=HELD_MAX_BYTES).contains(&unsent_bytes), "{unsent_bytes}");
        assert!(buffer.delivery_bytes_per_s > 0, "{buffer:?}");
        drop(sender);
        assert_eq!(reader.join().expect("no panic").expect("read"), 64 * (64 << 10));
    }

    const ASKED: u32 = 65_096;

    /// A connection that is sampled after every half a megabyte.
    struct Path {
        size: FrameSizer,
        now: Time,
        acknowledged_bytes: u64,
        frame_bytes: u32,
    }

    impl Path {
        fn new() -> Path {
            let size = FrameSizer::new(ASKED);
            Path { size, now: Time::ZERO, acknowledged_bytes: 0, frame_bytes: ASKED }
        }

        /// Returns the size of frames after samples at this rate.
        fn carries(&mut self, bytes_per_s: u64, samples: u32) -> u32 {
            for _ in 0..samples {
                self.acknowledged_bytes += 524_288;
                self.now.0 += 524_288 * 1_000_000_000 / bytes_per_s;
                if let Some(bytes) = self.size.sample(self.now, self.acknowledged_bytes) {
                    self.frame_bytes = bytes;
                }
            }
            self.frame_bytes
        }
    }

    #[test]
    fn frames_grow_while_they_last_three_milliseconds_at_most() {
        let third_of = |mbit_per_s: u64| mbit_per_s * 1_000_000 / 8 / 3;
        for (bytes_per_s, expected) in [
            (1_000_000, ASKED),
            (third_of(500), ASKED),
            // Two would last for 3.03 ms.
            (43_000_000, ASKED),
            (45_000_000, 2 * ASKED),
            (third_of(2_000), 3 * ASKED),
            (3_000_000_000, 3 * ASKED),
        ] {
            assert_eq!(Path::new().carries(bytes_per_s, 20), expected, "{bytes_per_s}");
        }
    }

    #[test]
    fn samples_of_one_moment_are_no_rate() {
        let mut path = Path::new();
        for _ in 0..100 {
            path.carries(20_000_000, 1);
            // Acknowledged at once, after a moment without acknowledgements.
            assert_eq!(path.carries(u64::MAX, 1), ASKED);
        }
    }

    #[test]
    fn a_rest_shrinks_no_frame_and_a_slower_path_does() {
        let mut path = Path::new();
        assert_eq!(path.carries(150_000_000, 4), 3 * ASKED);
        path.now.0 += 1_000_000_000;
        assert_eq!(path.carries(150_000_000, 4), 3 * ASKED);
        assert_eq!(path.carries(10_000_000, 20), ASKED);
    }

    #[test]
    fn whatever_is_acknowledged_and_whenever_frames_stay_in_their_limits() {
        let mut rng = Rng::new(9);
        for asked in [1, 64, ASKED, u32::MAX / 2] {
            let (mut size, mut now) = (FrameSizer::new(asked), Time::ZERO);
            for _ in 0..1_000 {
                now.0 += u64::from(rng.below(1 << 30));
                let any = u64::from(rng.below(u32::MAX));
                let acknowledged_bytes = [0, 1, u64::MAX, any][rng.below(4) as usize];
                if let Some(bytes) = size.sample(now, acknowledged_bytes) {
                    assert!((asked..=asked.saturating_mul(3)).contains(&bytes), "{asked} {bytes}");
                }
            }
        }
    }
}
