//! Schemes: how one tensor is aggregated.

use serde::{Deserialize, Serialize};

/// How one tensor is aggregated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheme {
    /// Sharded parameter servers.
    #[default]
    Ps,
    /// Round a ring: each slice's sum grows from rank to rank, and its mean goes round once more.
    Ring,
    /// Not at all: every rank gets every rank's block, of at most as many elements as the tensor has.
    /// There is nothing to spread in step 0.
    #[serde(rename = "gather")]
    AllGather,
    /// By its owner: every rank's block goes there, and one block comes back to all. Nothing in step 0.
    #[serde(rename = "answer")]
    GatherToRoot,
}

impl Scheme {
    /// The name in plans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::Ps => "ps",
            Scheme::Ring => "ring",
            Scheme::AllGather => "gather",
            Scheme::GatherToRoot => "answer",
        }
    }

    /// Whether ranks give blocks of any size, not gradients that are added up.
    #[must_use]
    pub const fn has_blocks(self) -> bool {
        matches!(self, Scheme::AllGather | Scheme::GatherToRoot)
    }
}
