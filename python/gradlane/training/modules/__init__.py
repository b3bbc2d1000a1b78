"""Properties of torch modules and gradients: compiled, forward order, shared memory."""
