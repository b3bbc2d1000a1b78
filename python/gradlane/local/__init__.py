"""Several ranks on one node: they add up in shared memory before anything goes to the network.

`layout` finds out which ranks share a node, `shares` cuts tensors into what each of them carries,
`link` connects them, `sums` adds up, and `channel` is a channel to all ranks made of these and of
one to the other nodes. Nothing above a channel knows of it; `connection` opens one or the other.
"""
