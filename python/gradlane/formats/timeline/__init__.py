"""Timelines: what every rank did when, of simulated and of real runs in one format.

`spans` says what a timeline is, `chrome` writes and reads the one format, `checks` says whether a
file is in it; `simulated` and `recorded` make timelines of the two kinds of runs, `recorder`
listens to a real run, `merge` joins the files of its ranks. Only `recorder` imports torch.
"""
