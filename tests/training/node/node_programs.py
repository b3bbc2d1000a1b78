"""Programs of four ranks on two emulated nodes; each function runs on every rank.

The nodes are this machine; the launcher's variables emulate them (`LOCAL_RANK`,
`LOCAL_WORLD_SIZE`).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import gradlane
from gradlane.planning.planner import plan_while_training
from gradlane.training.node import channel as node_channel
from gradlane.training.node import devices
from gradlane.training.node.leader import NodeLeader
from gradlane.training.options.options import keywords_of
from gradlane.training.plans.plan import Plan
from gradlane.training.plans.settings import LEARNING_STEPS, ClusterFacts, Settings

LOCAL_SIZE = 2
PORT_ELEMENTS = 400_000
"""Of the gradient in `port_bytes`: slices that two and four owners share evenly."""


@contextmanager
def launched(rank: int, local_size: int = LOCAL_SIZE) -> Iterator[None]:
    """Have the launcher's variables of a rank, for as long as it lasts."""
    os.environ.update(LOCAL_RANK=str(rank % local_size), LOCAL_WORLD_SIZE=str(local_size))
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]


@contextmanager
def opened(
    store: Any,
    rank: int,
    world_size: int,
    job: str,
    *,
    local_size: int = LOCAL_SIZE,
    **options: Any,
) -> Iterator[gradlane.Session]:
    """Open a session on a rank of the pool, two to a node."""
    settings: dict[str, Any] = {
        "connect_timeout_s": 30.0,
        "silence_timeout_s": 20.0,
        "summary": False,
        **options,
    }
    with launched(rank, local_size):
        session = gradlane.init(
            **keywords_of(
                store=store,
                rank=rank,
                world_size=world_size,
                job=job,
                advertise="127.0.0.1",
                **settings,
            )
        )
        with session:
            yield session


def digest(model: nn.Module) -> str:
    """Return a hash of a model's values."""
    state = hashlib.sha256()
    for tensor in model.state_dict().values():
        numbers = tensor.detach().cpu().contiguous().view(-1)
        state.update(numbers.view(torch.uint8).numpy().data)
    return state.hexdigest()[:16]


@contextmanager
def device_of(rank: int, world_size: int, on_cuda: bool) -> Iterator[torch.device]:
    """Yield a rank's device; with fewer of them than ranks, NCCL hears that ranks are machines.

    Then its traffic goes through sockets, and everything else is as with a device each.
    """
    count = torch.cuda.device_count() if on_cuda else 0
    if world_size <= count or not on_cuda:
        yield torch.device("cuda", rank) if on_cuda else torch.device("cpu")
        return
    told = {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    with (
        mock.patch.dict(os.environ, told),
        mock.patch.object(devices, "accelerator_id", return_value=f"that of rank {rank}"),
    ):
        yield torch.device("cuda", rank % count)


class Net(nn.Module):
    """Layers of several sizes and dtypes, one that some steps leave out, and batch statistics."""

    def __init__(self, on: str = "cpu") -> None:
        super().__init__()
        self.on = on
        self.stem = nn.Linear(6, 100)
        self.norm = nn.BatchNorm1d(100)
        self.wide = nn.Linear(100, 97)
        self.sometimes = nn.Linear(97, 97)
        self.low = nn.Linear(97, 8, dtype=torch.bfloat16)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 2, dtype=torch.float64)

    def forward(self, points: Tensor, more: bool) -> Tensor:
        hidden = torch.tanh(self.wide(torch.relu(self.norm(self.stem(points)))))
        if more:
            hidden = hidden + self.sometimes(hidden)
        hidden = self.low(hidden.bfloat16()).float()
        out: Tensor = self.head(self.frozen(hidden).double())
        return out


def loss_of(model: Net, rank: int, step: int, part: int = 0) -> Tensor:
    """Return a rank's loss in a step; one layer is used by some ranks in some steps only."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + part)
    points = torch.randn(5, 6, generator=generator).to(model.on)
    more = step % 3 != 0 and (rank + step) % 2 == 0
    loss: Tensor = model(points, more).square().mean()
    return loss


def trained(
    store: Any,
    rank: int,
    world_size: int,
    job: str,
    *,
    steps: int = 5,
    accumulate: int = 1,
    clip: float = 0.0,
    clip_by_session: float = 0.0,
    buffers: str = "broadcast",
    defer: bool | None = None,
    on_cuda: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train and say what came of it."""
    torch.manual_seed(7 + rank)
    with (
        device_of(rank, world_size, on_cuda) as device,
        opened(store, rank, world_size, job, **options) as session,
    ):
        model = Net(str(device)).to(device)
        start = digest(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session.prepare(model, optimizer, buffers=buffers, defer=defer)
        begun = digest(model)
        losses, norms = [], []
        for step in range(1, steps + 1):
            for part in range(accumulate - 1):
                with session.no_sync():
                    (loss_of(model, rank, step, part + 1) / accumulate).backward()  # type: ignore[no-untyped-call]
            loss = loss_of(model, rank, step) / accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            if clip_by_session:
                norms.append(session.clip_grad_norm_(clip_by_session))
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        metrics = session.metrics()
    return {
        "start": start,
        "begun": begun,
        "digest": digest(model),
        "losses": losses,
        "norms": [norm.item() for norm in norms],
        "tx": metrics["tx_payload_bytes"],
        "peers": [row["tx_payload_bytes"] for row in metrics["peers"]],
        "waits": metrics["tensor_waits"],
        "channel": {
            name: metrics["channels"][0][name]
            for name in ("local_bytes", "wait_s", "local_sums", "collective_bytes")
        }
        if options.get("local", "off") not in ("off", "auto")
        else {},
        "json": len(json.dumps(metrics)),
    }


class SlowChannel:
    """A channel between nodes whose ends of steps and norms come late to the leader's threads."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def step_end(self, step: int) -> None:
        time.sleep(0.4)
        self._channel.step_end(step)

    def wait_norm(self, step: int) -> float:
        time.sleep(0.8)
        norm: float = self._channel.wait_norm(step)
        return norm


class SlowLeader(NodeLeader):
    """A leader whose threads lag behind the results."""

    def __init__(self, core: Any, channel: Any, *others: Any, **options: Any) -> None:
        super().__init__(core, cast(Any, SlowChannel(channel)), *others, **options)


def trained_with_slow_leaders(
    store: Any, rank: int, world_size: int, job: str, **options: Any
) -> dict[str, Any]:
    """Train where every step's results are here before its leader's threads are done with it.

    Returns:
        What `trained` returns, and the failures that the rank told the others.
    """
    fail = mock.Mock()
    with (
        mock.patch.object(node_channel, "NodeLeader", SlowLeader),
        mock.patch.object(node_channel.NodeChannel, "fail", fail),
    ):
        result = trained(store, rank, world_size, job, **options)
    return {**result, "failures": [str(call.args[0]) for call in fail.call_args_list]}


def means(
    store: Any,
    rank: int,
    world_size: int,
    job: str,
    *,
    local_size: int = LOCAL_SIZE,
    **options: Any,
) -> dict[str, list[bytes]]:
    """Average arrays whose sums are rounded; rank 3 has nothing in step 2, nobody in step 3."""
    found: dict[str, list[bytes]] = {}
    with opened(store, rank, world_size, job, local_size=local_size, **options) as session:
        for dtype in ("float32", "float64", "float16"):
            session.arrays.register(dtype, (9_001,), dtype)
            session.arrays.register(f"{dtype} small", (3,), dtype)
        values = {
            slot: values_of(slot, dtype, size, 0, 0)
            for dtype in ("float32", "float64", "float16")
            for slot, size in ((dtype, 9_001), (f"{dtype} small", 3))
        }
        for first in values.values():
            first *= rank + 1
        spread = session.arrays.spread(values)
        found["spread"] = [value.tobytes() for value in spread.values()]
        for step in (1, 2, 3):
            for slot, first in values.items():
                array = values_of(slot, str(first.dtype), first.size, rank, step)
                nothing = step == 3 or (step == 2 and rank == 3)
                session.arrays.push(slot, None if nothing else array)
            found[str(step)] = []
            for slot in values:
                mean = session.arrays.wait(slot)
                found[str(step)].append(b"" if mean is None else mean.tobytes())
    return found


def values_of(name: str, dtype: str, size: int, rank: int, step: int) -> Any:
    """Return what a rank pushes."""
    draw = np.random.default_rng([len(name), size, rank, step])
    return draw.normal(size=size).astype(dtype)


def refused(store: Any, rank: int, world_size: int, job: str, **options: Any) -> str:
    """Open a session that cannot be, or prepare in it."""
    try:
        with opened(store, rank, world_size, job, **options) as session:
            model = nn.Linear(2000, 3)
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "opened"


def another_block(store: Any, rank: int, world_size: int, job: str, local: str) -> str:
    """Have launchers that number ranks over nodes in turns."""
    os.environ.update(LOCAL_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
    try:
        session = gradlane.init(
            local=local,
            rendezvous=gradlane.Rendezvous(store=store, rank=rank, world_size=world_size, job=job),
            network=gradlane.Network(advertise="127.0.0.1", connect_timeout_s=30.0),
            monitoring=gradlane.Monitoring(summary=False),
        )
        model = nn.Linear(3, 3)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session.close()
    except gradlane.RanksDifferError as error:
        return str(error)
    finally:
        del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    return "opened"


def lost(
    store: Any,
    rank: int,
    world_size: int,
    job: str,
    *,
    victim: int,
    how: str,
    on_cuda: bool = False,
    **options: Any,
) -> list[Any]:
    """Train until one rank ends; the others say what they heard, and how soon."""
    begun_s = 0.0
    try:
        with (
            device_of(rank, world_size, on_cuda) as device,
            opened(store, rank, world_size, job, **options) as session,
        ):
            model = nn.Linear(300, 300, device=device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer)
            points = torch.ones(2, 300, device=device) * (rank + 1)
            for step in range(1, 100):
                if rank == victim and step == 4 and how != "kill in step":
                    if how == "kill":
                        os._exit(0)
                    if how == "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    session.abort("the test says so")
                    return []
                begun_s = time.monotonic()
                model(points).square().mean().backward()
                if rank == victim and step == 5:
                    # Here `how` is "kill in step": what was given is under way.
                    os._exit(0)
                optimizer.step()
                optimizer.zero_grad()
    except gradlane.PeerLostError as error:
        return [error.rank, error.last_complete_step, str(error), time.monotonic() - begun_s]
    raise AssertionError("nobody was lost")


class Branches(nn.Module):
    """Layers that are used by themselves, in any order; some numbers are complex, some halves."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(40, 41) for _ in range(count))
        self.turns = nn.Parameter(torch.randn(41, dtype=torch.complex64))
        self.low = nn.Parameter(torch.randn(5000).half())

    def forward(self, points: Tensor, which: int) -> Tensor:
        hidden: Tensor = self.branches[which](points)
        if which == 0:
            hidden = (hidden * self.turns).abs()
        if which == 1:
            hidden = hidden * self.low.float().mean()
        return hidden


def in_any_order(
    store: Any,
    rank: int,
    world_size: int,
    job: str,
    *,
    steps: int = 6,
    leave_out: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Have gradients become ready in another order on each rank, and leave some of them out."""
    torch.manual_seed(1)
    model = Branches()
    count = len(model.branches)
    with opened(store, rank, world_size, job, **options) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session.prepare(model, optimizer)
        for step in range(1, steps + 1):
            order = list(range(count))
            random.Random(100 * step + rank).shuffle(order)
            # One that this rank leaves out, and one that all do.
            without = {(rank + step) % count, step % count} if leave_out and step % 3 else set()
            for which in order:
                if which in without:
                    continue
                generator = torch.Generator().manual_seed(1000 * step + 10 * rank + which)
                points = torch.randn(3, 40, generator=generator)
                model(points, which).square().mean().backward()
                # So that the others are at another place.
                time.sleep(0.001 * (rank % 2))
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        channel = session.metrics()["channels"][0]
    return {"digest": digest(model), "sums": channel.get("local_sums")}


def opened_again(
    store: Any, rank: int, world_size: int, job: str, *, times: int, **options: Any
) -> list[list[int]]:
    """Train shortly in several sessions; says what descriptors and threads there are after each."""
    found = []
    for number in range(times):
        trained(store, rank, world_size, f"{job}-{number}", steps=2, **options)
        gc.collect()
        found.append([len(os.listdir("/proc/self/fd")), threading.active_count()])
    return found


def uneven(store: Any, rank: int, world_size: int, job: str, **options: Any) -> str:
    """Train over uneven data: the state of the last rank is handed over."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5000), nn.Linear(5000, 1))
    with opened(store, rank, world_size, job, **options) as session:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        with session.join():
            for step in range(2 + rank):
                generator = torch.Generator().manual_seed(10 * step + rank)
                model(torch.randn(3, 6, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return digest(model)


def planned(store: Any, rank: int, world_size: int, job: str) -> dict[str, Any]:
    """Train under `plan="auto"`, whose decision is to add up on nodes from then on."""
    seen: list[ClusterFacts] = []

    class Decided:
        """In place of the coordinator: what is simulated is tested elsewhere."""

        def __init__(self, profile: Any, facts: ClusterFacts, **arguments: Any) -> None:
            seen.append(facts)
            assert arguments["any_rounding"]

        def plan(self, *, budget_s: float) -> Plan:
            return Plan("decided", seen[0], "probed", Settings(local="leader"))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 200), nn.ReLU(), nn.Linear(200, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent = []
    with (
        mock.patch.object(plan_while_training, "Coordinator", Decided),
        opened(store, rank, world_size, job, local="off", exact_order=False) as session,
    ):
        session.prepare(model, optimizer, plan="auto")
        for step in range(LEARNING_STEPS + 3):
            generator = torch.Generator().manual_seed(100 * step + rank)
            loss = model(torch.randn(8, 30, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sent.append(session.metrics()["channels"][-1]["tx_bytes"])
        session.synchronize()
        sent.append(session.metrics()["channels"][-1]["tx_bytes"])
        local = None if session.planning.plan is None else session.planning.plan.settings.local
        weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    return {
        "local": local,
        "nodes_of": [facts.ranks_per_node for facts in seen],
        "sent": sent,
        "digest": hashlib.sha256(weights).hexdigest(),
    }


class Feedback:
    """Trainings of a small model whose gradients are encoded with error feedback, in sessions."""

    def __init__(
        self, store: Any, rank: int, world_size: int, job: str, codec: str, momentum: float
    ) -> None:
        self._where = (store, rank, world_size, job)
        self._codec = {"*.weight": codec}
        self._momentum = momentum
        self.rank = rank

    def run(
        self,
        name: str,
        steps: range,
        *,
        state: dict[str, Any] | None = None,
        values: tuple[Any, Any] | None = None,
        per_rank: int = 1,
        restores: bool = False,
        **options: Any,
    ) -> tuple[str, dict[str, Any], tuple[Any, Any]]:
        """Train; return the digest, the session's state, and that of the model and the optimizer.

        Args:
            name: of the session.
            steps: to train.
            state: of a session, to be loaded first.
            values: of the model and the optimizer, in place of their first ones.
            restores: begin with the last checkpoint.
            per_rank: ranks of a cluster whose losses each rank averages by itself.
            options: of the session.
        """
        store, rank, world_size, job = self._where
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(40, 90), nn.Tanh(), nn.Linear(90, 41), nn.Linear(41, 33, dtype=torch.bfloat16)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=self._momentum)
        if values is not None:
            model.load_state_dict(values[0])
            optimizer.load_state_dict(values[1])
        there = opened(store, rank, world_size, f"{job}-{name}", codec=self._codec, **options)
        with there as session:
            session.prepare(model, optimizer)
            if state is not None:
                session.load_state_dict(state)
            if restores:
                assert session.restore() == steps[0] - 1
            for step in steps:
                for one in range(per_rank * rank, per_rank * (rank + 1)):
                    generator = torch.Generator().manual_seed(100 * step + one)
                    points = torch.randn(4, 40, generator=generator)
                    hidden = model[2](model[1](model[0](points)))
                    loss = hidden.square().mean() + model[3](hidden.bfloat16()).float().mean()
                    with contextlib.ExitStack() as stack:
                        if one < per_rank * (rank + 1) - 1:
                            stack.enter_context(session.no_sync())
                        (loss / per_rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            session.synchronize()
            after = session.state_dict()
        values = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        return digest(model), after, values


def feedback(
    store: Any, rank: int, world_size: int, job: str, *, codec: str, momentum: float, **options: Any
) -> dict[str, Any]:
    """Train straight on, and in two sessions with all ranks' states between them."""
    training = Feedback(store, rank, world_size, job, codec, momentum)
    right, _, _ = training.run("straight", range(1, 9), **options)
    _, state, values = training.run("first", range(1, 5), **options)
    again, _, _ = training.run("second", range(5, 9), state=state, values=values, **options)
    without, _, _ = training.run("without", range(5, 9), values=values, **options)
    (model,) = state["models"]
    return {
        "right": right,
        "again": again,
        "without": without,
        "residuals": {
            kind: {name: one.numpy().tobytes() for name, one in model[kind].items()}
            for kind in ("worker_residual", "mean_worker_residual", "owner_residual")
        },
        "common": model["ranks_per_residual"],
    }


def feedback_of_nodes(
    store: Any, rank: int, world_size: int, job: str, *, codec: str, momentum: float, strategy: str
) -> str:
    """Train on as many ranks as there are nodes, each of which has the mean of a node's losses."""
    training = Feedback(store, rank, world_size, job, codec, momentum)
    return training.run("nodes", range(1, 9), per_rank=LOCAL_SIZE, strategy=strategy)[0]


def feedback_restored(
    store: Any, rank: int, world_size: int, job: str, *, folder: str, **options: Any
) -> list[str]:
    """Train straight on, and again from a checkpoint of the middle."""
    training = Feedback(store, rank, world_size, job, "onebit", 0.0)
    saved = {"checkpoint_folder": folder, "checkpoint_every": 5, **options}
    right, _, _ = training.run("straight", range(1, 9), **saved)
    again, _, _ = training.run("again", range(6, 9), restores=True, **saved)
    return [right, again]


def feedback_moves(
    store: Any, rank: int, world_size: int, job: str, *, ways: list[str]
) -> list[dict[str, bytes]]:
    """Take residuals from sessions with one value of `local` to sessions with the next."""
    training = Feedback(store, rank, world_size, job, "bf16:residual=on", 0.0)
    _, state, _ = training.run("0", range(1, 4), local=ways[0])
    found = [state]
    for number, local in enumerate(ways[1:], 1):
        found.append(training.run(str(number), range(0), state=found[-1], local=local)[1])
    kinds = ("worker_residual", "mean_worker_residual", "owner_residual")
    return [
        {kind: b"".join(one.numpy().tobytes() for one in model[kind].values()) for kind in kinds}
        for (model,) in (one["models"] for one in found)
    ]


def port_bytes(
    store: Any, rank: int, world_size: int, job: str, *, local_size: int, **options: Any
) -> float:
    """Return the bytes that this rank sends to other nodes in a step."""
    model = nn.Linear(PORT_ELEMENTS, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps, sent = 3, []

    def sent_so_far() -> int:
        own = rank // local_size
        rows = session.metrics()["peers"]
        return sum(row["tx_bytes"] for row in rows if row["rank"] // local_size != own)

    def to_other_nodes() -> int:
        # A rank that has its updates may still send others theirs.
        before, now = -1, sent_so_far()
        while now != before:
            time.sleep(0.3)
            before, now = now, sent_so_far()
        return now

    with opened(store, rank, world_size, job, local_size=local_size, **options) as session:
        session.prepare(model, optimizer)
        for step in range(1 + steps):
            if step in (0, 1):
                session.synchronize()
            if step == 1:
                sent.append(to_other_nodes())
            model(torch.full((1, PORT_ELEMENTS), float(rank + step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        sent.append(to_other_nodes())
    return (sent[1] - sent[0]) / steps
