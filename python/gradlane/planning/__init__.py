"""Profile a model, simulate a cluster, and say what would help."""
