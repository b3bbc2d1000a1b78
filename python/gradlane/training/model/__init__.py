"""What torch's modules and gradients are like: compiled, in which order, sharing which memory."""
