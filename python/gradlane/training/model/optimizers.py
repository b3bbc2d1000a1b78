"""How each class of optimizers can be driven, and the settings that servers take.

An optimizer steps *per parameter* when the update of one parameter needs nothing of another, and
`step()` leaves parameters without a gradient alone. Only then can it be given some of the gradients
now and the rest later with the same result to the last bit. `OPTIMIZER_SUPPORT` says it for each
class of `torch.optim`; the tests hold every one of them against a loop without gradlane.
"""

from __future__ import annotations

import inspect
import json
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from gradlane.errors import RefusedError, UsageError
from gradlane.training.model.lazy_state import plain_state
from gradlane.training.model.several_optimizers import members_of, name_of
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.rendezvous.tensor_table import TensorEntry, names_of
from gradlane.training.torch_internals import all_step_hooks, is_wrapped_by_scheduler


@dataclass(frozen=True)
class OptimizerSupport:
    """How a class of optimizers is driven.

    Attributes:
        in_parts: whether each tensor may be stepped as soon as its averaged gradient is there.
        on_servers: whether the servers have a kernel for it (`update="server"`).
        takes_dense: whether it steps on dense gradients.
        takes_sparse: whether it steps on sparse ones.
        evaluates: whether it calls the closure itself, as often as it likes.
    """

    in_parts: bool = True
    on_servers: bool = False
    takes_dense: bool = True
    takes_sparse: bool = False
    evaluates: bool = False


OPTIMIZER_SUPPORT: dict[str, OptimizerSupport] = {
    "ASGD": OptimizerSupport(),
    "Adadelta": OptimizerSupport(),
    "Adafactor": OptimizerSupport(),
    "Adagrad": OptimizerSupport(takes_sparse=True),
    "Adam": OptimizerSupport(on_servers=True),
    "AdamW": OptimizerSupport(on_servers=True),
    "Adamax": OptimizerSupport(),
    "LBFGS": OptimizerSupport(False, evaluates=True),
    "Muon": OptimizerSupport(),
    "NAdam": OptimizerSupport(),
    "RAdam": OptimizerSupport(),
    "RMSprop": OptimizerSupport(),
    "Rprop": OptimizerSupport(),
    "SGD": OptimizerSupport(on_servers=True, takes_sparse=True),
    "SparseAdam": OptimizerSupport(takes_dense=False, takes_sparse=True),
}
"""Every class of `torch.optim` by name; a class that is not here steps whole at the barrier."""


OF_PACKAGES: dict[str, tuple[str, ...]] = {
    "lion_pytorch.lion_pytorch": ("Lion",),
    "timm.optim.adafactor": ("Adafactor",),
    "timm.optim.lion": ("Lion",),
    "transformers.optimization": ("Adafactor",),
}
"""Classes of other packages that step per parameter, by module."""


def steps_per_parameter(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known, or says, to step per parameter.

    Those of `torch.optim` are known, and some of other packages. Any other class says so with an
    attribute `steps_per_parameter = True`, but not of a `step` that the program has wrapped.
    """
    members = members_of(optimizer)
    if len(members) > 1:
        return all(map(steps_per_parameter, members))
    declared = getattr(optimizer, "steps_per_parameter", None)
    if declared is not None:
        says_itself = "steps_per_parameter" in vars(optimizer)
        return bool(declared) and (says_itself or step_of_class(optimizer) is not None)
    return is_known(optimizer) or _is_of_package(optimizer)


def _is_of_package(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of `OF_PACKAGES`, neither derived from nor replaced."""
    kind, step = type(optimizer), step_of_class(optimizer)
    listed = kind.__name__ in OF_PACKAGES.get(kind.__module__, ())
    return listed and step is not None and _module(inspect.unwrap(step)) == kind.__module__


def evaluates_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer calls the closure of its `step` itself, as often as it likes.

    Those of `torch.optim` are known; any other class says so with an attribute
    `evaluates_closure = True`.
    """
    _, support = _support_of(optimizer)
    known = support is not None and support.evaluates
    return bool(getattr(optimizer, "evaluates_closure", known))


def is_known(optimizer: Optimizer) -> bool:
    """Return whether an optimizer steps per parameter by torch's own code alone."""
    return _steps_by(
        optimizer, [name for name, support in OPTIMIZER_SUPPORT.items() if support.in_parts]
    )


def step_of_class(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """Return the `step` of an optimizer's class, or None where the optimizer's own does more."""
    of_class: Callable[[Optimizer], Any] = type(optimizer).step
    step: Callable[..., Any] | None = optimizer.step
    while step is not None:
        step = getattr(step, "__func__", step)
        if step is of_class:
            return of_class
        step = _wrapped(step) if _is_written_by_torch(step) else None
    return None


def mixes_first_steps(optimizer: Optimizer) -> bool:
    """Return whether the bits of a step depend on which parameters are stepped together.

    With `foreach=True`, SGD multiplies all momenta in one call only where every parameter with a
    gradient has one, and on the CPU torch rounds the factor of that call to 16 bits first.
    """
    if not isinstance(optimizer, SGD):
        return False
    state = plain_state(optimizer)
    for group in optimizer.param_groups:
        if group["foreach"] and group["momentum"]:
            are_new = {
                state.get(one, {}).get("momentum_buffer") is None
                for one in list.__iter__(group["params"])
                if one.device.type == "cpu" and one.dtype in (torch.float16, torch.bfloat16)
            }
            if len(are_new) == 2:
                return True
    return False


def _steps_by(optimizer: Optimizer, names: Sequence[str]) -> bool:
    """Return whether an optimizer steps by the code of one of these classes of `torch.optim`.

    It does not where a subclass or the program replaces anything that the class has.
    """
    known = {getattr(torch.optim, name, None) for name in names}
    for base in type(optimizer).__mro__:
        if base in known:
            return not _replaced(optimizer, base) and is_torchs(optimizer.step)
    return False


def _replaced(optimizer: Optimizer, base: type[Any]) -> set[str]:
    """Return the attributes of a class of torch that an optimizer or its subclass replaces."""
    classes = type(optimizer).__mro__
    own: set[str] = set(vars(optimizer))
    for one in classes[: classes.index(base)]:
        own.update(vars(one))
    replaced = {name for name in own if hasattr(base, name) and not name.startswith("__")}
    return replaced - _REPLACEABLE


_REPLACEABLE = {
    # `step` is looked at by itself: schedulers of torch wrap it, and each class's once used.
    *("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group", "hooked"),
}


def is_torchs(step: Callable[..., Any]) -> bool:
    """Return whether nothing but torch, or gradlane, has written or wrapped a `step`."""
    return _module(written_step(step)).startswith("torch.optim.")


def written_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside all that torch, or gradlane, has wrapped around a `step`."""
    while True:
        step = getattr(step, "__func__", step)
        wrapped = _wrapped(step) if _is_written_by_torch(step) else None
        if wrapped is None:
            return step
        step = wrapped


def _is_written_by_torch(step: Callable[..., Any]) -> bool:
    return _module(step).partition(".")[0] in ("torch", "gradlane")


def _module(step: Callable[..., Any]) -> str:
    # Not `__module__`: `functools.wraps` copies that from what is wrapped.
    return str(getattr(step, "__globals__", {}).get("__name__", ""))


def _wrapped(step: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return what torch or gradlane has wrapped in a `step`, or None."""
    wrapped: Callable[..., Any] | None = getattr(step, "__wrapped__", None)
    if wrapped is None and is_wrapped_by_scheduler(step):
        # Schedulers of torch 2.4 do not say what they wrap as others do.
        wrapped = inspect.getclosurevars(step).nonlocals["func"]
    return wrapped


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def gradlane_hook(hook: _Hook) -> _Hook:
    """Mark a hook on all optimizers as one that does not mind steps in parts."""
    _OWN_HOOKS.add(hook)
    return hook


_OWN_HOOKS: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether a step hook is registered, which must not see steps in parts."""
    return any(hook not in _OWN_HOOKS for hook in all_step_hooks(optimizer))


def check_optimizer(optimizer: Optimizer, entries: Sequence[TensorEntry]) -> None:
    """Check that an optimizer fits the model.

    Args:
        optimizer: the user's.
        entries: the model's tensor table.

    Raises:
        ValueError: the optimizer cannot be driven, or its parameters are not the model's.
    """
    for number, group in enumerate(optimizer.param_groups):
        _check_group(number, group)
    model_parameters = {id(entry.tensor): entry for entry in entries}
    held: set[int] = set()
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            entry = model_parameters.get(id(parameter))
            if id(parameter) in held and entry is not None:
                raise RefusedError(
                    f"{names_of([entry])} is in two of the optimizers ({name_of(optimizer)}): give "
                    "each parameter to one"
                )
            held.add(id(parameter))
            if id(parameter) not in model_parameters and parameter.numel() > 0:
                raise RefusedError(
                    f"group {number} of the optimizer holds a parameter of shape "
                    f"{tuple(parameter.shape)} that the model does not have: prepare one module "
                    "that holds them all, such as nn.ModuleList([model, loss])"
                )
    missing = [entry for entry in entries if entry.trained and id(entry.tensor) not in held]
    if missing:
        raise RefusedError(
            f"the optimizer does not hold {names_of(missing)}, which are trained: call "
            "requires_grad_(False) on them, or give them to the optimizer"
        )


_DENSE_OPTIONS = ("momentum", "weight_decay", "fused")
"""Options with which torch, or a state that can be saved, asks for a dense gradient."""


def takes_sparse(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Return whether an optimizer is given a sparse mean for a parameter.

    Classes of `torch.optim` that refuse one get it dense, with all zeros, and so do those whose
    group has an option that does, such as weight decay. SGD's momentum of a sparse gradient would
    be sparse, too: it grows, and no checkpoint holds it. The program's own classes get what they
    get in torch.
    """
    member, group = next(
        (member, group)
        for member in members_of(optimizer)
        for group in member.param_groups
        if any(one is parameter for one in list.__iter__(group["params"]))
    )
    _, support = _support_of(member)
    if support is None:
        return True
    return support.takes_sparse and not any(group.get(option) for option in _DENSE_OPTIONS)


def needing_sparse(optimizer: Optimizer) -> set[int]:
    """Return the `id` of each parameter that an optimizer steps on sparse gradients alone."""
    return {
        id(one)
        for member in members_of(optimizer)
        if (support := _support_of(member)[1]) is not None and not support.takes_dense
        for group in member.param_groups
        for one in list.__iter__(group["params"])
    }


def _support_of(optimizer: Optimizer) -> tuple[str, OptimizerSupport | None]:
    """Return the class of `torch.optim` that an optimizer is of, and how that is driven."""
    for base in type(optimizer).__mro__:
        if base.__module__.startswith("torch.") and base.__name__ in OPTIMIZER_SUPPORT:
            return base.__name__, OPTIMIZER_SUPPORT[base.__name__]
    return "", None


def _check_group(number: int, group: dict[str, Any]) -> None:
    if group.get("differentiable"):
        raise RefusedError(
            f"group {number} of the optimizer has differentiable=True: an update that autograd "
            "follows cannot happen later than step()"
        )
    if group.get("capturable") and any(one.device.type == "cpu" for one in group["params"]):
        raise RefusedError(
            f"group {number} of the optimizer has capturable=True, which torch takes for "
            "parameters on an accelerator only, and parameters on the CPU"
        )


def optimizer_features(optimizer: Optimizer) -> dict[Feature, str]:
    """Return what an optimizer asks for that not all options go with, each in words."""
    name, members = name_of(optimizer), members_of(optimizer)
    served = [kind for kind, support in OPTIMIZER_SUPPORT.items() if support.on_servers]
    evaluating = [name_of(one) for one in members if evaluates_closure(one)]
    amsgrad = [number for number, one in enumerate(optimizer.param_groups) if one.get("amsgrad")]
    found = {
        Feature.CLOSURE: f"{' and '.join(evaluating)}, which calls its closure itself,"
        if evaluating
        else "",
        Feature.SEVERAL: Feature.SEVERAL.label if len(members) > 1 else "",
        Feature.UNSERVED: "" if _steps_by(optimizer, served) else name,
        Feature.AMSGRAD: f"group {amsgrad[0]} of {name} with amsgrad=True" if amsgrad else "",
        Feature.STEP_HOOKS: f"{name} with step hooks" if any(map(has_step_hooks, members)) else "",
    }
    return {feature: words for feature, words in found.items() if words}


def check_server_optimizer(optimizer: Optimizer, entries: Sequence[TensorEntry]) -> None:
    """Check that an optimizer can run on the owners of the slices.

    Raises:
        ValueError: a setting makes no sense there, or a parameter is not in plain memory.
    """
    for number, group in enumerate(optimizer.param_groups):
        _settings(optimizer, number, group)
    for entry in entries:
        if entry.trained and entry.tensor.stride() != entry.stride:
            strided = f"parameter {entry.name!r}, which is not dense in memory,"
            words = {Feature.STRIDED: strided, Feature.SERVER: Feature.SERVER.label}
            raise RefusedError(refusal(words))


def server_rows(
    optimizer: Optimizer, index_of: dict[int, int], steps: Sequence[int]
) -> tuple[str, frozenset[int]]:
    """Return every tensor's settings for the servers.

    Args:
        optimizer: one that passed `check_server_optimizer`.
        index_of: number of each trained parameter, by `id`.
        steps: how many steps each of them has taken, by number.

    Returns:
        The JSON that the core reads, and the numbers of the tensors that have a momentum.

    Raises:
        ValueError: a setting makes no sense; the message names group and key.
        UsageError: the optimizer was changed into one that the servers do not run.
    """
    if why := refusal(optimizer_features(optimizer), {Feature.SERVER: Feature.SERVER.label}):
        raise UsageError(why)
    rows: list[dict[str, Any]] = []
    with_momentum: list[int] = []
    seen = 0
    for number, group in enumerate(optimizer.param_groups):
        settings = _settings(optimizer, number, group)
        tensors = []
        for parameter in group["params"]:
            index = index_of.get(id(parameter))
            if index is not None:
                tensors.append(index)
            elif parameter.requires_grad and parameter.numel() > 0:
                raise RefusedError(
                    f"group {number} of the optimizer holds a parameter of shape "
                    f"{tuple(parameter.shape)} that was not trained when the model was prepared; "
                    "open a new session and prepare it again"
                )
        seen += len(tensors)
        if settings["kind"] == "adam":
            settings["steps"] = [steps[index] for index in tensors]
        elif settings["momentum"] != 0.0:
            with_momentum += tensors
        if tensors:
            rows.append({**settings, "tensors": tensors})
    if seen != len(index_of):
        raise RefusedError(
            f"the optimizer holds {seen} of {len(index_of)} trained parameters: with "
            'update="server" groups may not lose any after prepare()'
        )
    return json.dumps(rows), frozenset(with_momentum)


def _settings(optimizer: Optimizer, number: int, group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings in the core's words, each of them checked."""

    def take(key: str, value: Any, wanted: str, fits: Callable[[float], bool]) -> float:
        found = float(value.item() if isinstance(value, Tensor) else value)
        if not (math.isfinite(found) and fits(found)):
            raise RefusedError(
                f"group {number} of the optimizer has {key}={value!r}: the servers take {wanted}"
            )
        return found

    def not_negative(key: str) -> float:
        return take(key, group[key], "a number that is not negative", lambda value: value >= 0.0)

    if isinstance(optimizer, (Adam, AdamW)):
        beta1, beta2 = (
            take("betas", beta, "two numbers from 0 to below 1", lambda value: 0.0 <= value < 1.0)
            for beta in group["betas"]
        )
        return {
            "kind": "adam",
            "lr": not_negative("lr"),
            "beta1": beta1,
            "beta2": beta2,
            "eps": not_negative("eps"),
            "weight_decay": not_negative("weight_decay"),
            # Before torch 2.7, AdamW is no Adam, and the class alone says how weights decay.
            "decoupled_weight_decay": bool(
                group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))
            ),
            "maximize": bool(group["maximize"]),
        }
    momentum = not_negative("momentum")
    dampening = take("dampening", group["dampening"], "a number", lambda value: True)
    if group["nesterov"] and (momentum == 0.0 or dampening != 0.0):
        raise RefusedError(
            f"group {number} of the optimizer has nesterov=True with momentum={momentum} and "
            f"dampening={dampening}: Nesterov momentum needs a momentum and no dampening"
        )
    return {
        "kind": "sgd",
        "lr": not_negative("lr"),
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": not_negative("weight_decay"),
        "nesterov": bool(group["nesterov"]),
        "maximize": bool(group["maximize"]),
    }
