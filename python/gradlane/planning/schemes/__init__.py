"""How tensors may be aggregated and what that costs, layer by layer; Poseidon's rule."""
