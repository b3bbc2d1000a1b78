"""Simulation of clusters from profiles.

`profiles` reads and checks profile files, `scenarios` runs the compiled core's simulator, and
`grid` evaluates a profile over workers, rates and strategies. No module here imports torch.
"""
