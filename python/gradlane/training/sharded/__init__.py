"""Models that `fully_shard` has sharded within a node, averaged shard by shard between nodes."""
