"""Samples of an epoch, shared out to ranks of which some are lost and others join.

`cut` says which rank trains which samples in which step, `progress` how far a rank has come in one;
`sampler` draws for a data loader, and cuts anew when the members change; `agreement` holds the
numbers that the ranks tell each other for that, `membership` what they need of a session.
"""
