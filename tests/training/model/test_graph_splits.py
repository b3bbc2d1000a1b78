"""A model that is compiled as a whole: its gradients leave during the backward, as with DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from tests.built import needs_core
from tests.torch_versions import in_threads, torch_release
from tests.training.model.models import seeded
from tests.training.model.pool import RankPool
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import ReferenceSession, run_reference, same_bits, snapshot
from tests.training.model.scenarios import open_session
from tests.training.model.test_training import batch

WIDTH = 560
"""A layer has 1.2 MB, which is more than torch's smallest part."""

compiles_whole = pytest.mark.skipif(
    torch_release() <= (2, 4), reason="torch 2.4 ends a graph at each hook"
)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs


class Normed(Layers):
    """With statistics that the forward writes, and a part of it recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.norm(self.layers[0](inputs))
        inputs = checkpoint(self.layers[1], inputs, use_reentrant=False)
        outputs: Tensor = self.layers[2](inputs)
        return outputs


def boxed(function: Any) -> Any:
    def run(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()
        return function(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def logging_backend(events: list[str]) -> Any:
    """Return a backend that notes each backward of a graph."""

    def compile_backward(graph: Any, _: Any) -> Any:
        def run(*arguments: Any) -> Any:
            events.append("backward")
            return graph(*arguments)

        return boxed(run)

    return aot_autograd(
        fw_compiler=lambda graph, _: boxed(graph.forward), bw_compiler=compile_backward
    )


def train(
    session: Any,
    build: Any = Layers,
    events: Any = None,
    *,
    compiles: bool = True,
    steps: int = 3,
    **settings: Any,
) -> list[Tensor]:
    model: Any = seeded(build)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    run = model
    if compiles:
        events = [] if events is None else events
        for number, layer in enumerate(model.layers):
            layer.weight.register_post_accumulate_grad_hook(
                lambda _, number=number: events.append(f"gradient {number}")
            )
        run = torch.compile(model, backend=logging_backend(events), **settings)
    for step in range(steps):
        rows = 4 + step if settings.get("dynamic") else 4
        run(batch((rows, WIDTH), session.rank, step)).square().mean().backward()
        if isinstance(session, ReferenceSession):
            session.average(model)
        optimizer.step()
        optimizer.zero_grad()
    return snapshot(model)


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert nn.parallel.DistributedDataParallel._active_ddp_module is None


def split_graphs(store: Any, rank: int, world_size: int, job: str) -> tuple[list[str], float]:
    """Train a model compiled and not; returns the events, and how far the parameters differ."""
    events: list[str] = []
    found = []
    for compiles in (True, False):
        torch._dynamo.reset()
        with open_session(store, rank, world_size, f"{job}-{compiles}") as session:
            found.append(train(session, Layers, events, compiles=compiles))
    return events, max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


@compiles_whole
@needs_core
def test_graphs_of_processes_are_split(pool: RankPool) -> None:
    once = ["backward", "gradient 2", "backward", "gradient 1", "backward", "gradient 0"]
    for events, difference in pool.run(f"{__name__}:split_graphs", ranks=2):
        assert events == once * 3
        assert difference < 1e-6


@compiles_whole
@in_threads
def test_gradients_come_between_the_parts_of_the_backward() -> None:
    events: dict[int, list[str]] = {0: [], 1: []}
    run_ranks(2, lambda session: train(session, Layers, events[session.rank]))
    once = ["backward", "gradient 2", "backward", "gradient 1", "backward", "gradient 0"]
    # Ranks are threads here, and one of them may compile what the other one uses.
    assert sorted(events[0] + events[1]) == sorted(once * 6)
    assert [one for one in events[0] if one != "backward"] == once[1::2] * 3


@compiles_whole
def test_alone_nothing_is_split() -> None:
    events: list[str] = []
    run_ranks(1, lambda session: train(session, Layers, events))
    assert events.count("backward") == 3


@compiles_whole
@in_threads
@pytest.mark.parametrize(
    ("build", "settings"),
    [(Layers, {"fullgraph": True}), (Layers, {"dynamic": True}), (Normed, {})],
)
def test_results_are_those_of_the_reference(build: Any, settings: dict[str, Any]) -> None:
    def eager(session: Any) -> list[Tensor]:
        return train(session, build, compiles=False, **settings)

    expected = run_reference(2, eager)
    found = run_ranks(2, lambda session: train(session, build, **settings), local="off")
    for one, other in zip(found, expected, strict=True):
        for mine, right in zip(one, other, strict=True):
            assert torch.allclose(mine, right, rtol=1e-5, atol=1e-6)
    assert same_bits(found[0], found[1])


@compiles_whole
@in_threads
def test_what_torch_cannot_split_is_compiled_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError("a higher order op")

    monkeypatch.setattr("torch._dynamo.backends.distributed.SubmodCompiler.run", refuse)
    events: list[str] = []
    first, second = run_ranks(2, lambda session: train(session, Layers, events))
    assert same_bits(first, second)
    assert events.count("backward") == 6


@in_threads
def test_who_compiles_the_whole_is_told_once_of_blocks(caplog: pytest.LogCaptureFixture) -> None:
    def hints(build: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", logger="gradlane"):
            run_ranks(2, lambda session: build(session))
        return [one for one in caplog.messages if "compile its blocks instead" in one]

    def whole(session: Any) -> None:
        train(session, steps=6)

    def eager(session: Any) -> None:
        train(session, compiles=False, steps=6)

    assert [one.split()[0] for one in hints(whole)] == ["Layers", "Layers"]
    assert hints(eager) == []
