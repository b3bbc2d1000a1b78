//! What a report has beside its figures.

use serde::{Deserialize, Serialize};

/// Contents of the report beside the figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Outputs {
    /// Whether frames, computations and waits are kept (see [`crate::Trace`]).
    pub trace: bool,
    /// Of this many ranks, the first; 0 keeps those of all.
    pub trace_ranks: u32,
    /// Largest number of them; the rest are counted.
    pub trace_spans_max: u64,
    /// Width of the intervals over which the ports' use is given; 0 leaves it out.
    pub utilization_interval_s: f64,
}

impl Default for Outputs {
    fn default() -> Outputs {
        Outputs {
            trace: false,
            trace_ranks: 0,
            trace_spans_max: 4_000_000,
            utilization_interval_s: 0.0,
        }
    }
}
