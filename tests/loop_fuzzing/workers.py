"""Processes that call a function on many arguments, and outlive a call that kills its process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

Result = dict[str, Any]


class Workers:
    """A number of processes; with one job everything runs in this one."""

    def __init__(self, jobs: int) -> None:
        """Start nothing yet."""
        self._jobs = jobs
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.loop_fuzzing.search"])

    def run(
        self,
        call: Callable[..., Result],
        arguments: Iterable[tuple[Any, ...]],
        died: Callable[[tuple[Any, ...], int | None], Result],
    ) -> Iterator[Result]:
        """Yield what the calls return, as they end.

        Args:
            call: what to call.
            arguments: of each call.
            died: makes the result of a call whose process died, from its arguments and exit code.
        """
        rest = iter(arguments)
        if self._jobs == 1:
            for one in rest:
                yield call(*one)
            return
        busy: dict[Connection, tuple[Any, tuple[Any, ...]]] = {}
        try:
            for one in rest:
                process, connection = self._start(call)
                connection.send(one)
                busy[connection] = (process, one)
                if len(busy) == self._jobs:
                    break
            while busy:
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    connection = ready
                    process, one = busy.pop(connection)
                    try:
                        result = connection.recv()
                    except (EOFError, OSError):
                        process.join()
                        result = died(one, process.exitcode)
                        process, connection = self._start(call)
                    following = next(rest, None)
                    if following is None:
                        connection.close()
                        process.join()
                    else:
                        connection.send(following)
                        busy[connection] = (process, following)
                    yield result
        finally:
            for process, _ in busy.values():
                process.kill()

    def _start(self, call: Callable[..., Result]) -> tuple[Any, Connection]:
        mine, its = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(its, call), daemon=True)
        process.start()
        its.close()
        return process, mine


def _serve(connection: Connection, call: Callable[..., Result]) -> None:
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        connection.send(call(*arguments))
