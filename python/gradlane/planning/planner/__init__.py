"""The search for the settings that make a training fastest on a cluster, by simulation.

`coordinator` holds the facts of model and cluster and answers queries. `search` simulates
candidates and chooses. `learning` records a session's own steps and switches the session to the
best plan.
"""
