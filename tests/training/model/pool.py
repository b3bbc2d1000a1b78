"""Rank processes that stay up over many scenarios, since starting torch takes seconds.

They are forked from one process that has loaded torch already. Tests take the fixture `pool` of
`tests/conftest.py`, which all of them share.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
import uuid
from typing import Any

from torch._C._distributed_c10d import TCPStore

from tests.paths import ROOT


class RankPool:
    """Some rank processes on this machine, connected to nothing until a scenario runs.

    Attributes:
        world_size: how many there are.
    """

    def __init__(self, world_size: int, *, start_method: str = "forkserver") -> None:
        """Plan so many ranks; the first scenario starts them.

        Args:
            world_size: how many.
            start_method: of multiprocessing; with `"spawn"` each rank loads torch itself, as those
                that use a GPU must.
        """
        self.world_size = world_size
        self._start_method = start_method
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._store: TCPStore | None = None

    def _start(self) -> None:
        """Start the processes and the store that they meet in."""
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # The server of forks takes its path from the environment alone.
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = dict.fromkeys([str(ROOT / "python"), str(ROOT), *filter(None, known)])
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        context: Any = multiprocessing.get_context(self._start_method)
        if self._start_method == "forkserver":
            context.set_forkserver_preload(["tests.training.model.preloaded"])
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, rank, self.world_size, self._store.port)
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(
        self, scenario: str, *, ranks: int | None = None, timeout_s: float = 240.0, **arguments: Any
    ) -> list[Any]:
        """Run a scenario on the first ranks and return their results.

        It is a function of `scenarios.py`, or of another module as `module:function`.
        """
        count = ranks or self.world_size
        self.begin(scenario, count, **arguments)
        results = []
        for rank in range(count):
            answer = self.answer(rank, timeout_s)
            if answer is None:
                self.kill()
                raise TimeoutError(f"rank {rank} gave no answer to {scenario} in {timeout_s} s")
            results.append(answer)
        failed = [result["error"] for result in results if "error" in result]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [result["result"] for result in results]

    def begin(self, scenario: str, ranks: int, **arguments: Any) -> None:
        """Have the first ranks begin a scenario, as `run` does; `answer` returns how it went."""
        if not self._processes:
            self._start()
        job = f"{scenario.rpartition(':')[2]}-{uuid.uuid4().hex[:8]}"
        for pipe in self._pipes[:ranks]:
            pipe.send((scenario, ranks, job, arguments))

    def answer(self, rank: int, timeout_s: float) -> dict[str, Any] | None:
        """Return a rank's `result`, or its `error`; None if it has not answered in time."""
        pipe = self._pipes[rank]
        return pipe.recv() if pipe.poll(timeout_s) else None

    def close(self) -> None:
        """End the processes; a scenario after that starts others."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
        self.kill()

    def kill(self) -> None:
        """End processes that do not end by themselves."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes, self._store = [], [], None


class FirstRanks:
    """The first ranks of a pool, for tests whose scenarios run on fewer than it has."""

    def __init__(self, pool: RankPool, count: int) -> None:
        """Stand for so many ranks of a pool."""
        self._pool = pool
        self._count = count

    def run(self, scenario: str, *, ranks: int | None = None, **arguments: Any) -> list[Any]:
        """Run a scenario as the pool does, on these ranks or on fewer."""
        return self._pool.run(scenario, ranks=ranks or self._count, **arguments)


def serve(pipe: Any, rank: int, world_size: int, port: int) -> None:
    """Run scenarios until the pipe is closed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from tests.training.model import scenarios

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while True:
        try:
            name, count, job, arguments = pipe.recv()
        except EOFError:
            return
        try:
            module, _, function_name = name.rpartition(":")
            place = importlib.import_module(module) if module else scenarios
            function = getattr(place, function_name)
            pipe.send({"result": function(store, rank, count, job, **arguments)})
        except BaseException:
            pipe.send({"error": f"rank {rank}: {traceback.format_exc()}"})
