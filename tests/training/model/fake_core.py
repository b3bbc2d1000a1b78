"""An in-process double of the compiled core: ranks are threads, reduction is done in memory.

It keeps the core's contract where tests can see it: results are means in rank order, they land in
the memory that was lent, steps follow one another, and a failed channel raises. A tensor becomes
ready when the last rank has spoken about it; `hold` delays that until a test says otherwise.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from gradlane._core import SquareSum
from gradlane.training import core
from gradlane.training.core import CoreRow

_TORCH_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f64": torch.float64,
    "u8": torch.uint8,
}


_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


class ChannelError(Exception):
    """A failed channel: (message, last complete step, rank at fault)."""


class ChannelTimeout(ChannelError):  # noqa: N818
    """No progress in time."""


def view_memory(pointer: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over memory at an address."""
    buffer = (ctypes.c_char * nbytes).from_address(pointer)
    raw = torch.from_numpy(np.frombuffer(memoryview(buffer), dtype=np.uint8))
    return raw.view(dtype)


@dataclass
class Lent:
    """Memory that a rank lent for a tensor in a step, and what was in it."""

    pointer: int
    nbytes: int
    values: torch.Tensor | None


@dataclass
class Round:
    """One step."""

    lent: dict[int, dict[int, Lent]] = field(default_factory=dict)
    ready: dict[int, bool] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    landed: dict[int, set[int]] = field(default_factory=dict)
    taken: dict[int, set[int]] = field(default_factory=dict)


class World:
    """What all ranks' channels of one job share."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.changed = threading.Condition()
        self.rounds: dict[int, Round] = {}
        self.joined: set[int] = set()
        self.finished: set[int] = set()
        self.failure: tuple[str, int | None, int | None] | None = None
        self.timed_out = False
        self.held: set[int] = set()
        self.rows: dict[int, dict[int, dict[str, Any]]] = {}
        self.state: dict[tuple[int, str], torch.Tensor] = {}
        self.reads: dict[int, tuple[str, int]] = {}
        self.parameters: dict[tuple[int, int], tuple[int, int]] = {}
        self.results: dict[tuple[int, int], torch.Tensor] = {}
        self.priorities: list[list[int]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.goes_on = False
        self.tears = False
        """Whether the first half of a mean is over a lost rank, too, if that has contributed."""
        self.lost: set[int] = set()
        self.steps: dict[int, int] = {}
        self.changes: list[tuple[str, int, list[int], int, str]] = []
        self.change_steps: list[int] = []
        """By change, the latest step of those that are left."""
        self.claims = False
        """Whether half of the ranks has asked the job's store and was not answered yet."""
        self.used: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        """The ranks that the two halves of each mean are over, by step and tensor."""

    @property
    def world_size(self) -> int:
        return int(self.plan["world_size"])

    def round(self, step: int) -> Round:
        return self.rounds.setdefault(step, Round())

    def dtype(self, tensor: int) -> torch.dtype:
        return _TORCH_DTYPES[self.plan["tensors"][tensor]["dtype"]]

    def members(self, step: int) -> list[int]:
        tensors = self.plan["tensors"]
        return [
            index
            for index, tensor in enumerate(tensors)
            if (not self.gathers(index) if step == 0 else tensor["role"] == "parameter")
        ]

    def gathers(self, tensor: int) -> bool:
        return bool(self.plan["tensors"][tensor].get("scheme") == "gather")

    @property
    def alive(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.lost]

    @property
    def latest_step(self) -> int:
        """The latest step that a rank which is left has begun."""
        return max(self.steps[rank] for rank in self.alive)

    def lose(self, rank: int, reason: str) -> None:
        """Go on without a rank; half of a world asks the job's store first."""
        with self.changed:
            before = len(self.alive)
            self.lost.add(rank)
            if not self.alive:
                return
            change = self.next_members(reason)
            if 2 * len(self.alive) == before:
                self.claims = True
                self.tell("claim", change[0], [], 0, str(change[1]))
            else:
                self.tell("members", *change)

    def tell(self, kind: str, *change: Any) -> None:
        """Tell all that are left of a change."""
        self.changes.append((kind, *change))
        self.change_steps.append(self.latest_step)
        self.settle()
        self.changed.notify_all()

    def next_members(self, reason: str) -> tuple[int, list[int], int, str]:
        generation = 1 + sum(kind == "members" for kind, *_ in self.changes)
        return generation, self.alive, self.latest_step, reason

    def settle(self) -> None:
        for step in list(self.rounds):
            for tensor in self.members(step):
                self.land(step, tensor)

    def lend(self, rank: int, step: int, tensor: int, lent: Lent) -> None:
        with self.changed:
            mine = self.round(step).lent.setdefault(tensor, {})
            assert rank not in mine, f"tensor {tensor} twice in step {step} on rank {rank}"
            mine[rank] = lent
            self.land(step, tensor)
            self.changed.notify_all()

    def release(self, *tensors: int) -> None:
        """Let held tensors become ready."""
        with self.changed:
            self.held -= set(tensors)
            for step in list(self.rounds):
                for tensor in tensors:
                    self.land(step, tensor)
            self.changed.notify_all()

    def land(self, step: int, tensor: int) -> None:
        """Write a tensor's result wherever it can be written by now."""
        current = self.round(step)
        lent = current.lent.get(tensor, {})
        held = self.claims or (step > 0 and tensor in self.held)
        if held or any(rank not in lent for rank in self.alive):
            return
        serves = self.serves(step, tensor)
        if tensor not in current.ready:
            current.ready[tensor] = all(one.values is None for one in lent.values())
            if self.gathers(tensor):
                current.landed[tensor] = set(lent)
                return
            if not current.ready[tensor]:
                mean = self.mean(step, tensor, lent)
                self.results[(step, tensor)] = self.updated(step, tensor, mean) if serves else mean
        landed = current.landed.setdefault(tensor, set())
        for rank, one in lent.items():
            if rank in landed or rank in self.lost or (serves and rank not in current.ended):
                continue
            landed.add(rank)
            if not current.ready[tensor]:
                pointer, nbytes = (one.pointer, one.nbytes)
                if serves:
                    pointer, nbytes = self.parameters[(rank, tensor)]
                target = view_memory(pointer, nbytes, self.dtype(tensor))
                target.copy_(self.results[(step, tensor)])

    def mean(self, step: int, tensor: int, lent: dict[int, Lent]) -> torch.Tensor:
        if step == 0:
            values = lent[0].values
            assert values is not None
            return values
        status = "statuses" in self.plan["tensors"][tensor]["name"]
        before = sorted(lent) if self.tears and not status else self.alive
        self.used[(step, tensor)] = (before, self.alive)
        first, second = (self.mean_over(ranks, tensor, lent) for ranks in (before, self.alive))
        half = len(first) // 2
        return torch.cat([first[:half], second[half:]])

    def serves(self, step: int, tensor: int) -> bool:
        """Whether servers update a tensor; buffers, of f64, are averaged."""
        is_gradient = step > 0 and self.dtype(tensor) is not torch.float64
        return is_gradient and self.plan["update"] == "server"

    def mean_over(self, ranks: list[int], tensor: int, lent: dict[int, Lent]) -> torch.Tensor:
        dtype = self.dtype(tensor)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        total: torch.Tensor | None = None
        for rank in ranks:
            values = lent[rank].values
            term = torch.zeros(lent[rank].nbytes // dtype.itemsize, dtype=wide, device="cpu")
            if values is not None:
                term = values.to(wide)
            total = term if total is None else total + term
        assert total is not None
        return (total / len(ranks)).to(dtype)

    def updated(self, step: int, tensor: int, mean: torch.Tensor) -> torch.Tensor:
        if step in self.reads:
            return self.read(tensor, *self.reads[step])
        row = self.rows[step][tensor]
        pointer, nbytes = self.parameters[(0, tensor)]
        parameter = view_memory(pointer, nbytes, self.dtype(tensor)).clone()
        if row["kind"] == "adam":
            return self.adam(tensor, row, parameter, mean)
        momentum = self.state.get((tensor, "momentum_buffer"))
        buffers = [momentum]
        sgd(
            [parameter],
            [mean],
            buffers,
            foreach=False,
            **{key: row[key] for key in row if key not in ("kind", "tensors", "steps")},
        )
        if row["momentum"]:
            assert buffers[0] is not None
            self.state[(tensor, "momentum_buffer")] = buffers[0].clone()
        return parameter

    def adam(
        self, tensor: int, row: dict[str, Any], parameter: torch.Tensor, mean: torch.Tensor
    ) -> torch.Tensor:
        steps = row["steps"][row["tensors"].index(tensor)]
        if steps == 0:
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[(tensor, name)] = torch.zeros_like(parameter)
        settings = {key: row[key] for key in row if key not in ("kind", "tensors", "steps")}
        kernel: Any = adam
        if "decoupled_weight_decay" not in inspect.signature(adam).parameters:
            # Torch 2.4: decoupled is the other function's.
            kernel = adamw if settings.pop("decoupled_weight_decay") else adam
        kernel(
            [parameter],
            [mean],
            [self.state[(tensor, "exp_avg")]],
            [self.state[(tensor, "exp_avg_sq")]],
            [],
            [torch.tensor(float(steps))],
            foreach=False,
            amsgrad=False,
            **settings,
        )
        return parameter

    def read(self, tensor: int, name: str, part: int) -> torch.Tensor:
        """State as it travels: whole in tensors of four bytes, in halves in those of two."""
        words = self.state[(tensor, name)].float().view(torch.int32)
        dtype = self.dtype(tensor)
        if dtype.itemsize == 4:
            return words.view(dtype)
        return words.view(torch.int16)[part::2].contiguous().view(dtype)

    def fail(
        self, message: str, rank: int | None, last: int | None = None, timed_out: bool = False
    ) -> None:
        with self.changed:
            if self.failure is None:
                self.failure = (message, last, rank)
                self.timed_out = timed_out
            self.changed.notify_all()


class FakeListener:
    def __init__(self, host: str, port_low: int, port_high: int) -> None:
        self.port = port_low or 1

    def close(self) -> None:
        pass


class FakeBlocks:
    """All ranks' blocks of a tensor in a step."""

    def __init__(self, rank: int, lent: list[Lent]) -> None:
        self._rank = rank
        self._lent = lent

    def regions(self) -> list[tuple[int, int] | None]:
        regions: list[tuple[int, int] | None] = []
        for rank, one in enumerate(self._lent):
            if one.values is None:
                regions.append(None)
            else:
                regions.append((0 if rank == self._rank else one.values.data_ptr(), one.nbytes))
        return regions

    def release(self) -> None:
        self._lent = []


class FakeChannel:
    """One rank's end."""

    def __init__(self, world: World, rank: int, timeout_s: float) -> None:
        self.world = world
        self.rank = rank
        self.timeout_s = timeout_s
        self.step = -1
        self.own_failure: str | None = None
        self.measured = (0, -1)
        self.added_to: core.SquareSum | None = None
        self.changes_seen = 0
        self.changes_noted = 0
        with world.changed:
            world.joined.add(rank)
            world.changed.notify_all()
            self._wait_for(lambda: len(world.joined) == world.world_size)

    def _wait_for(self, condition: Any) -> None:
        deadline = self.timeout_s
        if not self.world.changed.wait_for(
            lambda: condition() or self.world.failure is not None, deadline
        ):
            raise ChannelTimeout("no progress; tensors outstanding", self.step - 1, None)
        if not condition():
            self._check()

    def _check(self) -> None:
        if self.world.failure is not None:
            kind = ChannelTimeout if self.world.timed_out else ChannelError
            raise kind(*self.world.failure)

    def _complete(self, step: int) -> bool:
        return all(
            self.rank in self.world.round(step).landed.get(tensor, ())
            for tensor in self.world.members(step)
        )

    def step_begin(self, step: int) -> None:
        self._check()
        assert step == self.step + 1, (step, self.step)
        assert step == 0 or self._complete(step - 1)
        with self.world.changed:
            self._wait_for(lambda: self._has_noted_changes_before(step - 1))
        self.step = step
        self.world.steps[self.rank] = step
        self.world.rounds.pop(step - 3, None)

    def step_pass(self, step: int) -> None:
        raise NotImplementedError("real ranks do that")

    def step_barrier(self, step: int) -> None:
        raise NotImplementedError("real ranks do that")

    def wait_decided(self, step: int) -> None:
        raise NotImplementedError("real ranks do that")

    def participation(self, step: int) -> tuple[bool | None, bool, int]:
        raise NotImplementedError("real ranks do that")

    def gradient_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        self._check()
        assert step == self.step
        self.world.calls.append((self.rank, "gradient_ready", step, tensor))
        values = view_memory(pointer, nbytes, self.world.dtype(tensor)).clone()
        self.world.lend(self.rank, step, tensor, Lent(pointer, nbytes, values))

    def tensor_absent(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        self._check()
        assert step == self.step
        self.world.calls.append((self.rank, "tensor_absent", step, tensor))
        self.world.lend(self.rank, step, tensor, Lent(pointer, nbytes, None))

    def block_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        self._check()
        assert step == self.step and self.world.gathers(tensor)
        self.world.calls.append((self.rank, "block_ready", step, tensor))
        values = view_memory(pointer, nbytes, torch.uint8).clone() if nbytes else torch.empty(0)
        self.world.lend(self.rank, step, tensor, Lent(pointer, nbytes, values))

    def block_absent(self, tensor: int, step: int) -> None:
        self._check()
        assert step == self.step and self.world.gathers(tensor)
        self.world.calls.append((self.rank, "block_absent", step, tensor))
        self.world.lend(self.rank, step, tensor, Lent(0, 0, None))

    def root_result_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        raise NotImplementedError("real ranks do that")

    def next_root_requests(self, *, wait: bool = True) -> list[tuple[int, int]]:
        raise NotImplementedError("real ranks do that")

    def next_changes(self, *, wait: bool = True) -> list[tuple[str, int, list[int], int, str]]:
        world = self.world
        with world.changed:
            # Whoever asks for more has noted what it was told before.
            self.changes_noted = self.changes_seen
            world.changed.notify_all()
            world.changed.wait_for(lambda: len(world.changes) > self.changes_seen or self.is_over())
            rows = world.changes[self.changes_seen :]
            self.changes_seen += len(rows)
            if not rows or self.rank in world.lost:
                raise ChannelError("the session is over", self.step, None)
            return rows

    def _has_noted_changes_before(self, step: int) -> bool:
        """Steps of a test take less time than a thread to wake up; those of a training do not."""
        return all(made >= step for made in self.world.change_steps[self.changes_noted :])

    def is_over(self) -> bool:
        world = self.world
        return bool(world.failure) or self.rank in world.finished or self.rank in world.lost

    def answer_claim(self, generation: int, text: str | None) -> None:
        if text != str(self.world.alive):
            self.world.fail(f"the other half may go on: the store holds {text}", None)
            return
        with self.world.changed:
            if not self.world.alive:
                return
            self.world.claims = False
            self.world.tell("members", *self.world.next_members("claimed"))

    def take_blocks(self, tensor: int, step: int) -> FakeBlocks | None:
        self._check()
        lent = self.world.round(step).lent[tensor]
        return FakeBlocks(self.rank, [lent[rank] for rank in range(self.world.world_size)])

    def set_parameter(self, tensor: int, pointer: int, nbytes: int) -> None:
        self.world.parameters[(self.rank, tensor)] = (pointer, nbytes)

    def set_optimizer(self, step: int, rows_json: str) -> None:
        assert step == self.step
        rows = json.loads(rows_json)
        self.world.rows[step] = {tensor: row for row in rows for tensor in row["tensors"]}

    def read_state(self, name: str, part: int) -> None:
        self._check()
        assert self.world.reads.setdefault(self.step, (name, part)) == (name, part)

    def write_state(self, name: str, part: int, clear: bool) -> None:
        raise AssertionError("no rank of the double only serves")

    def write_parameters(self, tensors: list[int]) -> None:
        raise AssertionError("no rank of the double only serves")

    def send_raw(self, step: int) -> None:
        self._check()

    def has_measurable_squares(self, tensors: int) -> bool:
        return not (self.world.plan["update"] == "server" or self.world.goes_on)

    def measure_squares(self, tensors: int, step: int) -> None:
        self._check()
        assert step == self.step and not self.world.round(step).ready
        self.measured = (tensors, step)
        self.added_to = None

    def wait_norm(self, step: int, blocks: core.SquareSum | None = None) -> float:
        count, measured = self.measured
        assert step == measured
        measured_ones = [one for one in self.world.members(step) if one < count]
        tensors = [tensor for tensor in measured_ones if not self.world.gathers(tensor)]
        assert (len(tensors) < len(measured_ones)) == (blocks is not None)
        with self.world.changed:
            lent, ranks = self.world.round(step).lent, self.world.world_size
            self._wait_for(lambda: all(len(lent.get(tensor, ())) == ranks for tensor in tensors))
            means = [
                self.world.mean(step, tensor, lent[tensor])
                for tensor in tensors
                if any(one.values is not None for one in lent[tensor].values())
            ]
        squares: core.SquareSum = SquareSum() if blocks is None else blocks
        # Sums cannot be copied: that of the blocks takes the others, once.
        for mean in means if squares is not self.added_to else ():
            squares.add(_NAMES[mean.dtype], mean.data_ptr(), mean.nbytes)
        self.added_to = blocks
        return squares.root()

    def residual_squares(
        self, first: int, elements_max: int
    ) -> tuple[list[tuple[int, int, float]], int]:
        return [], 0

    def copy_worker_residual(self, tensor: int, pointer: int, count: int) -> None:
        raise AssertionError("nothing is encoded here, so nothing is kept of it")

    def clear_state(self) -> None:
        self._check()
        self.world.state.clear()

    def load_state(self, tensor: int, name: str, pointer: int, count: int) -> None:
        self._check()
        values = view_memory(pointer, 4 * count, torch.float32).clone()
        self.world.state[(tensor, name)] = values.to(self.world.dtype(tensor))

    def step_end(self, step: int) -> None:
        self._check()
        with self.world.changed:
            current = self.world.round(step)
            current.ended.add(self.rank)
            for tensor in self.world.members(step):
                self.world.land(step, tensor)
            self.world.changed.notify_all()

    def needed(self, tensor: int, step: int) -> None:
        pass

    def wait(self, tensors: list[int], step: int) -> None:
        assert step == self.step
        self.world.calls.append((self.rank, "wait", step, tuple(tensors)))
        with self.world.changed:
            landed = self.world.round(step).landed
            self._wait_for(lambda: all(self.rank in landed.get(one, ()) for one in tensors))

    def wait_step(self, step: int) -> None:
        self.world.calls.append((self.rank, "wait_step", step))
        with self.world.changed:
            self._wait_for(lambda: self._complete(step))

    def is_ready(self, tensor: int, step: int) -> bool:
        self._check()
        return self.rank in self.world.round(step).landed.get(tensor, ())

    def take_ready(self, step: int) -> list[tuple[int, bool]]:
        with self.world.changed:
            current = self.world.round(step)
            taken = current.taken.setdefault(self.rank, set())
            ready = [
                (tensor, current.ready[tensor])
                for tensor, ranks in current.landed.items()
                if self.rank in ranks and tensor not in taken
            ]
            taken.update(tensor for tensor, _ in ready)
            return ready

    def next_ready(self, step: int) -> list[tuple[int, bool]]:
        with self.world.changed:
            taken: list[tuple[int, bool]] = []

            def found() -> bool:
                taken.extend(self.take_ready(step))
                return bool(taken)

            self._wait_for(found)
            return taken

    def all_connected(self) -> None:
        """Nothing is checked here."""

    def switch_priorities(self, priorities: list[int]) -> None:
        assert self.rank == 0
        assert len(priorities) == len(self.world.plan["tensors"])
        self.world.priorities.append(priorities)

    def metrics_json(self) -> str:
        return json.dumps({"tx_bytes": 1, "rx_bytes": 2})

    def waited_ns(self) -> int:
        return 0

    def take_trace(self) -> list[tuple[int, str, int, int, int, int, int, int]]:
        return []

    def take_timeline(self) -> tuple[list[CoreRow], int]:
        return [], 0

    def failure(self) -> str | None:
        return self.world.failure[0] if self.world.failure else None

    def finish(self, timeout_s: float) -> None:
        with self.world.changed:
            self.world.finished.add(self.rank)
            self.world.changed.notify_all()
            self._wait_for(lambda: self.world.finished.issuperset(self.world.alive))

    def abort(self, reason: str) -> None:
        if self.world.goes_on:
            self.world.lose(self.rank, f"rank {self.rank} gave up: {reason}")
            return
        self.world.fail(f"rank {self.rank} gave up: {reason}", self.rank, max(self.step - 1, 0))

    def forget_in_child(self) -> None:
        pass


class FakeCore:
    """Stands in for the module `gradlane._core`; shared by the threads of one test."""

    SquareSum = SquareSum

    Listener: Any = FakeListener
    Pulse: Any = None
    ChannelError = ChannelError
    ChannelTimeout = ChannelTimeout

    def __init__(self, timeout_s: float = 20.0, *, tears: bool = False) -> None:
        self.worlds: dict[str, World] = {}
        self.tears = tears
        self.timeout_s = timeout_s
        self._lock = threading.Lock()

    @staticmethod
    def plan_json(
        tensors_json: str,
        strategy: str,
        slice_elems: int | None,
        seed: int,
        update: str,
        world_size: int,
        *,
        stragglers_json: str | None = None,
        servers: int | None = None,
        workers: int | None = None,
    ) -> str:
        assert stragglers_json is None and servers is None and workers is None, "real ranks do that"
        return json.dumps(
            {
                "tensors": json.loads(tensors_json),
                "strategy": strategy,
                "slice_elems": slice_elems,
                "seed": seed,
                "update": update,
                "world_size": world_size,
            }
        )

    def Channel(  # noqa: N802
        self,
        listener: Any,
        options_json: str,
        plan_json: str,
        peers: list[str],
        secret: bytes,
    ) -> FakeChannel:
        options = json.loads(options_json)
        assert len(peers) == options["world_size"]
        with self._lock:
            world = self.worlds.setdefault(options["job"], World(json.loads(plan_json)))
            world.goes_on, world.tears = "going_on" in options, self.tears
        return FakeChannel(world, options["rank"], self.timeout_s)

    @property
    def world(self) -> World:
        """The only world of a test."""
        (world,) = self.worlds.values()
        return world
