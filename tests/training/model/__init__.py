"""Tests of the PyTorch adapter."""
