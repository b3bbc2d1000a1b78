"""Profiles: what one training step computes, and when each gradient appears and is needed.

A profile file is one JSON object::

    {"format": "gradlane-profile", "version": 1, "model": "resnet50", "batch_size": 32,
     "forward_s": 0.1, "compute_s": 0.3,
     "tensors": [{"name": "conv1.weight", "shape": [64, 3, 7, 7], "dtype": "f32",
                  "need_s": 0.0, "ready_s": 0.3}]}

Tensors are in `named_parameters()` order. All times are seconds from the start of the step's
forward: a parameter is needed within forward, its gradient is ready within backward. Every field
is checked when a file is read, and an error names the field and its place.

Files of another kind are imported: one object with `batch_time_s`, `backward_time_s` and `params`,
in backward order, with `grad_ready_s` since the start of backward (the logs of Zhang et al. 2020).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gradlane.lab.workloads.architectures import ARCHITECTURES
from gradlane.lab.workloads.contract import TensorTiming, compute_s_of, timings_of
from gradlane.lab.workloads.schedule import (
    ReplayLayer,
    layers_from_architecture,
    layers_from_profile,
)

FORMAT = "gradlane-profile"
VERSION = 1
TENSORS_MAX = 1_000_000
"""Most tensors in a profile; as in the compiled core."""
DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8}
"""Element types and their bytes."""


class ProfileError(ValueError):
    """A profile that makes no sense; the text names file, field and place."""


@dataclass(frozen=True)
class ProfileTensor:
    """One parameter and its gradient."""

    name: str
    """Name as in `named_parameters()`."""
    shape: tuple[int, ...]
    """Its dimensions; empty for a scalar."""
    dtype: str
    """One of `DTYPE_BYTES`."""
    need_s: float
    """When forward first reads it, since the start of forward."""
    ready_s: float
    """When backward has its gradient, since the start of forward."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the gradient."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Profile:
    """What one training step computes."""

    model: str
    """Name of the model, for people."""
    batch_size: int
    """Samples in a batch of one worker."""
    forward_s: float
    """Duration of forward."""
    compute_s: float
    """Duration of forward and backward together."""
    tensors: tuple[ProfileTensor, ...]
    """In `named_parameters()` order."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def timings(self) -> list[TensorTiming]:
        """Return the tensors as the bound wants them."""
        return [
            TensorTiming(
                tensor.name, tensor.numel, DTYPE_BYTES[tensor.dtype], tensor.ready_s, tensor.need_s
            )
            for tensor in self.tensors
        ]

    def scaled(self, factor: float) -> Profile:
        """Return the profile of an accelerator that takes `factor` times as long."""
        tensors = (
            ProfileTensor(
                tensor.name,
                tensor.shape,
                tensor.dtype,
                tensor.need_s * factor,
                tensor.ready_s * factor,
            )
            for tensor in self.tensors
        )
        return Profile(
            self.model,
            self.batch_size,
            self.forward_s * factor,
            self.compute_s * factor,
            tuple(tensors),
        )

    def to_scenario(self) -> dict[str, Any]:
        """Return what the compiled core calls a profile."""
        return {
            "forward_s": self.forward_s,
            "compute_s": self.compute_s,
            "tensors": [
                {
                    "name": tensor.name,
                    "numel": tensor.numel,
                    "dtype": tensor.dtype,
                    "need_s": tensor.need_s,
                    "ready_s": tensor.ready_s,
                }
                for tensor in self.tensors
            ],
        }

    def to_json(self) -> dict[str, Any]:
        """Return the contents of a profile file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "batch_size": self.batch_size,
            "forward_s": self.forward_s,
            "compute_s": self.compute_s,
            "tensors": [
                {
                    "name": tensor.name,
                    "shape": list(tensor.shape),
                    "dtype": tensor.dtype,
                    "need_s": tensor.need_s,
                    "ready_s": tensor.ready_s,
                }
                for tensor in self.tensors
            ],
        }


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
    if batch_time_s is not None and not 0.0 < batch_time_s < math.inf:
        raise ProfileError(f"batch time must be positive, got {batch_time_s} s")
    layers = layers_from_architecture(architecture, batch_time_s)
    return profile_of_layers(model, architecture.batch_size, layers)


def profile_of_layers(model: str, batch_size: int, layers: Sequence[ReplayLayer]) -> Profile:
    """Return the profile of layers that run one after another.

    Args:
        model: name of the model.
        batch_size: samples in a batch of one worker.
        layers: in forward order.
    """
    shapes = {shape.name: shape.shape for layer in layers for shape in layer.parameters}
    stages = [layer.stage() for layer in layers]
    forward_s = sum(stage.forward_s for stage in stages)
    compute_s = compute_s_of(stages)
    # Sums in another order differ in their last bits.
    tensors = tuple(
        ProfileTensor(
            timing.name,
            shapes[timing.name],
            "f32",
            min(timing.need_s, forward_s),
            min(max(timing.ready_s, forward_s), compute_s),
        )
        for timing in timings_of(stages)
    )
    return Profile(model, batch_size, forward_s, compute_s, tensors)


def find_profile(text: str, batch_time_s: float | None = None) -> Profile:
    """Return the profile that a person means: a file, or a model known by name.

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
    profile = read_profile(Path(text))
    if batch_time_s is None:
        return profile
    if not 0.0 < batch_time_s < math.inf:
        raise ProfileError(f"batch time must be positive, got {batch_time_s} s")
    return profile.scaled(batch_time_s / profile.compute_s)


def read_profile(path: Path) -> Profile:
    """Read a profile file, of gradlane's own format or of the one that is imported.

    Raises:
        ProfileError: the file cannot be read or is no profile; the text names field and place.
    """
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read profile {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"profile {path} is not JSON: {error}") from error
    reader = _Reader(str(path))
    if not isinstance(source, dict):
        raise reader.error("", f"expected an object, got {_shown(source)}")
    if "format" in source:
        return _read_own(source, reader)
    if "params" in source:
        return _import_log(source, path, reader)
    raise reader.error("format", f'missing: a profile has "format": "{FORMAT}"')


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile file."""
    path.write_text(json.dumps(profile.to_json(), indent=1), encoding="utf-8")


class _Reader:
    """Reads fields, and names file, field and place when one is not what it must be."""

    def __init__(self, file: str, place: str = "") -> None:
        self._file = file
        self._place = place

    def inside(self, place: str) -> _Reader:
        return _Reader(self._file, f"{self._place}{place}.")

    def error(self, field: str, what: str) -> ProfileError:
        where = f"{self._place}{field}".rstrip(".")
        return ProfileError(f"profile {self._file}: {where + ': ' if where else ''}{what}")

    def _get(self, source: Mapping[str, Any], field: str) -> Any:
        if field not in source:
            raise self.error(field, "missing")
        return source[field]

    def seconds(self, source: Mapping[str, Any], field: str) -> float:
        """A time that is finite and not negative."""
        value = self._get(source, field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, f"expected seconds, got {_shown(value)}")
        seconds = float(value) if abs(value) < 1e9 else math.inf
        if not math.isfinite(seconds):
            raise self.error(field, f"must be a finite number of seconds, got {value!r}")
        if seconds < 0.0:
            raise self.error(field, f"must not be negative, got {value!r}")
        return seconds

    def integer(self, source: Mapping[str, Any], field: str) -> int:
        """A number of things, at least one."""
        value = self._get(source, field)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**40:
            raise self.error(field, f"expected a positive integer, got {_shown(value)}")
        return value

    def text(self, source: Mapping[str, Any], field: str) -> str:
        """A text that is not empty."""
        value = self._get(source, field)
        if not isinstance(value, str) or not value:
            raise self.error(field, f"expected a text, got {_shown(value)}")
        return value

    def entries(self, source: Mapping[str, Any], field: str) -> list[Any]:
        """A list that is neither empty nor absurdly long."""
        value = self._get(source, field)
        if not isinstance(value, list) or not value:
            raise self.error(field, f"expected a list with entries, got {_shown(value)}")
        if len(value) > TENSORS_MAX:
            raise self.error(
                field, f"has {len(value)} entries; at most {TENSORS_MAX} are supported"
            )
        return value

    def shape(self, source: Mapping[str, Any], field: str) -> tuple[int, ...]:
        """Dimensions."""
        value = self._get(source, field)
        sizes_are_sane = isinstance(value, list) and all(
            isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**48
            for size in value
        )
        if not sizes_are_sane or prod(value) >= 2**48:
            raise self.error(field, f"expected a list of sizes, got {_shown(value)}")
        return tuple(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_own(source: Mapping[str, Any], reader: _Reader) -> Profile:
    if source["format"] != FORMAT:
        raise reader.error("format", f'expected "{FORMAT}", got {_shown(source["format"])}')
    version = reader.integer(source, "version")
    if version != VERSION:
        raise reader.error("version", f"is {version}; this gradlane reads version {VERSION}")
    forward_s = reader.seconds(source, "forward_s")
    compute_s = reader.seconds(source, "compute_s")
    if compute_s <= 0.0 or forward_s > compute_s:
        raise reader.error("forward_s", f"{forward_s} is not within compute_s, {compute_s}")
    tensors: list[ProfileTensor] = []
    seen: set[str] = set()
    for index, entry in enumerate(reader.entries(source, "tensors")):
        place = reader.inside(f"tensors[{index}]")
        if not isinstance(entry, dict):
            raise place.error("", f"expected an object, got {_shown(entry)}")
        name = place.text(entry, "name")
        if name in seen:
            raise place.error("name", f"{name!r} occurs twice")
        seen.add(name)
        dtype = place.text(entry, "dtype")
        if dtype not in DTYPE_BYTES:
            raise place.error("dtype", f"unknown {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
        shape = place.shape(entry, "shape")
        need_s = place.seconds(entry, "need_s")
        if need_s > forward_s:
            raise place.error("need_s", f"{need_s} is after the end of forward, {forward_s}")
        ready_s = place.seconds(entry, "ready_s")
        if not forward_s <= ready_s <= compute_s:
            raise place.error(
                "ready_s", f"{ready_s} is not within backward, {forward_s} to {compute_s}"
            )
        tensors.append(ProfileTensor(name, shape, dtype, need_s, ready_s))
    return Profile(
        reader.text(source, "model"),
        reader.integer(source, "batch_size"),
        forward_s,
        compute_s,
        tuple(tensors),
    )


def _import_log(source: Mapping[str, Any], path: Path, reader: _Reader) -> Profile:
    """Import a log of gradient times; needs in forward are distributed like backward's times."""
    compute_s = reader.seconds(source, "batch_time_s")
    backward_s = reader.seconds(source, "backward_time_s")
    if not 0.0 < backward_s < compute_s:
        raise reader.error(
            "backward_time_s", f"{backward_s} is not between 0 and batch_time_s, {compute_s}"
        )
    forward_s = compute_s - backward_s
    entries: list[tuple[str, tuple[int, ...], float]] = []
    seen: set[str] = set()
    for index, entry in enumerate(reader.entries(source, "params")):
        place = reader.inside(f"params[{index}]")
        if not isinstance(entry, dict):
            raise place.error("", f"expected an object, got {_shown(entry)}")
        name = place.text(entry, "name")
        if name in seen:
            raise place.error("name", f"{name!r} occurs twice")
        seen.add(name)
        shape = place.shape(entry, "shape")
        if "numel" in entry and place.integer(entry, "numel") != prod(shape):
            raise place.error("numel", f"is {entry['numel']}, but shape {list(shape)} has another")
        ready_s = place.seconds(entry, "grad_ready_s")
        # The logs round: the last gradient may come a microsecond after backward's end.
        if ready_s > backward_s + 1e-6:
            raise place.error("grad_ready_s", f"{ready_s} is after backward's end, {backward_s}")
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
    """When forward begins with each layer."""
    needs: dict[str, float] = {}
    now_s = 0.0
    for layer in layers_from_profile(path):
        needs[layer.name] = now_s
        now_s += layer.forward_s
    return needs
