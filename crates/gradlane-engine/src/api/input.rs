//! All that an engine is told: the application's calls, what the driver notices, and what lanes of its rank tell
//! each other.

use crate::api::Failure;
use alloc::string::String;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SquareSum, Step, TensorId, Time};
use gradlane_wire::FrameHeader;

/// What the lanes of a rank tell each other, where training goes on when ranks are lost, or steps without
/// stragglers. The first lane leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaneNews {
    /// To the first lane: a lane has lost its connection to a peer.
    PeerLost {
        /// The peer.
        peer: Rank,
        /// Why.
        reason: String,
        /// Whether the lane ends the connection itself, so that the peer does not end the others.
        by_own_will: bool,
    },
    /// To the first lane: all ranks have said goodbye in a lane, and nothing is owed there.
    Through,
    /// From the first lane: ranks were lost, and nothing of this membership is sent or taken any more.
    Suspended,
    /// From the first lane: the next membership.
    Members {
        /// Its number.
        generation: u32,
        /// In rank order.
        members: Vec<Rank>,
        /// Whether a rank of the last membership had said goodbye.
        is_through: bool,
        /// Why each rank that is not in it left; the same on all ranks.
        reason: String,
    },
    /// From the first lane: all ranks have left.
    Closed,
    /// To the first lane: this rank has submitted all that a lane carries of a step.
    Submitted {
        /// The step.
        step: Step,
        /// Whether the results of all that were here by then.
        had_results: bool,
    },
    /// From the first lane: the contributors of a step are these.
    Contributors(Step, Vec<Rank>),
}

/// Names one job between `poll_job` and `Input::JobDone`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// What came of a job besides what it wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobResult {
    /// Nothing, or an encoding of the only length that there is.
    Written,
    /// An encoding of this many bytes.
    Encoded(u64),
    /// The squares of [`Operation::AddSquares`].
    Squares(SquareSum),
}

/// All that an engine is told, for [`Engine::handle`](crate::Engine::handle): first the application's calls, then
/// what the driver notices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Begins a step: 0 first (rank 0's values go everywhere), then 1, 2, …
    StepBegin(Step),
    /// Begins a step and takes no part in it, to be with the other ranks again in the next: for a
    /// rank that was late. [`Input::TensorAbsent`] lends the memory for the results.
    StepPass(Step),
    /// Begins a step that no rank is left out of: a barrier between two steps of training. All ranks
    /// have to begin it so. Where no rank is ever left out it is a step like any other.
    StepBarrier(Step),
    /// A tensor's gradient is ready in memory that the driver knows as `Memory::Gradient`. The engine
    /// owns that memory until the tensor is ready. In step 0 the memory is the tensor itself.
    GradientReady(TensorId, Step),
    /// This rank has no gradient for a tensor, which counts as zeros. Memory for the result is lent
    /// all the same.
    TensorAbsent(TensorId, Step),
    /// This rank's block of a tensor is ready, and has this many bytes: at most the plan's, and whole
    /// elements. Memory as for [`Input::GradientReady`].
    BlockReady(TensorId, Step, u64),
    /// The root's result for a tensor is ready, and has this many bytes: after
    /// [`Event::RootRequest`](crate::Event::RootRequest), once. Memory as for [`Input::GradientReady`].
    RootResultReady(TensorId, Step, u64),
    /// The blocks of a tensor in a step are no longer read.
    ReleaseBlocks(TensorId, Step),
    /// A consumer waits for a tensor. The first wait after all contributions is the start of the next
    /// iteration, which sends deferred pulls.
    TensorNeeded(TensorId, Step),
    /// In this step this rank's contributions travel as they are, whatever the plan says. It precedes
    /// the step's first contribution, on all ranks.
    SendRaw(Step),
    /// In this step the squares of the means of the tensors before this one are added up by their
    /// owners: [`Event::SquaresReady`](crate::Event::SquaresReady). It precedes the step's first
    /// contribution, on all ranks.
    MeasureSquares(TensorId, Step),
    /// The application has ended the step (`optimizer.step()`): with updates on the server,
    /// parameters may be written from now on.
    StepEnd(Step),
    /// Rank 0 announces another priority vector, one entry a tensor. It is in force on all ranks from
    /// the same step on, two steps after the current one; where ranks may be in different steps, on
    /// each rank from its next step on.
    SwitchPriorities(Vec<Priority>),
    /// The driver knows how tensors are updated. Asynchronous training applies no push before. On a
    /// dedicated server, results are parameters from now on.
    UpdatesReady,
    /// Until updates are ready again, the driver replies to pushes with something else than
    /// parameters, which stay as they are.
    UpdatesPaused,
    /// Before its first contribution to the current step, this rank tells the dedicated servers how to
    /// handle the step. What it says is the driver's: the engine delivers it
    /// ([`Input::Control`]), and takes no push without.
    ServerCommand(Vec<u8>),
    /// What the register in the job's store holds for a membership's generation; none: the store does not
    /// answer. After [`Event::ClaimNeeded`](crate::Event::ClaimNeeded).
    ClaimAnswered(u32, Option<Vec<u8>>),
    /// Another lane of this rank tells this one, in the order in which it said so
    /// ([`Event::TellLead`](crate::Event::TellLead), [`Event::TellLanes`](crate::Event::TellLanes)).
    Told(LaneNews),
    /// There will be no more steps: the engine sends what it owes, then goodbye. In the middle of a
    /// step that this rank has not finished contributing to, this is an abort.
    Finish,

    /// A verified header has arrived from a peer. The answer says where its payload goes.
    Header(Rank, FrameHeader),
    /// The payload of the frame announced last by this peer is in place and its checksum is right.
    Frame(Rank, FrameHeader),
    /// A control frame and its payload have arrived.
    Control(Rank, FrameHeader, Vec<u8>),
    /// The socket to a peer can, or cannot, take more without queueing in the kernel.
    Writable(Rank, bool),
    /// Frames to a peer have at most this many bytes of payload from now on, whatever the options say:
    /// more on a connection that is so fast that an urgent slice hardly waits longer for it.
    FrameBytes(Rank, u32),
    /// The kernel has a whole frame to a peer: its credit comes back.
    Sent(Rank, FrameHeader),
    /// Nobody reads the memory of a frame that was sent to a peer any more: it may be written, or freed. Frames
    /// to a peer are read in the order in which they are sent.
    Read(Rank, FrameHeader),
    /// The driver has done a job.
    JobDone(JobId, JobResult),
    /// It is now this late. Without progress for the progress timeout the session fails, naming the ranks
    /// that are missing.
    Time(Time),
    /// The connection to a peer is gone: closed, reset, or silent for too long. After the peer's
    /// goodbye that is in order.
    PeerLost(Rank, String),
    /// Nothing was heard of a peer for too long: the other ranks are asked whether they hear it. Refused where there
    /// is no other rank to ask.
    Suspect(Rank),
    /// A peer hears nothing of another one, and this rank hears both: the session fails on all ranks
    /// with the same words.
    BlameLink(Rank, Rank),
    /// A peer broke the protocol or sent a payload with a wrong checksum: the session fails, naming
    /// it. Where training goes on without lost ranks, the ranks agree on who leaves.
    RejectPeer(Rank, String),
    /// This rank gives up, and tells the other ranks why.
    Abort(String),
    /// Another lane of this rank has failed: this one tells its peers the same, and ends without an event.
    EndAs(Failure),
}
