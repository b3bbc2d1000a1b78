"""Checkpoints that a session writes by itself: complete or not there, for worlds of any size.

`manager` takes and restores them, `folder` says which are complete, `shard` is one rank's file,
`partition` says which rank writes what.
"""
