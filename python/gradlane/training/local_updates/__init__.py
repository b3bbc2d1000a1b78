"""Local updates: optimizers that run on each rank by itself, and exchange rarely."""
