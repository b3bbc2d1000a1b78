"""Numbers, names and codecs of the parameters in DDP's buckets.

Numbers follow the order in which parameters first appear in DDP's buckets, or the model's order if
the hook has the model; both are the same on every rank. Small parameters are not encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from gradlane.codecs import Codec
from gradlane.ddp.layout import BucketParameter
from gradlane.errors import RefusedError
from gradlane.training.options.codec_choice import smallest_for
from gradlane.training.options.momentum import keeps_momentum

UNNAMED = "parameter "
"""Prefix of the number of a parameter without a known name."""


class BucketParameters:
    """The parameters that a hook has seen."""

    def __init__(
        self,
        spec: str,
        *,
        names: Iterable[tuple[str, torch.Tensor]],
        overrides: Mapping[str, str],
        small_elems: int | None,
    ) -> None:
        """Number the parameters that are known in advance.

        Args:
            spec: codec of the others.
            names: parameters and their names, in the model's order; may be empty.
            overrides: codecs by patterns of names; the first match counts.
            small_elems: parameters with fewer elements stay f32; None: the codec's rule
                (`smallest_for`) if the parameters are known in advance, else 0.

        Raises:
            ValueError: a text names no codec, or patterns are given without names.
        """
        self._spec = spec
        self._overrides = dict(overrides)
        self._parts: dict[int, BucketParameter] = {}
        self._seen: dict[int, torch.Tensor] = {}
        self.names: list[str] = []
        self.momentum_codecs: dict[int, str] = {}
        """Codecs that keep momentum, by `id` of the parameter."""
        for text in (spec, *self._overrides.values()):
            Codec(text)
        known = [(name, one) for name, one in names if one.requires_grad]
        if self._overrides and not known:
            raise RefusedError("codecs by name need the model: ddp_hook(..., model=model)")
        self.small_elems = (
            smallest_for(spec, (one.numel() for _, one in known))
            if small_elems is None
            else small_elems
        )
        for name, parameter in known:
            self._add(name, parameter)

    def parts(self, parameters: Sequence[torch.Tensor]) -> tuple[BucketParameter, ...]:
        """Return the parameters of a bucket, in its order."""
        for parameter in parameters:
            if id(parameter) not in self._parts:
                self._add(f"{UNNAMED}{len(self.names)}", parameter)
        return tuple(self._parts[id(parameter)] for parameter in parameters)

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        if id(parameter) in self._parts:
            return
        spec = self._spec
        fitting = [text for pattern, text in self._overrides.items() if fnmatchcase(name, pattern)]
        if fitting:
            spec = fitting[0]
        elif parameter.numel() < self.small_elems:
            spec = "f32"
        codec = Codec(spec, storage_sizes(parameter))
        self._parts[id(parameter)] = BucketParameter(len(self.names), parameter.numel(), codec)
        # An id is unique only while its object lives.
        self._seen[id(parameter)] = parameter
        if keeps_momentum(codec.spec):
            self.momentum_codecs[id(parameter)] = codec.spec
        self.names.append(name)

    def codecs(self) -> dict[str, str]:
        """Return the canonical text of each parameter's codec."""
        parts = sorted(self._parts.values(), key=lambda part: part.number)
        return {self.names[part.number]: part.codec.spec for part in parts}

    def by_number(self) -> list[BucketParameter]:
        """Return all parameters by their numbers."""
        return sorted(self._parts.values(), key=lambda part: part.number)


def storage_sizes(parameter: torch.Tensor) -> list[int]:
    """Return the sizes in memory order, slowest first."""
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda axis: -strides[axis])
    return [parameter.shape[axis] for axis in order]
