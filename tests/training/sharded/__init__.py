"""Tests of models that `fully_shard` has sharded within nodes."""
