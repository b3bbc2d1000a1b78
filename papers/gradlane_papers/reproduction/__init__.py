"""Figures of the papers, beside what gradlane simulates at their settings.

`published.json` holds what the papers say, each number with its source; `figures` is the list of
what can be asked for; one file a paper computes ours. Nothing is measured here: everything is the
simulator, a model of bytes (`planning/schemes/step_time.py`, `lowprec`) or arithmetic, and the same
each time.
"""
