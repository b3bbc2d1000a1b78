"""Training after the loss of a rank: the same kill under several systems."""
