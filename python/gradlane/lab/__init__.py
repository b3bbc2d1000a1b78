"""The laboratory: clusters of network namespaces on one machine, and what is measured on them.

Nothing here is needed for training: only the command line imports it. Rates and times handed to
`namespaces` and `ranks` are real ones; `run` translates between nominal and real by the dilation.
"""
