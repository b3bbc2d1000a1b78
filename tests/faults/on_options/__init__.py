"""Ranks whose options differ: `python -m tests.faults --options`.

`scenario` draws options from a seed, and `campaign` runs and judges.
"""
