"""What rank processes run in the tests of sessions that send factors.

Each model is trained twice, by servers and by factors; the loops are those of users.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradlane
from gradlane.training.factors import block, sending
from gradlane.training.factors.block import Part
from gradlane.training.plans.plan import Plan, PlannedTensor
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.training.model.scenarios import digest, open_session

Program = Callable[[Any, nn.Module, torch.optim.Optimizer, int, int], None]


class Classifier(nn.Module):
    """Convolution, two linear layers, one of them used twice."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 3, 3)
        self.first = nn.Linear(3 * 36, width)
        self.again = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, 5)
        self.unused = nn.Linear(7, 7)
        # Who asks the parameters between two calls of backward gets the averaged gradients.
        self.dtype = torch.float32

    def forward(self, images: Tensor) -> Tensor:
        values = self.first(self.features(images).flatten(1)).relu()
        output: Tensor = self.last(self.again(self.again(values).tanh()))
        return output


class Words(nn.Module):
    """An embedding tied to the output layer, another one that is not, any leading dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 12)
        self.places = nn.Embedding(9, 12, padding_idx=0)
        self.inner = nn.Linear(12, 12)
        self.out = nn.Linear(12, 40, bias=False)
        self.out.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[-1]).expand_as(tokens)
        output: Tensor = self.out(self.inner(self.words(tokens) + self.places(places)).tanh())
        return output


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(11)
    return make()


def converted(dtype: torch.dtype) -> nn.Module:
    model = Classifier().to(dtype)
    model.dtype = dtype
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "classifier": Classifier,
    "words": Words,
    "bf16": lambda: converted(torch.bfloat16),
    "f64": lambda: converted(torch.float64),
}


def loss_of(model: Any, rank: int, step: int, rows: int | None = None) -> Tensor:
    """The loss of a rank's own batch, whose size differs from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    count = 2 + rank if rows is None else rows
    if isinstance(model, Words):
        tokens = torch.randint(40, (count, 6), generator=generator)
        return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    images = torch.randn(count, 1, 8, 8, generator=generator).to(model.dtype)
    labels = torch.randint(5, (count,), generator=generator)
    return functional.cross_entropy(model(images).float(), labels)


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def plain(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    backward(loss_of(model, rank, step))


def clipped(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    backward(loss_of(model, rank, step))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0


def accumulated(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    with session.no_sync():
        backward(loss_of(model, rank, 50 + step))
    backward(loss_of(model, rank, step))


def only_accumulated(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    with session.no_sync():
        backward(loss_of(model, rank, 50 + step))


def twice(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    backward(loss_of(model, rank, step, rows=1))
    backward(loss_of(model, rank, 50 + step, rows=1))


def autocast(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, rank, step)
    backward(loss)


def checkpointed(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randn(3, 108, generator=generator, requires_grad=True)

    def first(values: Tensor) -> Tensor:
        result: Tensor = model.get_submodule("first")(values)
        return result.tanh()

    hidden: Any = checkpoint(first, values, use_reentrant=step % 2 == 0, preserve_rng_state=False)
    backward(model.get_submodule("last")(hidden).square().mean())


def changing(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """A layer that is used twice has its gradient as one or in parts, as steps go."""
    (accumulated if step % 2 else plain)(session, model, optimizer, rank, step)
    if step == 3:
        assert next(model.parameters()).grad is not None
        backward(loss_of(model, rank, 80 + step))


def sometimes(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Some ranks have no gradient in some steps, and in one nobody has."""
    layer: Any = model.get_submodule("first" if (rank + step) % 2 and step != 2 else "unused")
    backward(layer(torch.full((2, layer.in_features), 0.5 + rank)).square().mean())


def asked(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Gradients that somebody asks for are computed, and those of the step still leave."""
    weight = model.get_submodule("first").get_parameter("weight")
    (own,) = torch.autograd.grad(loss_of(model, rank, 70 + step), weight)
    assert own.shape == weight.shape
    backward(loss_of(model, rank, step))


def zeroed_in_place(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(loss_of(model, rank, step))


def scaled(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    backward(scaler.scale(loss_of(model, rank, step)))
    scaler.unscale_(optimizer)


def forgotten(session: Any, model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """A step that is not taken, and one that is."""
    backward(loss_of(model, rank, 90 + step))
    optimizer.zero_grad()
    backward(loss_of(model, rank, step))


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        plain,
        clipped,
        accumulated,
        only_accumulated,
        twice,
        changing,
        autocast,
        checkpointed,
        sometimes,
        asked,
        zeroed_in_place,
        scaled,
        forgotten,
    )
}


def compare(
    store: Store, rank: int, world_size: int, job: str, cases: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Train each (model, program) by servers, by factors, and by factors to one owner."""
    found = []
    for number, (model_name, program_name) in enumerate(cases):
        results = []
        for scheme in ("ps", "sfb", "adam"):
            result = train(
                store,
                rank,
                world_size,
                f"{job}-{number}-{scheme}",
                model_name,
                PROGRAMS[program_name],
                scheme=scheme,
            )
            results.append(result)
        servers, factors, answered = results
        found.append(
            {
                "case": f"{model_name} {program_name}",
                "digests": factors["digests"],
                "off": max(
                    float((one - other).abs().max() / other.abs().max())
                    for one, other in zip(factors["values"], servers["values"], strict=True)
                ),
                "moved": factors["moved"],
                "answered": answered["digests"],
            }
        )
    return found


class Drawn(nn.Module):
    """Layers drawn by a seed: any sizes, with and without bias, used once or twice, or not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)

        def below(count: int) -> int:
            return int(torch.randint(count, (1,), generator=draw))

        self.leading = [1 + below(3) for _ in range(below(3))]
        self.words = nn.Embedding(2 + below(30), 1 + below(20), padding_idx=below(2) or None)
        width = self.words.embedding_dim
        self.layers = nn.ModuleList()
        self.times = []
        for _ in range(1 + below(3)):
            again = below(3) == 0
            wide = width if again else 1 + below(40)
            self.layers.append(nn.Linear(width, wide, bias=below(2) == 0))
            self.times.append(2 if again else 1)
            width = wide
        self.norm = nn.LayerNorm(width)
        torch.manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        values: Tensor = self.words(tokens)
        for layer, times in zip(self.layers, self.times, strict=True):
            for _ in range(times):
                values = layer(values).tanh()
        output: Tensor = self.norm(values)
        return output


def drawn_loss(model: Drawn, rank: int, step: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(10_000 * seed + 100 * step + rank)
    count = int(torch.randint(1, 6, (1,), generator=draw))
    shape = (count, *model.leading)
    tokens = torch.randint(model.words.num_embeddings, shape, generator=draw)
    loss: Tensor = (model(tokens) * torch.rand(model.norm.normalized_shape, generator=draw)).sum()
    return loss


def drawn(
    store: Store, rank: int, world_size: int, job: str, seeds: list[int]
) -> list[dict[str, Any]]:
    """Train drawn models by servers and by factors both ways; a seed says what the loop is."""
    found = []
    for seed in seeds:
        values, digests = [], []
        for scheme in ("ps", "sfb", "adam"):
            name = f"{job}-{seed}-{scheme}"
            with open_session(store, rank, world_size, name, scheme=scheme) as session:
                model = Drawn(seed)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
                session.prepare(model, optimizer, defer=seed % 5 != 0)
                for step in range(4):
                    if seed % 3 == 0 and step % 2:
                        with session.no_sync():
                            backward(drawn_loss(model, rank, 50 + step, seed))
                    if seed % 4 == 0:
                        backward(drawn_loss(model, rank, 80 + step, seed))
                    # Some ranks have nothing in some steps, but for what they had above.
                    if (seed + rank + step) % 7 or step == 0 or seed % 4:
                        backward(drawn_loss(model, rank, step, seed))
                    if seed % 2:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                digests.append(digest(model))
                values.append([parameter.detach().double() for parameter in model.parameters()])
        off = max(
            float((one - other).abs().max() / (other.abs().max() + 1e-3))
            for one, other in zip(*values[:2], strict=True)
        )
        case = {"case": f"seed {seed}", "digests": digests[1:2], "answered": digests[2:]}
        found.append({**case, "off": off, "moved": [True]})
    return found


def train(
    store: Store,
    rank: int,
    world_size: int,
    job: str,
    model_name: str,
    program: Program = plain,
    steps: int = 5,
    plan: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a model with every rank's own data."""
    with open_session(store, rank, world_size, job, **options) as session:
        model = seeded(MODELS[model_name])
        first = [parameter.detach().double().clone() for parameter in model.parameters()]
        if rank:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        session.prepare(model, optimizer, plan=plan)
        digests = [digest(model)]
        for step in range(steps):
            program(session, model, optimizer, rank, step)
            optimizer.step()
            optimizer.zero_grad()
            digests.append(digest(model))
        session.synchronize()
        values = [parameter.detach().double() for parameter in model.parameters()]
        schemes = session.monitoring.schemes
        return {
            "digests": digests,
            "values": values,
            "moved": [bool((a != b).any()) for a, b in zip(values, first, strict=True)],
            "schemes": schemes,
            "plan": session.planning.plan.to_json() if session.planning.plan is not None else None,
            "sent": session.metrics()["tx_payload_bytes"],
            "codecs": {one.tensor: (one.codec, one.reason) for one in session.monitoring.codecs},
        }


class Wide(nn.Module):
    """A layer whose factors are far fewer numbers than its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 512)
        self.last = nn.Linear(512, 3)

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(values))
        return output


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products with a result of one shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shape = shape
        self.seen: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default and result.shape in (
            self._shape,
            self._shape[::-1],
        ):
            self.seen.append(1)
        return result


def wide(
    store: Store, rank: int, world_size: int, job: str, rows: int, scheme: str, plan: Any = None
) -> dict[str, Any]:
    """Train it for a step that nobody counts, and for four that are counted."""
    with open_session(store, rank, world_size, job, scheme=scheme) as session:
        model = seeded(Wide)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer, plan=plan)
        computed: list[int] = []
        weight = model.get_submodule("first").get_parameter("weight")
        for step in range(14 if plan else 5):
            if step == (10 if plan else 1):
                session.synchronize()
                before = session.metrics()["tx_payload_bytes"]
            generator = torch.Generator().manual_seed(100 * step + rank)
            loss = model(torch.randn(rows, 256, generator=generator)).square().mean()
            with Products(weight.shape) as products:
                loss.backward()
            computed += products.seen
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        sent = session.metrics()["tx_payload_bytes"] - before
        return {
            "digest": digest(model),
            "sent": sent / 4,
            "computed": len(computed),
            "plan": session.planning.plan.to_json() if session.planning.plan is not None else None,
            "schemes": session.monitoring.schemes,
        }


def refused(store: Store, rank: int, world_size: int, job: str, how: str, scheme: str) -> str:
    """Ask for what cannot be; returns the error."""
    options: dict[str, Any] = {}
    plan = None
    if how == "server":
        options = {"scheme": scheme, "update": "server"}
    elif how == "pull":
        options = {"scheme": scheme, "strategy": "kvstore"}
    elif how == "differ":
        options = {"scheme": scheme if rank == 0 else "ps"}
    else:
        model = seeded(Classifier)
        rows = [
            PlannedTensor(
                name, value.numel(), scheme if name == "features.weight" else "ps", "raw", 1, ""
            )
            for name, value in model.named_parameters()
        ]
        plan = Plan("any", ClusterFacts(world_size, 1e9), "given", Settings(), tuple(rows))
    try:
        with open_session(store, rank, world_size, job, **options) as session:
            model = seeded(Classifier)
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    except (ValueError, gradlane.GradlaneError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def hostile(store: Store, rank: int, world_size: int, job: str, scheme: str) -> list[str]:
    """Rank 1 sends bytes that are no block; every rank's error, now and at the next read."""
    session = open_session(store, rank, world_size, job, scheme=scheme)
    model = seeded(Wide)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)

    def pack_noise(parts: Sequence[Part]) -> Tensor:
        packed = block.pack(parts)
        if rank == 1:
            packed[4:8] = 255
        return packed

    errors = []
    with mock.patch.object(sending, "pack", pack_noise):
        for _ in range(2):
            try:
                backward(model(torch.ones(2, 256)).square().mean())
                optimizer.step()
                session.synchronize()
            except gradlane.GradlaneError as error:
                errors.append(f"{type(error).__name__}: {error}")
            optimizer.zero_grad()
    session.abort("the test is over")
    return errors


def uneven(store: Store, rank: int, world_size: int, job: str, scheme: str) -> dict[str, Any]:
    """Ranks run out of data one after another; later the model is prepared again, and restored."""
    with open_session(store, rank, world_size, job, scheme=scheme) as session:
        model = seeded(Classifier)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        session.prepare(model, optimizer)
        with session.join():
            for step in range(2 + rank):
                plain(session, model, optimizer, rank, step)
                optimizer.step()
                optimizer.zero_grad()
        joined = digest(model)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        model.get_submodule("unused").requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        session.prepare(model, optimizer)
        for step in range(2):
            plain(session, model, optimizer, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        trained = digest(model)
        model.load_state_dict(saved)
        restored = digest(model)
        for step in range(2):
            plain(session, model, optimizer, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        values = [parameter.detach().double() for parameter in model.parameters()]
        results = {
            "same": restored == joined and digest(model) == trained,
            "digest": trained,
            "values": values,
        }
    with contextlib.suppress(AttributeError):
        assert "forward" not in model.get_submodule("first").__dict__
    return results


def elsewhere(store: Store, rank: int, world_size: int, job: str) -> list[str]:
    """Rank 0, which owns the largest layer, goes on when the others have what it owes them."""
    digests = []
    with open_session(store, rank, world_size, job, scheme="adam") as session:
        model = seeded(Wide)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * step + rank)
            backward(model(torch.randn(2, 256, generator=generator)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            done = [f"{job}/{other}/{step}" for other in range(1, world_size)]
            if rank == 0:
                # As in a long evaluation: nothing of the session is called.
                store.wait(done)
            session.synchronize()
            store.set(f"{job}/{rank}/{step}", "1")
            digests.append(digest(model))
    return digests
