"""Checkpoints that sessions write by themselves."""
