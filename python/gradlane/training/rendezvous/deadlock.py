"""Finds out when ranks wait for each other for ever, each for what another one holds back.

With several models in a session a rank can wait for one model's gradients while the others wait for
another model's: something that waits was done on some ranks only, or in another order. Nobody is
dead or silent then, and only the progress timeout would tell. So a thread looks at waits that last,
tells the other ranks through the rendezvous store what this rank waits for and what it still holds
back, and looks for a circle.

A circle is reported only if all its ranks were in the same waits at one moment: everybody repeats
its word as long as the wait lasts, and counts. Whoever reads all words, reads them again, and then
sees every count go on knows that all were waiting at the second reading. Nothing rests on how fast
a network is: a rank that has handed over what another one waits for is in nobody's way.
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

_TICK_S = 0.5


class Watched(Protocol):
    """A model's exchange as this file sees it."""

    step: int

    def held_back(self) -> list[int]:
        """Numbers of the tensors that were not handed over in the current step."""


@dataclass(frozen=True)
class _Wait:
    number: int
    model: str
    step: int
    needed: tuple[int, ...] | None


class DeadlockDetector:
    """The watch of one session."""

    def __init__(self, store: BoundedStore, place: RankInfo) -> None:
        """Watch nothing yet; the thread starts with the second model.

        Args:
            store: the rendezvous store.
            place: this rank's.
        """
        self._whole_store = store
        self._place = place
        self.belong_to(str(place.restart))
        self._models: dict[str, tuple[Watched, Callable[[str], None]]] = {}
        self._numbers = itertools.count(1)
        self._wait: _Wait | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def belong_to(self, start: str) -> None:
        """Look for the other ranks' words among those of this start alone, before any model."""
        self._store = self._whole_store.under(f"gradlane/{self._place.job}/{start}/standstill")

    def add(self, name: str, model: Watched, give_up: Callable[[str], None]) -> None:
        """Watch a model.

        Args:
            name: the same on every rank.
            model: its exchange.
            give_up: called with the reason, in the thread of the watch.
        """
        self._models[name] = (model, give_up)
        if len(self._models) > 1 and self._thread is None and self._place.world_size > 1:
            self._thread = threading.Thread(target=self._run, name="gradlane-watch", daemon=True)
            self._thread.start()

    def remove(self, name: str) -> None:
        """Watch a model no longer."""
        self._models.pop(name, None)

    def close(self) -> None:
        """Stop."""
        self._closing.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @contextlib.contextmanager
    def waiting(self, name: str, step: int, needed: list[int] | None) -> Iterator[None]:
        """Note that this rank waits for tensors of a step, or for all of them."""
        before = self._wait
        self._wait = _Wait(
            next(self._numbers), name, step, None if needed is None else tuple(needed)
        )
        try:
            yield
        finally:
            self._wait = before

    def _run(self) -> None:
        last: _Wait | None = None
        count = 0
        readings: list[dict[int, dict[str, Any]]] = []
        while not self._closing.wait(_TICK_S):
            wait = self._wait
            if wait is None or wait is not last:
                last, readings = wait, []
                continue
            count += 1
            # A store that is gone ends the session in other ways.
            with contextlib.suppress(RendezvousError):
                word = json.dumps(self._word(wait, count))
                if self._wait is not wait:
                    # The wait has ended while the word was written: it may be half of the next.
                    continue
                self._store.set(str(self._place.rank), word, look=self._raise_if_closing)
                readings = [*readings[-2:], self._read()]
            circle = _circle(readings, self._place.rank)
            if circle and wait is self._wait:
                self._give_up(circle)
                return

    def _word(self, wait: _Wait, count: int) -> dict[str, Any]:
        models = {
            name: [model.step, model.held_back()] for name, (model, _) in list(self._models.items())
        }
        needed = None if wait.needed is None else list(wait.needed)
        return {
            "number": wait.number,
            "count": count,
            "waits": [wait.model, wait.step, needed],
            "models": models,
        }

    def _read(self) -> dict[int, dict[str, Any]]:
        said = {
            rank: self._store.read(str(rank), look=self._raise_if_closing)
            for rank in range(self._place.world_size)
        }
        return {rank: json.loads(word) for rank, word in said.items() if word is not None}

    def _raise_if_closing(self) -> None:
        """Leave a store that does not answer: whoever closes waits for the thread."""
        if self._closing.is_set():
            raise RendezvousError("the session ends")

    def _give_up(self, circle: dict[int, dict[str, Any]]) -> None:
        order = list(self._models)

        def told(rank: int) -> str:
            name, step, _ = circle[rank]["waits"]
            number = order.index(name) + 1 if name in order else 0
            return f"rank {rank} waits for the gradients of model {number} in its step {step}"

        reason = (
            f"the ranks wait for each other: {'; '.join(map(told, sorted(circle)))}, and hold back "
            "their own. Something that waits for gradients between backward() and "
            "optimizer.step(), such as listing parameters, was done on some ranks only or in "
            "another order: do it on all ranks alike, or after optimizer.step()"
        )
        for _, give_up in list(self._models.values()):
            give_up(reason)


def _circle(
    readings: list[dict[int, dict[str, Any]]], own: int
) -> dict[int, dict[str, Any]] | None:
    """Return the ranks of a circle that a rank is in, and their words, if there is one for sure."""
    if len(readings) < 3:
        return None
    first, second, third = readings
    still = {
        rank: word
        for rank, word in third.items()
        if rank in first
        and first[rank]["number"] == second[rank]["number"] == word["number"]
        and second[rank]["count"] < word["count"]
    }
    reached: dict[int, int] = {}
    frontier = [own] if own in still else []
    while frontier:
        rank = frontier.pop()
        for other in _hindered_by(still, rank):
            if other not in reached:
                reached[other] = rank
                if other == own:
                    return _path(still, reached, own)
                frontier.append(other)
    return None


def _hindered_by(words: Mapping[int, dict[str, Any]], rank: int) -> list[int]:
    """Ranks that have not handed over what a rank waits for."""
    model, step, needed = words[rank]["waits"]
    found = []
    for other, word in words.items():
        at, missing = word["models"].get(model, (step, []))
        wanted = missing if needed is None else set(missing).intersection(needed)
        if other != rank and (at < step or (at == step and wanted)):
            found.append(other)
    return found


def _path(
    words: dict[int, dict[str, Any]], reached: dict[int, int], own: int
) -> dict[int, dict[str, Any]]:
    path = {own: words[own]}
    rank = reached[own]
    while rank != own:
        path[rank] = words[rank]
        rank = reached[rank]
    return path
