"""Runs a loop on ranks that are threads, with gradlane, over the reluctant or the plain core."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

import gradlane
from gradlane.training.core import load_core
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.session.init import open_session
from tests.loop_fuzzing.description import Action, Loop
from tests.loop_fuzzing.oddities import aside
from tests.loop_fuzzing.program import Note, Program
from tests.loop_fuzzing.reluctant_core import ReluctantCore

TIMEOUT_S = 60.0
COMPILES = bool(os.environ.get("GRADLANE_FUZZ_COMPILE"))
"""Whether ranks run their models through `torch.compile`; the reference never does."""


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

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._compiled: dict[int, tuple[Any, Any]] = {}

    def called(self, number: int) -> Any:
        if not COMPILES:
            return super().called(number)
        model = self.models[number]
        if number not in self._compiled or self._compiled[number][0] is not model:
            self._compiled[number] = (model, torch.compile(model, backend="eager"))
        return self._compiled[number][1]

    def without_exchange(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self.session.no_sync()
        return context

    def synchronize(self, model: int) -> None:
        self.session.synchronize()

    def clip_by_session(self, model: int, limit: float) -> Tensor:
        norm: Tensor = self.session.clip_grad_norm_(limit, model=self.models[model])
        return norm

    def weigh(self, model: int, samples: int) -> None:
        self.session.weight(samples, model=self.models[model])

    def connect(self, model: int) -> None:
        with self.default_device("prepare"):
            self.session.prepare(
                self.models[model],
                self.prepared[model],
                defer=self.loop.defer,
                buffers=self.loop.buffers,
            )

    def perform(self, number: int, action: Action) -> None:
        if not action.thread:
            super().perform(number, action)
            return
        errors = self._in_threads([lambda: super(RankProgram, self).perform(number, action)])
        if errors:
            raise errors[0]

    def _in_threads(self, calls: list[Callable[[], Any]]) -> list[BaseException]:
        """Run calls in threads at the same time; returns what they raised."""
        errors: list[BaseException] = []

        def run(call: Callable[[], Any]) -> None:
            try:
                call()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"a thread hangs: nothing after {TIMEOUT_S} s")
        return errors

    def backward_twice(self, model: int, *, through: list[int], data: int) -> None:
        losses = [
            functools.partial(self.forward, through, data, batch=data * 2 + 1000 + number)
            for number in range(2)
        ]
        errors = self._in_threads([functools.partial(_backward, loss) for loss in losses])
        if errors:
            raise errors[0]

    def look_aside(self, model: int, *, how: str, times: int) -> None:
        look = aside(how, self.models[model], self.optimizers[model], self.kept_lists[model])
        errors: list[str] = []

        def run() -> None:
            try:
                for _ in range(times):
                    look()
            except gradlane.GradlaneError:
                # The training thread raises it, too.
                pass
            except RuntimeError as error:
                # Torch's own steps let state grow while another thread goes through it.
                if how not in ("optimizer", "state") or "changed size" not in str(error):
                    errors.append(f"{type(error).__name__}: {str(error)[:60]}")
            except BaseException as error:
                errors.append(f"{type(error).__name__}: {str(error)[:60]}")

        thread = threading.Thread(target=run, daemon=True)
        self.threads.append((thread, errors))
        thread.start()

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


def _backward(loss: Callable[[], Any]) -> None:
    loss().backward()


def run_ranks(loop: Loop, *, real: bool = False) -> list[Outcome]:
    """Run a loop and return how each rank's run ended.

    Args:
        loop: what to run.
        real: over the compiled core as it is.
    """
    core: Any = load_core() if real else ReluctantCore(loop.seed)
    store = HashStore()
    job = f"stranger-{loop.seed}-{uuid.uuid4().hex[:8]}"
    outcomes: list[Outcome | None] = [None] * loop.ranks
    grown = threading.Barrier(loop.ranks)

    def one(rank: int) -> None:
        outcomes[rank] = _run(loop, rank, grown, core, store=store, job=job)

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


def _run(loop: Loop, rank: int, grown: threading.Barrier, core: Any, **where: Any) -> Outcome:
    program: RankProgram | None = None
    try:
        program = RankProgram(loop, rank, values_of=rank)
        program.grown = grown
        keywords = keywords_of(
            rank=rank,
            world_size=loop.ranks,
            advertise="127.0.0.1",
            connect_timeout_s=20.0,
            progress_timeout_s=20.0,
            **where,
            **loop.options,
        )
        with open_session(core, Options.of(**keywords)) as program.session:
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
