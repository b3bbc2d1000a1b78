"""Runs loops over sharded models on ranks that are processes, which stay up from loop to loop.

`python -m tests.loop_fuzzing.sharded_ranks [SEED ...]`, started as torchrun starts ranks, runs the
loops of some seeds, or of each line that it reads, and prints a line for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.loop_fuzzing.description import Loop
from tests.loop_fuzzing.sharded_loops import generate_sharded
from tests.ports import reserve_port

TIMEOUT_S = 400.0
"""For a loop, and for processes to start."""
_MARK = "gradlane-loop "


class ShardedRanks:
    """The processes of one number of ranks, started anew after a loop that hung or killed one."""

    def __init__(self, ranks: int, local: int) -> None:
        """Start nothing yet.

        Args:
            ranks: of the world.
            local: ranks of a node.
        """
        self._ranks = ranks
        self._local = local
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="gradlane-loops-"))

    def run(self, loop: Loop) -> list[dict[str, Any] | str]:
        """Run a loop; returns each rank's result, or why it has none."""
        if not self._processes:
            self._start()
        line = json.dumps(json.loads(loop.to_json())).encode() + b"\n"
        for one in self._processes:
            assert one.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                one.stdin.write(line)
                one.stdin.flush()
        found = self._read()
        results = [one if one is not None else self._end_of(at) for at, one in enumerate(found)]
        if not all(isinstance(one, dict) and one["goes_on"] for one in results):
            self.close()
        return results

    def close(self) -> None:
        """End the processes."""
        for one in self._processes:
            one.kill()
        for one in self._processes:
            one.communicate()
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
                    subprocess.Popen(
                        [sys.executable, "-m", __name__],
                        env={**os.environ, **common, **own},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                    )
                )

    def _read(self) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = [None] * self._ranks
        texts = [b""] * self._ranks
        until = time.monotonic() + TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for rank, one in enumerate(self._processes):
                assert one.stdout is not None
                selector.register(one.stdout, selectors.EVENT_READ, rank)
            while selector.get_map() and (left_s := until - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    rank = key.data
                    read = os.read(key.fd, 1 << 16)
                    texts[rank] += read
                    found[rank] = _result_in(texts[rank])
                    if found[rank] is not None or not read:
                        selector.unregister(key.fileobj)
        return found

    def _end_of(self, rank: int) -> str:
        code = self._processes[rank].poll()
        if code is None:
            return f"nothing after {TIMEOUT_S} s"
        errors = (self._folder / f"errors-{rank}").read_text(errors="replace")
        return f"the process died with {code}: {errors[-2000:]}"


def _result_in(text: bytes) -> dict[str, Any] | None:
    for line in text.decode(errors="replace").splitlines(keepends=True):
        if line.startswith(_MARK) and line.endswith("\n"):
            result: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return result
    return None


def results_in(text: str) -> list[dict[str, Any]]:
    """Return the results that a rank has printed."""
    lines = text.splitlines()
    return [json.loads(one.removeprefix(_MARK)) for one in lines if one.startswith(_MARK)]


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


def main(seeds: list[str]) -> None:
    """Run the loops of some seeds, or of the lines of standard input."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    local, ranks = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // local, local), mesh_dim_names=("node", "shard"))
    given = (generate_sharded(int(seed), (ranks,)) for seed in seeds)
    loops = given if seeds else (Loop.from_json(line) for line in sys.stdin)
    for number, loop in enumerate(loops):
        folder = Path(os.environ["CHECKPOINTS"]) / str(number)
        result = run_here(loop, mesh, folder)
        os.write(1, f"\n{_MARK}{json.dumps({'seed': loop.seed, **result})}\n".encode())
        if result["goes_on"]:
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
