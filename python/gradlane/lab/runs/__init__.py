"""Runs of workloads under strategies on the emulated cluster, and their rows."""
