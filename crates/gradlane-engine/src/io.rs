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
pub enum PayloadDest {
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

/// Names one job between `poll_job` and `handle_job_done`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// A computation that the driver executes on its threads (or charges time for).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// To be given back to `handle_job_done`.
    pub id: JobId,
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
pub enum Operation<R = Region> {
    /// `output = (inputs[0] + inputs[1] + …) / divisor`, inputs in rank order. `output` may be one
    /// of the inputs.
    Reduce {
        /// Contributions in rank order.
        inputs: Vec<R>,
        /// Whether a rank contributed nothing, which counts as zeros.
        absent: bool,
        /// Number of ranks that the mean is over.
        divisor: u32,
        /// Where the mean goes.
        output: R,
        /// Where else it goes, in the same pass.
        copy_to: Option<R>,
    },
    /// The same mean, then the optimizer: `output = updated parameters`.
    ReduceApply {
        /// Contributions in rank order.
        inputs: Vec<R>,
        /// Whether a rank contributed nothing, which counts as zeros.
        absent: bool,
        /// Number of ranks that the mean is over.
        divisor: u32,
        /// The parameters before the update. Not written.
        parameters: R,
        /// Where the parameters after the update go.
        output: R,
    },
    /// `output = encode(input)`, this rank's contribution; with error feedback of `input` and what
    /// was lost before. To be reported with the length of the encoding.
    Encode {
        /// The gradient.
        input: R,
        /// Room for its encoding.
        output: R,
    },
    /// `output = encode((decode(inputs[0]) + …) / divisor)`; with error feedback of the mean and what
    /// was lost before. To be reported with the length of the encoding.
    DecodeReduceEncode {
        /// Encoded contributions in rank order.
        inputs: Vec<R>,
        /// Whether a rank contributed nothing, which counts as zeros.
        absent: bool,
        /// Number of ranks that the mean is over.
        divisor: u32,
        /// Room for the encoded mean.
        output: R,
        /// Where what `output` decodes to goes, in the same pass.
        copy_to: Option<R>,
    },
    /// As [`Operation::ReduceApply`], of encoded contributions.
    DecodeReduceApply {
        /// Encoded contributions in rank order.
        inputs: Vec<R>,
        /// Whether a rank contributed nothing, which counts as zeros.
        absent: bool,
        /// Number of ranks that the mean is over.
        divisor: u32,
        /// The parameters before the update. Not written.
        parameters: R,
        /// Where the parameters after the update go.
        output: R,
    },
    /// One hop of an encoded sum: `output = encode((decode(received) + own) / divisor)`; with error
    /// feedback. To be reported with the length of the encoding.
    RingEncode {
        /// The encoded sum of the ranks before; none where none of them had a gradient.
        received: Option<R>,
        /// This rank's gradient, if it has one.
        own: Option<R>,
        /// Number of ranks that the mean is over, on the last one; else 1.
        divisor: u32,
        /// Room for the encoding.
        output: R,
        /// On the last rank, where what `output` decodes to goes, in the same pass.
        copy_to: Option<R>,
    },
    /// `output = the larger of received and the scales of own`, a number for each bucket.
    RingMaxScales {
        /// Scales of the ranks before; none where none of them had a gradient.
        received: Option<R>,
        /// This rank's gradient.
        own: R,
        /// The scales. May be `received`.
        output: R,
    },
    /// `output = codes of own`, to the larger of `scales` and its own: a sum that begins.
    RingBeginCodes {
        /// Scales of all other ranks; none where none of them had a gradient.
        scales: Option<R>,
        /// This rank's gradient, if it has one: scales or gradient are there.
        own: Option<R>,
        /// Room for scales and sums.
        output: R,
    },
    /// `sums = sums + codes of own`, as integers.
    RingAddCodes {
        /// Scales and sums, which are read and written.
        sums: R,
        /// This rank's gradient, if it has one; none counts as zeros.
        own: Option<R>,
        /// On the last rank, where the mean that `sums` then stands for goes, in the same pass.
        copy_to: Option<R>,
    },
    /// `to = decode(from)`.
    Decode {
        /// An encoded slice.
        from: R,
        /// Where its values go.
        to: R,
    },
    /// `to = from`.
    Copy {
        /// Source.
        from: R,
        /// Destination.
        to: R,
    },
}

impl<R> Operation<R> {
    /// The same operation on other memory: regions become addresses.
    ///
    /// # Errors
    /// The first that `locate` returns.
    pub fn try_map<S, E>(
        &self,
        mut locate: impl FnMut(&R) -> Result<S, E>,
    ) -> Result<Operation<S>, E> {
        let locate = &mut locate;
        Ok(match self {
            Operation::Reduce { inputs, absent, divisor, output, copy_to } => Operation::Reduce {
                inputs: inputs.iter().map(&mut *locate).collect::<Result<_, E>>()?,
                absent: *absent,
                divisor: *divisor,
                output: locate(output)?,
                copy_to: copy_to.as_ref().map(&mut *locate).transpose()?,
            },
            Operation::ReduceApply { inputs, absent, divisor, parameters, output } => {
                Operation::ReduceApply {
                    inputs: inputs.iter().map(&mut *locate).collect::<Result<_, E>>()?,
                    absent: *absent,
                    divisor: *divisor,
                    parameters: locate(parameters)?,
                    output: locate(output)?,
                }
            }
            Operation::Encode { input, output } => {
                Operation::Encode { input: locate(input)?, output: locate(output)? }
            }
            Operation::DecodeReduceEncode { inputs, absent, divisor, output, copy_to } => {
                Operation::DecodeReduceEncode {
                    inputs: inputs.iter().map(&mut *locate).collect::<Result<_, E>>()?,
                    absent: *absent,
                    divisor: *divisor,
                    output: locate(output)?,
                    copy_to: copy_to.as_ref().map(&mut *locate).transpose()?,
                }
            }
            Operation::DecodeReduceApply { inputs, absent, divisor, parameters, output } => {
                Operation::DecodeReduceApply {
                    inputs: inputs.iter().map(&mut *locate).collect::<Result<_, E>>()?,
                    absent: *absent,
                    divisor: *divisor,
                    parameters: locate(parameters)?,
                    output: locate(output)?,
                }
            }
            Operation::RingEncode { received, own, divisor, output, copy_to } => {
                Operation::RingEncode {
                    received: received.as_ref().map(&mut *locate).transpose()?,
                    own: own.as_ref().map(&mut *locate).transpose()?,
                    divisor: *divisor,
                    output: locate(output)?,
                    copy_to: copy_to.as_ref().map(&mut *locate).transpose()?,
                }
            }
            Operation::RingMaxScales { received, own, output } => Operation::RingMaxScales {
                received: received.as_ref().map(&mut *locate).transpose()?,
                own: locate(own)?,
                output: locate(output)?,
            },
            Operation::RingBeginCodes { scales, own, output } => Operation::RingBeginCodes {
                scales: scales.as_ref().map(&mut *locate).transpose()?,
                own: own.as_ref().map(&mut *locate).transpose()?,
                output: locate(output)?,
            },
            Operation::RingAddCodes { sums, own, copy_to } => Operation::RingAddCodes {
                sums: locate(sums)?,
                own: own.as_ref().map(&mut *locate).transpose()?,
                copy_to: copy_to.as_ref().map(&mut *locate).transpose()?,
            },
            Operation::Decode { from, to } => {
                Operation::Decode { from: locate(from)?, to: locate(to)? }
            }
            Operation::Copy { from, to } => {
                Operation::Copy { from: locate(from)?, to: locate(to)? }
            }
        })
    }
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
    /// ([`Engine::root_result_ready`]) and keeps the blocks until [`Engine::release_blocks`] is called.
    ///
    /// [`Engine::root_result_ready`]: crate::Engine::root_result_ready
    /// [`Engine::release_blocks`]: crate::Engine::release_blocks
    RootRequest {
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
    /// This rank, the owner, has applied one rank's push alone (synchrony `Async`).
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
    /// The contributors of a step are known (synchrony `BackupWorkers`).
    ContributorsDecided {
        /// The step.
        step: Step,
        /// In rank order.
        contributors: Vec<Rank>,
    },
    /// This rank has handed over all its gradients of a step, or passes it, and the step goes on without
    /// them (synchrony `BackupWorkers`).
    LeftOut {
        /// The step.
        step: Step,
        /// Whether that was so much later than the decision that the next step would go on without
        /// this rank, too: by more than a tenth of a step, or, in the first steps, when the whole
        /// result was here.
        behind: bool,
    },
    /// A rank had all its gradients of a step after it was decided without that rank (synchrony
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
