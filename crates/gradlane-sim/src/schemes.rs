//! Schemes of single tensors in scenarios: servers, round a ring, or as factors in blocks that every
//! rank gets of every other.
//!
//! The engine runs such blocks as scheme `gather`. What it does not do is to multiply them: that is
//! the accelerator's work, at the moment when forward needs the tensor, and takes as long as the
//! scenario says. Where one rank is the root (scheme `answer`), that rank multiplies them, one
//! tensor after another, on a thread beside the accelerator, as sessions do.

use crate::error::SimError;
use crate::profile::{nanos, ProfiledTensor, Script, SECONDS_MAX};
use crate::scenario::Scenario;
use gradlane_engine::{Scheme, TensorSetting};
use serde::{Deserialize, Serialize};

/// How one tensor is aggregated.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", tag = "scheme")]
pub enum TensorScheme {
    /// Servers.
    Ps,
    /// Round a ring.
    Ring,
    /// Factors to every other rank.
    Sfb {
        /// Bytes of the factors of one rank and step.
        block_bytes: u64,
        /// Time that the accelerator takes to make the sum of the factors of the other ranks.
        rebuild_s: f64,
    },
    /// Factors to the tensor's owner, and the whole gradient back (Project Adam).
    Adam {
        /// Bytes of the factors of one rank and step.
        block_bytes: u64,
        /// Time that the owner takes to make the sum of all factors.
        rebuild_s: f64,
    },
}

/// A tensor whose owner makes the result from the blocks of all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RootTensor {
    /// Bytes of one rank's block.
    pub(crate) block_bytes: u64,
    /// Bytes of the result.
    pub(crate) result_bytes: u64,
    /// Time that the owner takes.
    pub(crate) rebuild_ns: u64,
}

/// Tensors as plans are built of, under the scenario's schemes.
///
/// # Errors
/// [`SimError::Argument`] for names of no tensor, and for blocks that make no sense.
pub(crate) fn settings(
    mut tensors: Vec<TensorSetting>,
    scenario: &Scenario,
) -> Result<Vec<TensorSetting>, SimError> {
    let refuse = |text: String| Err(SimError::Argument(format!("schemes{text}")));
    for (name, scheme) in &scenario.schemes {
        let Some(tensor) = tensors.iter_mut().find(|it| it.spec.name == *name) else {
            return refuse(format!(": the profile has no tensor {name:?}"));
        };
        tensor.scheme = Some(match *scheme {
            TensorScheme::Ps => Scheme::Ps,
            TensorScheme::Ring => Scheme::Ring,
            TensorScheme::Sfb { block_bytes, rebuild_s }
            | TensorScheme::Adam { block_bytes, rebuild_s } => {
                if !(1..=u64::from(u32::MAX)).contains(&block_bytes) {
                    return refuse(format!(
                        "[{name:?}].block_bytes is {block_bytes}: use 1 to {}",
                        u32::MAX
                    ));
                }
                if !(0.0..=SECONDS_MAX).contains(&rebuild_s) {
                    return refuse(format!(
                        "[{name:?}].rebuild_s is {rebuild_s}: use 0 to {SECONDS_MAX} s"
                    ));
                }
                let elements = block_bytes.div_ceil(tensor.spec.dtype.bytes());
                if matches!(scheme, TensorScheme::Adam { .. }) {
                    // Blocks and results are below the same bound.
                    tensor.spec.numel = tensor.spec.numel.max(elements);
                    Scheme::GatherToRoot
                } else {
                    tensor.spec.numel = elements;
                    Scheme::AllGather
                }
            }
        });
    }
    Ok(tensors)
}

/// The tensors of a scenario that have a root, by number; none of the others.
pub(crate) fn root_tensors(scenario: &Scenario) -> Vec<Option<RootTensor>> {
    let of = |tensor: &ProfiledTensor| match scenario.schemes.get(&tensor.name) {
        Some(&TensorScheme::Adam { block_bytes, rebuild_s }) => {
            let element = tensor.dtype.bytes();
            Some(RootTensor {
                block_bytes: block_bytes.next_multiple_of(element),
                result_bytes: tensor.numel * element,
                rebuild_ns: nanos(rebuild_s),
            })
        }
        _ => None,
    };
    scenario.profile.tensors.iter().map(of).collect()
}

impl Script {
    /// The script under a scenario's schemes: what comes as factors is rebuilt before it is used.
    pub(crate) fn under_schemes(mut self, scenario: &Scenario) -> Script {
        for (tensor, rebuild_ns) in scenario.profile.tensors.iter().zip(&mut self.rebuild_ns) {
            if let Some(TensorScheme::Sfb { rebuild_s, .. }) = scenario.schemes.get(&tensor.name) {
                *rebuild_ns = nanos(*rebuild_s);
            }
        }
        self
    }
}
