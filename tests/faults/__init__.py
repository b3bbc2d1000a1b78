"""A seeded campaign of faults in real trainings: `python -m tests.faults`, see `docs/faults.md`.

`scenario` draws a fault from a seed, `rank_program` is one rank of the training, `trigger` reports
when it reaches the drawn moment, `cluster` runs the ranks and injects the fault, `verdict` judges
the outcome, and `campaign` runs many at once.
"""
