//! The flow control of one connection that only its own thread needs: the size of its frames and the
//! kernel's send buffer.

use super::frame_size::FrameSizer;
use super::limits::Ends;
use super::send_buffer::SendBuffer;
use crate::options::ChannelOptions;
use crate::sys::socket::Socket;
use crate::sys::syscall::PathEstimate;
use gradlane_units::Time;
use std::io;
use std::time::Duration;

/// Frame size and send buffer of one connection.
#[derive(Debug)]
pub(crate) struct ConnectionFlow {
    send_buffer: SendBuffer,
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

    /// Notes whether the I/O thread paces the connection.
    pub(crate) fn set_paced_by_thread(&mut self, by_thread: bool) {
        self.send_buffer.set_paced_by_thread(by_thread);
    }

    /// Whether as many bytes wait unsent as may.
    pub(crate) fn is_full(&self) -> bool {
        self.send_buffer.is_full()
    }

    /// Time until the unsent bytes are sent; zero where the path's rate is not known.
    pub(crate) fn drain_time(&self) -> Duration {
        self.send_buffer.drain_time()
    }
}
