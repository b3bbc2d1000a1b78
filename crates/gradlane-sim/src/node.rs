//! One rank: its engine, the I/O thread that drives it, its work threads and its accelerator.
//!
//! An I/O thread does one thing after another, as `gradlane-net`'s does: what it hears while it is
//! busy waits in its inbox.

use crate::accelerator::Accelerator;
use crate::connections::Partial;
use crate::straggling::Pace;
use gradlane_engine::{Engine, JobId, JobResult, Transmit};
use gradlane_units::{Step, TensorId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

/// A task of the I/O thread.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IoTask {
    /// The header of a frame is here.
    Header(u32),
    /// All of a frame is here; `true` when its header was not heard before.
    Frame(u32, bool),
    /// The connection to this rank takes bytes again.
    Writable(u32),
    /// The work thread has finished a job of a lane.
    JobDone(JobId, u32),
    /// The application has begun a step.
    Begin(Step),
    /// The application hands over a gradient.
    Gradient(TensorId, Step),
    /// The application waits for a tensor.
    Needed(TensorId, Step),
    /// The application has made a tensor's gradient of all ranks' blocks.
    Answer(TensorId, Step),
    /// The application has ended a step.
    End(Step),
    /// The application passes a step.
    Pass(Step),
    /// A moment has come that the engine wanted to hear of.
    Clock,
}

/// A thread that drives the engine: one event touches one line of the cache.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct IoThread {
    pub(crate) inbox: VecDeque<IoTask>,
    /// When it has done its last task.
    pub(crate) busy_until: u64,
    /// Whether it will look into its inbox then.
    pub(crate) will_listen: bool,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) engine: Engine,
    pub(crate) accelerator: Accelerator,
    /// Bytes that the kernel takes of a connection on average before the first is acknowledged.
    pub(crate) window_bytes: f64,
    /// Frames that the kernel has not taken whole, by rank.
    pub(crate) partial: BTreeMap<u32, Partial>,
    /// Frames behind them that the engine has chosen, by rank.
    pub(crate) unsent: BTreeMap<u32, VecDeque<Transmit>>,
    /// Threads that drive the sockets, each those of its part of the peers; the first hears the
    /// application, too.
    pub(crate) io: Vec<IoThread>,
    /// When each work thread has done all that it was given.
    pub(crate) work_until: Vec<u64>,
    /// Jobs with their ends, the first to end first.
    pub(crate) jobs: BinaryHeap<Reverse<(u64, JobId, u32)>>,
    /// What comes of those that encode to other lengths than the plan's.
    pub(crate) results: BTreeMap<JobId, JobResult>,
    /// Tensors whose gradient it makes for all, the first to end first, each with when it is made.
    pub(crate) root_requests: VecDeque<(u64, TensorId, Step)>,
    /// When the accelerator's present stretch of computing began.
    pub(crate) computes_since: u64,
    /// Its pace between steps.
    pub(crate) pace: Pace,
    /// When it runs again.
    pub(crate) stopped_until: u64,
    /// When it looks at its clock next.
    pub(crate) clock_at: u64,
    /// Last step whose norm is known, where gradients are clipped.
    pub(crate) clipped_step: u64,
    /// When the owners' squares of the current step were here, while the norm is not known.
    pub(crate) squares_at: Option<u64>,
    /// Tensors that wait for the norm, since when they are here.
    pub(crate) unclipped: Vec<(TensorId, u64)>,
    /// Slowness of this rank: 1 is the profile's time.
    pub(crate) slowness: f64,
}
