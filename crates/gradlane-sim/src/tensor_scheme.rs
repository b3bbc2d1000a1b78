//! The scheme of a single tensor, as a scenario gives it.

use crate::error::SimError;
use crate::profile::SECONDS_MAX;
use gradlane_engine::{Scheme, TensorSetting};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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

/// Tensors as plans are built of, under the scenario's schemes.
///
/// # Errors
/// [`SimError::Argument`] for names of no tensor, and for blocks that make no sense.
pub(crate) fn settings(
    mut tensors: Vec<TensorSetting>,
    schemes: &BTreeMap<String, TensorScheme>,
) -> Result<Vec<TensorSetting>, SimError> {
    let refuse = |text: String| Err(SimError::Argument(format!("schemes{text}")));
    for (name, scheme) in schemes {
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
