"""Trains on a pool of ranks, of which some may only serve."""

from __future__ import annotations

from typing import Any

from tests.training.model.pool import RankPool


def digests_of(
    pool: RankPool,
    module: str,
    workers: int,
    servers: int,
    runs: list[dict[str, Any]],
    **arguments: Any,
) -> list[Any]:
    """Return what `digests` of a module returns on each process.

    Args:
        pool: of four ranks.
        module: has `digests`, as `rank_programs` does.
        workers: number of ranks that train.
        servers: number of ranks that only serve; with 0 those that train serve.
        runs: options of each run.
        arguments: more for `digests`.
    """
    return pool.run(
        f"{module}:digests",
        ranks=4 if servers else workers,
        workers=workers,
        servers=servers,
        runs=runs,
        **arguments,
    )
