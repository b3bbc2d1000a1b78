//! Settings of a channel, with unit, default and limits.
//!
//! Options never change after a channel is made. [`ChannelOptions::validate`] runs before any
//! socket is used.

use crate::error::ChannelError;
use gradlane_engine::{GoingOn, FRAME_BYTES_DEFAULT};
use gradlane_wire::MAX_FRAME_BYTES;
use serde::Deserialize;
use std::time::Duration;

/// Settings of one channel. From JSON by the same names; unknown names are refused.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChannelOptions {
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub world_size: u32,
    /// Job id: ranks of different jobs refuse each other.
    #[serde(default)]
    pub job: String,
    /// The job's incarnation.
    #[serde(default)]
    pub generation: u32,
    /// How training goes on when ranks are lost; none: the session ends.
    #[serde(default)]
    pub going_on: Option<GoingOnOptions>,
    /// Payload bytes of a frame at most, or up to three times as many on connections so fast that a
    /// frame takes 3 ms at most. Preemption happens between frames.
    #[serde(default = "default_frame_bytes")]
    pub frame_bytes: u32,
    /// Bytes chosen for a peer and not yet with the kernel; one frame always goes.
    #[serde(default = "default_credit_bytes")]
    pub credit_bytes: u64,
    /// Bytes that may wait in the kernel, unsent, before a peer counts as busy.
    #[serde(default = "default_low_water_bytes")]
    pub low_water_bytes: u32,
    /// Send buffer of a connection; 0 fits it to the path while sending.
    #[serde(default)]
    pub send_buffer_bytes: u32,
    /// Receive buffer of a connection; 0 leaves it to the kernel. Where several peers send at once
    /// through a port with a short queue, 131,072 keeps them from overrunning it.
    #[serde(default)]
    pub receive_buffer_bytes: u32,
    /// Whether all that ranks send each other is encrypted and authenticated; needs a secret.
    #[serde(default)]
    pub seal: bool,
    /// Addresses by rank as the ranks have published them, where those that are called are others;
    /// sealed handshakes compare them. Empty: those that are called.
    #[serde(default)]
    pub published: Vec<String>,
    /// Whether connections are paced to their part of this rank's port.
    #[serde(default = "yes")]
    pub pacing: bool,
    /// Jobs (reductions, copies) handed out at once, shared by the lanes.
    #[serde(default = "default_work_depth")]
    pub work_depth: usize,
    /// Slices for one owner that are encoded ahead of sending; each holds a buffer.
    #[serde(default = "default_encoded_ahead")]
    pub encoded_ahead: usize,
    /// Seed of all random draws of codecs; the same on every rank.
    #[serde(default)]
    pub seed: u64,
    /// Threads that run jobs, shared by the lanes, of which each has one at least; 0 runs them on the threads of
    /// the lanes.
    #[serde(default = "one")]
    pub work_threads: usize,
    /// Connections to each peer, each with a thread of its own and its share of the slices; the same number on
    /// every rank.
    #[serde(default = "one_lane")]
    pub lanes: u16,
    /// A peer without bytes or heartbeats for this long is lost, in seconds.
    #[serde(default = "default_silence_timeout_s")]
    pub silence_timeout_s: f64,
    /// A step without progress for this long fails, in seconds.
    #[serde(default = "default_progress_timeout_s")]
    pub progress_timeout_s: f64,
    /// Time for all ranks to be connected, in seconds.
    #[serde(default = "default_connect_timeout_s")]
    pub connect_timeout_s: f64,
    /// Whether every frame and job is recorded (see `Channel::take_trace`).
    #[serde(default)]
    pub trace: bool,
    /// Whether all inputs and decisions of the engine are kept (see `Channel::take_journal`). The
    /// journal grows without limit.
    #[serde(default)]
    pub journal: bool,
}

/// How training goes on when ranks are lost.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoingOnOptions {
    /// With fewer ranks than these the session ends.
    pub min_ranks: u32,
    /// How long to wait for what other ranks have lost before a membership is proposed, in seconds.
    pub collect_s: f64,
    /// How long to wait for answers to a proposal, in seconds.
    pub answer_s: f64,
}

impl GoingOnOptions {
    /// The engine's options.
    #[must_use]
    pub fn for_engine(&self) -> GoingOn {
        GoingOn {
            min_ranks: self.min_ranks,
            collect: Duration::from_secs_f64(self.collect_s),
            answer: Duration::from_secs_f64(self.answer_s),
        }
    }
}

/// Frames of this size also fill a short send buffer: smaller ones leave shaped ports idle more
/// often (decision 5).
const fn default_frame_bytes() -> u32 {
    FRAME_BYTES_DEFAULT
}
fn default_credit_bytes() -> u64 {
    default_frame_bytes().into()
}
fn default_low_water_bytes() -> u32 {
    65_536
}
fn default_work_depth() -> usize {
    2
}
fn default_encoded_ahead() -> usize {
    4
}
fn one() -> usize {
    1
}
fn one_lane() -> u16 {
    1
}
fn yes() -> bool {
    true
}
fn default_silence_timeout_s() -> f64 {
    30.0
}
fn default_progress_timeout_s() -> f64 {
    1_800.0
}
fn default_connect_timeout_s() -> f64 {
    120.0
}

/// Most lanes of a channel.
pub const LANES_MAX: u16 = 16;

/// Longest timeout that is accepted: a hundred years, so that adding it to a clock cannot overflow.
const TIMEOUT_MAX_S: f64 = 3.2e9;

impl ChannelOptions {
    /// Makes the default options of one rank.
    #[must_use]
    pub fn new(rank: u32, world_size: u32) -> ChannelOptions {
        ChannelOptions {
            rank,
            world_size,
            job: String::new(),
            generation: 0,
            going_on: None,
            frame_bytes: default_frame_bytes(),
            credit_bytes: default_credit_bytes(),
            low_water_bytes: default_low_water_bytes(),
            send_buffer_bytes: 0,
            receive_buffer_bytes: 0,
            seal: false,
            published: Vec::new(),
            pacing: yes(),
            work_depth: default_work_depth(),
            encoded_ahead: default_encoded_ahead(),
            seed: 0,
            work_threads: one(),
            lanes: one_lane(),
            silence_timeout_s: default_silence_timeout_s(),
            progress_timeout_s: default_progress_timeout_s(),
            connect_timeout_s: default_connect_timeout_s(),
            trace: false,
            journal: false,
        }
    }

    /// Reads options from a JSON object.
    ///
    /// # Errors
    /// [`ChannelError::Argument`] when it is no such object or a value makes no sense.
    pub fn from_json(json: &str) -> Result<ChannelOptions, ChannelError> {
        let options: ChannelOptions = serde_json::from_str(json)
            .map_err(|error| ChannelError::Argument(format!("channel options: {error}")))?;
        options.validate()?;
        Ok(options)
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`ChannelError::Argument`] that names the option, its value and what is allowed.
    pub fn validate(&self) -> Result<(), ChannelError> {
        let refuse = |text: String| Err(ChannelError::Argument(text));
        if self.rank >= self.world_size {
            return refuse(format!(
                "rank is {}, but world_size is {}: ranks go from 0 to world_size - 1",
                self.rank, self.world_size
            ));
        }
        if self.frame_bytes < 64 || self.frame_bytes > MAX_FRAME_BYTES {
            return refuse(format!(
                "frame_bytes is {}: use 64 to {MAX_FRAME_BYTES}",
                self.frame_bytes
            ));
        }
        if !self.published.is_empty() && self.published.len() != self.world_size as usize {
            return refuse(format!(
                "published has {} addresses for a world of {} ranks",
                self.published.len(),
                self.world_size
            ));
        }
        if self.work_depth == 0 {
            return refuse("work_depth is 0: at least one job must be allowed at once".into());
        }
        if self.encoded_ahead == 0 || self.encoded_ahead > 65_536 {
            return refuse(format!("encoded_ahead is {}: use 1 to 65536", self.encoded_ahead));
        }
        if self.work_threads > 256 {
            return refuse(format!("work_threads is {}: use 0 to 256", self.work_threads));
        }
        if self.lanes == 0 || self.lanes > LANES_MAX {
            return refuse(format!("lanes is {}: use 1 to {LANES_MAX}", self.lanes));
        }
        let going_on = self.going_on.as_ref();
        if let Some(least) = going_on.map(|it| it.min_ranks).filter(|&it| it > self.world_size) {
            return refuse(format!("min_ranks is {least} in a world of {}", self.world_size));
        }
        for (name, value) in [
            ("collect_s", going_on.map_or(1.0, |it| it.collect_s)),
            ("answer_s", going_on.map_or(1.0, |it| it.answer_s)),
            ("silence_timeout_s", self.silence_timeout_s),
            ("progress_timeout_s", self.progress_timeout_s),
            ("connect_timeout_s", self.connect_timeout_s),
        ] {
            if !(value > 0.0 && value <= TIMEOUT_MAX_S) {
                return refuse(format!("{name} is {value}: use a positive number of seconds"));
            }
        }
        Ok(())
    }

    /// Returns `silence_timeout_s`.
    #[must_use]
    pub fn silence_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.silence_timeout_s)
    }

    /// Returns `progress_timeout_s`.
    #[must_use]
    pub fn progress_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.progress_timeout_s)
    }

    /// Returns `connect_timeout_s`.
    #[must_use]
    pub fn connect_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.connect_timeout_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_gives_defaults_and_refuses_what_it_does_not_know() {
        let options = ChannelOptions::from_json(r#"{"rank": 1, "world_size": 4}"#);
        assert_eq!(options, Ok(ChannelOptions::new(1, 4)));
        for (json, named) in [
            (r#"{"rank": 4, "world_size": 4}"#, "rank"),
            (r#"{"rank": 0, "world_size": 1, "frame_byte": 1}"#, "frame_byte"),
            (r#"{"rank": 0, "world_size": 1, "frame_bytes": 1}"#, "frame_bytes"),
            (r#"{"rank": 0, "world_size": 1, "lanes": 0}"#, "lanes"),
            (r#"{"rank": 0, "world_size": 1, "silence_timeout_s": 0}"#, "silence_timeout_s"),
            (r#"{"rank": 0, "world_size": 1, "silence_timeout_s": 1e99}"#, "silence_timeout_s"),
        ] {
            let text = ChannelOptions::from_json(json).map_err(|error| error.to_string());
            assert!(text.as_ref().is_err_and(|text| text.contains(named)), "{json}: {text:?}");
        }
    }
}
