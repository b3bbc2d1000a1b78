//! Errors of a simulation.

/// Why there is no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimError {
    /// A value makes no sense; the text names the field, its value and what is allowed.
    #[error("{0}")]
    Argument(String),
    /// The engine refused an input: an error of the simulator or of the engine.
    #[error("at {time_s} s, rank {rank}: {reason}")]
    Engine {
        /// Virtual time.
        time_s: String,
        /// The rank whose engine it was.
        rank: u32,
        /// Its reason.
        reason: String,
    },
    /// Nothing moves any more and a rank has not finished.
    #[error("nothing moves any more, but rank {rank} is in step {step}, waiting for {waits_for}")]
    Stuck {
        /// The rank.
        rank: u32,
        /// Its step.
        step: u64,
        /// The tensor that it waits for.
        waits_for: String,
    },
}
