"""Checks of a machine and a cluster, made before a training starts."""
