"""A double of the core that is as unhelpful as its contract allows, by a seed.

Memory that it was lent is overwritten with NaN at once. A result lands on a rank only when that
rank waits for it, or, drawn from the seed, along with others that it waits for. So whoever reads
too early, or reads memory that is not his, does not get away with it, and runs repeat exactly: what
lands when does not hang on which thread is faster.
"""

from __future__ import annotations

import ctypes
import json
import random
from typing import Any

import torch

from tests.training.model.fake_core import FakeChannel, FakeCore, Lent, Round, World, view_memory

_NAN_BYTE = 0xFF


class ReluctantWorld(World):
    """Knows all results, and lets them land nowhere by itself."""

    def land(self, step: int, tensor: int) -> None:
        """Let step 0 land; later results wait for someone who asks."""
        if step == 0:
            super().land(step, tensor)

    def is_complete(self, step: int, tensor: int) -> bool:
        """Whether every rank has spoken about a tensor."""
        return len(self.round(step).lent.get(tensor, {})) == self.world_size

    def land_on(self, rank: int, step: int, tensor: int) -> None:
        """Write a result for one rank."""
        current = self.round(step)
        landed = current.landed.setdefault(tensor, set())
        if rank in landed:
            return
        # The real core computes on threads of its own, whatever is in force in this one.
        with torch.inference_mode(False), torch.no_grad():
            self.write_result(current, rank, step, tensor)
        landed.add(rank)

    def write_result(self, current: Round, rank: int, step: int, tensor: int) -> None:
        """Compute a result, unless another rank has, and write it into one rank's memory."""
        lent = current.lent[tensor]
        serves = self.serves(step, tensor)
        if tensor not in current.ready:
            current.ready[tensor] = all(one.values is None for one in lent.values())
            if not (current.ready[tensor] or self.gathers(tensor)):
                mean = self.mean(step, tensor, lent)
                self.results[(step, tensor)] = self.updated(step, tensor, mean) if serves else mean
        if not (current.ready[tensor] or self.gathers(tensor)):
            pointer, nbytes = lent[rank].pointer, lent[rank].nbytes
            if serves:
                pointer, nbytes = self.parameters[(rank, tensor)]
            view_memory(pointer, nbytes, self.dtype(tensor)).copy_(self.results[(step, tensor)])


class ReluctantChannel(FakeChannel):
    """One rank's end."""

    world: ReluctantWorld

    def __init__(self, world: ReluctantWorld, rank: int, timeout_s: float, seed: int) -> None:
        super().__init__(world, rank, timeout_s)
        self.random = random.Random(seed * 31 + rank)
        self.eagerness = self.random.choice((0.0, 0.3, 1.0))

    def gradient_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        self._check()
        assert step == self.step
        _check_memory(pointer, nbytes)
        values = view_memory(pointer, nbytes, self.world.dtype(tensor)).clone()
        if step > 0:
            ctypes.memset(pointer, _NAN_BYTE, nbytes)
        self.world.lend(self.rank, step, tensor, Lent(pointer, nbytes, values))

    def tensor_absent(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        self._check()
        assert step == self.step
        _check_memory(pointer, nbytes)
        ctypes.memset(pointer, _NAN_BYTE, nbytes)
        self.world.lend(self.rank, step, tensor, Lent(pointer, nbytes, None))

    def wait(self, tensors: list[int], step: int) -> None:
        assert step == self.step
        with self.world.changed:
            wanted = set(tensors)
            mine = self.world.round(step)
            if self.rank in mine.ended:
                # Nothing more is asked of this rank in this step, so the others will speak.
                others = [one for one in self.world.members(step) if one not in wanted]
                wanted.update(one for one in others if self.random.random() < self.eagerness)
            self._await(sorted(wanted), step)

    def wait_step(self, step: int) -> None:
        with self.world.changed:
            if step == 0:
                self._wait_for(lambda: self._complete(0))
            else:
                self._await(self.world.members(step), step)

    def is_ready(self, tensor: int, step: int) -> bool:
        with self.world.changed:
            return self.rank in self.world.round(step).landed.get(tensor, ())

    def needed(self, tensor: int, step: int) -> None:
        with self.world.changed:
            if self.world.is_complete(step, tensor):
                self.world.land_on(self.rank, step, tensor)

    def _await(self, tensors: list[int], step: int) -> None:
        self._wait_for(lambda: all(self.world.is_complete(step, one) for one in tensors))
        for tensor in tensors:
            self.world.land_on(self.rank, step, tensor)


def _check_memory(pointer: int, nbytes: int) -> None:
    """Fail where the compiled core would write to an address that is none."""
    if nbytes > 0 and pointer == 0:
        raise AssertionError("memory that is on no processor was lent")


class ReluctantCore(FakeCore):
    """Stands in for the compiled core; shared by the ranks of one loop."""

    def __init__(self, seed: int, timeout_s: float = 20.0) -> None:
        super().__init__(timeout_s)
        self.seed = seed

    def Channel(  # noqa: N802
        self, listener: Any, options_json: str, plan_json: str, peers: list[str], secret: bytes
    ) -> FakeChannel:
        options = json.loads(options_json)
        with self._lock:
            world = self.worlds.get(options["job"])
            if world is None:
                world = self.worlds[options["job"]] = ReluctantWorld(json.loads(plan_json))
        assert isinstance(world, ReluctantWorld)
        return ReluctantChannel(world, options["rank"], self.timeout_s, self.seed)
