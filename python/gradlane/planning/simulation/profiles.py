"""Sources of the profiles of a what-if question: files, logs, and models known by name.

`gradlane.formats.profile` defines profiles and their file. Files of another kind are imported here:
one object with `batch_time_s`, `backward_time_s` and `params`, in backward order, with
`grad_ready_s` since the start of backward (the logs of Zhang et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from gradlane.formats.profile import (
    DTYPE_BYTES,
    FieldReader,
    Profile,
    ProfileError,
    ProfileTensor,
    profile_from,
    read_object,
)
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.models.schedule import (
    ReplayLayer,
    layers_from_architecture,
    layers_from_profile,
)
from gradlane.planning.models.timings import TensorTiming, compute_s_of, timings_of

__all__ = [
    "Profile",
    "ProfileError",
    "ProfileTensor",
    "find_profile",
    "profile_of_layers",
    "read_profile",
    "synthetic_profile",
    "timings_in",
    "write_profile",
]


def timings_in(profile: Profile) -> list[TensorTiming]:
    """Return a profile's tensors in the format of the bound."""
    return [
        TensorTiming(
            tensor.name, tensor.numel, DTYPE_BYTES[tensor.dtype], tensor.ready_s, tensor.need_s
        )
        for tensor in profile.tensors
    ]


def synthetic_profile(model: str, batch_time_s: float | None = None) -> Profile:
    """Make a profile of a well-known model from its architecture.

    Args:
        model: one of `ARCHITECTURES`.
        batch_time_s: forward and backward of one batch; the architecture's own if None. A third
            of it is forward, and layers share it by their operations.

    Raises:
        ProfileError: for an unknown model or a batch time that is not positive.
    """
    if model not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ProfileError(f"unknown model {model!r}; known are {known}, or give a profile file")
    architecture = ARCHITECTURES[model]()
    check_batch_time(batch_time_s)
    layers = layers_from_architecture(architecture, batch_time_s)
    profile = profile_of_layers(model, architecture.batch_size, layers)
    return replace(profile, flops=architecture.operations * architecture.batch_size)


def profile_of_layers(model: str, batch_size: int, layers: Sequence[ReplayLayer]) -> Profile:
    """Return the profile of layers that run one after another.

    Args:
        model: name of the model.
        batch_size: samples in a batch of one worker.
        layers: in forward order.
    """
    owners = {shape.name: (shape.shape, layer) for layer in layers for shape in layer.parameters}
    stages = [layer.stage() for layer in layers]
    forward_s = sum(stage.forward_s for stage in stages)
    compute_s = compute_s_of(stages)
    # Sums in another order differ in their last bits.
    tensors = tuple(
        ProfileTensor(
            timing.name,
            owners[timing.name][0],
            "f32",
            min(timing.need_s, forward_s),
            min(max(timing.ready_s, forward_s), compute_s),
            owners[timing.name][1].kind,
            rows=_rows_of(owners[timing.name][1], batch_size),
        )
        for timing in timings_of(stages)
    )
    return Profile(model, batch_size, forward_s, compute_s, tensors)


def _rows_of(layer: ReplayLayer, batch_size: int) -> int | None:
    return None if layer.positions is None else layer.positions * batch_size


def find_profile(text: str, batch_time_s: float | None = None) -> Profile:
    """Return the profile of a file, or of a model known by name.

    Args:
        text: path of a profile file, or one of `ARCHITECTURES`.
        batch_time_s: forward and backward of one batch, in place of the profile's own.

    Raises:
        ProfileError: there is no such file or model, or the file is no profile.
    """
    if text in ARCHITECTURES and not Path(text).is_file():
        return synthetic_profile(text, batch_time_s)
    if not Path(text).is_file():
        known = ", ".join(ARCHITECTURES)
        raise ProfileError(f"{text!r} is neither a file nor a known model ({known})")
    check_batch_time(batch_time_s)
    profile = read_profile(Path(text))
    return profile if batch_time_s is None else profile.scaled(batch_time_s / profile.compute_s)


def check_batch_time(batch_time_s: float | None) -> None:
    """Check the time of a batch; None: the profile's own.

    Raises:
        ProfileError: it is not positive.
    """
    if batch_time_s is not None and not 0.0 < batch_time_s < math.inf:
        raise ProfileError(f"batch time must be positive, got {batch_time_s} s")


def read_profile(path: Path) -> Profile:
    """Read a profile file, of gradlane's own format or of the one that is imported.

    Raises:
        ProfileError: the file cannot be read or is no profile; the text names field and position.
    """
    source = read_object(path)
    reader = FieldReader(str(path))
    if "params" in source and "format" not in source:
        return _import_log(source, path, reader)
    return profile_from(source, reader)


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile file."""
    profile.save(path)


def _import_log(source: Mapping[str, Any], path: Path, reader: FieldReader) -> Profile:
    """Import a log of gradient times; forward needs parameters in proportion to backward's
    times."""
    compute_s = reader.seconds(source, "batch_time_s")
    backward_s = reader.seconds(source, "backward_time_s")
    if not 0.0 < backward_s < compute_s:
        raise reader.error(
            "backward_time_s", f"{backward_s} is not between 0 and batch_time_s, {compute_s}"
        )
    forward_s = compute_s - backward_s
    entries: list[tuple[str, tuple[int, ...], float]] = []
    for position, name, entry in reader.named_entries(source, "params"):
        shape = position.shape(entry, "shape")
        if "numel" in entry and position.integer(entry, "numel") != prod(shape):
            raise position.error(
                "numel", f"is {entry['numel']}, but shape {list(shape)} has another"
            )
        ready_s = position.seconds(entry, "grad_ready_s")
        # The logs round: the last gradient may come a microsecond after backward's end.
        if ready_s > backward_s + 1e-6:
            raise position.error("grad_ready_s", f"{ready_s} is after backward's end, {backward_s}")
        entries.append((name, shape, min(forward_s + ready_s, compute_s)))
    needs = _needs_like_backward(path)
    tensors = tuple(
        ProfileTensor(name, shape, "f32", min(needs[_layer_of(name)], forward_s), ready_s)
        for name, shape, ready_s in reversed(entries)
    )
    model = source.get("model")
    batch_size = source.get("batch_size")
    return Profile(
        model if isinstance(model, str) and model else path.stem,
        reader.integer(source, "batch_size") if batch_size is not None else 1,
        forward_s,
        compute_s,
        tensors,
    )


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0] or name


def _needs_like_backward(path: Path) -> dict[str, float]:
    """Return when forward begins with each layer."""
    needs: dict[str, float] = {}
    now_s = 0.0
    for layer in layers_from_profile(path):
        needs[layer.name] = now_s
        now_s += layer.forward_s
    return needs
