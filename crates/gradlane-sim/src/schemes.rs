//! Schemes of single tensors in scenarios: servers, round a ring, or as factors in blocks that every
//! rank gets of every other.
//!
//! The engine runs such blocks as scheme `gather`. What it does not do is to multiply them: that is
//! the accelerator's work, at the moment when forward needs the tensor, and takes as long as the
//! scenario says. Where one rank is the root (scheme `answer`), that rank multiplies them, one
//! tensor after another, on a thread beside the accelerator, as sessions do.

use crate::profile::{nanos, ProfiledTensor, Script};
use crate::scenario::Scenario;
use crate::tensor_scheme::TensorScheme;

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
