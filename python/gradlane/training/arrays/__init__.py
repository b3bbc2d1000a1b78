"""Averaging arrays of any framework over all ranks: NumPy's, and whatever speaks DLPack.

`Session.register`, `spread`, `push` and `wait` reach it (`registered`). Nothing here imports a
framework: an array is an address, a shape and a dtype (`memory`, `dlpack`). Sessions themselves
need torch, whose c10d store is where ranks meet.
"""
