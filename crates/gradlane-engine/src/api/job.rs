//! Jobs: computations that the driver executes.
#![allow(missing_docs, reason = "fields with the name of their type")]

use crate::api::Region;
use alloc::vec::Vec;
use gradlane_units::{Priority, SliceId, SquareSum, Step, TensorId};

/// Names one job between `poll_job` and `Input::JobDone`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobId(pub u64);

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
