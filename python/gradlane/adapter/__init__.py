"""A model that is trained: its hooks, its steps, what goes out and what comes in."""
