"""A device whose copies take their time, for machines without one.

Copies to the host and back wait for a moment each, on two threads as on two streams of a device.
What a copy reads must stay as it was when the copy was asked for, and what was copied back must
stay in the host's memory until then: both are checked bit by bit. A difference fails whoever waits
for the copy, and the test at its end.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradlane.training.model.cuda_copies import CudaCopies
from gradlane.training.rendezvous.tensor_table import TensorEntry

PATIENCE_S = 30.0
OUT_S_MAX = 0.003
BACK_S_MAX = 0.01
"""The next gradient is there before the last mean is copied back."""


class SimulatedMark:
    """The end of a copy."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def synchronize(self) -> None:
        """Wait until the copy was made; raises what went wrong with it."""
        self._future.result(PATIENCE_S)


class SimulatedDevice(CudaCopies):
    """Copies of tensors that are in plain memory, as if they were on a device."""

    made: ClassVar[list[SimulatedDevice]] = []
    """All since the list was emptied."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(len(self.made))
        self._out, self._back = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._futures: list[Future[None]] = []
        self.copies = 0
        """How many were asked for."""
        self.made.append(self)

    def are_for(self, device: torch.device) -> bool:
        return True

    def host_memory(self, entry: TensorEntry) -> Tensor:
        host = torch.empty_strided(entry.tensor.shape, entry.stride, dtype=entry.tensor.dtype)
        # Whoever reads what was never copied shall see it.
        return host.fill_(float("nan")) if host.is_floating_point() else host

    def to_host(self, host: Tensor, gradient: Tensor, after: Any) -> Any:
        asked_for = gradient.clone()
        self.copies += 1

        def copy() -> None:
            if after is not None:
                after.synchronize()
            assert same(gradient, asked_for), "a gradient was written before it was copied"
            host.copy_(gradient)

        return self._later(self._out, OUT_S_MAX, copy)

    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
        self.copies += len(pairs)
        for gradient, host in pairs:
            gradient.copy_(host)
        returned = [(host, host.clone()) for _, host in pairs]

        def look() -> None:
            for host, before in returned:
                assert same(host, before), "memory was written before it was copied back"

        return self._later(self._back, BACK_S_MAX, look)

    def end(self) -> None:
        """Wait for all copies, and raise what was wrong with one of them."""
        self._out.shutdown()
        self._back.shutdown()
        for future in self._futures:
            future.result()

    def _later(
        self, stream: ThreadPoolExecutor, most_s: float, run: Callable[[], None]
    ) -> SimulatedMark:
        delay_s = self._random.uniform(0, most_s)

        def wait_and_run() -> None:
            time.sleep(delay_s)
            with torch.no_grad():
                run()

        self._futures.append(stream.submit(wait_and_run))
        return SimulatedMark(self._futures[-1])


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
