//! Ranks that share nodes, as a scenario gives them.

use serde::{Deserialize, Serialize};

/// Ranks that share nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nodes {
    /// Ranks on every node, numbered one after the other; they share its port.
    pub ranks: u32,
    /// The tensors that each of a node's first ranks carries after the node's ranks have added up: (number of a
    /// tensor, elements of it), ascending. None: they do not add up, each talks to all others.
    #[serde(default)]
    pub carried: Vec<Vec<(u32, u64)>>,
    /// Rate between the ranks of a node, bits a second: of a collective that adds up on its way.
    /// None: shared memory, at the costs of the host.
    #[serde(default)]
    pub rate_bps: Option<f64>,
}
