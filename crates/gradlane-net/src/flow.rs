//! How fast and in which portions connections send: pacing, frame size, send buffers, wake-up
//! coalescing.

pub(crate) mod frame_size;
pub(crate) mod pacer;
pub(crate) mod pacing;
pub(crate) mod send_buffer;
pub(crate) mod wakeup_coalescing;
