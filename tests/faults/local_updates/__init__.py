"""Faults in local updates that go on without lost ranks: `python -m tests.faults --local-updates`.

`scenario` draws faults and options from a seed, `rank_program` is one rank, `replay` trains the
same in one process, and `verdict` judges.
"""
