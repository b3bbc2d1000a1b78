"""Stores as sessions have them, around those of torch."""

from __future__ import annotations

from torch._C._distributed_c10d import HashStore, Store

from gradlane.training.rendezvous.bounded_store import BoundedStore


def bounded(
    store: Store | None = None,
    rank: int = 0,
    limit_s: float = 10.0,
    *,
    job: str = "job",
    secret: str | None = None,
) -> BoundedStore:
    """Return a store with calls that end; a new one in memory where none is given."""
    return BoundedStore.wrapping(
        HashStore() if store is None else store,
        rank,
        "in memory",
        limit_s,
        job=job,
        secret=secret,
    )
