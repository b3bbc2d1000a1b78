"""Which settings make a training fastest on a cluster, decided by simulating them.

`coordinator` holds what is known about model and cluster and answers questions, `search` simulates
candidates and chooses. `learning` records a session's own steps and switches it to the best plan.
"""
