"""The compiled core, whose calls are noted and whose results land when a test lets them.

What a rank lends goes to the core as a copy, and a result is copied to the rank's own memory as it
lands. So a test needs neither timers nor luck to look at memory before a result is there.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gradlane.training.core import load_core

LOOK_EVERY_S = 0.01


class Copy:
    """A copy of memory of a rank's."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.own = pointer
        self.bytes = np.empty(nbytes, np.uint8)
        self.pointer = self.bytes.ctypes.data
        self.refresh()

    def refresh(self) -> None:
        """Copy what the rank has."""
        ctypes.memmove(self.pointer, self.own, self.bytes.size)

    def land(self) -> None:
        """Copy to where the rank has it."""
        ctypes.memmove(self.own, self.pointer, self.bytes.size)


class HeldChannel:
    """One rank's end of the core: what is not said here is the real channel's."""

    def __init__(self, core: HeldCore, channel: Any, settings: Any, tensors: list[Any]) -> None:
        self.core, self.channel, self.settings, self.tensors = core, channel, settings, tensors
        self.rank: int = settings["rank"]
        self.members = [n for n, one in enumerate(tensors) if one["role"] == "parameter"]
        """Tensors of each step of training."""
        self.lent: dict[int, Copy] = {}
        """Copies of what has not landed, by tensor."""
        self._parameters: dict[int, Copy] = {}
        self._untold: dict[int, bool] = {}
        self._turn = threading.RLock()
        self.step = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def holds(self, tensor: int) -> bool:
        """Whether a tensor's result may not land."""
        return tensor in self.core.held

    def note(self, name: str, step: int, *of: Any) -> None:
        """Note a call."""
        self.core.calls.append((self.rank, name, step, *of))

    def land(self, tensors: list[int]) -> None:
        """Have results land that have arrived."""
        with self._turn:
            for tensor in tensors:
                lent = self.lent.pop(tensor, None)
                if lent is not None:
                    self._parameters.get(tensor, lent).land()

    def lend(self, tensor: int, step: int, pointer: int, nbytes: int) -> int:
        """Return the address of what is lent to the core; step 0 is never held."""
        if step == 0 or nbytes == 0:
            return pointer
        assert pointer, "memory that is on no processor was lent"
        with self._turn:
            self.step = step
            lent = self.lent[tensor] = Copy(pointer, nbytes)
            if tensor in self._parameters:
                self._parameters[tensor].refresh()
        return lent.pointer

    def set_parameter(self, tensor: int, pointer: int, nbytes: int) -> None:
        self._parameters[tensor] = Copy(pointer, nbytes)
        self.channel.set_parameter(tensor, self._parameters[tensor].pointer, nbytes)

    def gradient_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        self.note("gradient_ready", step, tensor)
        lent = self.lend(tensor, step, pointer, nbytes)
        self.channel.gradient_ready(tensor, step, lent, nbytes)

    def tensor_absent(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        self.note("tensor_absent", step, tensor)
        lent = self.lend(tensor, step, pointer, nbytes)
        self.channel.tensor_absent(tensor, step, lent, nbytes)

    def block_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        self.note("block_ready", step, tensor)
        self.channel.block_ready(tensor, step, pointer, nbytes)

    def block_absent(self, tensor: int, step: int) -> None:
        self.note("block_absent", step, tensor)
        self.channel.block_absent(tensor, step)

    def switch_priorities(self, priorities: list[int]) -> None:
        self.core.priorities.append(priorities)
        self.channel.switch_priorities(priorities)

    def wait(self, tensors: list[int], step: int) -> None:
        self.note("wait", step, tuple(tensors))
        self._await_release(lambda: not any(map(self.holds, tensors)), step)
        self.channel.wait(tensors, step)
        self.land(tensors)

    def wait_step(self, step: int) -> None:
        self.note("wait_step", step)
        self._await_release(lambda: not any(map(self.holds, self.lent)), step)
        self.channel.wait_step(step)
        self.land(list(self.lent))

    def is_ready(self, tensor: int, step: int) -> bool:
        ready = self.channel.is_ready(tensor, step) and (not step or not self.holds(tensor))
        if ready:
            self.land([tensor])
        return ready

    def take_ready(self, step: int) -> list[tuple[int, bool]]:
        with self._turn:
            self._untold.update(self.channel.take_ready(step))
            told = [tensor for tensor in self._untold if not step or not self.holds(tensor)]
            self.land(told)
            return [(tensor, self._untold.pop(tensor)) for tensor in told]

    def arrive(self, tensors: list[int]) -> None:
        """Wait for the core to have what was lent of these."""
        self.channel.wait([tensor for tensor in tensors if tensor in self.lent], self.step)

    def _await_release(self, released: Callable[[], bool], step: int) -> None:
        while step and not released():
            # It raises once the session has failed.
            self.channel.is_ready(0, step)
            time.sleep(LOOK_EVERY_S)


class HeldCore:
    """Stands in for `gradlane._core`; shared by the ranks of a test."""

    channel_type: Any = HeldChannel

    def __init__(self) -> None:
        self._core: Any = load_core()
        self.held: set[int] = set()
        """Tensors whose results do not land."""
        self.calls: list[tuple[Any, ...]] = []
        """(rank, name, step, tensor or tensors) of submissions and waits."""
        self.priorities: list[list[int]] = []
        self.channels: list[HeldChannel] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def Channel(self, listener: Any, options: str, plan: str, *rest: Any) -> Any:  # noqa: N802
        channel = self._core.Channel(listener, options, plan, *rest)
        about = json.loads(options), json.loads(plan)["tensors"]
        self.channels.append(self.channel_type(self, channel, *about))
        return self.channels[-1]

    def release(self, *tensors: int) -> None:
        """Let held tensors land."""
        self.held = self.held - set(tensors)
