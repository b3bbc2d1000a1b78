//! One rank: its accelerator and what its program knows; `rank_lane` has the lanes that communicate for it.

use crate::accelerator::Accelerator;
use crate::joined_lanes::JoinedLanes;
use crate::straggling::Pace;
use gradlane_units::{Step, TensorId};
use std::collections::VecDeque;

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) accelerator: Accelerator,
    pub(crate) joined: JoinedLanes,
    /// Tensors whose gradient it makes for all, the first to end first, each with when it is made.
    pub(crate) root_requests: VecDeque<(u64, TensorId, Step)>,
    /// When the accelerator's present stretch of computing began.
    pub(crate) computes_since: u64,
    /// Its pace between steps.
    pub(crate) pace: Pace,
    /// When it runs again.
    pub(crate) stopped_until: u64,
    /// Last step whose norm is known, where gradients are clipped.
    pub(crate) clipped_step: u64,
    /// When the owners' squares of the current step were here, while the norm is not known.
    pub(crate) squares_at: Option<u64>,
    /// Tensors that wait for the norm, since when they are here.
    pub(crate) unclipped: Vec<(TensorId, u64)>,
    /// Slowness of this rank: 1 is the profile's time.
    pub(crate) slowness: f64,
}
