"""Faults in trainings that go on without lost ranks: `python -m tests.faults --going-on`.

`scenario` draws one or two faults from a seed, `rank_program` is one rank, `replay` trains the same
in one process, and `campaign` runs and judges.
"""
