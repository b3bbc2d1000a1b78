"""Training gives the bits that it must give, whatever the model and the optimizer are.

The double averages in rank order at once; here the adapter alone is on trial.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from tests.training.model.held_core import HeldCore
from tests.training.model.models import Attention, Awkward, SmallCnn, seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot, train_reference

STEPS = 12


def batch(shape: tuple[int, ...], rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator)


def cnn_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    images = batch((4, 1, 8, 8), rank, step)
    labels = torch.arange(4) % 10
    return nn.functional.cross_entropy(model(images), labels)


def attention_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = batch((3, 5, 8), rank, step)
    value: Tensor = (model(tokens) * batch((3, 5, 8), rank, -step)).mean()
    return value


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def grouped_adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
    )


def train(
    session: Any,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor | None],
    *,
    steps: int = STEPS,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    scheduler_first: bool = True,
    defer: bool | None = None,
    clip_norm: float | None = None,
) -> list[Tensor]:
    """The user's loop; every rank but rank 0 starts from other values."""
    model = make_model()
    if session.rank != 0:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.zero_()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer) if make_scheduler and scheduler_first else None
    model, optimizer = session.prepare(model, optimizer, defer=defer)
    if make_scheduler and scheduler is None:
        scheduler = make_scheduler(optimizer)
    for step in range(1, steps + 1):
        value = loss(model, session.rank, step)
        if value is not None:
            value.backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return snapshot(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("defer", [None, False])
def test_cnn_equals_the_reference(world_size: int, defer: bool | None) -> None:
    def body(session: Any) -> list[Tensor]:
        return train(session, lambda: seeded(SmallCnn), sgd, cnn_loss, defer=defer)

    expected = train_reference(world_size, STEPS, lambda: seeded(SmallCnn), sgd, cnn_loss)
    for parameters in run_ranks(world_size, body):
        assert same_bits(parameters, snapshot(expected[0]))


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_adamw_with_groups_and_cosine_schedule(scheduler_first: bool) -> None:
    def cosine(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

    def body(session: Any) -> list[Tensor]:
        return train(
            session,
            lambda: seeded(Attention),
            grouped_adamw,
            attention_loss,
            make_scheduler=cosine,
            scheduler_first=scheduler_first,
        )

    expected = train_reference(
        3, STEPS, lambda: seeded(Attention), grouped_adamw, attention_loss, make_scheduler=cosine
    )
    for parameters in run_ranks(3, body):
        assert same_bits(parameters, snapshot(expected[0]))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


MARKS = {
    "adafactor": pytest.mark.skipif(
        not hasattr(torch.optim, "Adafactor"), reason="this torch has no Adafactor"
    )
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, ())) for name in OPTIMIZERS]
)
def test_every_per_parameter_optimizer(name: str) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](model.parameters())

    def exponential(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def body(session: Any) -> list[Tensor]:
        return train(
            session,
            lambda: seeded(Attention),
            make_optimizer,
            attention_loss,
            steps=5,
            make_scheduler=exponential,
        )

    expected = train_reference(
        2,
        5,
        lambda: seeded(Attention),
        make_optimizer,
        attention_loss,
        make_scheduler=exponential,
    )
    for parameters in run_ranks(2, body):
        assert same_bits(parameters, snapshot(expected[0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def make_model() -> nn.Module:
        return seeded(Attention).to(dtype)

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        value: Tensor = model(batch((3, 5, 8), rank, step).to(dtype)).square().mean()
        return value

    def body(session: Any) -> list[Tensor]:
        return train(session, make_model, sgd, loss, steps=5)

    expected = train_reference(3, 5, make_model, sgd, loss)
    for parameters in run_ranks(3, body):
        assert parameters[0].dtype is dtype
        assert same_bits(parameters, snapshot(expected[0]))


def awkward_loss(model: Any, rank: int, step: int) -> Tensor:
    # Used on all ranks, on some, on none, in turns.
    model.uses_sometimes = step % 4 == 0 or (step % 4 == 1 and rank == 1)
    value: Tensor = model(batch((3, 6), rank, step)).square().mean()
    return value


@pytest.mark.parametrize("defer", [None, False])
def test_tied_reused_frozen_unused_and_sometimes_used(defer: bool | None) -> None:
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def body(session: Any) -> list[Tensor]:
        model: Any = seeded(Awkward)
        if session.rank:
            with torch.no_grad():
                for tensor in [*model.parameters(), *model.buffers()]:
                    tensor.zero_()
        odd_before = model.odd
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer, defer=defer)
        assert model.odd is odd_before
        assert torch.equal(model.odd, torch.arange(12.0).view(3, 4).t())
        assert torch.equal(model.mask, torch.tril(torch.ones(6, 6)).bool())
        assert model.decoder.weight is model.encoder.weight
        for step in range(1, STEPS + 1):
            awkward_loss(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return snapshot(model)

    expected = train_reference(3, STEPS, lambda: seeded(Awkward), make_optimizer, awkward_loss)
    for parameters in run_ranks(3, body):
        assert same_bits(parameters, snapshot(expected[0]))


@pytest.mark.parametrize("defer", [None, False])
def test_clipping_with_torchs_own_function(defer: bool | None) -> None:
    def body(session: Any) -> list[Tensor]:
        return train(session, lambda: seeded(SmallCnn), sgd, cnn_loss, clip_norm=0.1, defer=defer)

    def clip(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    expected = train_reference(2, STEPS, lambda: seeded(SmallCnn), sgd, cnn_loss, before_step=clip)
    plain = train_reference(2, STEPS, lambda: seeded(SmallCnn), sgd, cnn_loss)
    assert not same_bits(snapshot(expected[0]), snapshot(plain[0])), "the norm clips nothing"
    for parameters in run_ranks(2, body):
        assert same_bits(parameters, snapshot(expected[0]))


def test_clipping_with_parameters_used_on_one_rank_only() -> None:
    def clip(model: nn.Module) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def body(session: Any) -> list[Tensor]:
        return train(session, lambda: seeded(Awkward), make_optimizer, awkward_loss, clip_norm=0.05)

    expected = train_reference(
        3, STEPS, lambda: seeded(Awkward), make_optimizer, awkward_loss, before_step=clip
    )
    for parameters in run_ranks(3, body):
        assert same_bits(parameters, snapshot(expected[0]))


def test_gradients_that_share_memory_with_the_rest_of_the_graph() -> None:
    """Autograd may give a parameter a view of what another branch has yet to read."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early = nn.Parameter(torch.randn(2, 3))
            self.late = nn.Parameter(torch.randn(6))

        def forward(self, values: Tensor) -> Tensor:
            # The gradient of `early` is a view of the gradient that `late` goes on from.
            return (self.late.exp() + self.early.view(-1)) * values

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        value: Tensor = model(batch((6,), rank, step)).sum()
        return value

    def body(session: Any) -> list[Tensor]:
        return train(session, lambda: seeded(Shared), sgd, loss)

    expected = train_reference(3, STEPS, lambda: seeded(Shared), sgd, loss)
    for parameters in run_ranks(3, body):
        assert same_bits(parameters, snapshot(expected[0]))


def test_channels_last_and_non_contiguous_parameters() -> None:
    def make_model() -> nn.Module:
        model = seeded(SmallCnn).to(memory_format=torch.channels_last)
        model.extra = nn.Parameter(torch.arange(24.0).view(4, 6)[:, ::2])
        return model

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        extra: Any = model.extra
        value: Tensor = cnn_loss(model, rank, step) + (extra * batch((4, 3), rank, step)).sum()
        return value

    def body(session: Any) -> list[Tensor]:
        return train(session, make_model, sgd, loss, steps=4)

    expected = train_reference(2, 4, make_model, sgd, loss)
    for parameters in run_ranks(2, body):
        assert same_bits(parameters, snapshot(expected[0]))


def test_evaluation_and_state_dict_between_steps() -> None:
    """Also on rank 0 only, under inference mode, autocast and no_grad, while updates are due."""

    def body(session: Any) -> tuple[list[Tensor], list[Any]]:
        model = seeded(Attention)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        seen: list[Any] = []
        for step in range(1, 9):
            attention_loss(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if session.rank == 0:
                model.eval()
                tokens = batch((3, 5, 8), 0, 99)
                if step % 4 == 0:
                    with torch.inference_mode():
                        model(tokens)
                elif step % 4 == 1:
                    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                        model(tokens)
                elif step % 4 == 2:
                    buffer = io.BytesIO()
                    torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, buffer)
                    buffer.seek(0)
                    seen.append((step, torch.load(buffer)["m"]))
                else:
                    seen.append((step, copy.deepcopy(model).state_dict()))
                model.train()
        return snapshot(model), seen

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    results = run_ranks(2, body)
    for steps in (2, 3, 6, 7, 8):
        (expected, _) = train_reference(
            2, steps, lambda: seeded(Attention), make_optimizer, attention_loss
        )
        if steps == 8:
            for parameters, _ in results:
                assert same_bits(parameters, snapshot(expected))
        for step, state in results[0][1]:
            if step == steps:
                assert same_bits(list(state.values()), list(expected.state_dict().values()))
    assert [step for step, _ in results[0][1]] == [2, 3, 6, 7]


def test_forward_order_is_observed_on_rank_0() -> None:
    class Backwards(nn.Module):
        """Modules are declared in another order than they are used in."""

        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 4, bias=False)
            self.unused = nn.Linear(4, 4, bias=False)
            self.first = nn.Linear(4, 4, bias=False)
            self.read = nn.Linear(4, 4, bias=False)

        def forward(self, values: Tensor) -> Tensor:
            hidden = self.first(values) @ self.read.weight
            return self.last(hidden)  # type: ignore[no-any-return]

    core = HeldCore()

    def body(session: Any) -> None:
        model: Any = seeded(Backwards)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        with torch.no_grad():
            model.last(torch.zeros(1, 4))  # an evaluation does not count
        for step in range(3):
            torch.utils.checkpoint.checkpoint(
                model,
                batch((2, 4), session.rank, step),
                use_reentrant=False,
                preserve_rng_state=False,
            ).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(2, body, core=core)
    # The last three are what all four travel in, as urgent as the most urgent one, and two tensors
    # that are asked for before any update: absences and statuses.
    assert core.priorities == [[-2, -3, 0, -1, 0, 0, 0]]


def test_several_models_share_a_session() -> None:
    def body(session: Any) -> list[list[Tensor]]:
        models = [seeded(Attention), seeded(Awkward, seed=3)]
        losses = [attention_loss, awkward_loss]
        optimizers = [sgd(model) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            session.prepare(model, optimizer)
        for step in range(1, 5):
            for model, optimizer, loss in zip(models, optimizers, losses, strict=True):
                loss(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        session.synchronize()
        metrics = session.metrics()
        sent = [channel["tx_bytes"] for channel in metrics["channels"]]
        assert len(sent) == 2 and min(sent) > 0 and metrics["tx_bytes"] == sum(sent)
        return [snapshot(model) for model in models]

    first = train_reference(2, 4, lambda: seeded(Attention), sgd, attention_loss)
    second = train_reference(2, 4, lambda: seeded(Awkward, seed=3), sgd, awkward_loss)
    for one, other in run_ranks(2, body):
        assert same_bits(one, snapshot(first[0]))
        assert same_bits(other, snapshot(second[0]))


class Adapted(nn.Module):
    """A trained layer behind a frozen weight of many more values, and a frozen table of some."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.zeros(300, 100), requires_grad=False)
        self.table = nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.layer = nn.Linear(3, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values) + self.base.mean() + self.table[0]  # type: ignore[no-any-return]


def trains_adapted(
    session: Any, change: Callable[[Any, int, int], None], steps: int, **options: Any
) -> None:
    model: Any = seeded(Adapted)
    optimizer = sgd(model.layer)
    session.prepare(model, optimizer, **options)
    for step in range(steps):
        change(model, session.rank, step)
        model(batch((2, 3), session.rank, step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def write_frozen(model: Any, rank: int, step: int) -> None:
    """Merge an adapter, on one rank."""
    if (rank, step) == (1, 3):
        model.base[-1, -1] = 7.0


def load_frozen(model: Any, rank: int, step: int) -> None:
    """Load a checkpoint, on one rank."""
    if (rank, step) == (1, 3):
        state = model.state_dict()
        model.load_state_dict({**state, "base": torch.ones(300, 100)})


def swap_frozen(model: Any, rank: int, step: int) -> None:
    """Give a parameter other memory, on one rank."""
    if (rank, step) == (1, 3):
        model.base.data = torch.ones(300, 100)


def write_uncounted(model: Any, rank: int, step: int) -> None:
    """Write values in a way that torch does not count."""
    if (rank, step) == (1, 3):
        model.table.data[2] = 1.0


@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (write_frozen, "base"),
        (load_frozen, "base"),
        (swap_frozen, "base"),
        (write_uncounted, "table"),
    ],
)
def test_check_every_names_the_frozen_parameter_that_differs(
    change: Any, name: str, update: str
) -> None:
    errors = run_ranks(
        2,
        lambda session: trains_adapted(session, change, 6),
        check_every=2,
        update=update,
        expect_errors=True,
    )
    for rank, error in enumerate(errors):
        assert isinstance(error, gradlane.SessionFailedError)
        words = rf"frozen parameter '{name}' differs between rank {rank} and rank {1 - rank} after"
        assert re.search(f"{words} step 4", str(error)), error


def test_frozen_parameters_that_all_ranks_change_alike() -> None:
    """Also where one writes the same values twice: the values count."""

    @torch.no_grad()
    def change(model: Any, rank: int, step: int) -> None:
        for _ in range(1 + rank):
            model.base[:] = float(step)
        if rank == 1:
            model.table.mul_(1.0)

    run_ranks(3, lambda session: trains_adapted(session, change, 5), check_every=1)


def test_frozen_parameters_are_in_the_sample() -> None:
    """And the first samples are soon: a model loaded on one rank is found before step 100."""

    def change(model: Any, rank: int, step: int) -> None:
        if (rank, step) == (0, 0):
            model.load_state_dict({**model.state_dict(), "base": torch.ones(300, 100)})

    errors = run_ranks(2, lambda session: trains_adapted(session, change, 3), expect_errors=True)
    for error in errors:
        assert isinstance(error, gradlane.SessionFailedError)
        assert re.search(r"differ after step 1 \('base' on ranks", str(error)), error


@torch.no_grad()
def load_late(model: Any, rank: int, step: int) -> None:
    """Load a model on one rank alone, too late for the first samples."""
    if (rank, step) == (0, 4):
        model.layer.weight[0] = 7.0
        model.base[:] = 7.0


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ["layer.weight"]),
        ({"check_every": 3}, ["layer.weight"]),
        ({"update": "server"}, ["base"]),
        ({"check_every": 0}, []),
    ],
)
def test_closing_compares_what_no_sample_has_seen(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], names: list[str]
) -> None:
    """With updates on the servers, trained parameters are theirs on all ranks."""
    run_ranks(2, lambda session: trains_adapted(session, load_late, 5), summary=False, **options)
    told = [one.getMessage() for one in caplog.records if one.name == "gradlane"]
    assert len(told) == len(names)
    for message, name in zip(told, names, strict=True):
        words = "as the session closes after step 5, values of"
        assert message.startswith(f"{words} {name!r} differ between rank 0 and rank 1")


@pytest.mark.parametrize("update", ["worker", "server"])
def test_closing_says_nothing_of_an_export_or_of_equal_models(
    caplog: pytest.LogCaptureFixture, update: str
) -> None:
    def body(session: Any) -> None:
        trains_adapted(session, lambda *_: None, 3)
        if session.rank == 0:
            session.models[0].half()

    run_ranks(2, body, update=update, summary=False)
    assert not [one for one in caplog.records if one.name == "gradlane"]


def test_check_every_names_the_parameter_that_differs() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        bias = model.bias
        for step in range(6):
            if step == 4 and session.rank == 1:
                with torch.no_grad():
                    bias[0] += 1.0
            model(batch((2, 3), session.rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    errors = run_ranks(2, body, check_every=2, expect_errors=True)
    for error in errors:
        assert isinstance(error, gradlane.SessionFailedError)
    assert "'bias' differs between rank 0 and rank 1 after step 4" in str(errors[0])
