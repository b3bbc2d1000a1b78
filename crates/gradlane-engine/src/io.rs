//! What the engine asks of its driver, and what it tells it: descriptors, never bytes.

use crate::error::Failure;
use alloc::vec::Vec;
use core::time::Duration;
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use gradlane_wire::FrameHeader;

/// A scratch buffer. The driver allocates it when it first meets it and frees it on
/// [`Event::BufferFree`]; numbers are reused after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BufferRef {
    /// Number, small and dense.
    pub id: u32,
    /// Size. Of an encoded slice: what is used of it, once that is known.
    pub bytes: u64,
}

impl BufferRef {
    /// All of its bytes.
    pub(crate) fn whole(self) -> Region {
        Region { memory: Memory::Buffer(self), offset: 0, length: self.bytes }
    }
}

/// Memory that the driver knows the address of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Memory {
    /// What `gradient_ready` or `tensor_absent` registered for the tensor in this step.
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

/// Where the payload of an announced frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landing {
    /// Straight into this memory.
    Region(Region),
    /// Into a buffer of the driver's own, to be given to `handle_control`.
    Control,
    /// There is no payload: call `handle_frame` at once.
    Nothing,
}

/// What goes out after the header.
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
    /// The header.
    pub header: FrameHeader,
    /// The payload.
    pub payload: Payload,
}

/// Names one piece of work between `poll_work` and `handle_work_done`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WorkId(pub u64);

/// A computation that the driver executes on its threads (or charges time for).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// To be given back to `handle_work_done`.
    pub id: WorkId,
    /// The slice.
    pub slice: SliceId,
    /// The tensor that the slice is part of.
    pub tensor: TensorId,
    /// The step.
    pub step: Step,
    /// Urgency.
    pub priority: Priority,
    /// What to do.
    pub operation: Operation,
}

/// What is computed. All regions of one operation are equally long, but for encoded ones: these are as
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
    /// `output = encode(input)`, this rank's contribution; with error feedback of `input` and what
    /// was lost before. To be reported with the length of the encoding.
    Encode {
        /// The gradient.
        input: Region,
        /// Room for its encoding.
        output: Region,
    },
    /// `output = encode((decode(inputs[0]) + …) / divisor)`; with error feedback of the mean and what
    /// was lost before. To be reported with the length of the encoding.
    Recode {
        /// Encoded contributions in rank order.
        inputs: Vec<Region>,
        /// Whether a rank contributed nothing, which counts as zeros.
        absent: bool,
        /// Number of ranks that the mean is over.
        divisor: u32,
        /// Room for the encoded mean.
        output: Region,
        /// Where what `output` decodes to goes, in the same pass.
        copy_to: Option<Region>,
    },
    /// As [`Operation::ReduceApply`], of encoded contributions.
    DecodeApply {
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
        /// On the last rank, where what `output` decodes to goes, in the same pass.
        copy_to: Option<Region>,
    },
    /// `output = the larger of received and the scales of own`, a number for each bucket.
    RingScale {
        /// Scales of the ranks before; none where none of them had a gradient.
        received: Option<Region>,
        /// This rank's gradient.
        own: Region,
        /// The scales. May be `received`.
        output: Region,
    },
    /// `output = codes of own`, to the larger of `scales` and its own: a sum that begins.
    RingBegin {
        /// Scales of all other ranks; none where none of them had a gradient.
        scales: Option<Region>,
        /// This rank's gradient, if it has one: scales or gradient are there.
        own: Option<Region>,
        /// Room for scales and sums.
        output: Region,
    },
    /// `sums = sums + codes of own`, as integers.
    RingAdd {
        /// Scales and sums, which are read and written.
        sums: Region,
        /// This rank's gradient, if it has one; none counts as zeros.
        own: Option<Region>,
        /// On the last rank, where the mean that `sums` then stands for goes, in the same pass.
        copy_to: Option<Region>,
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

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A tensor holds the result of a step: the mean, or the updated parameters. When `absent`, no
    /// rank had a gradient and the memory was not written.
    TensorReady {
        /// The tensor.
        tensor: TensorId,
        /// The step.
        step: Step,
        /// Whether no rank had a gradient.
        absent: bool,
    },
    /// All ranks' blocks of a tensor are here, or the one that its owner answered with (not on the
    /// owner itself), until [`Engine::release_blocks`] is called; the tensor is ready.
    ///
    /// [`Engine::release_blocks`]: crate::Engine::release_blocks
    BlocksReady {
        /// The tensor.
        tensor: TensorId,
        /// The step.
        step: Step,
        /// By rank; none where a rank had none. That of this rank is where it was given.
        blocks: Vec<Option<Region>>,
    },
    /// All ranks' blocks of a tensor are here, whose owner this rank is: it owes an answer
    /// ([`Engine::answer_ready`]) and keeps the blocks until [`Engine::release_blocks`] is called.
    ///
    /// [`Engine::answer_ready`]: crate::Engine::answer_ready
    /// [`Engine::release_blocks`]: crate::Engine::release_blocks
    BlocksCollected {
        /// The tensor.
        tensor: TensorId,
        /// The step.
        step: Step,
        /// By rank, as in [`Event::BlocksReady`]; at least one rank had one.
        blocks: Vec<Option<Region>>,
    },
    /// All tensors of the step are ready on this rank.
    StepComplete {
        /// The step.
        step: Step,
    },
    /// This rank, the owner, has applied one rank's push alone (ready rule `Each`).
    Applied {
        /// The slice.
        slice: SliceId,
        /// Who pushed.
        rank: Rank,
        /// In which step of that rank.
        step: Step,
        /// Updates that the slice has had, this one included.
        version: u64,
        /// Updates of the slice since the version that the rank had received.
        staleness: u64,
    },
    /// The contributors of a step are known (ready rule `Set`).
    Decided {
        /// The step.
        step: Step,
        /// In rank order.
        contributors: Vec<Rank>,
    },
    /// This rank has handed over all its gradients of a step, or passes it, and the step goes on without
    /// them (ready rule `Set`).
    LeftOut {
        /// The step.
        step: Step,
        /// Whether that was so much later than the decision that the next step would go on without
        /// this rank, too: by more than a tenth of a step, or, in the first steps, when the whole
        /// result was here.
        behind: bool,
    },
    /// A rank had all its gradients of a step after it was decided without that rank (ready rule
    /// `Set`; on rank 0).
    Late {
        /// The rank.
        rank: Rank,
        /// The step.
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
    /// The driver may free or reuse this buffer.
    BufferFree(BufferRef),
    /// Everything was sent, every peer has said goodbye: connections may be closed.
    Closed,
    /// The session is over. Nothing more comes out of the engine.
    Failed(Failure),
}
