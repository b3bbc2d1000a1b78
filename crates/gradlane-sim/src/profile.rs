//! A profile: the computation of one step, and when each gradient appears and each parameter is read.
//!
//! Times are seconds from the start of the step's forward. A [`Script`] is the same in integers,
//! in the order in which an accelerator goes through it.

use crate::error::SimError;
use gradlane_engine::{TensorKind, TensorSpec};
use gradlane_units::{Dtype, TensorId};
use serde::{Deserialize, Serialize};

/// One tensor of a profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfiledTensor {
    /// Name, as in `named_parameters()`.
    pub name: String,
    /// Number of elements.
    pub numel: u64,
    /// Type of the elements.
    #[serde(default = "f32_elements")]
    pub dtype: Dtype,
    /// When forward first reads the parameter, in seconds.
    pub need_s: f64,
    /// When backward has the gradient, in seconds.
    pub ready_s: f64,
}

fn f32_elements() -> Dtype {
    Dtype::F32
}

/// The computation of one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Tensors in `named_parameters()` order.
    pub tensors: Vec<ProfiledTensor>,
    /// Duration of forward, in seconds.
    pub forward_s: f64,
    /// Duration of forward and backward together, in seconds.
    pub compute_s: f64,
}

impl Profile {
    /// Checks every field.
    ///
    /// # Errors
    /// [`SimError::Argument`] naming the field, the tensor and what is allowed.
    pub fn validate(&self) -> Result<(), SimError> {
        let refuse = |text: String| Err(SimError::Argument(text));
        if self.tensors.is_empty() {
            return refuse("profile.tensors is empty: a step needs at least one tensor".into());
        }
        if self.tensors.len() > TENSORS_MAX {
            return refuse(format!(
                "profile.tensors has {} entries; at most {TENSORS_MAX} are supported",
                self.tensors.len()
            ));
        }
        let in_order = self.forward_s >= 0.0 && self.forward_s <= self.compute_s;
        if !in_order || self.compute_s > SECONDS_MAX {
            return refuse(format!(
                "profile.forward_s is {} and profile.compute_s is {}: use 0 <= forward_s <= \
                 compute_s <= {SECONDS_MAX}",
                self.forward_s, self.compute_s
            ));
        }
        for (index, tensor) in self.tensors.iter().enumerate() {
            let place = format!("profile.tensors[{index}] ({:?})", tensor.name);
            if !(tensor.need_s >= 0.0 && tensor.need_s <= self.forward_s) {
                return refuse(format!(
                    "{place}: need_s is {}, outside of forward (0 to {} s)",
                    tensor.need_s, self.forward_s
                ));
            }
            if !(tensor.ready_s >= self.forward_s && tensor.ready_s <= self.compute_s) {
                return refuse(format!(
                    "{place}: ready_s is {}, outside of backward ({} to {} s)",
                    tensor.ready_s, self.forward_s, self.compute_s
                ));
            }
        }
        Ok(())
    }

    /// The tensors as a plan wants them.
    #[must_use]
    pub fn specs(&self) -> Vec<TensorSpec> {
        let spec = |tensor: &ProfiledTensor| TensorSpec {
            name: tensor.name.clone(),
            numel: tensor.numel,
            dtype: tensor.dtype,
            kind: TensorKind::Parameter,
        };
        self.tensors.iter().map(spec).collect()
    }

    /// Bytes of all gradients.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|it| it.numel * it.dtype.bytes()).sum()
    }

    /// Position of each tensor in the order of need, as a priority vector has it: the first is 0.
    #[must_use]
    pub fn forward_positions(&self) -> Vec<u32> {
        let mut order: Vec<usize> = (0..self.tensors.len()).collect();
        order.sort_by(|&a, &b| {
            let need = |index: usize| self.tensors[index].need_s;
            need(a).total_cmp(&need(b)).then(a.cmp(&b))
        });
        let mut positions = vec![0; self.tensors.len()];
        for (position, index) in order.into_iter().enumerate() {
            positions[index] = position as u32;
        }
        positions
    }
}

/// Most tensors in a profile.
pub const TENSORS_MAX: usize = 1_000_000;
/// Longest step.
pub(crate) const SECONDS_MAX: f64 = 1e6;

/// One thing that an accelerator does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Act {
    /// Forward reads a parameter.
    Need(TensorId),
    /// Forward is over.
    ForwardEnd,
    /// Backward has a gradient.
    Ready(TensorId),
    /// Backward is over.
    StepEnd,
}

/// Acts with their times from the start of the step, in nanoseconds and in order.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    pub(crate) acts: Vec<(u64, Act)>,
    /// Time for making a tensor's gradient of what arrived, before it can be used.
    pub(crate) rebuild_ns: Vec<u64>,
}

impl Script {
    pub(crate) fn new(profile: &Profile) -> Script {
        let mut acts = Vec::with_capacity(2 * profile.tensors.len() + 2);
        for (index, tensor) in profile.tensors.iter().enumerate() {
            let id = TensorId(index as u32);
            acts.push((nanos(tensor.need_s), Act::Need(id)));
            acts.push((nanos(tensor.ready_s), Act::Ready(id)));
        }
        acts.push((nanos(profile.forward_s), Act::ForwardEnd));
        acts.push((nanos(profile.compute_s), Act::StepEnd));
        // Of the gradients of one layer, the last tensor's comes first, as in backward.
        acts.sort_by_key(|&(time, act)| match act {
            Act::Need(tensor) => (time, 0, tensor.0),
            Act::ForwardEnd => (time, 1, 0),
            Act::Ready(tensor) => (time, 2, u32::MAX - tensor.0),
            Act::StepEnd => (time, 3, 0),
        });
        Script { acts, rebuild_ns: vec![0; profile.tensors.len()] }
    }
}

/// Seconds as whole nanoseconds.
pub(crate) fn nanos(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}
