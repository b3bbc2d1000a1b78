//! Constants: the capacities of ports and connections, and the time that the host's processor takes for a frame, a
//! reduction and a wake-up.
//!
//! Measured on 2026-11-21 by `gradlane lab calibrate --json costs.json` (four emulated nodes, ports of
//! 500 Mbit/s, a virtual machine of two cores, Linux 6.18, machine 17 % busy; medians of three turns,
//! which lay within 21 % for the cost of a frame and within 10 % for all others). On another machine
//! the same command makes a file for `--costs`. `docs/simulator.md` says how each is measured and
//! how far predictions are off. Times are seconds of real time: in an emulation with dilation D a
//! nominal second is D of them.

use crate::error::SimError;
use serde::{Deserialize, Serialize};

/// Share of a port's rate that carries frames: the payload of a full TCP segment over its bytes on an
/// Ethernet, 0.9564. Plain TCP streams on shaped ports were measured at 0.9555.
pub const GOODPUT_SHARE: f64 = 1448.0 / 1514.0;

/// The send buffer of a connection whose path is short: the kernel doubles the 72 kB that it is asked
/// for (`gradlane-net`'s `connection_flow.rs`).
pub(crate) const SEND_BUFFER_FLOOR_BYTES: u64 = 147_456;

/// How unequal connections are. Fitted to steps of ResNet-50 that were measured in the lab:
/// `gradlane lab grid --fit`.
pub(crate) const SHARE_SPREAD: f64 = 0.125;

/// How many times as unequal they are over several lanes: each paces itself to the most that it has
/// carried, so that they exceed the port together. Fitted to ResNet-50 by `p3` at 4 Gbit/s over two lanes
/// and four, the other constant that is fitted.
pub(crate) const LANES_SPREAD: f64 = 1.6;

/// Bytes of a connection after which it is unequal in another way. Chosen, not measured: flows that were
/// traced in the lab were 7 MB apart in a step of 51 MB (`docs/decisions/0005-send-buffers.md`), and
/// shares that last for good made `p3` on VGG-19 at 10 Gbit/s 8 % too slow.
pub(crate) const SHARE_LASTS_BYTES: u32 = 4_000_000;

/// The largest packet with segmentation offload: 45 segments of 1,448 bytes.
pub(crate) const PACKET_BYTES: u32 = 65_160;

/// Bytes of the send buffer that a packet takes beside its own.
pub(crate) const PACKET_OVERHEAD_BYTES: u32 = 1_280;

/// Bytes that are not acknowledged by themselves: no more than one segment.
pub(crate) const SMALL_PIECE_BYTES: u32 = 1_448;

/// An acknowledgement: headers alone.
pub(crate) const ACKNOWLEDGEMENT_BYTES: u32 = 66;

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
    /// Time that sealing an outgoing byte adds, where connections are sealed: encryption in place of the checksum.
    pub seal_byte_s: f64,
    /// Time that opening an incoming byte adds: decryption and a copy in place of the checksum.
    pub open_byte_s: f64,
    /// Handing a job to the work thread and hearing of its end.
    pub work_s: f64,
    /// Reading one byte of one contribution, and its share of writing the result.
    pub reduce_byte_s: f64,
    /// Encoding a byte of values, with a codec.
    pub encode_byte_s: f64,
    /// Decoding a byte of values and adding it up.
    pub decode_byte_s: f64,
    /// A command of the application reaching the I/O thread.
    pub command_s: f64,
    /// A finished tensor reaching the application's thread, its update included.
    pub wake_s: f64,
    /// Between the end of a step's backward and the next forward.
    pub between_steps_s: f64,
    /// Copying a byte to where another rank of the node reads it, or from there.
    pub local_copy_byte_s: f64,
    /// Reading a byte of one rank's contribution, where those of a node are added up, and its share
    /// of writing the result.
    pub local_sum_byte_s: f64,
    /// A word to another rank of the node, to its being heard.
    pub local_word_s: f64,
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
        seal_byte_s: 0.0,
        open_byte_s: 0.0,
        work_s: 0.0,
        reduce_byte_s: 0.0,
        encode_byte_s: 0.0,
        decode_byte_s: 0.0,
        command_s: 0.0,
        wake_s: 0.0,
        between_steps_s: 0.0,
        local_copy_byte_s: 0.0,
        local_sum_byte_s: 0.0,
        local_word_s: 0.0,
    };

    /// As measured: see the top of this file. `between_steps_s` is the training loop's own, and is in
    /// the compute time of a measured profile.
    pub const USUAL: Costs = Costs {
        send_frame_s: 3.8e-6,
        send_byte_s: 0.30e-9,
        receive_frame_s: 3.8e-6,
        receive_byte_s: 0.30e-9,
        // Decision 58: sealed and not, in turn, over loopback.
        seal_byte_s: 0.14e-9,
        open_byte_s: 0.14e-9,
        work_s: 54e-6,
        reduce_byte_s: 0.041e-9,
        // Those of 8-bit QSGD; a scenario with another codec says its own.
        encode_byte_s: 0.19e-9,
        decode_byte_s: 0.08e-9,
        command_s: 81e-6,
        wake_s: 13e-6,
        between_steps_s: 0.0,
        // Of the next day, while others used the machine: `lab/calibration/node_costs.py`, processor time of
        // copies and sums of 4 MiB out of 64 MiB, half of a word's way there and back.
        local_copy_byte_s: 0.18e-9,
        local_sum_byte_s: 0.26e-9,
        local_word_s: 4.7e-6,
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
            ("seal_byte_s", self.seal_byte_s),
            ("open_byte_s", self.open_byte_s),
            ("work_s", self.work_s),
            ("reduce_byte_s", self.reduce_byte_s),
            ("encode_byte_s", self.encode_byte_s),
            ("decode_byte_s", self.decode_byte_s),
            ("command_s", self.command_s),
            ("wake_s", self.wake_s),
            ("between_steps_s", self.between_steps_s),
            ("local_copy_byte_s", self.local_copy_byte_s),
            ("local_sum_byte_s", self.local_sum_byte_s),
            ("local_word_s", self.local_word_s),
        ] {
            if !(0.0..=1.0).contains(&value) {
                return Err(SimError::Argument(format!("costs.{name} is {value}: use 0 to 1 s")));
            }
        }
        Ok(())
    }
}
