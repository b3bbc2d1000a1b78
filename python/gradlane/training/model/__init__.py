"""A prepared model: its hooks, step machine, gradient exchange, optimizer and buffers."""
