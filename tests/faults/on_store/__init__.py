"""Faults and attackers of the rendezvous store: `python -m tests.faults --store`.

`scenario` draws one from a seed, `attacker` is the process that attacks, and `campaign` runs and
judges.
"""
