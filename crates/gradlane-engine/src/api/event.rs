//! Events, from the engine to its driver.
#![allow(missing_docs, reason = "fields with the name of their type")]

use crate::api::{BufferRef, Failure, LaneNews, Region};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;
use gradlane_units::{Rank, SliceId, SquareSum, Step, TensorId};

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A tensor holds the result of a step: the mean, or the updated parameters. When `absent`, no
    /// rank had a gradient and the memory was not written.
    TensorReady {
        tensor: TensorId,
        step: Step,
        /// Whether no rank had a gradient.
        absent: bool,
    },
    /// All ranks' blocks of a tensor are here, or the root's result (not on the root itself), until
    /// [`Input::ReleaseBlocks`](crate::Input::ReleaseBlocks); the tensor is ready.
    BlocksReady {
        tensor: TensorId,
        step: Step,
        /// By rank; `None` of a rank without a block. This rank's own block is in its own memory.
        blocks: Vec<Option<Region>>,
    },
    /// All ranks' blocks of a tensor are here, whose root this rank is: it owes a result
    /// ([`Input::RootResultReady`](crate::Input::RootResultReady)), and keeps the blocks until
    /// [`Input::ReleaseBlocks`](crate::Input::ReleaseBlocks).
    RootRequest {
        tensor: TensorId,
        step: Step,
        /// By rank, as in [`Event::BlocksReady`]; at least one rank had one.
        blocks: Vec<Option<Region>>,
    },
    /// All tensors of the step are ready on this rank.
    StepComplete { step: Step },
    /// This rank, the owner, has applied one rank's push alone (synchrony `Async`).
    Applied {
        slice: SliceId,
        /// The rank that pushed.
        rank: Rank,
        /// In which step of that rank.
        step: Step,
        /// Updates that the slice has had, this one included.
        version: u64,
        /// Updates of the slice since the version that the rank had received.
        staleness: u64,
    },
    /// The squares of all gradients of a step are added up, exactly
    /// ([`Input::MeasureSquares`](crate::Input::MeasureSquares)); means may still be on their way.
    SquaresReady {
        step: Step,
        /// Over all ranks' slices; the same on all ranks.
        sum: SquareSum,
    },
    /// The contributors of a step are known (synchrony `BackupWorkers`).
    ContributorsDecided {
        step: Step,
        /// In rank order.
        contributors: Vec<Rank>,
    },
    /// This rank has handed over all its gradients of a step, or passes it, and the step goes on without
    /// them (synchrony `BackupWorkers`).
    LeftOut {
        step: Step,
        /// Whether that was so much later than the decision that the next step would go on without
        /// this rank, too: by more than a tenth of a step, or, in the first steps, when the whole
        /// result was here.
        behind: bool,
    },
    /// A rank had all its gradients of a step after it was decided without that rank (synchrony
    /// `Set`; on rank 0).
    Late {
        rank: Rank,
        step: Step,
        /// How much later.
        lateness: Duration,
    },
    /// From this step on, frames are ordered by another priority vector.
    PlanSwitched {
        /// Version of the vector.
        version: u32,
        /// First step in which it is in force.
        step: Step,
    },
    /// A peer has heard nothing of another one for too long: where the driver hears both, it blames
    /// their link ([`Engine::blame_link`]).
    ///
    /// [`Engine::blame_link`]: crate::Engine::blame_link
    Suspected {
        /// The peer.
        by: Rank,
        /// The one that it does not hear.
        suspect: Rank,
    },
    /// This rank is no longer connected to a peer that the others go on without: the driver closes the
    /// connection, reads and writes nothing more for it, and calls
    /// [`Input::PeerLost`](crate::Input::PeerLost).
    Disconnect(Rank),
    /// As many ranks are left as were lost: the driver writes this value into the register of this
    /// generation in the job's store, unless that holds one, and tells what it holds
    /// ([`Input::ClaimAnswered`](crate::Input::ClaimAnswered)).
    ClaimNeeded { generation: u32, value: Vec<u8> },
    /// Training goes on with these ranks alone.
    MembersChanged {
        /// Number of the membership; 0 is that of the start.
        generation: u32,
        /// In rank order.
        members: Vec<Rank>,
        /// The latest step that a member is in: its means may be over the members of before, or these.
        step: Step,
        /// Who was lost, and why; the same on all ranks.
        reason: String,
    },
    /// The driver gives this to the first lane of this rank ([`Input::Told`](crate::Input::Told)).
    TellLead(LaneNews),
    /// The driver gives this to all other lanes of this rank ([`Input::Told`](crate::Input::Told)).
    TellLanes(LaneNews),
    /// The driver may free or reuse this buffer.
    BufferFree(BufferRef),
    /// Everything was sent, every peer has said goodbye: connections may be closed.
    Closed,
    /// The session is over. Nothing more comes out of the engine.
    Failed(Failure),
}
