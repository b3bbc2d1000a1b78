"""Durations of the layers of a replayed model, from operation counts or from a profile.

The durations of all layers add up to the given batch time. Layers too short for the machine's sleep
to be exact lend their time to a neighbour.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from gradlane.formats.profile import FORMAT, Profile, ProfileTensor, read_profile_file
from gradlane.planning.models import Architecture, ParameterShape
from gradlane.planning.models.timings import Stage

MINIMUM_LAYER_SHARE = 0.001
"""Least part of forward that a layer takes however few its operations: memory traffic and
starting a kernel cost time, too."""
MINIMUM_SLEEP_S = 0.001
"""Shortest real sleep: the machine overshoots a sleep by about a tenth of this."""
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class ReplayLayer:
    """A layer of a replayed model: its parameters and its nominal durations."""

    name: str
    parameters: tuple[ParameterShape, ...]
    forward_s: float
    backward_s: float
    kind: str | None = None
    """Class of the module, such as `Linear`; None if unknown."""
    positions: int | None = None
    """Vectors of one sample that it is applied to; None if unknown."""

    def stage(self) -> Stage:
        """Return the layer as a stage of the accelerator's time line."""
        parameters = tuple(
            (parameter.name, parameter.numel, FLOAT32_BYTES) for parameter in self.parameters
        )
        return Stage(self.name, self.forward_s, self.backward_s, parameters)


def layers_from_architecture(
    architecture: Architecture, batch_time_s: float | None = None
) -> list[ReplayLayer]:
    """Distribute a batch time over an architecture's layers by their operation counts.

    Args:
        architecture: the layers in forward order.
        batch_time_s: forward and backward of one batch together; the architecture's default
            where it is None.

    Returns:
        The layers in forward order; each has at least about `MINIMUM_LAYER_SHARE` of the time.

    Raises:
        ValueError: if `batch_time_s` is not positive.
    """
    batch_time_s = architecture.batch_time_s if batch_time_s is None else batch_time_s
    _check_batch_time(batch_time_s)
    operations = [layer.operations for layer in architecture.layers]
    shares = _shares_with_floor([float(count) for count in operations])
    forward_s = batch_time_s * architecture.forward_share
    backward_s = batch_time_s - forward_s
    return [
        ReplayLayer(
            layer.name,
            layer.parameters,
            forward_s * share,
            backward_s * share,
            layer.kind,
            layer.positions,
        )
        for layer, share in zip(architecture.layers, shares, strict=True)
    ]


def layers_from_profile(path: Path, batch_time_s: float | None = None) -> list[ReplayLayer]:
    """Read a profile recorded on a real accelerator.

    The file is a profile of gradlane's own (see `layers_from_recording`), or one JSON object with
    `batch_time_s`, `backward_time_s` and `params`, a list in backward order of objects with
    `name`, `shape` and `grad_ready_s` (since backward began). For the latter:
    A layer's backward lasts from the gradient before it to its own last gradient. The rest of
    the batch time counts as forward, distributed like backward.

    Args:
        path: the profile.
        batch_time_s: scales all times to this batch time; None keeps those of the file.

    Returns:
        The layers in forward order: parameters that share all but the last part of their name.

    Raises:
        ValueError: if the file is not such a profile; the message names the field.
        OSError: if the file cannot be read.
    """
    profile = _read_profile(path)
    if profile.get("format") == FORMAT:
        return layers_from_recording(read_profile_file(path), batch_time_s)
    recorded_batch_s = _number(profile, "batch_time_s", path)
    backward_s = _number(profile, "backward_time_s", path)
    if not 0.0 < backward_s < recorded_batch_s:
        raise ValueError(
            f"profile {path}: backward_time_s {backward_s} is not between 0 and "
            f"batch_time_s {recorded_batch_s}"
        )
    batch_time_s = recorded_batch_s if batch_time_s is None else batch_time_s
    _check_batch_time(batch_time_s)
    scale = batch_time_s / recorded_batch_s
    groups = _layers_in_backward_order(profile, path)
    ends_s = [max(ready_s for _, ready_s in parameters) for _, parameters in groups]
    durations_s: list[float] = []
    before_s = 0.0
    for end_s in ends_s:
        durations_s.append(max(end_s - before_s, 0.0))
        before_s = max(before_s, end_s)
    # What follows the last gradient (the gradient of the input) belongs to no layer's wait.
    durations_s[-1] += max(backward_s - before_s, 0.0)
    forward_shares = _shares_with_floor(durations_s)
    forward_s = recorded_batch_s - sum(durations_s)
    layers = [
        ReplayLayer(
            name,
            tuple(shape for shape, _ in reversed(parameters)),
            forward_s * share * scale,
            duration_s * scale,
        )
        for (name, parameters), duration_s, share in zip(
            groups, durations_s, forward_shares, strict=True
        )
    ]
    layers.reverse()
    return layers


def layers_from_recording(profile: Profile, batch_time_s: float | None = None) -> list[ReplayLayer]:
    """Turn a recorded step into layers that run one after another.

    A layer's forward lasts until the next one needs its parameters, its backward from the gradient
    of the layer behind it to its own last one. What follows the last gradient (the optimizer, the
    next batch) lengthens the backward of the first layer: it goes by before the next forward.

    Args:
        profile: the recording.
        batch_time_s: scales all times to this step time; None keeps the recorded ones.

    Returns:
        The layers in the order in which forward needs them.

    Raises:
        ValueError: if `batch_time_s` is not positive.
    """
    batch_time_s = profile.compute_s if batch_time_s is None else batch_time_s
    _check_batch_time(batch_time_s)
    scale = batch_time_s / profile.compute_s
    groups: dict[str, list[ProfileTensor]] = {}
    for tensor in profile.tensors:
        groups.setdefault(_layer_of(tensor.name)[0], []).append(tensor)
    layers = sorted(groups.items(), key=lambda item: min(one.need_s for one in item[1]))
    needs_s = [min(one.need_s for one in tensors) for _, tensors in layers]
    forwards_s = [
        after_s - need_s
        for need_s, after_s in zip(needs_s, [*needs_s[1:], profile.forward_s], strict=True)
    ]
    # What comes before the first parameter is needed is part of the first layer.
    forwards_s[0] += needs_s[0]
    backwards_s: list[float] = []
    before_s = profile.forward_s
    for _, tensors in reversed(layers):
        end_s = max(before_s, *(one.ready_s for one in tensors))
        backwards_s.append(end_s - before_s)
        before_s = end_s
    backwards_s[-1] += profile.compute_s - before_s
    return [
        ReplayLayer(
            name,
            tuple(
                ParameterShape(".".join(_layer_of(one.name)), one.shape)
                for one in tensors
                if one.numel > 0
            ),
            forward_s * scale,
            backward_s * scale,
        )
        for (name, tensors), forward_s, backward_s in zip(
            layers, forwards_s, reversed(backwards_s), strict=True
        )
    ]


def merge_short_layers(layers: Sequence[ReplayLayer], dilation: float) -> list[ReplayLayer]:
    """Move the time of layers that are too short to sleep exactly to a layer beside them.

    Every layer stays, so that each still waits for its own parameters, but consecutive ones
    form groups whose whole time is that of the group's last layer: in backward it runs first,
    in forward last. A group's parameters are so needed when it starts and ready when it ends.

    Args:
        layers: in forward order.
        dilation: factor from nominal to real seconds.

    Returns:
        The layers, in the same order and with the same sums; real sleeps last `MINIMUM_SLEEP_S`
        or longer, except when the whole model is shorter.
    """
    groups: list[list[ReplayLayer]] = [[]]
    for layer in layers:
        if _is_long_enough(groups[-1], dilation):
            groups.append([])
        groups[-1].append(layer)
    if len(groups) > 1 and not _is_long_enough(groups[-1], dilation):
        groups[-2].extend(groups.pop())
    merged: list[ReplayLayer] = []
    for group in groups:
        for layer in group[:-1]:
            merged.append(replace(layer, forward_s=0.0, backward_s=0.0))
        forward_s = sum(layer.forward_s for layer in group)
        backward_s = sum(layer.backward_s for layer in group)
        merged.append(replace(group[-1], forward_s=forward_s, backward_s=backward_s))
    return merged


def _is_long_enough(group: Sequence[ReplayLayer], dilation: float) -> bool:
    forward_s = sum(layer.forward_s for layer in group)
    backward_s = sum(layer.backward_s for layer in group)
    return min(forward_s, backward_s) * dilation >= MINIMUM_SLEEP_S


def _shares_with_floor(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    floored = [max(weight / total, MINIMUM_LAYER_SHARE) for weight in weights]
    return [weight / sum(floored) for weight in floored]


def _check_batch_time(batch_time_s: float) -> None:
    if not batch_time_s > 0.0:
        raise ValueError(f"batch time must be positive, got {batch_time_s} s")


def _read_profile(path: Path) -> Mapping[str, Any]:
    try:
        profile: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"profile {path} is not JSON: {error}") from error
    if isinstance(profile, dict) and (profile.get("format") == FORMAT or profile.get("params")):
        return profile
    raise ValueError(
        f"profile {path}: expected an object with a list 'params', or one that "
        "`gradlane profile` wrote"
    )


def _number(source: Mapping[str, Any], key: str, path: Path) -> float:
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"profile {path}: field '{key}' must be a number, got {value!r}")
    return float(value)


def _layer_of(name: str) -> tuple[str, str]:
    """Split a parameter's name into those of its layer and its own."""
    layer_name, _, own_name = name.rpartition(".")
    # A parameter of the model itself gets a layer, because layers are what is called.
    return (layer_name, own_name) if layer_name else (name, "weight")


def _layers_in_backward_order(
    profile: Mapping[str, Any], path: Path
) -> list[tuple[str, list[tuple[ParameterShape, float]]]]:
    """Group parameters by layer: (layer name, [(parameter, ready time)])."""
    groups: dict[str, list[tuple[ParameterShape, float]]] = {}
    seen: set[str] = set()
    for entry in profile["params"]:
        if not isinstance(entry, dict):
            raise ValueError(f"profile {path}: a parameter must be an object, got {entry!r}")
        name, shape = entry.get("name"), entry.get("shape")
        if not isinstance(name, str) or not name or name in seen:
            raise ValueError(f"profile {path}: missing or repeated parameter name {name!r}")
        seen.add(name)
        if not isinstance(shape, list) or not all(
            isinstance(size, int) and size > 0 for size in shape
        ):
            raise ValueError(f"profile {path}: shape of '{name}' must be a list of sizes")
        if "numel" in entry and entry["numel"] != prod(shape):
            raise ValueError(
                f"profile {path}: '{name}' has shape {shape} but numel {entry['numel']}"
            )
        ready_s = _number(entry, "grad_ready_s", path)
        layer_name, own_name = _layer_of(name)
        parameter = ParameterShape(f"{layer_name}.{own_name}", tuple(shape))
        groups.setdefault(layer_name, []).append((parameter, ready_s))
    return list(groups.items())
