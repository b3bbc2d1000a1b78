"""Reports that a rank has reached the drawn moment, and waits until the fault is there.

The rank writes the file `reached`; whoever runs the ranks injects the fault and writes `acted`.
An exception is raised here, in the thread that reached the moment.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradlane.training.rendezvous.wait_notifier import WAIT_NOTIFIER
from tests.faults.scenario import JOINING, PREPARING

_WAIT_S = 60.0
_POLL_S = 0.002
EXIT = 3
"""Status of a program that ends itself."""
LATE = "late"
"""In the file `reached` where the program did not come by the moment."""


class UserError(Exception):
    """Raised by the training program itself."""


class Trigger:
    """The drawn moment as one rank's program sees it; does nothing on ranks that do not announce.

    Attributes:
        step: the training step that the program is in.
        is_drawn: whether there is a fault in this run, on any rank.
    """

    def __init__(self, folder: Path, job: dict[str, Any], rank: int) -> None:
        """Take the moment from the scenario of a job, where it has one.

        Args:
            folder: for `reached` and `acted`.
            job: `scenario`, as JSON or None.
            rank: this rank.
        """
        scenario = job["scenario"]
        self.step = 0
        self.is_drawn = scenario is not None
        self._folder = folder
        self._rank = rank
        self._is_armed = scenario is not None and scenario["announcer"] == rank
        self._scenario = scenario or {}
        self._word = ""
        self._lock = threading.Lock()

    def reach(self, moment: str) -> None:
        """Report that the program is at a moment, where that is the drawn one."""
        if self._is_armed and moment == self._scenario["moment"] and self._is_due():
            self._fire()

    def pass_by(self) -> None:
        """Report the moment two steps after it was due: the program did not come by it."""
        if self._is_armed and 0 < self._scenario["step"] < self.step - 1:
            self._word = LATE
            self._fire()

    def _is_due(self) -> bool:
        early = ("start", "rendezvous", "connecting", "restore", *PREPARING, *JOINING)
        return self._scenario["moment"] in early or self.step >= self._scenario["step"]

    def _fire(self) -> None:
        with self._lock:
            if not self._is_armed:
                return
            self._is_armed = False
        delay_ms = self._scenario["delay_ms"]
        if delay_ms is not None:
            timer = threading.Timer(delay_ms / 1e3, self._announce)
            timer.daemon = True
            timer.start()
            return
        self._announce()
        if self._scenario["fault"] == "raise":
            raise UserError(f"raised at {self._scenario['moment']}")
        if self._scenario["fault"] == "exit":
            sys.exit(EXIT)
        deadline_s = time.monotonic() + _WAIT_S
        while not (self._folder / "acted").exists() and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _announce(self) -> None:
        whole = self._folder / ".reached"
        whole.write_text(self._word)
        whole.rename(self._folder / "reached")

    def watch(self) -> None:
        """Reach the moments of waits, updates and files of checkpoints, wherever they occur."""
        if not self._is_armed:
            return
        moment = self._scenario["moment"]
        if moment in ("waiting", "broadcast"):
            WAIT_NOTIFIER.add_observer(self)
        if moment == "update":
            module: Any = importlib.import_module("torch.optim.sgd")
            module.sgd = self._before(module.sgd)
        if moment == "checkpoint" and self._scenario["fault"] != "raise":
            count = iter(range(1 << 30))
            for name in ("fsync", "replace"):
                setattr(os, name, self._around_file(getattr(os, name), count))

    def wait_begins(self) -> None:
        """Note that a wait for other ranks begins."""
        self.reach("waiting")

    def wait_ends(self) -> None:
        """Note that a tensor's result is here, while others are still on their way."""
        self.reach("broadcast")

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def update(*arguments: Any, **options: Any) -> Any:
            self.reach("update")
            return function(*arguments, **options)

        return update

    def _around_file(self, function: Callable[..., Any], count: Any) -> Callable[..., Any]:
        # Those of a shard; rank 0 writes a manifest, too.
        operations = 7 if self._rank == 0 else 3

        def operate(*arguments: Any, **options: Any) -> Any:
            number = -1
            if self._is_armed and self.step >= self._scenario["step"]:
                number = next(count)
            if number == self._scenario["call"]:
                self.reach("checkpoint")
            result = function(*arguments, **options)
            if number + operations == self._scenario["call"]:
                self.reach("checkpoint")
            return result

        return operate

    def module(self) -> nn.Module:
        """Return a layer that changes nothing and reaches the moments of forward and backward."""
        return _Layer(self)


class _Layer(nn.Module):
    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self._trigger = trigger

    def forward(self, values: Tensor) -> Tensor:
        self._trigger.reach("forward")
        result: Tensor = _Identity.apply(values, self._trigger)
        return result


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, trigger: Trigger) -> Tensor:
        context.trigger = trigger
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context.trigger.reach("backward")
        return gradient, None
