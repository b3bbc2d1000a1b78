"""Runs loops over sharded models on ranks that are processes, which stay up from loop to loop.

`python -m tests.loop_fuzzing.sharded_ranks` is one of them: it runs the loop of each line that it
reads, and prints a line for each.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradlane.lab.cluster.fork_server import ForkedProgram, running_fork_server
from tests.forked_programs import PATIENCE_S, SOURCES
from tests.loop_fuzzing.description import Loop
from tests.paths import ROOT
from tests.ports import reserve_port
from tests.training.sharded.fsdp2 import FSDP_MODULES

_TIMEOUT_S = 120.0
"""For a loop, and for processes to start."""
_TIMEOUT_AFTER_FAILURE_S = 60.0
"""For the other ranks, once one has failed."""
_STACK_S = 1.0
"""For a rank to tell where it is."""
_MODULES = (*FSDP_MODULES, "tests.loop_fuzzing.sharded_program")
_MARK = "gradlane-loop "


class ShardedRanks:
    """The processes of one number of ranks, forked anew after a loop that failed on one of them."""

    def __init__(self, ranks: int, local: int) -> None:
        """Start nothing yet.

        Args:
            ranks: of the world.
            local: ranks of a node.
        """
        self._ranks = ranks
        self._local = local
        self._processes: list[ForkedProgram] = []
        self._folder = Path(tempfile.mkdtemp(prefix="gradlane-loops-"))

    def run(self, loop: Loop, timeout_s: float = _TIMEOUT_S) -> list[dict[str, Any] | str]:
        """Run a loop; returns each rank's result, or why it has none."""
        if not self._processes:
            self._start()
        line = json.dumps(json.loads(loop.to_json())).encode() + b"\n"
        for one in self._processes:
            with contextlib.suppress(BrokenPipeError):
                one.stdin.write(line)
                one.stdin.flush()
        found = self._read(timeout_s)
        results = [one if one is not None else self._end_of(at) for at, one in enumerate(found)]
        if not all(isinstance(one, dict) and one["goes_on"] for one in results):
            self.close()
        return results

    def close(self) -> None:
        """End the processes."""
        for one in self._processes:
            one.kill()
        for one in self._processes:
            one.wait(PATIENCE_S)
            for pipe in (one.stdin, one.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._processes = []

    def _start(self) -> None:
        common = {
            **{"WORLD_SIZE": str(self._ranks), "LOCAL_WORLD_SIZE": str(self._local)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())},
            **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "GRADLANE_SUMMARY": "0"},
            "CHECKPOINTS": str(self._folder),
        }
        for rank in range(self._ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % self._local)}
            with (self._folder / f"errors-{rank}").open("wb") as errors:
                self._processes.append(
                    running_fork_server(SOURCES).fork(
                        __name__,
                        [],
                        environment={**SOURCES, **common, **own},
                        stderr=errors,
                        folder=ROOT,
                        modules=_MODULES,
                        timeout_s=PATIENCE_S,
                    )
                )

    def _read(self, timeout_s: float) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = [None] * self._ranks
        texts = [b""] * self._ranks
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, one in enumerate(self._processes):
                selector.register(one.stdout, selectors.EVENT_READ, rank)
            while selector.get_map() and (left_s := until - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    rank = key.data
                    read = os.read(key.fd, 1 << 16)
                    texts[rank] += read
                    found[rank] = result = _result_in(texts[rank])
                    if result is not None or not read:
                        selector.unregister(key.fileobj)
                        if result is None or not result["goes_on"]:
                            until = min(until, time.monotonic() + _TIMEOUT_AFTER_FAILURE_S)
        return found

    def _end_of(self, rank: int) -> str:
        one = self._processes[rank]
        if not one.has_ended:
            one.send_signal(signal.SIGUSR1)
            time.sleep(_STACK_S)
        errors = (self._folder / f"errors-{rank}").read_text(errors="replace")
        if not one.has_ended:
            return f"nothing in time: {errors[-2000:]}"
        return f"the process died with {one.wait()}: {errors[-2000:]}"


def _result_in(text: bytes) -> dict[str, Any] | None:
    for line in text.decode(errors="replace").splitlines(keepends=True):
        if line.startswith(_MARK) and line.endswith("\n"):
            result: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return result
    return None


def run_here(loop: Loop, mesh: Any, folder: Path) -> dict[str, Any]:
    """Run a loop on this rank; returns how it ended.

    Args:
        loop: what to run.
        mesh: of nodes and shards.
        folder: for checkpoints, shared by all ranks.
    """
    from tests.loop_fuzzing.sharded_program import TorchError, build_both
    from tests.loop_fuzzing.sharded_verdict import first_difference

    both = None
    at = -1
    sums: list[list[int]] = []
    try:
        both = build_both(loop, mesh)
        for at, action in enumerate(loop.actions):
            both.perform(at, action, folder)
            if action.do == "synchronize":
                sums.append(both.ours.sums())
        at = len(loop.actions)
        both.ours.session.close()
        if "update" in loop.options:
            both.reference.synchronize(0)
        for one in (both.reference, both.ours):
            one.at = at
            sums.append(one.sums())
            one.note("after close", [one for model in one.models for one in model.parameters()])
        if one is both.ours and "update" not in loop.options:
            sums = sums[-1:]
        kind, text = first_difference(loop, both.reference.notes, both.ours.notes)
        return {"kind": kind, "text": text, "sums": sums[-1:], "goes_on": True}
    except TorchError as error:
        return {"kind": "torch does not", "text": str(error), "sums": [], "goes_on": False}
    except BaseException as error:
        text = f"action {at}: {''.join(traceback.format_exception(error))}"
        named = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"kind": "error", "error": named, "text": text, "sums": [], "goes_on": False}


def main() -> None:
    """Run the loops of the lines of standard input."""
    from torch.distributed.device_mesh import init_device_mesh

    faulthandler.register(signal.SIGUSR1, all_threads=False)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    local, ranks = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // local, local), mesh_dim_names=("node", "shard"))
    for number, line in enumerate(sys.stdin):
        folder = Path(os.environ["CHECKPOINTS"]) / str(number)
        result = run_here(Loop.from_json(line), mesh, folder)
        os.write(1, f"\n{_MARK}{json.dumps(result)}\n".encode())
        if result["goes_on"]:
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
