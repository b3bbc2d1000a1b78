//! What happened when, in lanes: for people (Chrome's and Perfetto's format) and for tests.

use gradlane_engine::Plan;
use gradlane_units::{SliceId, Step, TensorId};
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
    /// Gradients leave.
    Push,
    /// Results leave.
    Broadcast,
    /// Notices and pulls leave.
    Control,
    /// Something arrives.
    Receive,
    /// Contributions are reduced.
    Reduce,
}

impl Lane {
    /// All lanes, top to bottom.
    pub const ALL: [Lane; 8] = [
        Lane::Forward,
        Lane::Backward,
        Lane::Wait,
        Lane::Push,
        Lane::Broadcast,
        Lane::Control,
        Lane::Receive,
        Lane::Reduce,
    ];

    /// The lane in which a frame leaves.
    #[must_use]
    pub const fn of(kind: FrameKind) -> Lane {
        match kind {
            FrameKind::Push => Lane::Push,
            FrameKind::Broadcast => Lane::Broadcast,
            _ => Lane::Control,
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
            Lane::Reduce => "reduce",
        }
    }
}

/// What a span is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The whole step.
    Step,
    /// A tensor.
    Tensor(TensorId),
    /// A slice in a frame, or in a piece of one: kind, slice, other rank, bytes.
    Slice {
        /// What the frame is for; none for work.
        kind: Option<FrameKind>,
        /// The slice.
        slice: SliceId,
        /// The other rank, or this one.
        peer: u32,
        /// Bytes, headers included.
        bytes: u32,
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
    /// About what.
    pub subject: Subject,
    /// Begin, in nanoseconds.
    pub begin_ns: u64,
    /// End, in nanoseconds.
    pub end_ns: u64,
}

/// All spans of a run, in the order in which they were known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The spans.
    pub spans: Vec<Span>,
}

impl Trace {
    /// The trace in the format of Chrome's and Perfetto's viewers; a rank is a process, a lane a
    /// thread.
    #[must_use]
    pub fn to_chrome(&self, plan: &Plan) -> Value {
        let mut events = Vec::with_capacity(self.spans.len() + 64);
        let mut ranks: Vec<u32> = self.spans.iter().map(|span| span.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        for rank in ranks {
            events.push(json!({"name": "process_name", "ph": "M", "pid": rank, "tid": 0,
                "args": {"name": format!("rank {rank}")}}));
            for (row, lane) in Lane::ALL.into_iter().enumerate() {
                events.push(json!({"name": "thread_name", "ph": "M", "pid": rank, "tid": row,
                    "args": {"name": lane.name()}}));
            }
        }
        events.extend(self.spans.iter().map(|span| chrome_event(span, plan)));
        json!({"traceEvents": events, "displayTimeUnit": "ms"})
    }
}

fn chrome_event(span: &Span, plan: &Plan) -> Value {
    let tensor_name = |tensor: TensorId| plan.tensor(tensor).spec.name.clone();
    let (name, arguments) = match span.subject {
        Subject::Step => (format!("step {}", span.step.0), json!({"step": span.step.0})),
        Subject::Tensor(tensor) => (tensor_name(tensor), json!({"step": span.step.0})),
        Subject::Slice { kind, slice, peer, bytes } => {
            let arguments = json!({"step": span.step.0, "slice": slice.0, "peer": peer,
                "bytes": bytes, "kind": kind.map(|kind| format!("{kind:?}").to_lowercase())});
            (tensor_name(plan.slice(slice).tensor), arguments)
        }
    };
    let row = Lane::ALL.iter().position(|&lane| lane == span.lane).unwrap_or_default();
    let micros = |nanos: u64| nanos as f64 / 1e3;
    json!({"name": name, "cat": span.lane.name(), "ph": "X", "pid": span.rank, "tid": row,
        "ts": micros(span.begin_ns), "dur": micros(span.end_ns - span.begin_ns),
        "args": arguments})
}
