"""Timelines: the spans of every rank over time, of simulated and of real runs in one format.

`spans` defines timelines, `chrome` writes and reads the file format, and `checks` checks a file.
`merge` joins the files of ranks, `step` extracts one step for a page, and `throughput` computes
rates. No module here imports torch.
"""
