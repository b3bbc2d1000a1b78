//! Jobs: computations that the driver executes.
#![allow(missing_docs, reason = "fields with the name of their type")]

use crate::api::Region;
use alloc::vec::Vec;
use gradlane_units::{Priority, SliceId, Step, TensorId};

/// Names one job between `poll_job` and `handle_job_done`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// A computation that the driver executes on its threads (or charges time for).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// To be given back to `handle_job_done`.
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
    /// `output = encode(input)`, this rank's contribution; with error feedback, of `input` and the
    /// residual. To be reported with the length of the encoding.
    Encode {
        /// The gradient.
        input: R,
        /// Room for its encoding.
        output: R,
    },
    /// `output = encode((decode(inputs[0]) + …) / divisor)`; with error feedback, of the mean and the
    /// residual. To be reported with the length of the encoding.
    DecodeReduceEncode {
        /// Encoded contributions in rank order.
        inputs: Vec<R>,
        /// Whether a rank contributed nothing, which counts as zeros.
        absent: bool,
        /// Number of ranks that the mean is over.
        divisor: u32,
        /// Room for the encoded mean.
        output: R,
        /// Where the decoded `output` goes, in the same pass.
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
        /// On the last rank, where the decoded `output` goes, in the same pass.
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
