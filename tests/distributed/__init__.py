"""Tests of the backend of torch.distributed."""
