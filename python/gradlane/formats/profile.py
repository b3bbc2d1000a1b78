"""Profiles of a training step: when gradients are ready, and parameters needed.

A profile file is one JSON object::

    {"format": "gradlane-profile", "version": 1, "model": "resnet50", "batch_size": 32,
     "forward_s": 0.1, "compute_s": 0.3,
     "tensors": [{"name": "conv1.weight", "shape": [64, 3, 7, 7], "dtype": "f32",
                  "need_s": 0.0, "ready_s": 0.3}]}

Tensors are in `named_parameters()` order. All times are seconds from the start of the step's
forward: a parameter is needed within forward, its gradient is ready within backward. Further fields
of a recording are optional: `device`, `batch`, `flops`, `modules`, and `layer`, `gradients`, `rows`
and `sparse_rows` of a tensor. This module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from gradlane.formats.untrusted import EscapedError

FORMAT = "gradlane-profile"
VERSION = 1
DTYPE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "f64": 8}
"""Element types and their bytes."""


class ProfileError(EscapedError, ValueError):
    """An invalid profile; the text names file, field and position."""


@dataclass(frozen=True)
class ProfileTensor:
    """A parameter and its gradient."""

    name: str
    """Name as in `named_parameters()`."""
    shape: tuple[int, ...]
    """Its dimensions; empty for a scalar. Complex numbers are pairs, in a last dimension of 2."""
    dtype: str
    """One of `DTYPE_BYTES`."""
    need_s: float
    """First read in forward, since the start of forward."""
    ready_s: float
    """End of its gradient in backward, since the start of forward."""
    layer: str | None = None
    """Class of the owning module, such as `Conv2d`."""
    gradients: int | None = None
    """Number of parts that backward adds to its gradient in a step; 0: it never has one."""
    rows: int | None = None
    """Vectors that its layer is applied to in a step of one worker: samples times positions, such
    as words or patches. Factors of the gradient have that many rows."""
    sparse_rows: int | None = None
    """Rows of its gradient in a step of one worker, where that is sparse; None: it is dense."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the gradient."""
        return self.numel * DTYPE_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Return the tensor as a profile file has it."""
        fields: dict[str, Any] = {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "need_s": self.need_s,
            "ready_s": self.ready_s,
        }
        return fields | _known(
            layer=self.layer,
            gradients=self.gradients,
            rows=self.rows,
            sparse_rows=self.sparse_rows,
        )


@dataclass(frozen=True)
class ProfileModule:
    """A module and its calls in a step's forward."""

    name: str
    """Name as in `named_modules()`; the model itself is the empty text."""
    layer: str
    """Its class, such as `Conv2d`."""
    forwards_s: tuple[tuple[float, float], ...]
    """Start and end of each call, in order, since the start of forward, without calls in backward
    (activation checkpointing)."""
    flops: int | None = None
    """Floating-point operations of all its calls, those of modules in it included."""

    def to_json(self) -> dict[str, Any]:
        """Return the module as a profile file has it."""
        calls = [list(call) for call in self.forwards_s]
        return {"name": self.name, "layer": self.layer, "forwards_s": calls} | _known(
            flops=self.flops
        )


@dataclass(frozen=True)
class BatchTime:
    """Durations of whole steps."""

    steps: int
    """Number of recorded steps."""
    median_s: float
    lower_quartile_s: float
    upper_quartile_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the spread as a profile file has it."""
        return {
            "steps": self.steps,
            "median_s": self.median_s,
            "lower_quartile_s": self.lower_quartile_s,
            "upper_quartile_s": self.upper_quartile_s,
        }


@dataclass(frozen=True)
class Profile:
    """The profile of one training step."""

    model: str
    """Name of the model, for readers."""
    batch_size: int
    """Samples in a batch of one worker."""
    forward_s: float
    """Duration of forward."""
    compute_s: float
    """Duration of a whole step without communication: forward, backward, and the loop until the
    next forward (optimizer, next batch)."""
    tensors: tuple[ProfileTensor, ...]
    """In `named_parameters()` order."""
    device: str | None = None
    """Device of the recording, such as `cpu` or the name of a CUDA device."""
    batch: BatchTime | None = None
    """Spread of the recorded steps."""
    flops: int | None = None
    """Floating-point operations of a step's forward; backward has about twice as many."""
    modules: tuple[ProfileModule, ...] = ()
    """Modules that forward called, in `named_modules()` order."""

    def __repr__(self) -> str:
        return (
            f"<Profile {self.model!r}, batch {self.batch_size}: {len(self.tensors)} tensors of "
            f"{self.size_bytes / 1e6:.1f} MB, step {self.compute_s * 1e3:.1f} ms>"
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def scaled(self, factor: float) -> Profile:
        """Return the profile of an accelerator that takes `factor` times as long."""
        batch = self.batch
        return replace(
            self,
            forward_s=self.forward_s * factor,
            compute_s=self.compute_s * factor,
            tensors=tuple(
                replace(tensor, need_s=tensor.need_s * factor, ready_s=tensor.ready_s * factor)
                for tensor in self.tensors
            ),
            batch=batch
            and BatchTime(
                batch.steps,
                batch.median_s * factor,
                batch.lower_quartile_s * factor,
                batch.upper_quartile_s * factor,
            ),
            modules=tuple(
                replace(
                    module,
                    forwards_s=tuple(
                        (start_s * factor, end_s * factor) for start_s, end_s in module.forwards_s
                    ),
                )
                for module in self.modules
            ),
        )

    def accumulated(self, batches: int) -> Profile:
        """Return the profile of steps that add up the gradients of several batches.

        Forward of the first batch waits for parameters, and backward of the last has gradients
        ready; nothing is exchanged between.
        """
        if batches == 1:
            return self
        before_s = (batches - 1) * self.compute_s
        return replace(
            self,
            batch_size=batches * self.batch_size,
            compute_s=batches * self.compute_s,
            flops=None if self.flops is None else batches * self.flops,
            tensors=tuple(
                replace(tensor, ready_s=before_s + tensor.ready_s) for tensor in self.tensors
            ),
            batch=None,
            modules=(),
        )

    def to_scenario(self) -> dict[str, Any]:
        """Return the profile in the compiled core's format."""
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
            **_known(device=self.device, batch=self.batch and self.batch.to_json()),
            **_known(flops=self.flops),
            "tensors": [tensor.to_json() for tensor in self.tensors],
            **_known(modules=[module.to_json() for module in self.modules] or None),
        }

    def save(self, path: Path | str) -> None:
        """Write a profile file.

        Raises:
            OSError: it cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_json(), indent=1), encoding="utf-8")

    @staticmethod
    def load(path: Path | str) -> Profile:
        """Read a profile file that `save` wrote.

        Raises:
            ProfileError: the file cannot be read or is no profile; the text names the field.
        """
        return read_profile_file(Path(path))


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


ENTRIES_MAX = 1_000_000
"""Most tensors, modules or calls of a module, as in the compiled core."""


def read_object(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object.

    Raises:
        ProfileError: the file cannot be read, or holds no object.
    """
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read profile {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"profile {path} is not JSON: {error}") from error
    if not isinstance(source, dict):
        raise ProfileError(f"profile {path}: expected an object, got {shorten(source)}")
    return source


def read_profile_file(path: Path) -> Profile:
    """Read a profile file of gradlane's own format.

    Raises:
        ProfileError: the file cannot be read or is no such profile.
    """
    return profile_from(read_object(path), FieldReader(str(path)))


def shorten(value: Any) -> str:
    """Return a value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class FieldReader:
    """Reads fields of one object; errors name file, field and position."""

    def __init__(self, file: str, position: str = "") -> None:
        """Read the object at `position` (empty, or a path that ends with a dot) of a file."""
        self._file = file
        self._position = position

    def inside(self, position: str) -> FieldReader:
        """Return a reader of an object within this one."""
        return FieldReader(self._file, f"{self._position}{position}.")

    def error(self, field: str, what: str) -> ProfileError:
        """Return an error that names file and field; an empty field is the object itself."""
        where = f"{self._position}{field}".rstrip(".")
        return ProfileError(f"profile {self._file}: {where + ': ' if where else ''}{what}")

    def _get(self, source: Mapping[str, Any], field: str) -> Any:
        if field not in source:
            raise self.error(field, "missing")
        return source[field]

    def seconds(self, source: Mapping[str, Any], field: str) -> float:
        """Return a time that is finite and not negative."""
        return self._check_seconds(self._get(source, field), field)

    def _check_seconds(self, value: Any, field: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, f"expected seconds, got {shorten(value)}")
        seconds = float(value) if abs(value) < 1e9 else math.inf
        if not math.isfinite(seconds):
            raise self.error(field, f"must be a finite number of seconds, got {value!r}")
        if seconds < 0.0:
            raise self.error(field, f"must not be negative, got {value!r}")
        return seconds

    def integer(self, source: Mapping[str, Any], field: str, least: int = 1) -> int:
        """Return an integer of at least `least`."""
        value = self._get(source, field)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            kind = "a positive integer" if least == 1 else f"an integer from {least}"
            raise self.error(field, f"expected {kind}, got {shorten(value)}")
        return value

    def text(self, source: Mapping[str, Any], field: str) -> str:
        """Return a text that is not empty."""
        value = self._get(source, field)
        if not isinstance(value, str) or not value:
            raise self.error(field, f"expected a text, got {shorten(value)}")
        if not value.isprintable():
            raise self.error(field, f"has characters that cannot be printed: {shorten(value)}")
        return value

    def entries(self, source: Mapping[str, Any], field: str) -> list[Any]:
        """Return a list that is neither empty nor too long."""
        value = self._get(source, field)
        if not isinstance(value, list) or not value:
            raise self.error(field, f"expected a list with entries, got {shorten(value)}")
        if len(value) > ENTRIES_MAX:
            raise self.error(
                field, f"has {len(value)} entries; at most {ENTRIES_MAX} are supported"
            )
        return value

    def named_entries(
        self, source: Mapping[str, Any], field: str, *, may_be_empty: bool = False
    ) -> Iterator[tuple[FieldReader, str, Mapping[str, Any]]]:
        """Yield the objects of a list with a unique `name` each.

        Args:
            source: the object that has the list.
            field: the list's name.
            may_be_empty: whether a name may be the empty text.

        Yields:
            A reader for the entry's position, its name, and the entry.
        """
        seen: set[str] = set()
        for index, entry in enumerate(self.entries(source, field)):
            position = self.inside(f"{field}[{index}]")
            if not isinstance(entry, dict):
                raise position.error("", f"expected an object, got {shorten(entry)}")
            name = "" if may_be_empty and entry.get("name") == "" else position.text(entry, "name")
            if name in seen:
                raise position.error("name", f"{name!r} occurs twice")
            seen.add(name)
            yield position, name, entry

    def shape(self, source: Mapping[str, Any], field: str) -> tuple[int, ...]:
        """Return dimensions."""
        value = self._get(source, field)
        sizes_are_sane = isinstance(value, list) and all(
            isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**48
            for size in value
        )
        if not sizes_are_sane or prod(value) >= 2**48:
            raise self.error(field, f"expected a list of sizes, got {shorten(value)}")
        return tuple(value)

    def calls(self, source: Mapping[str, Any], field: str) -> tuple[tuple[float, float], ...]:
        """Return pairs of a start and an end."""
        calls = []
        for index, pair in enumerate(self.entries(source, field)):
            position = f"{field}[{index}]"
            if not isinstance(pair, list) or len(pair) != 2:
                raise self.error(position, f"expected start and end, got {shorten(pair)}")
            start_s, end_s = (self._check_seconds(value, position) for value in pair)
            if start_s > end_s:
                raise self.error(position, f"ends at {end_s}, before its start at {start_s}")
            calls.append((start_s, end_s))
        return tuple(calls)


def profile_from(source: Mapping[str, Any], reader: FieldReader) -> Profile:
    """Read a profile of gradlane's own format from the object of a file.

    Raises:
        ProfileError: it is none.
    """
    if "format" not in source:
        raise reader.error("format", f'missing: a profile has "format": "{FORMAT}"')
    if source["format"] != FORMAT:
        raise reader.error("format", f'expected "{FORMAT}", got {shorten(source["format"])}')
    version = reader.integer(source, "version")
    if version != VERSION:
        raise reader.error("version", f"is {version}; this gradlane reads version {VERSION}")
    forward_s = reader.seconds(source, "forward_s")
    compute_s = reader.seconds(source, "compute_s")
    if compute_s <= 0.0 or forward_s > compute_s:
        raise reader.error("forward_s", f"{forward_s} is not within compute_s, {compute_s}")
    return Profile(
        model=reader.text(source, "model"),
        batch_size=reader.integer(source, "batch_size"),
        forward_s=forward_s,
        compute_s=compute_s,
        tensors=tuple(
            _tensor(position, name, entry, forward_s, compute_s)
            for position, name, entry in reader.named_entries(source, "tensors")
        ),
        device=reader.text(source, "device") if "device" in source else None,
        batch=_batch(source["batch"], reader.inside("batch")) if "batch" in source else None,
        flops=reader.integer(source, "flops", 0) if "flops" in source else None,
        modules=tuple(_modules(source, reader)) if "modules" in source else (),
    )


def _tensor(
    position: FieldReader, name: str, entry: Mapping[str, Any], forward_s: float, compute_s: float
) -> ProfileTensor:
    dtype = position.text(entry, "dtype")
    if dtype not in DTYPE_BYTES:
        raise position.error("dtype", f"unknown {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    shape = position.shape(entry, "shape")
    need_s = position.seconds(entry, "need_s")
    if need_s > forward_s:
        raise position.error("need_s", f"{need_s} is after the end of forward, {forward_s}")
    ready_s = position.seconds(entry, "ready_s")
    if not forward_s <= ready_s <= compute_s:
        raise position.error(
            "ready_s", f"{ready_s} is not within backward, {forward_s} to {compute_s}"
        )
    return ProfileTensor(
        name,
        shape,
        dtype,
        need_s,
        ready_s,
        position.text(entry, "layer") if "layer" in entry else None,
        position.integer(entry, "gradients", 0) if "gradients" in entry else None,
        position.integer(entry, "rows", 0) if "rows" in entry else None,
        position.integer(entry, "sparse_rows", 0) if "sparse_rows" in entry else None,
    )


def _modules(source: Mapping[str, Any], reader: FieldReader) -> Iterator[ProfileModule]:
    for position, name, entry in reader.named_entries(source, "modules", may_be_empty=True):
        yield ProfileModule(
            name,
            position.text(entry, "layer"),
            position.calls(entry, "forwards_s"),
            position.integer(entry, "flops", 0) if "flops" in entry else None,
        )


def _batch(source: Any, reader: FieldReader) -> BatchTime:
    if not isinstance(source, dict):
        raise reader.error("", f"expected an object, got {shorten(source)}")
    lower_s = reader.seconds(source, "lower_quartile_s")
    median_s = reader.seconds(source, "median_s")
    upper_s = reader.seconds(source, "upper_quartile_s")
    if not lower_s <= median_s <= upper_s:
        raise reader.error("median_s", f"{median_s} is not between its quartiles")
    return BatchTime(reader.integer(source, "steps"), median_s, lower_s, upper_s)
