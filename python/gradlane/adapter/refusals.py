"""Models that cannot be prepared, whatever their tensors are like, and why."""

from __future__ import annotations

from typing import Any

from torch import nn

from gradlane.adapter.guard import GuardedParameters
from gradlane.errors import UsageError

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
        "prepare the bare model"
    ),
    "FSDPModule": (
        "is sharded by fully_shard(); gradlane keeps whole parameters on every rank: prepare the "
        "bare model"
    ),
}


def check_model(model: nn.Module) -> None:
    """Check that a model is one that gradlane can keep together.

    Raises:
        ValueError: it is not; the message names the module.
    """
    for name, module in model.named_modules():
        where = f"module {name!r} of the model" if name else "the model"
        for base in type(module).__mro__:
            if base.__module__.startswith("torch.") and base.__name__ in _WRAPPERS:
                raise ValueError(f"{where} {_WRAPPERS[base.__name__]}")
        if isinstance(module.__dict__.get("_parameters"), GuardedParameters):
            raise ValueError(
                f"{where} has parameters of a model that is already prepared: close that session "
                "first, or prepare one module that holds everything"
            )


def refuse_assignment(
    module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Keep `load_state_dict(assign=True)` from replacing parameters: a hook of prepared modules.

    Raises:
        UsageError: it would. Copies of the model are plain ones and may.
    """
    if metadata.get("assign_to_params_buffers") and isinstance(
        module._parameters, GuardedParameters
    ):
        raise UsageError(
            f"load_state_dict(assign=True) would replace the parameters of {prefix[:-1]!r}, which "
            "were prepared: load with assign=False, or before prepare()"
        )
