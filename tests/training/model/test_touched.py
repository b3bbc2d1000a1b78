"""Kept parameters, copied optimizers, steps of others, threads: right, or refused where they are.

What programs do by hand with gradients and state is in `constructs/by_hand.py`.
"""

from __future__ import annotations

import copy
import functools
import importlib
import io
import re
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane.training.model.optimizers import steps_per_parameter
from tests.training.model.constructs.by_hand import Training, on_two
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot

# ---- gradients


def test_a_gradient_on_its_way_is_not_touched_inside_backward() -> None:
    def body(session: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        last = model[1].weight
        model[0].weight.register_hook(lambda _: last.grad.mul_(2.0))
        with pytest.raises(gradlane.UsageError, match=r"'1.weight' is touched inside backward"):
            model(torch.ones(1, 1)).sum().backward()

    run_ranks(1, body)


# ---- parameters that are kept


def test_kept_parameters_wait_for_their_update() -> None:
    def check(one: Training) -> None:
        average = torch.zeros(1, 1)
        one.backward()
        one.optimizer.step()
        with torch.no_grad():
            torch._foreach_add_([average], one.optimizer.param_groups[0]["params"])
        assert average.item() == -1.5
        one.optimizer.zero_grad()
        one.backward()
        one.optimizer.step()
        assert one.kept[0].shape == (1, 1)
        with torch.no_grad():
            average.lerp_(one.kept[0], 1.0)
        assert average.item() == -3.0
        assert type(one.weight) is nn.Parameter

    on_two(check)


READS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": lambda weight: copy.copy(weight).detach(),
    "clone": lambda weight: weight.detach().clone(),
    "data": lambda weight: weight.data,
    "numpy": lambda weight: torch.from_numpy(weight.detach().numpy()),
    "pickle": lambda weight: _saved(weight),
    "tolist": lambda weight: torch.tensor(weight.tolist()),
    "cat": lambda weight: torch.cat([weight, weight])[:1].detach(),
    "pointer": lambda weight: (weight.data_ptr(), weight.view(1, 1).detach())[1],
}


def _saved(weight: Any) -> Any:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("read", READS)
def test_a_kept_parameter_is_right_however_it_is_read(read: str) -> None:
    def check(one: Training) -> None:
        one.backward()
        one.optimizer.step()
        found = READS[read](one.kept[0])
        assert found.item() == -1.5
        assert type(found) in (Tensor, nn.Parameter)
        assert type(one.kept[0]) is nn.Parameter

    on_two(check)


def test_a_parameter_has_its_own_class_after_the_session() -> None:
    def body(session: Any) -> Any:
        one = Training(session)
        one.backward()
        one.optimizer.step()
        one.backward()
        session.close()
        return one.kept[0]

    for weight in run_ranks(2, body):
        assert type(weight) is nn.Parameter
        assert weight.item() == -1.5


# ---- the optimizer's state


def test_state_read_or_copied_after_step_is_that_of_the_update() -> None:
    def check(one: Training) -> None:
        one.backward()
        one.optimizer.step()
        again = copy.deepcopy(one.optimizer)
        assert again.param_groups[0]["params"][0].item() == -1.5
        assert len(again.state) == 1
        one.backward()
        one.optimizer.step()
        assert len(one.optimizer.state) == 1
        file = io.BytesIO()
        torch.save(one.optimizer, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        (state,) = loaded.state.values()
        assert state["momentum_buffer"].item() == 0.5 * 1.5 + 3.0
        assert type(loaded.state) is not type(one.optimizer.state)

    on_two(check, momentum=0.5)


# ---- steps


def wrapped_object(optimizer: Any) -> None:
    inner = optimizer.step

    @functools.wraps(inner)
    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        return inner(*arguments, **options)

    optimizer.step = types.MethodType(step, optimizer)


def wrapped_twice(optimizer: Any) -> None:
    wrapped_object(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


class Decorated(torch.optim.SGD):
    """Has a step that something of its own wraps, as functools.wraps has it."""


def _decorate(step: Any) -> Any:
    @functools.wraps(step)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        return step(*arguments, **options)

    return wrapper


Decorated.step = _decorate(torch.optim.SGD.step)  # type: ignore[method-assign]


class Overridden(torch.optim.SGD):
    """Replaces what torch's step calls."""

    def _init_group(self, *arguments: Any, **options: Any) -> Any:
        return super()._init_group(*arguments, **options)  # type: ignore[no-untyped-call]


def test_only_torchs_own_wrappers_leave_a_step_torchs() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    plain = torch.optim.SGD(parameters, lr=0.1)
    assert steps_per_parameter(plain)
    torch.optim.lr_scheduler.OneCycleLR(plain, 0.1, 10)
    assert steps_per_parameter(plain)
    for wrap in (wrapped_object, wrapped_twice):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        wrap(optimizer)
        assert not steps_per_parameter(optimizer)
    assert not steps_per_parameter(Decorated(parameters, lr=0.1))
    assert not steps_per_parameter(Overridden(parameters, lr=0.1))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer._init_group = optimizer._init_group  # type: ignore[method-assign]
    assert not steps_per_parameter(optimizer)


def test_a_class_does_not_speak_for_a_step_that_the_program_has_wrapped() -> None:
    optimizer: Any = Says([nn.Parameter(torch.ones(2))], lr=0.1)
    assert steps_per_parameter(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert steps_per_parameter(optimizer)
    wrapped_object(optimizer)
    assert not steps_per_parameter(optimizer)
    optimizer.steps_per_parameter = True
    assert steps_per_parameter(optimizer)


def prepared_with_a_class_of_its_own(session: Any) -> Any:
    """Return a rank's model and optimizer, whose class no other rank has."""
    model = nn.Linear(1, 1, bias=False)
    own_class: Any = type("SGD", (torch.optim.SGD,), {})
    optimizer = own_class(model.parameters(), lr=1.0)
    session.prepare(model, optimizer)
    model(torch.ones(1, 1)).sum().backward()
    return model, optimizer


@pytest.mark.parametrize("how", ["patched", "assigned", "decorated"])
def test_another_step_of_the_class_after_prepare_is_refused(how: str) -> None:
    """torch would call that one, which nothing here does."""

    def body(session: Any) -> None:
        _, optimizer = prepared_with_a_class_of_its_own(session)

        class Halving(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                self.param_groups[0]["lr"] *= 0.5
                return super().step(closure)

        if how == "decorated":  # By torch, which is then the last to have wrapped it.
            Halving.step = torch.no_grad()(Halving.step)  # type: ignore[method-assign]
        if how == "patched":
            type(optimizer).step = Halving.step
        else:
            optimizer.__class__ = Halving
        with pytest.raises(gradlane.UsageError, match=r"\.step is another function than when"):
            optimizer.step()

    run_ranks(2, body)


def test_torch_may_wrap_the_step_of_its_class_after_prepare() -> None:
    """As torch.compile does with some classes when it is used first."""

    def body(session: Any) -> None:
        model, optimizer = prepared_with_a_class_of_its_own(session)
        before = model.weight.item()
        type(optimizer).step = torch.no_grad()(type(optimizer).step)
        optimizer.step()
        assert model.weight.item() == before - 1.0

    run_ranks(2, body)


class Counting(torch.optim.Optimizer):
    """Says that it steps per parameter, and counts in its group, or in itself."""

    steps_per_parameter = True

    def __init__(self, parameters: Any, within: str) -> None:
        super().__init__(parameters, {"k": 0})
        self.within = within
        self.k = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            count = group["k"] if self.within == "group" else self.k
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (1 + count))
            if self.within == "group":
                group["k"] += 1
        if self.within == "self":
            self.k += 1


@pytest.mark.parametrize("within", ["group", "self", "nothing"])
def test_an_optimizer_that_counts_is_stepped_whole(within: str) -> None:
    def body(session: Any) -> list[Tensor]:
        model: Any = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        optimizer = Counting(model.parameters(), within)
        session.prepare(model, optimizer)
        for step in range(3):
            model(torch.tensor([[session.rank + 1.0 + step]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.k == (3 if within == "self" else 0)
        assert optimizer.param_groups[0]["k"] == (3 if within == "group" else 0)
        return snapshot(model)

    # Ranks are threads here, and warnings are caught for the whole process.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same_bits(*run_ranks(2, body))
    told = [str(one.message) for one in caught]
    assert any(re.match(r"step\(\) of Counting writes .*k", one) for one in told) is (
        within != "nothing"
    )


class Says(torch.optim.SGD):
    """Says that it steps per parameter."""

    steps_per_parameter = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, Says])
def test_the_program_may_change_the_optimizer_while_an_update_is_done(kind: Any) -> None:
    """As where one thread reads parameters, and so updates them, and another steps a scheduler."""
    module = importlib.import_module("torch.optim.sgd")
    update = module.sgd
    changed: list[float] = []

    def body(session: Any) -> None:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        optimizer = kind(model.parameters(), lr=0.5)
        session.prepare(model, optimizer)

        def meanwhile(*arguments: Any, **options: Any) -> None:
            if stepped:
                optimizer.param_groups[0]["lr"] *= 0.5
                optimizer.register_state_dict_post_hook(lambda *_: None)
                optimizer.register_step_post_hook(lambda *_: None)
                changed.append(optimizer.param_groups[0]["lr"])
            update(*arguments, **options)

        stepped: list[int] = []
        with patch.object(module, "sgd", meanwhile):
            for step in range(2):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                if step:
                    stepped.append(step)
                session.synchronize()
        assert changed and optimizer.param_groups[0]["lr"] == changed[-1] < 0.5
        assert len(optimizer._optimizer_step_post_hooks) == len(changed)

    run_ranks(1, body)


def test_another_optimizer_is_refused_where_it_steps() -> None:
    def check(one: Training) -> None:
        other = torch.optim.SGD(one.kept, lr=1.0)
        one.backward()
        with pytest.raises(gradlane.UsageError, match="another SGD than the prepared optimizer"):
            other.step()

    on_two(check)


def test_another_optimizer_is_refused_in_a_hook() -> None:
    def check(one: Training) -> None:
        other = torch.optim.SGD(one.kept, lr=1.0)
        one.weight.register_post_accumulate_grad_hook(lambda _: other.step())
        with pytest.raises(gradlane.UsageError, match=r"inside backward\(\)"):
            one.backward()
        assert one.weight.detach().item() == 0.0

    on_two(check)


def test_the_prepared_optimizer_is_refused_in_a_hook() -> None:
    def check(one: Training) -> None:
        one.weight.register_post_accumulate_grad_hook(lambda _: one.optimizer.step())
        with pytest.raises(gradlane.UsageError, match=r"optimizer.step\(\) inside backward\(\)"):
            one.backward()

    on_two(check)


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, as a look-ahead does."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        super().__init__([{"params": list(inner.param_groups[0]["params"])}], {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()


def test_a_wrapper_that_steps_the_prepared_optimizer_is_welcome() -> None:
    def check(one: Training) -> None:
        wrapper = Wrapper(one.optimizer)
        one.backward()
        wrapper.step()
        assert one.value() == -1.5

    on_two(check)


def test_a_backward_inside_a_step_is_refused() -> None:
    model = nn.Linear(1, 1)

    def greedy(session: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        inner = optimizer.step

        def step() -> Any:
            model(torch.ones(1, 1)).sum().backward()
            return inner()

        optimizer.step = step  # type: ignore[method-assign,assignment]
        session.prepare(model, optimizer)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    with pytest.warns(UserWarning, match="not known to treat"):
        (error,) = run_ranks(1, greedy, expect_errors=True)
    assert "backward() inside optimizer.step()" in str(error)


# ---- threads


def test_a_thread_that_saves_while_training_goes_on() -> None:
    def body(session: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        kept = list(model.parameters())
        threads = []
        for step in range(20):
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            reads: Any = (model.state_dict, optimizer.state_dict, lambda: torch.stack([*kept[:1]]))
            threads.append(threading.Thread(target=reads[step % 3]))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return snapshot(model)

    assert same_bits(*run_ranks(2, body))


def test_two_threads_in_forward_and_backward_add_up() -> None:
    def body(session: Any) -> list[Tensor]:
        one = Training(session)
        for _ in range(5):
            threads = [threading.Thread(target=one.backward) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            one.optimizer.step()
            one.optimizer.zero_grad()
        assert one.value() == -15.0
        return snapshot(one.model)

    assert same_bits(*run_ranks(2, body))


# ---- ranks that drift apart


def test_a_sample_of_the_parameters_is_compared_by_default() -> None:
    def body(session: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        session.prepare(model, optimizer)
        for step in range(102):
            if step == 50 and session.rank == 1:
                with torch.no_grad():
                    model[1].weight += 1.0
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    for error in run_ranks(2, body, expect_errors=True):
        assert isinstance(error, gradlane.SessionFailedError)
        assert "parameters of rank 0 and rank 1 differ after step 100 ('1.weight' on" in str(error)
