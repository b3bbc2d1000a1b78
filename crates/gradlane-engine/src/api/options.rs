//! Options of an engine.

use core::time::Duration;
use gradlane_units::Rank;

/// Default payload of a frame: with its header, one packet of 45 segments of 1,448 bytes, as a kernel
/// cuts a stream over IPv4 where packets have 1,500 bytes
/// (`docs/decisions/0048-paced-by-the-thread.md`).
pub const FRAME_BYTES_DEFAULT: u32 = 65_096;

/// Options of an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// This rank.
    pub rank: Rank,
    /// Payload of one frame: an urgent slice waits for one at most, a peer. A rest of up to an eighth
    /// of it goes with the last frame of a message. Other sizes for single peers are
    /// [`crate::Input::FrameBytes`]'s.
    pub frame_bytes: u32,
    /// Bytes handed out towards a peer and not yet reported as sent. One frame always goes.
    pub credit_bytes: u64,
    /// Jobs handed out at once.
    pub job_depth: usize,
    /// Slices towards one owner that are encoded ahead of sending.
    pub encoded_ahead: usize,
    /// How long to wait for ranks that are alive but do not take part.
    pub progress_timeout: Duration,
    /// The job's incarnation: frames of another one are refused.
    pub generation: u32,
    /// How training goes on when ranks are lost; none: the session ends.
    pub going_on: Option<GoingOn>,
}

/// How training goes on when ranks are lost.
#[derive(Clone, Debug)]
pub struct GoingOn {
    /// With fewer ranks than these the session ends.
    pub min_ranks: u32,
    /// How long to wait for what other ranks have lost before a membership is proposed.
    pub collect: Duration,
    /// How long to wait for the answer to a proposal: longer than a round trip. A rank that does not
    /// answer is lost.
    pub answer: Duration,
}

impl EngineOptions {
    /// The defaults for a rank: frames of 65 kB, credit for one, two jobs, four slices
    /// encoded ahead for each peer, 30 minutes.
    #[must_use]
    pub fn new(rank: Rank) -> EngineOptions {
        EngineOptions {
            rank,
            frame_bytes: FRAME_BYTES_DEFAULT,
            credit_bytes: u64::from(FRAME_BYTES_DEFAULT),
            job_depth: 2,
            encoded_ahead: 4,
            progress_timeout: Duration::from_secs(30 * 60),
            generation: 0,
            going_on: None,
        }
    }
}
