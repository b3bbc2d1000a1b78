"""Detection of deadlocks between ranks that wait for gradients that others have not submitted.

With several models in a session, a rank can wait for one model's gradients while the others wait
for another model's: some call that waits was made on some ranks only, or in a different order. No
rank is dead or silent then, and only the progress timeout would end the wait. So a thread watches
waits that last, publishes through the rendezvous store what this rank waits for and which tensors
it has not submitted, and looks for a cycle.

A cycle is reported only if all its ranks were in the same waits at one moment. Each rank repeats
its report with a rising count while its wait lasts. A rank that reads all reports twice, and then
sees every count rise, knows that all were waiting at the second reading. The speed of the network
does not matter: a rank that has submitted a needed tensor blocks no other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gradlane.errors import RendezvousError
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.signatures import StoreValueRefusedError

_TICK_S = 0.5


class WatchedExchange(Protocol):
    """The exchange of a model's gradients."""

    step: int

    def unsubmitted_tensors(self) -> list[int]:
        """Return the tensors that were not submitted in the current step."""


@dataclass(frozen=True)
class Wait:
    """A wait of this rank's program.

    Attributes:
        number: counts all waits of the session.
        model: the model's name among those that are watched.
        step: of its channel.
        needed: numbers of tensors; None: the whole step.
    """

    number: int
    model: str
    step: int
    needed: tuple[int, ...] | None


class DeadlockDetector:
    """The deadlock detection of one session."""

    def __init__(self, store: BoundedStore, rank_info: RankInfo) -> None:
        """Start without models; the thread starts with the second one.

        Args:
            store: the rendezvous store.
            rank_info: this rank's.
        """
        self._whole_store = store
        self._rank_info = rank_info
        self.use_incarnation(str(rank_info.restart))
        self._models: dict[str, tuple[WatchedExchange, Callable[[str], None]]] = {}
        self._numbers = itertools.count(1)
        self.wait: Wait | None = None
        """The wait of this moment."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def use_incarnation(self, incarnation: str) -> None:
        """Read only the reports of this incarnation; call it before any model."""
        self._store = self._whole_store.with_prefix(
            f"gradlane/{self._rank_info.job}/{incarnation}/deadlock"
        )

    def watch(self, name: str, model: WatchedExchange, on_deadlock: Callable[[str], None]) -> None:
        """Watch a model.

        Args:
            name: the same on every rank.
            model: its exchange.
            on_deadlock: called with the reason, in the detector's thread.
        """
        self._models[name] = (model, on_deadlock)
        if len(self._models) > 1 and self._thread is None and self._rank_info.world_size > 1:
            self._thread = threading.Thread(target=self._run, name="gradlane-watch", daemon=True)
            self._thread.start()

    def unwatch(self, name: str) -> None:
        """Stop watching a model."""
        self._models.pop(name, None)

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @contextlib.contextmanager
    def waiting(self, name: str, step: int, needed: list[int] | None) -> Iterator[None]:
        """Record that this rank waits for tensors of a step, or for all of them (None)."""
        outer = self.wait
        self.wait = Wait(next(self._numbers), name, step, None if needed is None else tuple(needed))
        try:
            yield
        finally:
            self.wait = outer

    def _run(self) -> None:
        last: Wait | None = None
        count = 0
        samples: list[dict[int, dict[str, Any]]] = []
        while not self._closing.wait(_TICK_S):
            wait = self.wait
            if wait is None or wait is not last:
                last, samples = wait, []
                continue
            count += 1
            try:
                report = json.dumps(self._report(wait, count))
                if self.wait is not wait:
                    # The wait ended during the report, which may mix two waits.
                    continue
                self._store.set(str(self._rank_info.rank), report, on_poll=self._raise_if_closing)
                samples = [*samples[-2:], self._read_reports()]
            except StoreValueRefusedError as error:
                self._fail(str(error))
                return
            except RendezvousError:
                # A store that is gone ends the session in other ways.
                pass
            cycle = find_cycle(samples, self._rank_info.rank)
            if cycle and wait is self.wait:
                self._report_deadlock(cycle)
                return

    def _report(self, wait: Wait, count: int) -> dict[str, Any]:
        models = {
            name: [model.step, model.unsubmitted_tensors()]
            for name, (model, _) in list(self._models.items())
        }
        needed = None if wait.needed is None else list(wait.needed)
        return {
            "number": wait.number,
            "count": count,
            "waits": [wait.model, wait.step, needed],
            "models": models,
        }

    def _read_reports(self) -> dict[int, dict[str, Any]]:
        texts = {
            rank: self._store.read(str(rank), rank, on_poll=self._raise_if_closing)
            for rank in range(self._rank_info.world_size)
        }
        return {rank: json.loads(report) for rank, report in texts.items() if report is not None}

    def _raise_if_closing(self) -> None:
        """Raise when the session ends, so that a store that does not respond cannot delay it."""
        if self._closing.is_set():
            raise RendezvousError("the session ends")

    def _report_deadlock(self, cycle: dict[int, dict[str, Any]]) -> None:
        order = list(self._models)

        def describe(rank: int) -> str:
            name, step, _ = cycle[rank]["waits"]
            number = order.index(name) + 1 if name in order else 0
            return f"rank {rank} waits for the gradients of model {number} in its step {step}"

        reason = (
            f"the ranks wait for each other: {'; '.join(map(describe, sorted(cycle)))}, and "
            "hold back their own. Something that waits for gradients between backward() and "
            "optimizer.step(), such as listing parameters, was done on some ranks only or in "
            "another order: do it on all ranks alike, or after optimizer.step()"
        )
        self._fail(reason)

    def _fail(self, reason: str) -> None:
        for _, on_deadlock in list(self._models.values()):
            on_deadlock(reason)


def find_cycle(
    samples: list[dict[int, dict[str, Any]]], own: int
) -> dict[int, dict[str, Any]] | None:
    """Return the ranks of a certain cycle with a rank in it, and their reports; None if there is
    none."""
    if len(samples) < 3:
        return None
    first, second, third = samples
    unchanged = {
        rank: report
        for rank, report in third.items()
        if rank in first
        and first[rank]["number"] == second[rank]["number"] == report["number"]
        and second[rank]["count"] < report["count"]
    }
    reached_from: dict[int, int] = {}
    frontier = [own] if own in unchanged else []
    while frontier:
        rank = frontier.pop()
        for other in _blockers_of(unchanged, rank):
            if other not in reached_from:
                reached_from[other] = rank
                if other == own:
                    return _cycle_path(unchanged, reached_from, own)
                frontier.append(other)
    return None


def _blockers_of(reports: Mapping[int, dict[str, Any]], rank: int) -> list[int]:
    """Return the ranks that have not submitted what a rank waits for."""
    model, step, needed = reports[rank]["waits"]
    found = []
    for other, report in reports.items():
        at, missing = report["models"].get(model, (step, []))
        wanted = missing if needed is None else set(missing).intersection(needed)
        if other != rank and (at < step or (at == step and wanted)):
            found.append(other)
    return found


def _cycle_path(
    reports: dict[int, dict[str, Any]], reached_from: dict[int, int], own: int
) -> dict[int, dict[str, Any]]:
    path = {own: reports[own]}
    rank = reached_from[own]
    while rank != own:
        path[rank] = reports[rank]
        rank = reached_from[rank]
    return path
