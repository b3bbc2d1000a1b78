"""Aggregation schemes and their costs by layer, and Poseidon's rule."""
