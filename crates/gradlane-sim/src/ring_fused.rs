//! The model of "Is network the bottleneck of distributed training?" (Zhang et al. 2020, section
//! 3.1): gradients are collected in a fusion buffer and reduced by rings, one buffer after another,
//! over a network that is always fully used.
//!
//! As in the authors' simulator, the fusion window is looked at only when a gradient arrives, and
//! that gradient goes along. Beside their flat ring over all workers there is a hierarchical one:
//! workers of a node share its port and add up over fast local links first.

use crate::error::SimError;
use crate::profile::{Act, Profile, Script};
use serde::{Deserialize, Serialize};

/// Which rings reduce a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Rings {
    /// One ring over all workers, each with a port of its own.
    Flat {
        /// Number of workers.
        workers: u32,
    },
    /// Reduce-scatter within each node, one ring over the nodes for each worker's share, gather
    /// within each node.
    Hierarchical {
        /// Number of nodes, each with one port.
        nodes: u32,
        /// Workers in a node.
        workers_per_node: u32,
        /// Rate between the workers of a node, bits a second.
        local_rate_bps: f64,
    },
}

/// All that the model depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RingScenario {
    /// The computation of one step.
    pub profile: Profile,
    /// The rings.
    pub rings: Rings,
    /// Rate of every port, all of it used, bits a second.
    pub rate_bps: f64,
    /// Times that the bytes of a gradient are over those that travel. Additions stay the same.
    #[serde(default = "one")]
    pub compression: f64,
    /// A buffer that holds as many bytes goes.
    #[serde(default = "default_fusion_bytes")]
    pub fusion_bytes: u64,
    /// A buffer goes with the first gradient that comes so long after the last buffer.
    #[serde(default = "default_fusion_timeout_s")]
    pub fusion_timeout_s: f64,
    /// Measured additions of two vectors: elements, seconds. Between them times are interpolated,
    /// outside of them the nearest one counts. None: additions take no time.
    #[serde(default)]
    pub additions: Vec<(f64, f64)>,
}

fn one() -> f64 {
    1.0
}
fn default_fusion_bytes() -> u64 {
    64 << 20
}
fn default_fusion_timeout_s() -> f64 {
    0.005
}

/// One buffer that was reduced.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fusion {
    /// When it was handed over, from the start of backward.
    pub ready_s: f64,
    /// When its reduction began.
    pub begin_s: f64,
    /// When its reduction ended.
    pub end_s: f64,
    /// Bytes before compression.
    pub bytes: u64,
}

/// The figures of the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RingReport {
    /// Time of computing, plus that of reduction beyond backward.
    pub step_s: f64,
    /// `compute_s / step_s`.
    pub scaling_factor: f64,
    /// Forward and backward alone.
    pub compute_s: f64,
    /// Time of reduction beyond backward.
    pub overhead_s: f64,
    /// The buffers.
    pub fusions: Vec<Fusion>,
}

/// Evaluates the model.
///
/// # Errors
/// [`SimError::Argument`] naming the field that makes no sense.
pub fn ring_fused(scenario: &RingScenario) -> Result<RingReport, SimError> {
    scenario.validate()?;
    let profile = &scenario.profile;
    let backward_s = profile.compute_s - profile.forward_s;
    let mut fusions: Vec<Fusion> = Vec::new();
    for (ready_s, bytes) in scenario.buffers() {
        let begin_s = fusions.last().map_or(ready_s, |last| last.end_s.max(ready_s));
        let end_s = begin_s + scenario.reduction_s(bytes as f64);
        fusions.push(Fusion { ready_s, begin_s, end_s, bytes });
    }
    let done_s = fusions.last().map_or(0.0, |last| last.end_s);
    let overhead_s = (done_s - backward_s).max(0.0);
    let compute_s = profile.compute_s;
    let step_s = compute_s + overhead_s;
    Ok(RingReport { step_s, scaling_factor: compute_s / step_s, compute_s, overhead_s, fusions })
}

impl RingScenario {
    /// When each buffer is handed over, from the start of backward, and its bytes.
    fn buffers(&self) -> Vec<(f64, u64)> {
        let profile = &self.profile;
        let mut buffers = Vec::new();
        let (mut opened_s, mut now_s, mut bytes) = (0.0, 0.0, 0);
        for (_, act) in Script::new(profile).acts {
            let Act::Ready(tensor) = act else {
                continue;
            };
            let tensor = &profile.tensors[tensor.index()];
            now_s = tensor.ready_s - profile.forward_s;
            bytes += tensor.numel * tensor.dtype.bytes();
            if now_s - opened_s >= self.fusion_timeout_s || bytes >= self.fusion_bytes {
                buffers.push((now_s, bytes));
                (opened_s, bytes) = (now_s, 0);
            }
        }
        if bytes > 0 {
            buffers.push((now_s, bytes));
        }
        buffers
    }

    /// Time to reduce a buffer.
    fn reduction_s(&self, bytes: f64) -> f64 {
        match self.rings {
            Rings::Flat { workers } => {
                self.exchange_s(bytes, workers, self.rate_bps) + self.additions_s(bytes, workers)
            }
            Rings::Hierarchical { nodes, workers_per_node, local_rate_bps } => {
                // The rings over the nodes, one for each worker of a node, share the node's port.
                let share = bytes / f64::from(workers_per_node);
                self.exchange_s(bytes, workers_per_node, local_rate_bps)
                    + self.additions_s(bytes, workers_per_node)
                    + self.exchange_s(bytes, nodes, self.rate_bps)
                    + self.additions_s(share, nodes)
            }
        }
    }

    /// Both halves of a ring: `2 S (N - 1) / N` bytes through every port.
    fn exchange_s(&self, bytes: f64, members: u32, rate_bps: f64) -> f64 {
        let members = f64::from(members);
        2.0 * bytes * 8.0 * (members - 1.0) / members / rate_bps / self.compression
    }

    /// `(N - 1) AddEst(S / N)`.
    fn additions_s(&self, bytes: f64, members: u32) -> f64 {
        let members = f64::from(members);
        (members - 1.0) * self.addition_s(bytes / members / ELEMENT_BYTES)
    }

    fn addition_s(&self, elements: f64) -> f64 {
        let points = &self.additions;
        let above = points.partition_point(|&(x, _)| x <= elements);
        match (above.checked_sub(1).map(|below| points[below]), points.get(above)) {
            (None, None) => 0.0,
            (None, Some(&(_, seconds))) | (Some((_, seconds)), None) => seconds,
            (Some((x0, y0)), Some(&(x1, y1))) => y0 + (y1 - y0) * (elements - x0) / (x1 - x0),
        }
    }

    fn validate(&self) -> Result<(), SimError> {
        let refuse = |text: String| Err(SimError::Argument(text));
        self.profile.validate()?;
        if !(1e3..=1e15).contains(&self.rate_bps) {
            return refuse(format!("rate_bps is {}: use 1e3 to 1e15", self.rate_bps));
        }
        if !(1e-3..=1e9).contains(&self.compression) {
            return refuse(format!("compression is {}: use 1e-3 to 1e9", self.compression));
        }
        if !(0.0..=1e6).contains(&self.fusion_timeout_s) {
            return refuse(format!("fusion_timeout_s is {}: use 0 to 1e6", self.fusion_timeout_s));
        }
        let sizes = match self.rings {
            Rings::Flat { workers } => [workers, 1],
            Rings::Hierarchical { nodes, workers_per_node, local_rate_bps } => {
                if !(1e3..=1e15).contains(&local_rate_bps) {
                    return refuse(format!(
                        "rings.local_rate_bps is {local_rate_bps}: use 1e3 to 1e15"
                    ));
                }
                [nodes, workers_per_node]
            }
        };
        if sizes.contains(&0) {
            return refuse("rings has no workers: use at least 1".into());
        }
        let ascends = self.additions.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let sane = |&(x, y): &(f64, f64)| x > 0.0 && y >= 0.0 && x.is_finite() && y.is_finite();
        if !ascends || !self.additions.iter().all(sane) {
            return refuse(
                "additions must be [elements, seconds] with elements ascending, none negative"
                    .into(),
            );
        }
        Ok(())
    }
}

/// Gradients are added up as f32.
const ELEMENT_BYTES: f64 = 4.0;
