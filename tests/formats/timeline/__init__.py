"""Tests of timelines: the file, simulated and recorded runs, and joining ranks."""
