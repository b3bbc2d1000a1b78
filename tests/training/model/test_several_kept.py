"""Programs that keep parameters of several prepared models, and caches of what they were.

An encoder that two heads share has an optimizer of its own, and each head another one; every
update is late.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.torch_versions import in_threads
from tests.training.model.late_core import LateCore
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits

STEPS = 4
Optimizers = list[torch.optim.Optimizer]


class Shared:
    """An encoder and two heads, each trained by an optimizer of its own class."""

    def __init__(self, session: Any) -> None:
        torch.manual_seed(0)
        self.encoder, self.actor, self.critic = (
            nn.Linear(2, size, bias=False) for size in (2, 1, 1)
        )
        self.models = [self.encoder, self.actor, self.critic]
        self.optimizers: Optimizers = [
            torch.optim.SGD(self.encoder.parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(self.actor.parameters(), lr=0.1),
            torch.optim.Adam(self.critic.parameters(), lr=0.1),
        ]
        if session is not None:
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                session.prepare(model, optimizer)
        self.kept: list[Any] = [one.weight for one in self.models]
        self.average = [one.detach().clone() for one in self.kept]
        self.found: list[Tensor] = []

    def step(self, number: int) -> None:
        features = self.encoder(torch.full((1, 2), number + 1.0))
        loss: Any = self.actor(features).sum() + self.critic(features).square().sum()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def note(use: Callable[[Shared], Any]) -> Callable[[Shared], None]:
    """Return a use whose result counts."""
    return lambda one: one.found.append(use(one).detach().clone())


def scaled_average(one: Shared) -> None:
    torch._foreach_mul_(one.average, 0.5)
    torch._foreach_add_(one.average, one.kept, alpha=0.5)


def loaded(one: Shared) -> Tensor:
    file = io.BytesIO()
    torch.save({"kept": one.kept}, file)
    file.seek(0)
    return nn.utils.parameters_to_vector(torch.load(file, weights_only=True)["kept"])


def compiled(use: Callable[[], Tensor]) -> Tensor:
    found: Tensor = torch.compile(use, backend="eager")()
    return found


def halved(one: Shared) -> None:
    flat = nn.utils.parameters_to_vector(one.kept)
    nn.utils.vector_to_parameters(flat * 0.5, one.kept)


def in_a_row(one: Shared) -> Tensor:
    rows = torch.zeros(2, 2)
    rows[0], rows[1] = one.kept[1][0], one.kept[2][0]
    return rows


USES: dict[str, Callable[[Shared], Any]] = {
    "average by lerp": lambda one: torch._foreach_lerp_(one.average, one.kept, 0.5),
    "average in two operations": scaled_average,
    "target network": lambda one: torch._foreach_copy_(one.average, one.kept),
    "head copied to head": lambda one: one.kept[1].copy_(one.kept[2]),
    "head moved towards head": lambda one: one.kept[1].data.lerp_(one.kept[2].data, 0.5),
    "set as one vector": halved,
    "set anew": lambda one: nn.init.zeros_(one.kept[1]),
    "total norm": note(lambda one: torch.stack(torch._foreach_norm(one.kept)).norm()),
    "saved and loaded": note(loaded),
    "stacked modules": note(lambda one: torch.func.stack_module_state(one.models[1:])[0]["weight"]),
    "chain of products": note(
        lambda one: torch.linalg.multi_dot([one.kept[2], *[one.kept[0]] * 2])
    ),
    "chosen by one": note(lambda one: torch.where(one.kept[1] > 0, one.kept[1], one.kept[2])),
    "by keyword": note(
        lambda one: torch.addcmul(one.kept[1], tensor1=one.kept[2], tensor2=one.kept[2])
    ),
    "by rows": note(in_a_row),
    "compared": note(lambda one: torch.tensor([torch.equal(one.kept[1], one.kept[2])])),
    "compiled": note(lambda one: compiled(lambda: one.kept[1] + one.kept[2] @ one.kept[0])),
}


COMPILED = ("compiled", "beside compiled code")


def marked(names: Iterable[str]) -> list[Any]:
    """Return names as parameters; those that compile are not for every torch."""
    return [pytest.param(one, marks=in_threads if one in COMPILED else ()) for one in names]


@pytest.mark.parametrize("use", marked(USES))
def test_an_encoder_that_two_heads_share_is_read_after_all_updates(use: str) -> None:
    def run(session: Any) -> list[Tensor]:
        one = Shared(session)
        for number in range(STEPS):
            one.step(number)
            with torch.no_grad():
                USES[use](one)
        return [value.detach().clone() for value in (*one.kept, *one.average, *one.found)]

    (late,) = run_ranks(1, run, core=LateCore())
    assert same_bits(late, run(None))


def compiled_reader(one: Shared) -> Callable[[], Any]:
    """Return a function whose compiled caller asks for the version outside of the graph."""
    disable: Any = torch._dynamo.disable
    asked = disable(lambda: one.kept[0]._version)

    def read(number: Tensor) -> Any:
        number.add_(asked())
        return asked()

    caller: Any = torch.compile(read, backend="eager")
    return lambda: caller(torch.ones(1))


VERSIONS: dict[str, Callable[[Shared], Callable[[], Any]]] = {
    "of a view": lambda one: lambda: one.kept[0].view(4)._version,
    "of the transposed": lambda one: lambda: one.kept[0].t()._version,
    "of the detached": lambda one: lambda: one.kept[0].detach()._version,
    "of all models": lambda one: lambda: [kept._version for kept in one.kept],
    "of the module's": lambda one: lambda: one.encoder.weight._version,
    "of the group's": lambda one: lambda: one.optimizers[0].param_groups[0]["params"][0]._version,
    "by the property": lambda one: (
        lambda: vars(torch._C.TensorBase)["_version"].__get__(one.kept[0])
    ),
    "beside compiled code": compiled_reader,
}


@pytest.mark.parametrize("version", marked(VERSIONS))
def test_a_cache_is_renewed_whatever_tells_its_version(version: str) -> None:
    def check(session: Any) -> None:
        one = Shared(session)
        read = VERSIONS[version](one)
        seen, cache = read(), one.kept[0].detach().t().clone()
        for number in range(STEPS):
            one.step(number)
            now = read()
            if now != seen:
                seen, cache = now, one.kept[0].detach().t().clone()
            assert torch.equal(cache, one.kept[0].detach().t()), number

    run_ranks(1, check, core=LateCore())
