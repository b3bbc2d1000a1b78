//! A trace, in lanes: the exact order of all transmissions, computations and waits.
//!
//! Its size is bounded: spans of ranks that were not requested are not kept, and those beyond the
//! limit are counted.

use crate::outputs::Outputs;
use crate::profile::Profile;
use gradlane_engine::Operation;
use gradlane_units::{Priority, SliceId, Step, TensorId};
use gradlane_wire::FrameKind;
use serde::Serialize;
use serde_json::{json, Value};

/// A row of the timeline of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lane {
    /// Forward computes.
    Forward,
    /// Backward computes.
    Backward,
    /// Forward waits for a tensor.
    Wait,
    /// Gradients leave, or sums of them.
    Push,
    /// Results leave.
    Broadcast,
    /// Notices and pulls leave.
    Control,
    /// Something arrives.
    Receive,
    /// A contribution is encoded.
    Encode,
    /// Contributions are reduced; encoded ones decoded before, and encoded once more after it.
    Reduce,
    /// A result is decoded.
    Decode,
    /// The accelerator makes a gradient of the factors of all ranks.
    Rebuild,
}

impl Lane {
    /// All lanes, top to bottom.
    pub const ALL: [Lane; 11] = [
        Lane::Forward,
        Lane::Backward,
        Lane::Wait,
        Lane::Push,
        Lane::Broadcast,
        Lane::Control,
        Lane::Receive,
        Lane::Encode,
        Lane::Reduce,
        Lane::Decode,
        Lane::Rebuild,
    ];

    /// The lane in which a frame leaves.
    #[must_use]
    pub const fn of(kind: FrameKind) -> Lane {
        match kind {
            FrameKind::Push | FrameKind::RingReduce | FrameKind::RingScale | FrameKind::Block => {
                Lane::Push
            }
            FrameKind::Broadcast | FrameKind::RingBroadcast => Lane::Broadcast,
            _ => Lane::Control,
        }
    }

    /// The lane of a job.
    pub(crate) const fn of_job(operation: &Operation) -> Lane {
        match operation {
            // The first rank of a ring has nothing to decode and to add to.
            Operation::Encode { .. }
            | Operation::RingEncode { received: None, .. }
            | Operation::RingMaxScales { .. }
            | Operation::RingBeginCodes { .. } => Lane::Encode,
            Operation::Decode { .. } => Lane::Decode,
            _ => Lane::Reduce,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Lane::Forward => "forward",
            Lane::Backward => "backward",
            Lane::Wait => "wait",
            Lane::Push => "push",
            Lane::Broadcast => "broadcast",
            Lane::Control => "control",
            Lane::Receive => "receive",
            Lane::Encode => "encode",
            Lane::Reduce => "reduce",
            Lane::Decode => "decode",
            Lane::Rebuild => "rebuild",
        }
    }
}

/// The subject of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The whole step.
    Step,
    /// A tensor.
    Tensor(TensorId),
    /// A slice in a frame, or in a piece of one, or in a job.
    Slice {
        /// The kind of the frame; none for a job.
        kind: Option<FrameKind>,
        /// The profile's tensor that it is of.
        tensor: TensorId,
        /// The slice, in the plan of the rank's channel.
        slice: SliceId,
        /// The other rank, or this one.
        peer: u32,
        /// Bytes, headers included.
        bytes: u32,
        /// Its urgency; 0 for a job.
        priority: Priority,
    },
}

/// Something that took time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// On which rank.
    pub rank: u32,
    /// In which lane.
    pub lane: Lane,
    /// In which step.
    pub step: Step,
    /// The subject.
    pub subject: Subject,
    /// Begin, in nanoseconds.
    pub begin_ns: u64,
    /// End, in nanoseconds.
    pub end_ns: u64,
}

/// The spans of a run, in the order in which they were known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The spans that were kept.
    pub spans: Vec<Span>,
    /// Spans beyond the limit.
    pub dropped: u64,
    ranks: u32,
    spans_max: u64,
}

impl Trace {
    /// A trace that keeps the requested ranks and steps.
    pub(crate) fn new(outputs: &Outputs) -> Trace {
        let ranks = if outputs.trace_ranks == 0 { u32::MAX } else { outputs.trace_ranks };
        Trace { spans: Vec::new(), dropped: 0, ranks, spans_max: outputs.trace_spans_max }
    }

    /// Keeps a span, if it is asked for and there is room.
    pub(crate) fn note(&mut self, span: Span) {
        if span.rank >= self.ranks {
            return;
        }
        if self.spans.len() as u64 >= self.spans_max {
            self.dropped += 1;
        } else {
            self.spans.push(span);
        }
    }

    /// The trace as numbers: `spans` holds a row for each, in the order of `columns`; lanes and
    /// tensors are numbers of `lanes` and `tensors`, and what a span does not have is null.
    #[must_use]
    pub fn to_json(&self, profile: &Profile) -> Value {
        let lanes: Vec<&str> = Lane::ALL.into_iter().map(Lane::name).collect();
        let tensors: Vec<&str> = profile.tensors.iter().map(|it| it.name.as_str()).collect();
        let spans: Vec<Value> = self.spans.iter().map(row).collect();
        json!({"columns": COLUMNS, "lanes": lanes, "tensors": tensors, "spans": spans,
            "dropped": self.dropped})
    }
}

const COLUMNS: [&str; 11] = [
    "rank", "lane", "begin_ns", "end_ns", "step", "tensor", "slice", "kind", "peer", "bytes",
    "priority",
];

fn row(span: &Span) -> Value {
    let lane = Lane::ALL.iter().position(|&lane| lane == span.lane).unwrap_or_default();
    let Span { rank, begin_ns, end_ns, step: Step(step), subject, .. } = span;
    match *subject {
        Subject::Step => {
            json!([rank, lane, begin_ns, end_ns, step, null, null, null, null, null, null])
        }
        Subject::Tensor(TensorId(tensor)) => {
            json!([rank, lane, begin_ns, end_ns, step, tensor, null, null, null, null, null])
        }
        Subject::Slice { kind, tensor, slice, peer, bytes, priority } => {
            let kind = kind.map(FrameKind::name);
            json!([
                rank, lane, begin_ns, end_ns, step, tensor.0, slice.0, kind, peer, bytes,
                priority.0
            ])
        }
    }
}
