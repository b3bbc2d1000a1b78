"""Buffers of unusual kinds, and buffers that a program changes between steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradlane
from tests.training.model.constructs import Construct
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import ReferenceSession, run_reference, same_bits

Change = Callable[[Any, int], None]
STEPS = 4


def values_of(rank: int, step: int) -> Tensor:
    """The inputs of a step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 3, generator=generator)


class Model(nn.Module):
    """Statistics, a buffer that forwards use and change, and one that is a constant."""

    low: Tensor
    scale: Tensor
    unused: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Linear(3, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-1, 1, 9).view(3, 3))
            self.layer.bias.copy_(torch.linspace(0, 1, 3))
        self.register_buffer("low", torch.zeros(3))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("unused", torch.zeros(3))

    def forward(self, values: Tensor) -> Tensor:
        self.low.copy_(torch.minimum(self.low, values.detach().amin(0)))
        result: Tensor = self.layer(self.norm(values) - self.low) * self.scale
        return result


class Expanded(Model):
    """Buffers and a frozen parameter whose elements share memory."""

    places: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(3.0).expand(5, 3))
        self.register_buffer("rows", torch.randn(1, 1).expand(5, 3))
        self.frozen = nn.Parameter(torch.randn(1, 3).expand(5, 3), requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) + self.places * self.frozen + self.rows


def not_expanded() -> nn.Module:
    """The same with memory for each element."""
    model = Expanded()
    for name in ("places", "rows"):
        model._buffers[name] = model._buffers[name].clone()  # type: ignore[union-attr]
    model.frozen = nn.Parameter(model.frozen.clone(), requires_grad=False)
    return model


class Sliced(Model):
    """A buffer whose elements do not lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(6)[::2])


def scripted() -> nn.Module:
    """Batch norm that torch.jit has compiled."""
    model: Any = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.norm = torch.jit.script(model.norm)
    return model  # type: ignore[no-any-return]


def none(model: Any, rank: int) -> None:
    """Change nothing."""


def train(session: Any, model: Any, change: Change, defer: bool | None) -> list[Tensor]:
    """Train some steps and change buffers after each; return what the model is after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer, defer=defer)
    seen = []
    for step in range(STEPS):
        model(values_of(session.rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(session, ReferenceSession):
            session.share_buffers(model)
        change(model, session.rank)
        seen += [tensor.detach().clone() for tensor in model.state_dict().values()]
    return seen


def built(build: Callable[[], nn.Module]) -> list[nn.Module]:
    """Build a model for each of two ranks, in one thread: random numbers are of all threads."""
    models = []
    for rank in range(2):
        torch.manual_seed(rank)
        models.append(build())
    return models


def alike(
    change: Change = none,
    build: Callable[[], nn.Module] = Model,
    plain: Callable[[], nn.Module] | None = None,
) -> Callable[[bool | None], None]:
    """Check that ranks see what DDP has them see, rank 0's buffers, as a plain model does."""

    def check(defer: bool | None) -> None:
        def trained(models: list[nn.Module]) -> Callable[[Any], list[Tensor]]:
            return lambda session: train(session, models[session.rank], change, defer)

        right = run_reference(2, trained(built(plain or build)))
        found = run_ranks(2, trained(built(build)))
        for rank in range(2):
            assert same_bits(found[rank], right[rank])

    return check


def refused(
    change: Change = none, build: Callable[[], nn.Module] = Model
) -> Callable[[bool | None], None]:
    """Let the error through; what is left of it to another rank says the same."""

    def check(defer: bool | None) -> None:
        models = built(build)
        first, second = run_ranks(
            2,
            lambda session: train(session, models[session.rank], change, defer),
            expect_errors=True,
        )
        assert str(first).partition(": ")[2][:60] in str(second) or str(second)[:60] in str(first)
        raise first

    return check


def keeps_own(defer: bool | None) -> None:
    """Check that a rank's write between two forwards is its own until the step ends."""

    def body(session: Any) -> list[Tensor]:
        model = models[session.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer, defer=defer)
        with session.no_sync():
            model(values_of(session.rank, 0)).square().mean().backward()
        model.scale.fill_(2.0 + session.rank)
        output = model(values_of(session.rank, 1))
        output.square().mean().backward()
        own = model.scale.clone()
        optimizer.step()
        return [own, model.scale.clone()]

    models: Any = built(Model)
    first, second = run_ranks(2, body)
    assert first == [2.0, 2.0] and second == [3.0, 2.0]


def put(model: Any, rank: int) -> None:
    """Put another tensor into the mapping itself."""
    model._buffers["low"] = torch.full((3,), -7.0)


def set_attribute(model: Any, rank: int) -> None:
    """Set a buffer to another tensor."""
    model.low = torch.full((3,), -7.0)


def take_out(model: Any, rank: int) -> None:
    """Take a buffer out and register another one in its place."""
    del model.low
    model.register_buffer("low", torch.full((3,), -7.0))


def write(model: Any, rank: int) -> None:
    """Write into a buffer."""
    model.scale.mul_(0.5)


def write_by_hand(model: Any, rank: int) -> None:
    """Write into a buffer past the model."""
    dict.__getitem__(model._buffers, "scale").mul_(0.5)


def kept_reference(defer: bool | None) -> None:
    """Let the error of a write past the model through, where ranks would lose it."""

    def trained(mode: str, defer: bool | None) -> list[Any]:
        models: Any = built(Model)

        def body(session: Any) -> Tensor:
            model = models[session.rank]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            kept = model.unused
            session.prepare(model, optimizer, defer=defer, buffers=mode)
            for step in range(2):
                model(values_of(session.rank, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    session.synchronize()
                kept.add_(1.0)
            found: Tensor = model.unused.clone()
            return found

        return run_ranks(2, body, expect_errors=True)

    for mode in ("broadcast", "average"):
        if defer is False:
            assert all(one.tolist() == [2.0, 2.0, 2.0] for one in trained(mode, defer))
        errors = trained(mode, None)
        assert any(isinstance(one, gradlane.UsageError) for one in errors)
        assert all("buffer 'unused' was written through a reference kept" in str(e) for e in errors)
    raise next(one for one in errors if isinstance(one, gradlane.UsageError))


def on(rank: int, change: Change) -> Change:
    """Have one rank alone make a change."""
    return lambda model, own: change(model, own) if own == rank else None


class Observer(Model):
    """A buffer that gets its size in the first forward, as those of torch.ao.quantization."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.empty(0))

    def forward(self, values: Tensor) -> Tensor:
        if not self.seen.numel():
            self.seen.resize_(3).copy_(values.detach().amin(0))
        return super().forward(values)


def with_view() -> nn.Module:
    """A buffer in the memory of a trained parameter."""
    model = Model()
    model.register_buffer("row", model.layer.weight.detach()[0])
    return model


def frozen_view() -> nn.Module:
    """A frozen parameter in the memory of a trained one."""
    model = Model()
    model.register_parameter("row", nn.Parameter(model.layer.weight.detach(), requires_grad=False))
    return model


def made_in_inference_mode() -> nn.Module:
    """A buffer that torch writes in inference mode alone."""
    model = Model()
    with torch.inference_mode():
        model.low = torch.zeros(3)
    return model


def parameter_of_inference_mode() -> nn.Module:
    """A frozen parameter that torch writes in inference mode alone."""
    model = Model()
    with torch.inference_mode():
        frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    model.register_parameter("frozen", frozen)
    return model


def negative_view() -> Tensor:
    """Zeros whose memory torch reads as negative."""
    view = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert view.is_neg()
    return view


def with_conjugate() -> nn.Module:
    """A buffer whose memory has the conjugate values."""
    model = Model()
    model.register_buffer("places", torch.ones(3, dtype=torch.complex64).conj())
    return model


def with_negative() -> nn.Module:
    """A buffer whose memory has the negative values."""
    model = Model()
    model.low = negative_view()
    return model


def replace_by_negative(model: Any, rank: int) -> None:
    """Replace a buffer by the imaginary part of a conjugate."""
    model.unused = negative_view()


def trained_expanded() -> nn.Module:
    """A trained parameter whose elements share memory."""
    model = Model()
    model.register_parameter("gain", nn.Parameter(torch.ones(1).expand(3)))
    return model


def replace_in_inference_mode(model: Any, rank: int) -> None:
    """Replace a buffer as an evaluation may."""
    with torch.inference_mode():
        model.unused = model.unused + 1.0


SECTION = "Buffers"
RIGHT: dict[str, tuple[Callable[[bool | None], None], str]] = {
    "buffers that forwards write": (alike(), "rank 0's after each step"),
    "expanded buffers and expanded frozen parameters": (
        alike(build=Expanded, plain=not_expanded),
        "",
    ),
    "buffers of a scripted module": (alike(build=scripted, plain=Model), ""),
    "`setattr` with another tensor between steps, alike on all ranks": (alike(set_attribute), ""),
    "`module._buffers[name] = ...` between steps, alike on all ranks": (alike(put), ""),
    "`del` and `register_buffer` with the same form, alike on all ranks": (alike(take_out), ""),
    "written between steps, alike on all ranks": (alike(write), ""),
    "the same where its elements lie apart": (
        alike(lambda model, rank: model.low.sub_(1.0), Sliced),
        "",
    ),
    "written between two forwards of a step": (
        keeps_own,
        "this rank's own until the step ends, then rank 0's, as what forwards write",
    ),
}
REFUSED: dict[str, tuple[Callable[[bool | None], None], str]] = {
    "written between steps on rank 0 alone": (
        refused(on(0, write)),
        "not alike on all ranks: rank 0 changed 'scale'; rank 1 changed none",
    ),
    "written between steps on another rank alone": (
        refused(on(1, write)),
        "not alike on all ranks: rank 0 changed none; rank 1 changed 'scale'",
    ),
    "replaced on rank 0 alone": (
        refused(on(0, set_attribute)),
        "not alike on all ranks: rank 0 changed 'low'; rank 1 changed none",
    ),
    "written to other values on each rank": (
        refused(lambda model, rank: model.scale.fill_(rank + 2)),
        "not alike on all ranks: rank 0 changed 'scale'; rank 1 changed 'scale'",
    ),
    "written after `step()` through a reference kept from before": (
        kept_reference,
        "buffer 'unused' was written through a reference kept from before, while the values",
    ),
    "a buffer that gets its size in the first forward": (
        refused(build=Observer),
        "buffer 'seen' is (3,) torch.float32 now, and in prepare() it was not there",
    ),
    "`register_buffer` with a new name after `prepare`": (
        refused(lambda model, rank: model.layer.register_buffer("late", torch.ones(1))),
        "buffer 'layer.late' is (1,) torch.float32 now, and in prepare() it was not there",
    ),
    "a buffer of another shape or dtype, or none": (
        refused(lambda model, rank: model.__setattr__("unused", torch.zeros(4))),
        "buffer 'unused' was prepared as (3,) torch.float32 and is (4,) torch.float32 now",
    ),
    "a buffer made in `torch.inference_mode()`": (
        refused(build=made_in_inference_mode),
        "tensor 'low' was made in torch.inference_mode()",
    ),
    "a frozen parameter made there": (
        refused(build=parameter_of_inference_mode),
        "tensor 'frozen' was made in torch.inference_mode()",
    ),
    "a buffer replaced there": (
        refused(replace_in_inference_mode),
        "buffer 'unused' was replaced by a tensor of torch.inference_mode()",
    ),
    "a conjugate view (`torch.conj`)": (
        refused(build=with_conjugate),
        "tensor 'places' is a conjugate or negative view (torch.conj)",
    ),
    "the imaginary part of one": (
        refused(build=with_negative),
        "tensor 'low' is a conjugate or negative view (torch.conj)",
    ),
    "a buffer replaced by that": (
        refused(replace_by_negative),
        "buffer 'unused' was replaced by a conjugate or negative view (torch.conj)",
    ),
    "a trained expanded parameter": (
        refused(build=trained_expanded),
        "parameter 'gain' is expanded (stride 0)",
    ),
    "a buffer that is a view of a trained parameter": (
        refused(build=with_view),
        "'row', which is not trained, lies in the memory of 'layer.weight', which is",
    ),
    "a frozen parameter that is one": (
        refused(build=frozen_view),
        "'row', which is not trained, lies in the memory of 'layer.weight', which is",
    ),
}

NOTES = {
    "written between steps on rank 0 alone": "not noticed in modules whose forward is compiled",
    "written after `step()` through a reference kept from before": "at the next use of the model; "
    "right after `session.synchronize()`, with `defer=False` and through the model; so with "
    '`buffers="average"`, too',
    "a buffer that gets its size in the first forward": "right after a forward before `prepare`",
    "`register_buffer` with a new name after `prepare`": 'right with `buffers="local"`',
}

CONSTRUCTS = [
    *(Construct(SECTION, name, check, note=note) for name, (check, note) in RIGHT.items()),
    *(
        Construct(SECTION, name, check, refused=words, note=NOTES.get(name, ""))
        for name, (check, words) in REFUSED.items()
    ),
]
