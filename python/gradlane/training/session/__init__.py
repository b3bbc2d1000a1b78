"""Sessions: how they start, the models they prepare, what they keep, how they end."""
