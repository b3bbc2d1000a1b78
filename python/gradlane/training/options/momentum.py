"""Momentum is applied by a codec or by the optimizer, never by both.

`dgc` accumulates momentum before it selects values (Lin et al. 2018, section 3.2). An optimizer
that applies momentum again moves parameters by up to 1 / (1 - momentum) times as far. Where it is
torch's SGD with the codec's own momentum, a session lets the codec apply it in SGD's place
(`training/model/momentum_takeover.py`); everything else that would apply it twice is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gradlane.errors import UsageError
from gradlane.training.options.codec_choice import local_clip
from gradlane.training.options.codec_options import Dgc, parse_codec
from gradlane.training.options.compatibility import Feature, refusal


def momentum_of(codec: str) -> float:
    """Return the momentum that a codec, given by its text, applies; 0 for none."""
    options = parse_codec(codec)
    return options.momentum if isinstance(options, Dgc) else 0.0


def keeps_momentum(codec: str) -> bool:
    """Return whether a codec, given by its text, adds momentum to gradients."""
    return momentum_of(codec) != 0.0


def adding_up(codecs: Iterable[str]) -> str:
    """Return a codec that adds gradients of several steps up with momentum, or clips them before.

    Their means are velocities: to scale gradients before, or to clip the means, is another update
    than without the codec.

    Args:
        codecs: by their canonical texts.

    Returns:
        The first such codec; empty if there is none.
    """
    return next((one for one in codecs if keeps_momentum(one) or local_clip(one)), "")


def check_momentum(
    optimizer: Any, codecs: Mapping[int, str], *, may_take_over: bool = False
) -> None:
    """Check that no parameter gets momentum twice, or another one than the program asks for.

    Where the codec may not take over, `torch.optim.SGD` with `momentum=0` passes: the codec's is in
    force then. Optimizers from outside torch pass with `momentum` 0 in their groups.

    Args:
        optimizer: with `param_groups`.
        codecs: canonical text of the codec of each parameter whose codec keeps momentum, by `id`.
        may_take_over: whether the codec may apply the momentum of torch's SGD in its place.

    Raises:
        UsageError: a parameter does; the message names group, setting and codec.
    """
    if not codecs:
        return
    for number, group in enumerate(optimizer.param_groups):
        reason = _own_momentum(optimizer, group)
        if not reason and may_take_over and type(optimizer) is torch.optim.SGD:
            # The program has asked for none, and would train with the codec's.
            reason = "has momentum=0"
        if not reason:
            continue
        for parameter in list.__iter__(group["params"]):
            codec = codecs.get(id(parameter))
            if codec is None:
                continue
            advice = ""
            if may_take_over:
                advice = _takeover_obstacle(optimizer, group, parameter, codec)
                if not advice:
                    continue
            own = f"group {number} of the optimizer ({type(optimizer).__name__}), which {reason},"
            words = {Feature.OWN_MOMENTUM: own, Feature.MOMENTUM_CODEC: f"codec {codec!r}"}
            raise UsageError(refusal(words, remedy=advice))


def _takeover_obstacle(optimizer: Any, group: Mapping[str, Any], parameter: Any, codec: str) -> str:
    """Return what keeps a codec from applying a group's momentum in SGD's place, as advice."""
    own = momentum_of(codec)
    if type(optimizer) is not torch.optim.SGD:
        return "use torch.optim.SGD, whose momentum it takes over, or momentum=0 in the codec"
    found = float(group["momentum"])
    if found != own:
        return (
            f"both need one value all the time: set momentum={own:g} in the group and use no "
            f"scheduler that cycles momentum, or begin with dgc:momentum={found:g}"
        )
    for name in ("nesterov", "dampening", "maximize"):
        if group.get(name):
            return f"it cannot take over {name}={group[name]}: leave that out, or the codec"
    if optimizer.state.get(parameter, {}).get("momentum_buffer") is not None:
        return (
            "the optimizer has momentum already, from steps without it: begin with a new optimizer"
        )
    return ""


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
