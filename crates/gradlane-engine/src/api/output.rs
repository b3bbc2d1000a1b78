//! What an engine tells its driver to do: frames to send, jobs to run, events to hear of, and where the payload of an
//! announced frame goes; and the memory that these are about, which the driver owns and the engine names.
#![allow(missing_docs, reason = "fields with the name of their type")]

use crate::api::{Failure, JobId, LaneNews};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;
use gradlane_units::{Priority, Rank, SliceId, SquareSum, Step, TensorId};
use gradlane_wire::FrameHeader;

/// A scratch buffer. The driver allocates it when it first meets it and frees it on
/// [`Event::BufferFree`](crate::Event::BufferFree); numbers are reused after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BufferRef {
    /// Number, small and dense.
    pub id: u32,
    /// Size; of an encoded slice, the bytes used, once they are known.
    pub bytes: u64,
}

impl BufferRef {
    /// The same buffer, of which this many bytes are used.
    pub(crate) fn fitted(self, bytes: u64) -> BufferRef {
        assert!(bytes <= self.bytes, "{bytes} encoded bytes in {}", self.bytes);
        BufferRef { bytes, ..self }
    }

    /// All of its bytes.
    pub(crate) fn whole(self) -> Region {
        Region { memory: Memory::Buffer(self), offset: 0, length: self.bytes }
    }
}

/// Memory that the driver knows the address of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Memory {
    /// The memory that the application lent for the tensor in this step.
    Gradient(TensorId),
    /// The parameter itself (updates on the server only).
    Parameter(TensorId),
    /// Scratch.
    Buffer(BufferRef),
}

/// A range of bytes in some memory; for tensors, `offset` counts from the tensor's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Region {
    /// The memory.
    pub memory: Memory,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

impl Region {
    /// The bytes of a frame within it.
    pub(crate) fn part(self, offset: u64, length: u32) -> Region {
        Region { offset: self.offset + offset, length: u64::from(length), ..self }
    }
}

/// Where the payload of an announced frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadDest {
    /// Straight into this memory.
    Region(Region),
    /// Into a buffer of the driver's own, to be given to the engine (`Input::Control`).
    Control,
    /// There is no payload: `Input::Frame` follows at once. Also the answer to every input but a header.
    Nothing,
}

/// The bytes after the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Payload {
    /// Nothing.
    None,
    /// These bytes of the driver's memory.
    Region(Region),
    /// These bytes, made by the engine (control frames).
    Inline(Vec<u8>),
}

/// One frame to send. `header.payload_checksum` is zero: the driver fills it in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// To whom.
    pub peer: Rank,
    pub header: FrameHeader,
    pub payload: Payload,
}

/// A computation that the driver executes on its threads (or charges time for).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// To be given back (`Input::JobDone`).
    pub id: JobId,
    pub slice: SliceId,
    /// The tensor that the slice is part of.
    pub tensor: TensorId,
    pub step: Step,
    /// Urgency.
    pub priority: Priority,
    /// The computation.
    pub operation: Operation,
}

/// A computation. All regions of one operation are equally long, but for encoded ones: these are as
/// long as their encoding, and an output at most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `output = (inputs[0] + inputs[1] + …) / divisor`, inputs in rank order. `output` may be one
    /// of the inputs.
    Reduce {
        /// Contributions in rank order.
        inputs: Vec<Region>,
        /// Whether a rank contributed nothing, which counts as zeros.
        absent: bool,
        /// Number of ranks that the mean is over.
        divisor: u32,
        /// Where the mean goes.
        output: Region,
        /// Where else it goes, in the same pass.
        copy_to: Option<Region>,
    },
    /// The same mean, then the optimizer: `output = updated parameters`.
    ReduceApply {
        /// Contributions in rank order.
        inputs: Vec<Region>,
        /// Whether a rank contributed nothing, which counts as zeros.
        absent: bool,
        /// Number of ranks that the mean is over.
        divisor: u32,
        /// The parameters before the update. Not written.
        parameters: Region,
        /// Where the parameters after the update go.
        output: Region,
    },
    /// `output = encode(input)`, this rank's contribution; with error feedback, of `input` and the
    /// residual. To be reported with the length of the encoding.
    Encode {
        /// The gradient.
        input: Region,
        /// Room for its encoding.
        output: Region,
    },
    /// `output = encode((decode(inputs[0]) + …) / divisor)`; with error feedback, of the mean and the
    /// residual. To be reported with the length of the encoding.
    DecodeReduceEncode {
        /// Encoded contributions in rank order.
        inputs: Vec<Region>,
        /// Whether a rank contributed nothing, which counts as zeros.
        absent: bool,
        /// Number of ranks that the mean is over.
        divisor: u32,
        /// Room for the encoded mean.
        output: Region,
        /// Where the decoded `output` goes, in the same pass.
        copy_to: Option<Region>,
    },
    /// As [`Operation::ReduceApply`], of encoded contributions.
    DecodeReduceApply {
        /// Encoded contributions in rank order.
        inputs: Vec<Region>,
        /// Whether a rank contributed nothing, which counts as zeros.
        absent: bool,
        /// Number of ranks that the mean is over.
        divisor: u32,
        /// The parameters before the update. Not written.
        parameters: Region,
        /// Where the parameters after the update go.
        output: Region,
    },
    /// One hop of an encoded sum: `output = encode((decode(received) + own) / divisor)`; with error
    /// feedback. To be reported with the length of the encoding.
    RingEncode {
        /// The encoded sum of the ranks before; none where none of them had a gradient.
        received: Option<Region>,
        /// This rank's gradient, if it has one.
        own: Option<Region>,
        /// Number of ranks that the mean is over, on the last one; else 1.
        divisor: u32,
        /// Room for the encoding.
        output: Region,
        /// On the last rank, where the decoded `output` goes, in the same pass.
        copy_to: Option<Region>,
    },
    /// `output = the larger of received and the scales of own`, a number for each bucket.
    RingMaxScales {
        /// Scales of the ranks before; none where none of them had a gradient.
        received: Option<Region>,
        /// This rank's gradient.
        own: Region,
        /// The scales. May be `received`.
        output: Region,
    },
    /// `output = codes of own`, to the larger of `scales` and its own: a sum that begins.
    RingBeginCodes {
        /// Scales of all other ranks; none where none of them had a gradient.
        scales: Option<Region>,
        /// This rank's gradient, if it has one: scales or gradient are there.
        own: Option<Region>,
        /// Room for scales and sums.
        output: Region,
    },
    /// `sums = sums + codes of own`, as integers.
    RingAddCodes {
        /// Scales and sums, which are read and written.
        sums: Region,
        /// This rank's gradient, if it has one; none counts as zeros.
        own: Option<Region>,
        /// On the last rank, where the mean that `sums` then stands for goes, in the same pass.
        copy_to: Option<Region>,
    },
    /// The exact sum of the squares of `input`. To be reported with the sum
    /// ([`JobResult::Squares`]).
    AddSquares {
        /// The mean of an owned slice.
        input: Region,
    },
    /// `to = decode(from)`.
    Decode {
        /// An encoded slice.
        from: Region,
        /// Where its values go.
        to: Region,
    },
    /// `to = from`.
    Copy {
        /// Source.
        from: Region,
        /// Destination.
        to: Region,
    },
}

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

/// The queue towards one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerQueueStats {
    /// Messages that are not, or not wholly, handed out.
    pub messages: u64,
    /// Bytes of them that are still to be handed out, without headers.
    pub bytes: u64,
    /// Bytes handed out and not yet reported as sent, with headers.
    pub in_flight_bytes: u64,
}

impl PeerQueueStats {
    pub(crate) fn add(&mut self, bytes: u64) {
        self.messages += 1;
        self.bytes += bytes;
    }
}

/// All queues.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// By rank; zeros for the engine's own.
    pub peers: Vec<PeerQueueStats>,
    /// Jobs that the driver has not asked for yet.
    pub jobs: u64,
}
