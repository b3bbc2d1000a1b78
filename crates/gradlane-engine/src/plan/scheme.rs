//! Schemes: how one tensor is aggregated.

use serde::{Deserialize, Serialize};

/// Elements of a ring tensor's block: the ring's slices are parts of blocks, and where a sum
/// begins follows from the block alone. So the order of addition does not depend on the slice
/// size. A block of f32 is one frame.
pub const RING_CHUNK_ELEMS: u64 = 16_384;

/// The same where slices are encoded: large, so that headers weigh little beside a bit or two an element.
pub const RING_ENCODED_CHUNK_ELEMS: u64 = 65_536;

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
