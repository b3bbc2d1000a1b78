//! Constants: what the host's processor does to a frame, a reduction and a wake-up.
//!
//! The goodput share was fitted to steps measured in the lab; the others are orders of magnitude, not
//! measured yet. `docs/simulator.md` says how far predictions are off. They are seconds of real time:
//! in an emulation with dilation D a nominal second is D of them.

use crate::error::SimError;
use serde::{Deserialize, Serialize};

/// Share of a port's rate that carries frames: the payload of a full TCP segment over its bytes on an
/// Ethernet, 1448 of 1514, times 0.97. The second factor is what a dozen short flows lose that
/// share a port: an all-to-all exchange was measured at 95 to 96 % of neighbour-to-neighbour
/// streams (`docs/decisions/0005-send-buffers.md`), and 0.97 fits steps best.
pub const GOODPUT_SHARE: f64 = 1448.0 / 1514.0 * 0.97;

/// What the kernel holds of a connection whose path is short: it doubles the 64 kB that it is asked
/// for (`gradlane-net`'s `send_buffer.rs`) and spends a little of that on bookkeeping.
pub(crate) const SEND_BUFFER_FLOOR_BYTES: f64 = 126_000.0;

/// Time that the host spends. One I/O thread and one work thread a rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Costs {
    /// Choosing a frame and giving it to the kernel, a frame.
    pub send_frame_s: f64,
    /// Checksum and copy of an outgoing byte.
    pub send_byte_s: f64,
    /// Reading a frame, a frame.
    pub receive_frame_s: f64,
    /// Copy and checksum of an incoming byte.
    pub receive_byte_s: f64,
    /// Handing a piece of work to the work thread and hearing of its end.
    pub work_s: f64,
    /// Reading one byte of one contribution, and its share of writing the result.
    pub reduce_byte_s: f64,
    /// A command of the application reaching the I/O thread.
    pub command_s: f64,
    /// A finished tensor reaching the application's thread, its update included.
    pub wake_s: f64,
    /// Between the end of a step's backward and the next forward.
    pub between_steps_s: f64,
}

impl Default for Costs {
    fn default() -> Costs {
        Costs::USUAL
    }
}

impl Costs {
    /// A host that costs nothing: the network alone decides.
    pub const FREE: Costs = Costs {
        send_frame_s: 0.0,
        send_byte_s: 0.0,
        receive_frame_s: 0.0,
        receive_byte_s: 0.0,
        work_s: 0.0,
        reduce_byte_s: 0.0,
        command_s: 0.0,
        wake_s: 0.0,
        between_steps_s: 0.0,
    };

    /// Orders of magnitude for a server of today.
    pub const USUAL: Costs = Costs {
        send_frame_s: 10e-6,
        send_byte_s: 0.35e-9,
        receive_frame_s: 10e-6,
        receive_byte_s: 0.35e-9,
        work_s: 30e-6,
        reduce_byte_s: 0.15e-9,
        command_s: 20e-6,
        wake_s: 100e-6,
        between_steps_s: 0.0,
    };

    /// Checks every value.
    ///
    /// # Errors
    /// [`SimError::Argument`] naming the constant.
    pub fn validate(&self) -> Result<(), SimError> {
        for (name, value) in [
            ("send_frame_s", self.send_frame_s),
            ("send_byte_s", self.send_byte_s),
            ("receive_frame_s", self.receive_frame_s),
            ("receive_byte_s", self.receive_byte_s),
            ("work_s", self.work_s),
            ("reduce_byte_s", self.reduce_byte_s),
            ("command_s", self.command_s),
            ("wake_s", self.wake_s),
            ("between_steps_s", self.between_steps_s),
        ] {
            if !(0.0..=1.0).contains(&value) {
                return Err(SimError::Argument(format!("costs.{name} is {value}: use 0 to 1 s")));
            }
        }
        Ok(())
    }
}
