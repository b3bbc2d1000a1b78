//! The report of a simulation.

use serde::Serialize;

/// Figures of a run. Times are seconds of virtual time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Name of the strategy.
    pub strategy: String,
    /// Number of ranks that train.
    pub workers: u32,
    /// Number of ranks that only serve.
    #[serde(skip_serializing_if = "is_zero")]
    pub serving: u32,
    /// Of them on a node, which share its port.
    pub ranks_per_node: u32,
    /// Rate of every port.
    pub rate_bps: f64,
    /// Median step: from the end of one forward to the end of the next, mean over the ranks.
    pub step_s: f64,
    /// Every step.
    pub steps_s: Vec<f64>,
    /// Forward and backward alone.
    pub compute_s: f64,
    /// Making gradients of factors; not in `compute_s`.
    pub rebuild_s: f64,
    /// `compute_s / step_s`.
    pub scaling_factor: f64,
    /// A bound that no strategy of this scheme can beat: the largest of computing, and of the bytes
    /// that an evenly loaded port carries.
    pub port_bound_s: f64,
    /// Waiting of forward for each tensor a step, mean over ranks and steps.
    pub waits: Vec<TensorWait>,
    /// Bytes that left a port a step, headers included: mean and largest over the nodes.
    pub tx_bytes_per_step_mean: f64,
    /// The largest over the nodes.
    pub tx_bytes_per_step_max: f64,
    /// Share of the time of a port that it sent, mean over the nodes.
    pub tx_utilization: f64,
    /// Share of the time of the I/O thread that it worked, mean over the ranks that have one.
    pub io_utilization: f64,
    /// The same for the work thread.
    pub work_utilization: f64,
    /// Share of all ports' capacity used, an interval after the other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization: Option<Utilization>,
    /// Staleness of the pushes that were applied alone, over all ranks and slices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub staleness: Option<StalenessFigures>,
    /// Where ranks stop, or steps go on without late ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stragglers: Option<StragglerFigures>,
    /// Frames sent in all.
    pub frames: u64,
    /// Bytes sent in all, headers included; as many have arrived.
    pub bytes: u64,
    /// Events of the simulation.
    pub events: u64,
    /// Ranks that were simulated: fewer than `workers` where some stood for others.
    pub simulated_ranks: u32,
    /// Virtual time of the whole run.
    pub end_s: f64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde asks")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Updates between the parameters that gradients were computed from and those that they were applied to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StalenessFigures {
    /// Pushes of slices.
    pub pushes: u64,
    /// Mean, in updates.
    pub mean: f64,
    /// The largest.
    pub max: u64,
}

/// Figures of stops, and of the policy for stragglers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StragglerFigures {
    /// Mean step of the ranks that are never stopped, without the first steps.
    pub others_step_s_mean: f64,
    /// Steps that went on without each rank.
    pub left_out_steps: Vec<u64>,
    /// Those of them that it passed.
    pub passed_steps: Vec<u64>,
}

/// How long forward waited for a tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorWait {
    /// Its name.
    pub name: String,
    /// Seconds a step.
    pub wait_s: f64,
}

/// Use of the ports over time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Utilization {
    /// Width of an interval.
    pub interval_s: f64,
    /// Outgoing: used share of all ports' capacity.
    pub tx: Vec<f64>,
    /// Incoming.
    pub rx: Vec<f64>,
}

/// Bytes over intervals of time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Histogram {
    interval_ns: u64,
    busy_ns: Vec<f64>,
}

impl Histogram {
    pub(crate) fn new(interval_ns: u64) -> Histogram {
        Histogram { interval_ns, busy_ns: Vec::new() }
    }

    /// A port is busy from `begin` to `end`.
    pub(crate) fn add(&mut self, begin: u64, end: u64) {
        if self.interval_ns == 0 {
            return;
        }
        let mut from = begin;
        while from < end {
            let index = (from / self.interval_ns) as usize;
            let until = ((index as u64 + 1) * self.interval_ns).min(end);
            if self.busy_ns.len() <= index {
                self.busy_ns.resize(index + 1, 0.0);
            }
            self.busy_ns[index] += (until - from) as f64;
            from = until;
        }
    }

    /// Used shares of the capacity of `ports` ports.
    pub(crate) fn shares(&self, ports: f64) -> Vec<f64> {
        let capacity = self.interval_ns as f64 * ports;
        self.busy_ns.iter().map(|busy| busy / capacity).collect()
    }
}

/// The middle of a list; of an even number of values the mean of the middle two.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        count if count % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}
