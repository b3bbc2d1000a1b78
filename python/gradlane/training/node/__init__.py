"""Hierarchical averaging: the ranks of a node add up before anything goes to the network.

`layout` finds the ranks that share a node, `parts` assigns ranges of tensors to node leaders,
`link` connects the ranks of a node, and `channel` joins them with the channel between nodes. Sums
are taken in shared memory (`sums`, `leader`) or by collectives on the gradients' device: `devices`
chooses, `group` connects, `collective_queue` orders the collectives, `collective_carrier` submits
gradients. Code above a channel sees only the `Channel` protocol; `connection` opens either kind.
"""
