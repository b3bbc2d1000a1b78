"""What rank processes do with arrays in the tests; each function runs on every rank."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import nn

import gradlane
from gradlane.training.arrays.memory import HostArray
from gradlane.training.options.options import keywords_of


def says_whether_writable(exporter: Any) -> bool:
    """Whether an array's DLPack capsules say if it may be written; torch 2.4's do not."""
    try:
        exporter.__dlpack__(max_version=(1, 0))
    except TypeError:
        return False
    return True


TORCH_LENDS = says_whether_writable(torch.zeros(1))
DTYPES = ("float32", "float64", "float16", "complex64", *(["bfloat16"] if TORCH_LENDS else []))
SHAPES = ((5,), (37, 11), (), (3, 2, 4), (1, 70_001))


def opened(store: Any, rank: int, world_size: int, job: str, **options: Any) -> gradlane.Session:
    """Open a session on a rank of the pool."""
    settings: dict[str, Any] = {"connect_timeout_s": 30.0, "silence_timeout_s": 20.0, **options}
    return gradlane.init(
        **keywords_of(
            store=store,
            rank=rank,
            world_size=world_size,
            job=job,
            advertise="127.0.0.1",
            **settings,
        )
    )


def values(dtype: str, shape: tuple[int, ...], rank: int, step: int) -> torch.Tensor:
    """Return what a rank pushes in a step, as torch's."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + len(shape))
    return torch.randn(shape, generator=generator, dtype=getattr(torch, dtype))


class Holder(nn.Module):
    """A model whose gradients are whatever the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.ones = nn.ParameterList(
            torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype in DTYPES for shape in SHAPES
        )


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def means_of_torch(store: Any, rank: int, world_size: int, job: str) -> list[bytes]:
    """Average three steps of gradients with a prepared model."""
    seen = []
    with opened(store, rank, world_size, job) as session:
        model = Holder()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer, defer=False)
        for step in range(1, 4):
            for number, parameter in enumerate(list(model.ones)):
                dtype, shape = DTYPES[number // len(SHAPES)], SHAPES[number % len(SHAPES)]
                parameter.grad = values(dtype, shape, rank, step)
            # Gradients that no backward made are averaged where the optimizer steps.
            loss = sum((one * 0).abs().sum().float() for one in model.ones)
            assert isinstance(loss, torch.Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():
                assert parameter.grad is not None
                seen.append(bits(parameter.grad))
            optimizer.step()
            optimizer.zero_grad()
    return seen


def means_of_arrays(
    store: Any, rank: int, world_size: int, job: str, **options: Any
) -> dict[str, Any]:
    """Average the same as arrays, NumPy's where it has the dtype, else torch's through DLPack."""
    seen = []
    in_place = True
    with opened(store, rank, world_size, job, **options) as session:
        names = [f"{dtype}{shape}" for dtype in DTYPES for shape in SHAPES]
        for number, name in enumerate(names):
            dtype, shape = DTYPES[number // len(SHAPES)], SHAPES[number % len(SHAPES)]
            session.arrays.register(name, shape, getattr(torch, dtype) if number % 2 else dtype)
        for step in range(1, 4):
            pushed: dict[str, Any] = {}
            for number, name in reversed(list(enumerate(names))):
                dtype, shape = DTYPES[number // len(SHAPES)], SHAPES[number % len(SHAPES)]
                tensor = values(dtype, shape, rank, step)
                as_torch = dtype == "bfloat16" or (number % 3 == 0 and TORCH_LENDS)
                pushed[name] = tensor if as_torch else tensor.numpy()
                assert session.arrays.push(name, pushed[name], step) == step
            for name in names:
                mean = session.arrays.wait(name, step)
                in_place = in_place and mean is pushed[name]
                seen.append(bits(torch.as_tensor(mean)))
        metrics = session.metrics()
    return {"seen": seen, "in_place": in_place, "steps": metrics["steps"]["count"], "m": metrics}


def spread_and_absent(store: Any, rank: int, world_size: int, job: str) -> dict[str, Any]:
    """Spread rank 0's values, then steps in which only some ranks have something."""
    with opened(store, rank, world_size, job) as session:
        session.arrays.register("late", (3,), np.float32, position=9)
        session.arrays.register("soon", (2,), np.float64, position=1)
        late = np.full(3, rank, np.float32)
        soon = np.full(2, 10.0 + rank)
        soon.flags.writeable = False
        spread = session.arrays.spread({"late": late, "soon": soon})
        assert spread["late"] is late and soon[0] == 10.0 + rank
        found: dict[str, Any] = {"spread": [one.tolist() for one in spread.values()]}
        session.arrays.push("late", np.full(3, 6.0, np.float32) if rank == 0 else None)
        session.arrays.push("soon", None)
        found["late"], found["soon"] = (
            session.arrays.wait("late").tolist(),
            session.arrays.wait("soon"),
        )
        fixed = np.full(2, float(rank))
        fixed.flags.writeable = False
        session.arrays.push("soon", fixed)
        session.arrays.push("late", None)
        mean = session.arrays.wait("soon")
        assert mean is not fixed and mean is session.arrays.wait("soon")
        found["fixed"] = [fixed.tolist(), mean.tolist()]
        # Nobody waits for this step: the next one does, and the memory is whole then.
        whole = np.full(3, float(rank), np.float32)
        session.arrays.push("late", whole)
        session.arrays.push("soon", None)
        session.arrays.push("late", None)
        found["unwaited"] = whole.tolist()
        session.arrays.push("soon", None)
    return found


def refused(store: Any, rank: int, world_size: int, job: str) -> list[str]:
    """Push what does not fit, and go on with what does."""
    said = []
    with opened(store, rank, world_size, job) as session:
        session.arrays.register("w", (4, 2), "float32")
        session.arrays.register("b", (2,), "float32")

        class OnDevice:
            def __dlpack__(self) -> object:
                raise AssertionError("a device array is not asked for a capsule")

            def __dlpack_device__(self) -> tuple[int, int]:
                return 2, 1

        wide: HostArray = np.zeros((4, 4), np.float32)
        for unfit in (
            np.zeros((2, 4), np.float32),
            np.zeros((4, 2)),
            wide[:, ::2],
            np.zeros((2, 4), np.float32).T,
            torch.zeros(2, 4).t(),
            OnDevice(),
            [[0.0, 0.0]] * 4,
            np.zeros((4, 2), ">f4"),
        ):
            try:
                session.arrays.push("w", unfit)
            except gradlane.ArrayRefusedError as error:
                said.append(f"{error.what}: {error}")
        session.arrays.push("w", np.zeros((4, 2), np.float32))
        for call in (
            lambda: session.arrays.push("w", np.zeros((4, 2), np.float32)),
            lambda: session.arrays.push("b", np.zeros(2, np.float32), step=2),
            lambda: session.arrays.push("x", None),
            lambda: session.arrays.wait("b"),
            lambda: session.arrays.register("late", (1,), "float32"),
            lambda: session.arrays.spread({}),
        ):
            try:
                call()
            except gradlane.UsageError as error:
                said.append(str(error))
        session.arrays.push("b", np.full(2, float(rank), np.float32))
        said.append(str(session.arrays.wait("b").tolist()))
    return said


def differing(store: Any, rank: int, world_size: int, job: str) -> str:
    """Register another shape on one rank."""
    session = opened(store, rank, world_size, job)
    session.arrays.register("w", (2, 2 + rank), "float32")
    try:
        session.arrays.push("w", np.zeros((2, 2 + rank), np.float32))
    except gradlane.RanksDifferError as error:
        session.close()
        return str(error)
    raise AssertionError("the ranks differ")


def lost(store: Any, rank: int, world_size: int, job: str) -> str:
    """Give up on one rank while the other waits, and use the session afterwards."""
    session = opened(store, rank, world_size, job)
    session.arrays.register("w", (2,), "float32")
    session.arrays.push("w", np.zeros(2, np.float32))
    session.arrays.wait("w")
    if rank == 1:
        # The other rank is through with the step, too.
        store.wait([f"{job}/through"])
        session.abort("the test says so")
        return ""
    store.set(f"{job}/through", "")
    said = []
    for _ in range(2):
        try:
            session.arrays.push("w", np.zeros(2, np.float32))
            session.arrays.wait("w")
        except gradlane.PeerLostError as error:
            said.append(f"{error.rank} {error.last_complete_step} {error}")
    try:
        session.close()
    except gradlane.PeerLostError:
        said.append("close")
    return " | ".join(said)


def beside_a_model(store: Any, rank: int, world_size: int, job: str) -> list[float]:
    """Average a metric while a model trains in the same session."""
    torch.manual_seed(rank)
    with opened(store, rank, world_size, job) as session:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        session.arrays.register("loss", (), "float64")
        means = []
        for _ in range(3):
            loss = model(torch.randn(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.arrays.push("loss", np.array(loss.item()))
            means.append(float(session.arrays.wait("loss")))
    return means


def ended_in_mid_step(store: Any, rank: int, world_size: int, job: str) -> list[Any]:
    """Close on one rank before all was pushed: the others get zeros for the rest."""
    session = opened(store, rank, world_size, job)
    session.arrays.register("a", (1,), "float32")
    session.arrays.register("b", (1,), "float32")
    session.arrays.push("a", np.array([4.0], np.float32))
    means: list[Any] = []
    if rank != 1:
        session.arrays.push("b", np.array([4.0], np.float32))
        means = [session.arrays.wait(name).tolist() for name in ("a", "b")]
    session.close()
    return means


def pid(store: Any, rank: int, world_size: int, job: str) -> int:
    """Return this process's number."""
    return os.getpid()
