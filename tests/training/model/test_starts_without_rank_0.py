"""Rank 0 is lost before the others have its values: all end by name, long before any time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.built import needs_core
from tests.forked_programs import PATIENCE_S, ForkedPrograms

pytestmark = needs_core

PROGRAM = textwrap.dedent(
    """
    import importlib, os, signal, sys

    import torch
    from torch._C._distributed_c10d import TCPStore

    import gradlane

    port, world_size, end, moment, folder = sys.argv[1:]
    rank = int(os.environ["RANK"])


    def ending(*arguments, **options):
        if end == "raise":
            raise ArithmeticError("the data are empty")
        os.kill(os.getpid(), getattr(signal, end))


    if rank == 0:
        module, _, name = moment.rpartition(".")
        owner = importlib.import_module(module.partition(":")[0])
        if ":" in module:
            owner = getattr(owner, module.partition(":")[2])
        setattr(owner, name, ending)
    store = TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    session = gradlane.init(
        going_on=True,
        local="off",
        rendezvous=gradlane.Rendezvous(store=store, rank=rank, world_size=int(world_size)),
        network=gradlane.Network(silence_timeout_s=3.0, advertise="127.0.0.1"),
        checkpoints=gradlane.Checkpoints(folder),
    )
    model = torch.nn.Linear(64, 64)
    try:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        print("prepared", flush=True)
    except gradlane.GradlaneError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)
    """
)
SPREADING = "gradlane.training.model.channel_setup.run_step_0"
OPENED = "gradlane.training.connection.wait_until_all_are_connected"
FOLLOWED = "gradlane.training.checkpoints.manager:CheckpointManager._agree_on_run"


@pytest.mark.parametrize(
    ("world_size", "end", "moment"),
    [
        (2, "SIGKILL", SPREADING),
        (3, "SIGKILL", SPREADING),
        (2, "SIGSTOP", SPREADING),
        (4, "raise", SPREADING),
        (2, "SIGKILL", OPENED),
        (3, "SIGKILL", FOLLOWED),
    ],
)
def test_all_end_by_name(
    programs: ForkedPrograms, tmp_path: Path, world_size: int, end: str, moment: str
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM)
    arguments = [str(store.port), str(world_size), end, moment, str(tmp_path / "checkpoints")]
    outputs = [tmp_path / f"output-{rank}" for rank in range(world_size)]
    pids = [
        programs.start(
            str(output),
            program=str(program),
            arguments=arguments,
            output=str(output),
            errors=str(tmp_path / f"errors-{rank}"),
            environment={"RANK": str(rank)},
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [programs.wait(str(output), PATIENCE_S) for output in outputs[1:]]
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    texts = [output.read_text() for output in outputs[1:]]
    assert codes == [0] * (world_size - 1), (texts, (tmp_path / "errors-1").read_text())
    for text in texts:
        assert "Error: rank 0 was lost" in text, texts
