"""Several ranks on one node: they add up among themselves before anything goes to the network.

`layout` finds out which ranks share a node, `shares` cuts tensors into what each of them carries,
`link` connects them, and `channel` is a channel to all ranks made of these and of one to the other
nodes. They add up in shared memory (`sum_backend`, `carriage`), or by collectives where their gradients
are: `devices` decides, `group` connects, `collectives` gives turns, `collective_carrier` hands over.
Nothing above a channel knows more of it than that; `connection` opens one or the other.
"""
