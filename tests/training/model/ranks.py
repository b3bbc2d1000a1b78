"""Runs a function once on each of some ranks, which are threads, over the compiled core."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from gradlane.training.core import load_core
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.session.init import open_session


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *,
    core: Any = None,
    timeout_s: float = 60.0,
    expect_errors: bool = False,
    **options: Any,
) -> list[Any]:
    """Call `body(session)` on every rank and return what each returned.

    Args:
        world_size: number of ranks.
        body: gets an open session; the session is closed, or given up, after it.
        core: what stands in for the compiled core, or None.
        timeout_s: for the whole run.
        expect_errors: return an exception in place of a rank's result instead of raising.
        options: for `gradlane.init`.
    """
    shared = core or load_core()
    store = HashStore()
    job = f"test-{uuid.uuid4().hex}"
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size

    def one(rank: int) -> None:
        torch.set_num_threads(1)
        settings: dict[str, Any] = {"connect_timeout_s": 20.0, **options}
        try:
            keywords = keywords_of(
                store=store,
                rank=rank,
                world_size=world_size,
                job=job,
                advertise="127.0.0.1",
                **settings,
            )
            given = Options.of(**keywords, environment=os.environ)
            with open_session(shared, given) as session:
                results[rank] = body(session)
        except BaseException as error:
            errors[rank] = error

    threads = [
        threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} hang; errors of others: {errors}"
    if expect_errors:
        return [error or result for error, result in zip(errors, results, strict=True)]
    for error in errors:
        if error is not None:
            raise error
    return results
