"""Gradients, kept references and the optimizer's state, read and written by hand.

Two ranks train a weight whose gradients are 1 and 2, so that the mean is 1.5 and every way of
missing it shows.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.loop_fuzzing.look_ahead import look_ahead
from tests.training.model.constructs import Construct
from tests.training.model.late_core import LateCore
from tests.training.model.ranks import run_ranks


class Training:
    """One rank's model, optimizer and batch."""

    def __init__(self, session: Any, defer: bool | None = None, **options: Any) -> None:
        self.session = session
        self.model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.model.weight.zero_()
        self.kept: list[Any] = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, **options)
        session.prepare(self.model, self.optimizer, defer=defer)

    @property
    def weight(self) -> Any:
        return self.model.weight

    def loss(self) -> Tensor:
        value: Tensor = self.model(torch.tensor([[self.session.rank + 1.0]])).sum()
        return value

    def backward(self) -> None:
        self.loss().backward()  # type: ignore[no-untyped-call]

    def value(self) -> float:
        return float(self.weight.item())


Check = Callable[[Training], None]


def on_two(check: Check, defer: bool | None = None, **options: Any) -> None:
    """Run a check on two ranks."""
    run_ranks(2, lambda session: check(Training(session, defer, **options)))


def assigned_without_backward(one: Training) -> None:
    (one.weight.grad,) = torch.autograd.grad(one.loss(), one.weight)
    one.optimizer.step()
    assert one.value() == -1.5


def assigned_after_backward(one: Training) -> None:
    for step in range(3):
        one.backward()
        one.weight.grad = torch.full((1, 1), 10.0)
        one.optimizer.step()
        one.optimizer.zero_grad()
        assert one.value() == -10.0 * (step + 1)


def assigned_through_a_kept_list(one: Training) -> None:
    one.backward()
    one.kept[0].grad = one.kept[0].grad * 2
    one.optimizer.step()
    assert one.value() == -3.0


def none_after_backward(one: Training) -> None:
    one.backward()
    one.weight.grad = None
    one.optimizer.step()
    assert one.value() == 0.0
    one.backward()
    one.optimizer.step()
    assert one.value() == -1.5


def deleted_after_backward(one: Training) -> None:
    one.backward()
    del one.kept[0].grad
    one.optimizer.step()
    assert one.value() == 0.0


def clipped_by_a_kept_list(one: Training) -> None:
    for step in range(2):
        one.backward()
        norm = nn.utils.clip_grad_norm_(one.kept, 0.5)
        assert norm == 1.5
        one.optimizer.step()
        one.optimizer.zero_grad()
        assert one.value() == pytest.approx(-0.5 * (step + 1), abs=1e-5)


def clipped_by_the_attribute(one: Training) -> None:
    one.backward()
    nn.utils.clip_grad_value_(one.model.weight, 0.5)
    one.optimizer.step()
    assert one.value() == -0.5


def clipped_by_new_groups(one: Training) -> None:
    group = one.optimizer.param_groups.pop()
    one.optimizer.add_param_group({"params": list(group["params"]), "lr": 1.0})
    one.backward()
    nn.utils.clip_grad_norm_(one.optimizer.param_groups[0]["params"], 0.5)
    one.optimizer.step()
    assert one.value() == pytest.approx(-0.5, abs=1e-5)


def scaled_in_place(one: Training) -> None:
    one.backward()
    gradients: Any = [parameter.grad for parameter in one.kept]
    torch._foreach_mul_(gradients, 2.0)
    one.kept[0].grad.data.mul_(2.0)
    one.optimizer.step()
    assert one.value() == -6.0


def read_after_step(one: Training) -> None:
    """As torch has it until zero_grad()."""
    one.backward()
    one.optimizer.step()
    assert one.kept[0].grad is not None
    assert one.kept[0].grad.item() == 1.5
    one.optimizer.zero_grad()
    assert one.kept[0].grad is None


def written_after_step(one: Training) -> None:
    """It is there for the next step, where torch would add to it."""
    one.backward()
    one.optimizer.step()
    one.kept[0].grad = None
    one.backward()
    one.optimizer.step()
    one.kept[0].grad = torch.ones(1, 1)
    one.backward()
    one.optimizer.step()
    assert one.value() == -1.5 - 1.5 - 2.5


def zeroed_by_hand_before_the_update(one: Training) -> None:
    for _ in range(3):
        one.backward()
        one.optimizer.step()
        for parameter in one.kept:
            parameter.grad = None
    assert one.value() == -4.5


def zeroed_through_kept_gradients(one: Training) -> None:
    gradients: list[Any] = []
    for step in range(4):
        one.backward()
        one.optimizer.step()
        gradients = gradients or [parameter.grad for parameter in one.kept]
        torch._foreach_zero_(gradients)
        assert one.kept[0].grad is gradients[0]
        assert one.value() == -1.5 * (step + 1)


def clipped_through_kept_gradients(one: Training) -> None:
    gradients: list[Any] = []
    for step in range(4):
        one.backward()
        gradients = gradients or [parameter.grad for parameter in one.kept]
        assert gradients[0].item() == 1.5
        torch._foreach_mul_(gradients, 2.0)
        one.optimizer.step()
        one.optimizer.zero_grad(set_to_none=False)
        assert one.value() == -3.0 * (step + 1)


def views_of_one_buffer(one: Training) -> None:
    buffer = torch.zeros(3)
    one.weight.grad = buffer[1:2].view(1, 1)
    for step in range(4):
        one.backward()
        assert buffer.tolist() == [0.0, 1.5, 0.0]
        buffer.mul_(2.0)
        one.optimizer.step()
        assert buffer.tolist() == [0.0, 3.0, 0.0]
        buffer.zero_()
        assert one.value() == -3.0 * (step + 1)


def views_of_one_buffer_with_two_backwards(one: Training) -> None:
    buffer = torch.zeros(3)
    one.weight.grad = buffer[1:2].view(1, 1)
    for step in range(4):
        one.backward()
        one.backward()
        assert buffer.tolist() == [0.0, 3.0, 0.0]
        one.optimizer.step()
        buffer.zero_()
        assert one.value() == -3.0 * (step + 1)


def never_zeroed(one: Training) -> None:
    wanted, gradient = 0.0, 0.0
    for _ in range(3):
        one.backward()
        one.optimizer.step()
        gradient += 1.5
        wanted -= gradient
        assert one.value() == wanted


def read_inside_no_sync(one: Training) -> None:
    with one.session.no_sync():
        one.backward()
        assert one.kept[0].grad is not None
        assert one.kept[0].grad.item() == one.session.rank + 1.0
    assert one.optimizer.param_groups[0]["params"][0].grad.item() == one.session.rank + 1.0
    one.backward()
    one.optimizer.step()
    assert one.value() == -3.0


def read_on_one_rank_inside_no_sync(one: Training) -> None:
    with one.session.no_sync():
        one.backward()
    if one.session.rank == 0:
        assert one.optimizer.param_groups[0]["params"][0].grad.item() == 1.0
    one.backward()
    one.optimizer.step()
    assert one.value() == -3.0


def clamped_by_a_later_hook(one: Training) -> None:
    def clamp(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.clamp_(-0.5, 0.5)

    one.weight.register_post_accumulate_grad_hook(clamp)
    for step in range(3):
        one.backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
        assert one.value() == -0.5 * (step + 1)


def clamped_by_a_later_hook_on_the_gradient(one: Training) -> None:
    one.weight.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    one.backward()
    one.optimizer.step()
    assert one.value() == -0.5


def frozen(session: Any, defer: bool | None) -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session.prepare(model, optimizer, defer=defer)
    for _ in range(2):
        loss = model(torch.tensor([[session.rank + 1.0]])).sum()
        model[0].weight.requires_grad_(False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].weight.requires_grad_(True)
    assert model[0].weight.item() == 1.0
    assert model[1].weight.item() == -2.0


def frozen_between(defer: bool | None) -> None:
    run_ranks(2, lambda session: frozen(session, defer))


def thawed(session: Any, defer: bool | None) -> None:
    model: Any = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].requires_grad_(False)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), defer=defer)
    model[0].requires_grad_(True)
    model(torch.ones(1, 1)).sum().backward()


def trained_though_frozen_in_prepare(defer: bool | None) -> None:
    run_ranks(2, lambda session: thawed(session, defer))


def cleared(one: Training) -> None:
    one.optimizer.state.clear()


def replaced(one: Training) -> None:
    one.optimizer.state = type(one.optimizer.state.copy())(dict)


def popped(one: Training) -> None:
    one.optimizer.state.pop(one.weight)


def halved(one: Training) -> None:
    one.optimizer.state[one.weight]["momentum_buffer"].mul_(0.0)


def _state_changed(change: Check) -> Callable[[bool | None], None]:
    def check(one: Training) -> None:
        one.backward()
        one.optimizer.step()
        one.optimizer.zero_grad()
        change(one)
        one.backward()
        one.optimizer.step()
        assert one.value() == -3.0
        assert one.optimizer.state[one.weight]["momentum_buffer"].item() == 1.5

    return lambda defer: on_two(check, defer, momentum=0.5)


def in_torchs_order(defer: bool | None) -> None:
    """Check the order of the state where updates come last layer first."""

    def body(session: Any) -> None:
        layers = [nn.Linear(2, 2) for _ in range(3)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        session.prepare(model, optimizer, defer=defer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for layer in reversed(layers):
            assert layer.weight.isfinite().all()
        right = [id(one) for one in model.parameters()]
        assert [id(key) for key in cast("Any", optimizer).__getstate__()["state"]] == right
        assert list(optimizer.state_dict()["state"]) == list(range(6))

    run_ranks(1, body, core=LateCore())


def _on_two(check: Check) -> Callable[[bool | None], None]:
    return lambda defer: on_two(check, defer)


Optimizing = Callable[[Any], None]


def _steps_otherwise(before: Optimizing, after: Optimizing) -> Callable[[bool | None], None]:
    """Check three steps of two weights with an optimizer changed before or after `prepare`."""

    def check(defer: bool | None) -> None:
        def body(session: Any) -> tuple[float, ...]:
            model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(1.0)
            own_class: Any = type("SGD", (torch.optim.SGD,), {})
            optimizer = own_class(model.parameters(), lr=0.5)
            before(optimizer)
            session.prepare(model, optimizer, defer=defer)
            after(optimizer)
            for _ in range(3):
                model(torch.tensor([[session.rank + 1.0]])).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return tuple(parameter.item() for parameter in model.parameters())

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "SGD is not known to treat each parameter by itself")
            found = run_ranks(2, body)
        # Both gradients are alike, and so have 0.3 of a norm of 0.3 * sqrt(2) each.
        for values in found:
            assert values == pytest.approx((1.0 - 3 * 0.5 * 0.3,) * 2, abs=1e-4)

    return check


def _nothing(optimizer: Any) -> None:
    pass


def _clip(optimizer: Any) -> None:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 0.3 * 2**0.5)


def wrap_step(optimizer: Any) -> None:
    """Clip by the norm of all gradients inside `optimizer.step`."""
    inner = optimizer.step

    @functools.wraps(inner)
    def step(*arguments: Any) -> Any:
        _clip(optimizer)
        return inner(*arguments)

    optimizer.step = step


def hook_step(optimizer: Any) -> None:
    """Clip in a hook before the step."""
    optimizer.register_step_pre_hook(lambda one, *_: _clip(one))


def patch_class(optimizer: Any) -> None:
    """Clip inside the `step` of the optimizer's class."""
    inner = type(optimizer).step

    def step(self: Any, *arguments: Any) -> Any:
        _clip(self)
        return inner(self, *arguments)

    type(optimizer).step = step


def assign_class(optimizer: Any) -> None:
    """Give the optimizer a class that clips inside its `step`."""
    optimizer.__class__ = type("Clipping", (type(optimizer),), {})
    patch_class(optimizer)


def stepped_by_a_look_ahead(one: Training) -> None:
    outer = look_ahead(one.optimizer, "timm")
    for expected in (-1.5, -2.25):
        one.backward()
        outer.step()
        outer.zero_grad()
        assert one.kept[0].item() == expected


def stepped_by_another(one: Training) -> None:
    other = torch.optim.SGD(one.kept, lr=1.0)
    one.backward()
    other.step()


_STEPS = {
    "`optimizer.step` wrapped before `prepare`, clipping inside": (wrap_step, _nothing, None),
    "the same after `prepare`": (_nothing, wrap_step, None),
    "`register_step_pre_hook` after `prepare`, that clips": (_nothing, hook_step, None),
    "`step` of the class replaced before `prepare`": (patch_class, _nothing, None),
    "`step` of the class replaced after `prepare`": (
        _nothing,
        patch_class,
        "SGD.step is another function than when the optimizer was prepared",
    ),
    "`optimizer.__class__ = ...` after `prepare`": (
        _nothing,
        assign_class,
        "Clipping.step is another function than when the optimizer was prepared",
    ),
}
_GRADIENTS = {
    assigned_without_backward: (
        "`p.grad = ...` from `torch.autograd.grad`, with no `backward()`",
        "averaged at `step()`",
    ),
    assigned_after_backward: (
        "`p.grad = ...` after `backward()`",
        "this rank steps with it, as with DDP",
    ),
    assigned_through_a_kept_list: (
        "`p.grad = p.grad * 2` through a list made before `prepare`",
        "",
    ),
    none_after_backward: ("`p.grad = None` after `backward()`", ""),
    deleted_after_backward: ("`del p.grad` after `backward()`", ""),
    clipped_by_a_kept_list: ("`clip_grad_norm_` of a list made before `prepare`", ""),
    clipped_by_the_attribute: ("`clip_grad_value_(model.weight, ...)`", ""),
    clipped_by_new_groups: ("`clip_grad_norm_` of `param_groups` made anew", ""),
    scaled_in_place: ("gradients changed in place, by `torch._foreach_*` or `.data`", ""),
    read_after_step: ("`.grad` after `step()`, before `zero_grad()`", "the mean"),
    written_after_step: ("`p.grad = ...` after `step()`", ""),
    zeroed_by_hand_before_the_update: (
        "`p.grad = None` for each of a kept list, in place of `zero_grad()`",
        "",
    ),
    zeroed_through_kept_gradients: (
        "gradients zeroed in place, through a list of them kept from the first step",
        "as with DDP, they get the means",
    ),
    clipped_through_kept_gradients: (
        "gradients changed in place, through such a list",
        "`backward()` waits for the means",
    ),
    views_of_one_buffer: (
        "`p.grad` set to views of one buffer, which is read, scaled and zeroed",
        "the same",
    ),
    views_of_one_buffer_with_two_backwards: (
        "the same with two `backward()` in a step",
        "averaged twice",
    ),
    never_zeroed: ("no `zero_grad()` at all", "gradients add up over steps"),
    read_inside_no_sync: (
        "`.grad` read after `session.no_sync()`, also through `param_groups`",
        "this rank's own",
    ),
    read_on_one_rank_inside_no_sync: ("the same on one rank alone", ""),
    clamped_by_a_later_hook: (
        "`register_post_accumulate_grad_hook` after `prepare`, that clamps",
        "",
    ),
    clamped_by_a_later_hook_on_the_gradient: ("`register_hook` after `prepare`, that clamps", ""),
}
_STATES = {
    cleared: "`optimizer.state.clear()` after `step()`",
    replaced: "`optimizer.state = defaultdict(dict)` after `step()`",
    popped: "`optimizer.state.pop(p)` after `step()`",
    halved: "a tensor of `optimizer.state[p]` changed after `step()`",
}

CONSTRUCTS = [
    *(
        Construct("Steps by hand", name, _steps_otherwise(before, after), refused=refused)
        for name, (before, after, refused) in _STEPS.items()
    ),
    Construct(
        "Steps by hand",
        "an optimizer that steps the prepared one, as a look-ahead",
        _on_two(stepped_by_a_look_ahead),
        note="so is one that is prepared itself; see [optimizers](optimizers.md)",
    ),
    Construct(
        "Steps by hand",
        "another optimizer that steps prepared parameters",
        _on_two(stepped_by_another),
        refused="another SGD than the prepared optimizer has stepped parameter 'weight'",
    ),
    *(
        Construct("Gradients by hand", name, _on_two(check), note=note)
        for check, (name, note) in _GRADIENTS.items()
    ),
    Construct(
        "Gradients by hand",
        "`requires_grad_(False)` between forward and backward",
        frozen_between,
        note="no gradient, as in torch",
    ),
    Construct(
        "Gradients by hand",
        "`requires_grad_(True)` after `prepare`, on a parameter that was frozen",
        trained_though_frozen_in_prepare,
        refused="was frozen when the model was prepared",
        note="in `backward()`",
    ),
    *(
        Construct("The optimizer's state by hand", name, _state_changed(change))
        for change, name in _STATES.items()
    ),
    Construct(
        "The optimizer's state by hand",
        "the order of `optimizer.state`, also by `__getstate__()` and in `state_dict()`",
        in_torchs_order,
        note="the order of the groups, whatever order updates came in",
    ),
]
