"""Rank processes that stay up over many scenarios, since starting torch takes seconds."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
import uuid
from typing import Any

from torch._C._distributed_c10d import TCPStore


class RankPool:
    """Some rank processes on this machine, connected to nothing until a scenario runs."""

    def __init__(self, world_size: int) -> None:
        """Start the processes and the store that they meet in."""
        self.world_size = world_size
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self.processes = []
        self.pipes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(theirs, rank, world_size, self.store.port), daemon=False
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def run(
        self, scenario: str, *, ranks: int | None = None, timeout_s: float = 120.0, **arguments: Any
    ) -> list[Any]:
        """Run a scenario on the first ranks and return their results.

        It is a function of `tests.adapter.scenarios`, or of another module as `module:function`.
        """
        count = ranks or self.world_size
        job = f"{scenario.rpartition(':')[2]}-{uuid.uuid4().hex[:8]}"
        for pipe in self.pipes[:count]:
            pipe.send((scenario, count, job, arguments))
        results = []
        for rank, pipe in enumerate(self.pipes[:count]):
            if not pipe.poll(timeout_s):
                self.kill()
                raise TimeoutError(f"rank {rank} gave no answer to {scenario} in {timeout_s} s")
            results.append(pipe.recv())
        failed = [result["error"] for result in results if "error" in result]
        if failed:
            raise RuntimeError("\n".join(failed))
        return [result["result"] for result in results]

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(20)
        self.kill()

    def kill(self) -> None:
        """End processes that do not end by themselves."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()


def serve(pipe: Any, rank: int, world_size: int, port: int) -> None:
    """Run scenarios until the pipe is closed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from tests.adapter import scenarios

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
