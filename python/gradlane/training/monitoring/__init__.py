"""Monitoring of a running training: metrics, their outputs, and a summary line at the end.

`metrics` defines the numbers and `observer` collects them. `prometheus`, `tensorboard` and
`summary` show them. `recorder` records a timeline.
"""
