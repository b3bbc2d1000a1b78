"""What a profile says: what one training step computes, and when each gradient is there and needed.

A profile file is one JSON object::

    {"format": "gradlane-profile", "version": 1, "model": "resnet50", "batch_size": 32,
     "forward_s": 0.1, "compute_s": 0.3,
     "tensors": [{"name": "conv1.weight", "shape": [64, 3, 7, 7], "dtype": "f32",
                  "need_s": 0.0, "ready_s": 0.3}]}

Tensors are in `named_parameters()` order. All times are seconds from the start of the step's
forward: a parameter is needed within forward, its gradient is ready within backward. What a
recording knows beyond that is optional: `device`, `batch`, `flops`, `modules`, and `layer`,
`gradients` and `rows` of a tensor. This file imports neither torch nor anything of gradlane's.
"""

from __future__ import annotations

import json
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
    """A profile that makes no sense; the text names file, field and place."""


@dataclass(frozen=True)
class ProfileTensor:
    """One parameter and its gradient."""

    name: str
    """Name as in `named_parameters()`."""
    shape: tuple[int, ...]
    """Its dimensions; empty for a scalar. Complex numbers are pairs, in a last dimension of 2."""
    dtype: str
    """One of `DTYPE_BYTES`."""
    need_s: float
    """When forward first reads it, since the start of forward."""
    ready_s: float
    """When backward has its gradient, since the start of forward."""
    layer: str | None = None
    """Class of the module that owns it, such as `Conv2d`."""
    gradients: int | None = None
    """How often backward adds to its gradient in a step; 0 where it never has one."""
    rows: int | None = None
    """Vectors that its layer is applied to in a step of one worker: samples times positions, such
    as words or patches. Factors of the gradient have so many rows."""

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
        return fields | _known(layer=self.layer, gradients=self.gradients, rows=self.rows)


@dataclass(frozen=True)
class ProfileModule:
    """One module and its calls in a step's forward."""

    name: str
    """Name as in `named_modules()`; the model itself is the empty text."""
    layer: str
    """Its class, such as `Conv2d`."""
    forwards_s: tuple[tuple[float, float], ...]
    """Start and end of each call, in order, since the start of forward. Calls in backward, as
    activation checkpointing makes them, are none."""
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
    """How long whole steps took."""

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
    """What one training step computes."""

    model: str
    """Name of the model, for people."""
    batch_size: int
    """Samples in a batch of one worker."""
    forward_s: float
    """Duration of forward."""
    compute_s: float
    """Duration of a whole step without communication: forward, backward, and what the loop does
    until the next forward (optimizer, next batch)."""
    tensors: tuple[ProfileTensor, ...]
    """In `named_parameters()` order."""
    device: str | None = None
    """What it was recorded on, such as `cpu` or the name of a CUDA device."""
    batch: BatchTime | None = None
    """Spread of the recorded steps."""
    flops: int | None = None
    """Floating-point operations of a step's forward; backward has about twice as many."""
    modules: tuple[ProfileModule, ...] = ()
    """Modules that forward called, in `named_modules()` order."""

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
            ProfileError: the file cannot be read or is no profile; the text names field and place.
        """
        from gradlane.formats.profile_reading import read_own

        return read_own(Path(path))


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
