"""Parameters that a program keeps, whose update is still to come: each look at one sees it.

The core delivers a result only when it is waited for, so a look that does not wait sees the values
of the step before.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.built import needs_core
from tests.training.model.late_core import LateCore
from tests.training.model.pool import RankPool
from tests.training.model.ranks import run_ranks


class Own(nn.Parameter):
    """A parameter of a class of the program's."""


class Marked(nn.Parameter):
    """A parameter whose results are of a class of their own."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        return result.as_subclass(Mark) if type(result) is Tensor else result


class Mark(Tensor):
    """Results of such a parameter; operations keep the class."""


class Boxed:
    """Takes part in torch's functions without being a tensor, as unit or graph libraries do."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [one.value if isinstance(one, Boxed) else one for one in args]
        return Boxed(function(*plain, **(kwargs or {})))


class Late:
    """Kept parameters, of zeros, of one or several prepared models; each step takes 1 away."""

    def __init__(self, session: Any, *classes: Sequence[type[Tensor]]) -> None:
        self.session = session
        self.models = [
            nn.ParameterList([cls(torch.zeros(2)) for cls in of_one]) for of_one in classes
        ]
        self.kept: list[Any] = [one for model in self.models for one in model]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in self.models]
        if session is not None:
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                session.prepare(model, optimizer)

    def backward(self) -> None:
        total: Any = sum(one.sum() for one in self.kept)
        total.backward()

    def step(self) -> None:
        self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def on_late(check: Callable[[Late], None], *classes: Sequence[type[Tensor]]) -> None:
    """Run a check on one rank with parameters of these classes, a model each."""
    run_ranks(1, lambda session: check(Late(session, *classes)), core=LateCore())


def averages(kept: list[Any], how: Callable[[Any, Any], Any]) -> Tensor:
    found = [torch.zeros(2) for _ in kept]
    with torch.no_grad():
        how(found, kept)
    return torch.stack(found)


def into(kept: list[Any]) -> Tensor:
    out = torch.zeros(2)
    with torch.no_grad():
        torch.add(kept[0], kept[-1], out=out)
    return out


class Adds(torch.autograd.Function):
    """Adds two tensors in a function that autograd knows nothing of."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


OPERATIONS: dict[str, Callable[[list[Any]], Tensor]] = {
    "a + b": lambda kept: kept[0] + kept[-1],
    "stack": torch.stack,
    "cat by keyword": lambda kept: torch.cat(tensors=kept),
    "foreach norm": lambda kept: torch.stack(torch._foreach_norm(kept, float("inf"))),
    "foreach average": lambda kept: averages(kept, lambda a, b: torch._foreach_lerp_(a, b, 0.5)),
    "foreach copy": lambda kept: averages(kept, torch._foreach_copy_),
    "linear": lambda kept: nn.functional.linear(torch.ones(2), kept[0].view(1, 2), kept[-1][:1]),
    "einsum": lambda kept: torch.einsum("i,i->", kept[0], kept[-1]),
    "of aten": lambda kept: torch.ops.aten.add(kept[0], kept[-1]),
    "into another": into,
    "one by one": lambda kept: torch.hstack([kept[0], kept[-1]]),
    "autograd function": lambda kept: Adds.apply(kept[0], kept[-1]),
    "deep copy of a dict": lambda kept: copy.deepcopy({"all": (kept[0], kept[-1])})["all"][1],
    "as_subclass": lambda kept: kept[-1].as_subclass(Tensor),
    "version": lambda kept: torch.tensor([one._version for one in kept]),
}
TOGETHER: dict[str, Sequence[Sequence[type[Tensor]]]] = {
    "two models": ([nn.Parameter], [nn.Parameter]),
    "two classes": ([Own, nn.Parameter],),
    "both": ([nn.Parameter, Own], [Own, nn.Parameter]),
    "own operations": ([nn.Parameter, Marked], [Own]),
}


@pytest.mark.parametrize("classes", TOGETHER)
def test_an_operation_waits_for_all_of_its_parameters(classes: str) -> None:
    def results(late: Late) -> dict[str, Tensor]:
        found = {}
        for name, operation in OPERATIONS.items():
            late.step()
            found[name] = operation(late.kept).detach().clone()
        return found

    plain = results(Late(None, *TOGETHER[classes]))

    def check(late: Late) -> None:
        found = results(late)
        wrong = [name for name, one in found.items() if not torch.equal(one, plain[name])]
        assert not wrong
        assert [type(one) for one in found.values()] == [type(one) for one in plain.values()]

    on_late(check, *TOGETHER[classes])


def test_an_operation_waits_where_only_a_class_of_the_programs_is_asked() -> None:
    """Its parameter has its update already, or its gradient is due; the other's update is due."""

    def check(late: Late) -> None:
        first, second = late.kept
        late.step()
        assert first.sum().item() == -2
        assert type(first + second) is Mark
        late.step()
        assert first.sum().item() == -4
        assert torch.equal(torch.stack([first, second]).as_subclass(Tensor), -2 * torch.ones(2, 2))
        late.step()
        first.sum().backward()
        assert torch.equal((first + second).as_subclass(Tensor), -6 * torch.ones(2))
        late.session.close()
        assert type(first) is Marked and type(second) is nn.Parameter

    on_late(check, [Marked], [nn.Parameter])


@pytest.mark.parametrize("is_parameter", [True, False])
def test_an_operation_waits_where_what_is_not_trained_is_asked_alone(is_parameter: bool) -> None:
    """Torch asks the class of the first argument, which looks at no other one."""

    def check(session: Any) -> None:
        model = nn.Linear(2, 1, bias=False)
        weight = model.weight
        nn.init.zeros_(weight)
        ones = Marked(torch.ones(1, 2), requires_grad=False)
        if is_parameter:
            model.register_parameter("ones", ones)
        else:
            model.register_buffer("ones", ones)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert torch.kron(ones, weight).as_subclass(Tensor).tolist() == [[-1.0] * 4]
        assert type(ones + weight) is Mark and ones.__class__ is Marked
        session.close()
        assert type(ones) is Marked

    run_ranks(1, check, core=LateCore())


def test_a_cache_by_version_is_renewed() -> None:
    def check(late: Late) -> None:
        weight = late.kept[0]
        seen, cache = weight._version, weight.detach() * 2
        for step in range(3):
            late.step()
            if weight._version != seen:
                seen, cache = weight._version, weight.detach() * 2
            assert cache.tolist() == [-2.0 * (step + 1)] * 2

    on_late(check, [nn.Parameter])


def test_operands_of_other_kinds_keep_their_classes() -> None:
    def check(late: Late) -> None:
        ones = torch.ones(2)
        mark = ones.as_subclass(Mark)
        for use in (
            lambda one: one + mark,
            lambda one: torch.stack([mark, one]),
            lambda one: mark.add(one),
        ):
            late.step()
            assert type(use(late.kept[0])) is Mark
        late.step()
        boxed = torch.add(late.kept[0], Boxed(ones))  # type: ignore[call-overload]
        assert type(boxed) is Boxed
        assert boxed.value.tolist() == [-3.0, -3.0]
        late.step()
        # Of the form alone, so that nothing is waited for.
        same: Any = torch.is_same_size(late.kept[0], Boxed(ones))  # type: ignore[arg-type]
        assert type(same) is Boxed
        late.backward()
        assert type(late.kept[1] * ones) is Mark

    on_late(check, [nn.Parameter, Marked])


def test_swapped_tensors_are_swapped_after_the_update() -> None:
    def check(late: Late) -> None:
        late.step()
        weight, other = late.kept[0], nn.Parameter(torch.full((2,), 7.0))
        torch.utils.swap_tensors(weight, other)  # type: ignore[no-untyped-call]
        assert (weight.tolist(), other.tolist()) == ([7.0, 7.0], [-1.0, -1.0])
        assert type(weight) is type(other) is nn.Parameter
        late.step()
        assert weight.tolist() == [6.0, 6.0]

    on_late(check, [nn.Parameter])


@pytest.mark.parametrize("moment", ["between", "after"])
def test_a_parameter_made_by_the_class_of_another_is_a_plain_one(moment: str) -> None:
    def check(late: Late) -> None:
        late.backward()
        if moment == "after":
            late.optimizers[0].step()
        weight = late.kept[0]
        assert weight.__class__ is Own
        for made in (type(weight)(torch.ones(2)), weight.__class__(torch.ones(2))):
            assert type(made) is Own
            made.sum().backward()  # type: ignore[no-untyped-call]
            assert made.grad is not None
        copied: Any = Tensor._make_subclass(type(weight), torch.ones(2), True)
        (copied * 2).sum().backward()
        assert copied.grad.tolist() == [2.0, 2.0]
        copied.grad = None

    on_late(check, [Own])


class Copied(nn.Parameter):
    """A parameter in whose copy something else happens, as in another thread."""

    meanwhile: Callable[[], None] | None = None

    def let_others(self) -> None:
        """Run something else to its end."""
        if Copied.meanwhile is not None:
            thread = threading.Thread(target=Copied.meanwhile)
            thread.start()
            thread.join(20)

    def __deepcopy__(self, memo: Any) -> Any:
        self.let_others()
        return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.let_others()
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_step_while_another_thread_copies_leaves_nothing_stale(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(late: Late) -> None:
        late.backward()
        monkeypatch.setattr(Copied, "meanwhile", late.optimizers[0].step)
        copied = COPIES[how](late.kept[0])
        monkeypatch.setattr(Copied, "meanwhile", None)
        assert type(copied) is (Copied if how == "deepcopy" else nn.Parameter)
        assert (late.kept[0] * 1).tolist() == [-1.0, -1.0]

    on_late(check, [Copied])


def test_gradients_are_means_while_another_thread_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(session: Any) -> Any:
        weight = Copied(torch.zeros(1))
        model = nn.ParameterList([weight])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        (weight * (session.rank + 1.0)).sum().backward()
        return weight

    def run(session: Any) -> Any:
        weight = body(session)
        seen: list[Any] = []
        looks[threading.get_ident()] = lambda: seen.append(weight.grad.item())
        copy.deepcopy(weight)
        return seen

    looks: dict[int, Callable[[], None]] = {}

    def let_others(self: Any) -> None:
        thread = threading.Thread(target=looks[threading.get_ident()])
        thread.start()
        thread.join(20)

    monkeypatch.setattr(Copied, "let_others", let_others)
    assert run_ranks(2, run) == [[1.5], [1.5]]


@pytest.mark.parametrize("by", ["the program", "another thread"])
def test_no_look_is_before_an_update_that_another_thread_is_in(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks on waits for the update's end; its parameter says that it is due until then."""
    updating, looked = threading.Event(), threading.Event()
    of_torch = importlib.import_module("torch.optim.sgd")
    sgd = of_torch.sgd

    def check(late: Late) -> None:
        seen: list[list[float]] = []

        def look() -> None:
            updating.wait(20)
            seen.append((late.kept[0] * 1).tolist())
            looked.set()

        def touch() -> None:
            (late.kept[0] * 1).tolist()

        late.step()
        first, second = (touch, look) if by == "the program" else (look, touch)
        thread = threading.Thread(target=second)
        thread.start()
        first()
        thread.join(20)
        assert seen == [[-1.0, -1.0]]

    def slowly(values: Any, *arguments: Any, **options: Any) -> None:
        updating.set()
        looked.wait(0.2)
        sgd(values, *arguments, **options)

    monkeypatch.setattr(of_torch, "sgd", slowly)
    for own in (nn.Parameter, Own, Marked):
        updating.clear()
        looked.clear()
        on_late(check, [own])


@needs_core
def test_torch_counts_what_the_core_writes(pool: RankPool) -> None:
    """Rank 0's values in `prepare`, and updates of servers."""
    for update in ("worker", "server"):
        results = pool.run("versions", ranks=2, update=update)
        for spread, moved in results:
            assert spread, (update, results)
            assert all(moved), (update, results)
