"""Simulations side by side: the compiled core runs each without Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Argument = TypeVar("Argument")
Result = TypeVar("Result")
MOST_THREADS = 4
"""Simulations at a time: each of a thousand ranks takes 0.7 GB."""


def usual_threads() -> int:
    """Return the simulations at a time that suit this process's processors."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def in_threads(
    call: Callable[[Argument], Result], arguments: Sequence[Argument], threads: int
) -> Iterator[Result]:
    """Yield the results of calls in their order, several of which run at a time.

    The first that fails raises here, and the calls that have not begun are left out.
    """
    if min(threads, len(arguments)) < 2:
        yield from map(call, arguments)
        return
    pool = ThreadPoolExecutor(threads)
    try:
        yield from pool.map(call, arguments)
    finally:
        pool.shutdown(cancel_futures=True)
