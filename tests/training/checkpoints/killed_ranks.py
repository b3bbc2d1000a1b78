"""Ranks that are killed at random moments, again and again, and go on from their checkpoints.

A process of its own, which forks the ranks of every round. Prints one line of JSON a round: the
step that the ranks began at, and the step of the last complete checkpoint.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step of an optimizer loads it, in each rank that is forked
from torch._C._distributed_c10d import TCPStore

import gradlane
from gradlane.training.checkpoints.folder import newest
from gradlane.training.checkpoints.shard import read_shard
from gradlane.training.options.options import keywords_of
from tests.training.checkpoints.training import train

WAIT_S = 90.0
"""For the first checkpoint of a round, machines that are busy included."""


def main(folder: Path, seed: int, rounds: int, options: dict[str, Any]) -> None:
    """Kill the ranks of so many rounds, whose sessions have these options."""
    chance = random.Random(seed)
    for _ in range(rounds):
        world_size = chance.choice((2, 3) if "stragglers" in options else (1, 2, 2, 3, 3))
        found = newest(folder)
        before = found.step if found else 0
        ports, port = os.pipe()
        ranks = [fork_rank(folder, ports, rank, world_size, options) for rank in range(world_size)]
        # Held here, where nobody is killed, and only now: a fork beside its threads could inherit
        # a lock that one of them has, and wait for it for ever.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(port, struct.pack("H", store.port) * world_size)
        try:
            wait_for_checkpoint(folder, before, ranks)
            time.sleep(chance.uniform(0.0, 0.15))
        finally:
            for process_id in ranks:
                os.kill(process_id, signal.SIGKILL)
            for process_id in ranks:
                os.waitpid(process_id, 0)
        del store
        os.close(ports)
        os.close(port)
        found = newest(folder)
        assert found is not None
        for name, _ in found.files:
            facts, _pieces = read_shard(found.folder / name)
            assert facts["step"] == found.step
        begun = json.loads((folder / "begun").read_text())
        print(json.dumps({"before": before, "begun": begun, "step": found.step}), flush=True)


def wait_for_checkpoint(folder: Path, before: int, ranks: list[int]) -> None:
    """Wait for a checkpoint of a later step; where none comes, the ranks say where they stand."""
    deadline = time.monotonic() + WAIT_S
    while (found := newest(folder)) is None or found.step <= before:
        if time.monotonic() >= deadline:
            for process_id in ranks:
                os.kill(process_id, signal.SIGUSR1)
                time.sleep(1.0)
            raise AssertionError(f"no checkpoint after step {before} in {WAIT_S:g} s")
        time.sleep(0.005)


def fork_rank(folder: Path, ports: int, rank: int, world_size: int, options: dict[str, Any]) -> int:
    """Start a rank, which reads the store's port from a pipe; returns its process id."""
    process_id = os.fork()
    if process_id:
        return process_id
    try:
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        torch.set_num_threads(1)
        (port,) = struct.unpack("H", os.read(ports, 2))
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        session = gradlane.init(
            **keywords_of(
                store=store,
                rank=rank,
                world_size=world_size,
                job="killed",
                advertise="127.0.0.1",
                summary=False,
                checkpoint_folder=folder,
                checkpoint_every=3,
                checkpoint_keep=2,
                **options,
            )
        )

        def note(step: int) -> None:
            if rank == 0 and not noted:
                noted.append(step)
                (folder / "begun").write_text(str(step - 1))

        noted: list[int] = []
        train(session, 1_000_000, after_step=note)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
