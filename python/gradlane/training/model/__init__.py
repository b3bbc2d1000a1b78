"""A prepared model: its hooks, the kernel and stages of its steps, optimizer and buffers."""
