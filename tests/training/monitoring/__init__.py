"""Tests of the monitoring of a training."""
