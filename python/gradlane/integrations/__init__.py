"""Adapters for training frameworks that drive the loop themselves; each imports its framework."""
