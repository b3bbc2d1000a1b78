"""Check that momentum is applied once: by the codec, or by the optimizer.

`dgc` accumulates momentum before it selects values (Lin et al. 2018, section 3.1). An optimizer
that applies momentum again moves parameters by up to 1 / (1 - momentum) times as far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlane.errors import UsageError


def keeps_momentum(codec: str) -> bool:
    """Return whether a codec, given by its canonical text, adds momentum to gradients."""
    name, _, rest = codec.partition(":")
    options = dict(option.split("=", 1) for option in rest.split(",") if option)
    if name != "dgc" or options.get("residual") == "off":
        return False
    return float(options["momentum"]) != 0.0


def check_momentum(optimizer: Any, codecs: Mapping[int, str]) -> None:
    """Check that no parameter gets momentum from its codec and from the optimizer.

    `torch.optim.SGD` with `momentum=0` passes, and so do optimizers from outside torch with
    `momentum` 0 in their groups.

    Args:
        optimizer: with `param_groups`.
        codecs: canonical text of the codec of each parameter whose codec keeps momentum, by `id`.

    Raises:
        UsageError: a parameter gets both; the message names group, setting and codec.
    """
    if not codecs:
        return
    for number, group in enumerate(optimizer.param_groups):
        reason = _own_momentum(optimizer, group)
        if not reason:
            continue
        for parameter in list.__iter__(group["params"]):
            if id(parameter) in codecs:
                raise UsageError(
                    f"group {number} of the optimizer ({type(optimizer).__name__}) {reason}, and "
                    f"codec {codecs[id(parameter)]!r} applies the momentum of SGD itself: use "
                    "torch.optim.SGD(..., momentum=0) without a scheduler that cycles momentum, or "
                    "momentum=0 in the codec"
                )


def _own_momentum(optimizer: Any, group: Mapping[str, Any]) -> str:
    """Return the reason that a group has, or may have, momentum; empty without one."""
    of_torch = [
        base.__name__
        for base in type(optimizer).__mro__
        if base.__module__.startswith("torch.") and base.__name__ != "Optimizer"
    ]
    if group.get("betas") is not None:
        return f"has betas={tuple(group['betas'])}"
    if of_torch and "SGD" not in of_torch:
        return "is not stepped by SGD"
    if "momentum" not in group:
        return "does not say momentum=0"
    momentum = float(group["momentum"])
    return "" if momentum == 0.0 else f"has momentum={momentum:g}"
