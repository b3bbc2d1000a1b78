"""Runs a loop on ranks that are threads, with gradlane, over the double or the compiled core."""

from __future__ import annotations

import contextlib
import threading
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

import gradlane
from tests.strangers.description import Loop
from tests.strangers.program import Note, Program
from tests.strangers.reluctant_core import ReluctantCore

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How a rank's run ended.

    Attributes:
        notes: what it saw.
        action: the action that it ended in.
        error: what ended it, or None.
    """

    notes: list[Note]
    action: int
    error: BaseException | None


class RankProgram(Program):
    """The program with a session."""

    session: Any = None
    grown: threading.Barrier

    def without_exchange(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self.session.no_sync()
        return context

    def synchronize(self, model: int) -> None:
        self.session.synchronize()

    def connect(self, model: int) -> None:
        self.session.prepare(
            self.models[model],
            self.optimizers[model],
            defer=self.loop.defer,
            buffers=self.loop.buffers,
        )

    def prepare_again(self, model: int, *, grows: bool) -> None:
        """Torch's hooks on registration are one for all threads: all grow first."""
        if grows:
            self.grow(model)
        with contextlib.suppress(threading.BrokenBarrierError):
            self.grown.wait(TIMEOUT_S)
        self.connect(model)

    def joining(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self.session.join()
        return context


def run_ranks(loop: Loop, *, real: bool = False) -> list[Outcome]:
    """Run a loop and return how each rank's run ended.

    Args:
        loop: what to run.
        real: over the compiled core and loopback connections.
    """
    core: Any = None if real else ReluctantCore(loop.seed)
    store = HashStore()
    job = f"stranger-{loop.seed}-{uuid.uuid4().hex[:8]}"
    outcomes: list[Outcome | None] = [None] * loop.ranks
    grown = threading.Barrier(loop.ranks)

    def one(rank: int) -> None:
        outcomes[rank] = _run(loop, rank, grown, core=core, store=store, job=job)

    threads = [
        threading.Thread(target=one, args=(rank,), daemon=True, name=f"{job}-{rank}")
        for rank in range(loop.ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    hanging = TimeoutError(f"the rank hangs: nothing after {TIMEOUT_S} s")
    return [outcome or Outcome([], -1, hanging) for outcome in outcomes]


def _run(loop: Loop, rank: int, grown: threading.Barrier, **where: Any) -> Outcome:
    program: RankProgram | None = None
    try:
        program = RankProgram(loop, rank, values_of=rank)
        program.grown = grown
        with gradlane.init(
            rank=rank,
            world_size=loop.ranks,
            advertise="127.0.0.1",
            connect_timeout_s=20.0,
            progress_timeout_s=20.0,
            **where,
            **loop.options,
        ) as program.session:
            for number in range(len(program.models)):
                program.connect(number)
            program.start()
            for number, action in enumerate(loop.actions):
                program.perform(number, action)
        program.at = len(loop.actions)
        for model in program.models:
            program.note("after close", list(model.parameters()))
    except BaseException as error:
        grown.abort()
        return Outcome(program.notes if program else [], program.at if program else -1, error)
    return Outcome(program.notes, program.at, None)


def quietly(call: Callable[[], Any]) -> Any:
    """Run something with one thread of computation and without warnings of torch's own.

    Filters of warnings belong to the whole process, so they are set around the threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    finally:
        torch.set_num_threads(threads)
