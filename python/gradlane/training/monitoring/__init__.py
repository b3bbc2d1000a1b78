"""What a session says about a running training: metrics, where they go, and a line at the end.

`metrics` says what the numbers are; `observer` collects them; `prometheus`, `scalars` and `summary`
show them.
"""
