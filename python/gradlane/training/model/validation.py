"""Refuse arguments of `prepare` that cannot be prepared, and say why."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gradlane.errors import RefusedError, UsageError
from gradlane.training.model.lazy_parameter_dict import LazyParameterDict
from gradlane.training.model.several_optimizers import members_of
from gradlane.training.options.compatibility import Feature
from gradlane.training.torch_internals import PARAMETERS, is_initialized, parameters_of

_WRAPPERS = {
    "DistributedDataParallel": (
        "is wrapped in DistributedDataParallel, which averages gradients by itself: prepare the "
        "bare one (its .module)"
    ),
    "DataParallel": (
        "is wrapped in DataParallel, which computes on copies that nothing keeps up to date: "
        "prepare the bare one (its .module) and start one rank a device"
    ),
    "FullyShardedDataParallel": (
        "is sharded by FullyShardedDataParallel; gradlane keeps whole parameters on every rank: "
        "prepare the bare model, or shard it by fully_shard() within the node"
    ),
}


def check_arguments(model: Any, optimizer: Any) -> None:
    """Check that `prepare` was given a model and its optimizer.

    Raises:
        UsageError: it was not; the message says what it was given and what to give instead.
    """
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise UsageError(
            f"prepare() was given the optimizer ({type(model).__name__}) before the model "
            f"({type(optimizer).__name__}): call prepare(model, optimizer)"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"prepare() was given {_told(model)} as the model: {_in_place_of(model)}")
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "param_groups"):
        advice = _in_place_of_optimizer(optimizer)
        raise UsageError(f"prepare() was given {_told(optimizer)} as the optimizer: {advice}")
    for one in members_of(optimizer):
        if not is_initialized(one):
            raise UsageError(
                f"prepare() was given {_told(one)} as the optimizer, which wraps another one: "
                "prepare the torch.optim optimizer inside, before anything wraps it"
            )


def _told(given: Any) -> str:
    """Return how a message names an argument: its class, and how many there are in a list."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    if isinstance(given, (list, tuple, set, dict)):
        held = given.values() if isinstance(given, dict) else given
        kinds = {type(one).__name__ for one in held}
        return f"a {type(given).__name__} of {len(given)} ({', '.join(sorted(kinds)[:3])})"
    return "None" if given is None else f"an object of class {type(given).__name__}"


def _in_place_of(model: Any) -> str:
    if isinstance(model, type):
        return f"give an instance, {model.__name__}(...)"
    if isinstance(model, dict):
        return "give one nn.Module that holds everything, such as nn.ModuleDict(models)"
    if isinstance(model, (list, tuple, set)):
        return (
            "give one nn.Module that holds everything, such as nn.ModuleList(models), with one "
            "optimizer, or call prepare() for each model with an optimizer of its own"
        )
    return "give the nn.Module itself, not its parameters, its forward or a wrapper"


def _in_place_of_optimizer(optimizer: Any) -> str:
    if isinstance(optimizer, type):
        return f"give an instance, {optimizer.__name__}(model.parameters(), ...)"
    if isinstance(optimizer, (list, tuple, set, dict)):
        return (
            "give one torch.optim.Optimizer, or a list of those that step a part of the model each"
        )
    if isinstance(optimizer, (LRScheduler, ReduceLROnPlateau)):
        return "give the scheduler's optimizer (scheduler.optimizer); schedulers stay as they are"
    if optimizer is None:
        return "give one of torch.optim, such as torch.optim.SGD(model.parameters(), lr=0.1)"
    return (
        "give a torch.optim.Optimizer; where this is a wrapper of another package, the optimizer "
        "inside of it"
    )


def check_model(model: nn.Module) -> None:
    """Check that a model is one that gradlane can keep together.

    Raises:
        ValueError: it is not; the message names the module.
    """
    for name, module in model.named_modules():
        where = f"module {name!r} of the model" if name else "the model"
        kind = _wrapper_kind(module)
        if kind is not None:
            raise RefusedError(f"{where} {_WRAPPERS[kind]}")
        if isinstance(module.__dict__.get(PARAMETERS), LazyParameterDict):
            raise RefusedError(
                f"{where} has parameters of a model that is already prepared: close that session "
                "first, or prepare one module that holds everything"
            )


def check_forward_writes(model: nn.Module) -> None:
    """Check that no module writes parameters in forward: each rank would, for its own batch.

    Raises:
        ValueError: one does; the message names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise RefusedError(
                f"module {name!r} ({type(module).__name__}) has max_norm={module.max_norm:g}, with "
                "which each forward rescales the rows that its own rank looks up, so that the "
                "ranks' parameters part: build it without max_norm, and after optimizer.step() "
                f"call its weight's renorm_({module.norm_type:g}, 0, {module.max_norm:g}) under "
                "torch.no_grad(), on all ranks"
            )


def _wrapper_kind(module: nn.Module) -> str | None:
    """Return which of torch's wrappers a module is, or None."""
    bases = (base for base in type(module).__mro__ if base.__module__.startswith("torch."))
    return next((base.__name__ for base in bases if base.__name__ in _WRAPPERS), None)


def refuse_wrapping() -> None:
    """Have torch's wrappers refuse modules that are prepared, as they take them in."""
    global _refuses_wrapping
    if not _refuses_wrapping:
        _refuses_wrapping = True
        register_module_module_registration_hook(_check_wrapper)


_refuses_wrapping = False


def _check_wrapper(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """Hook on the registration of submodules.

    Raises:
        UsageError: a wrapper that exchanges gradients itself takes in a prepared module.
    """
    kind = _wrapper_kind(wrapper)
    if kind is None or module is None:
        return
    if any(isinstance(one.__dict__.get(PARAMETERS), LazyParameterDict) for one in module.modules()):
        raise UsageError(
            f"{kind} was given a model that gradlane has prepared: its gradients would be "
            "exchanged twice; leave the wrapper out"
        )


def refuse_assignment(
    module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Keep `load_state_dict(assign=True)` from replacing parameters: a hook of prepared modules.

    Raises:
        UsageError: it would. Copies of the model are plain ones and may.
    """
    if metadata.get("assign_to_params_buffers") and isinstance(
        parameters_of(module), LazyParameterDict
    ):
        raise UsageError(
            f"load_state_dict(assign=True) would replace the parameters of {prefix[:-1]!r}, which "
            "were prepared: load with assign=False, or before prepare()"
        )


_WIDE = (torch.float64, torch.complex128)


def parameter_features(model: nn.Module) -> dict[Feature, str]:
    """Return what a model's trained parameters are that not all options go with, each in words."""
    found: dict[Feature, str] = {}
    for prefix, module in model.named_modules():
        own = parameters_of(module)
        # Without waiting for updates.
        for key, one in dict.items(own) if isinstance(own, dict) else own.items():
            if one is None or not one.requires_grad:
                continue
            name = f"{prefix}.{key}" if prefix else key
            for feature, is_given, words in (
                (Feature.ON_DEVICE, one.device.type != "cpu", f"on {one.device}"),
                (Feature.WIDE, one.dtype in _WIDE, f"of {one.dtype}"),
                (Feature.NARROW, one.dtype.itemsize == 2, f"of {one.dtype}"),
            ):
                if is_given:
                    found.setdefault(feature, f"parameter {name!r} {words}")
    return found
