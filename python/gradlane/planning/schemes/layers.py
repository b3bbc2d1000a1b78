"""The layers of a profile, and the traffic and rebuilding of those with factors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.formats.profile import DTYPE_BYTES, Profile, ProfileTensor
from gradlane.planning.schemes.costs import Counts, Layer, costs_of
from gradlane.training.options.strategy import ADAM, FACTOR_SCHEMES, PLAN_RULES, RING, SFB

Schemes = tuple[tuple[str, str], ...]
"""Layers, each with its scheme, where that is not the strategy's."""
SCHEME_RULES = ("poseidon", *FACTOR_SCHEMES)
"""Rules for the layers that travel as factors: Poseidon's formula, or all that have any, to every
rank or to one."""
_HEADER_BYTES = 16
"""Header of a part of a block (`gradlane.training.factors.block`)."""
_ROW_NUMBER_BYTES = 8


@dataclass(frozen=True)
class Factors:
    """A layer's gradient as factors.

    Attributes:
        tensor: name of the parameter with factors; the layer's others have none.
        block_bytes: sent by a rank to each other one in a step.
        operations: for adding one other rank's block to the sum.
    """

    tensor: str
    block_bytes: int
    operations: float


def layers_of(profile: Profile) -> list[Layer]:
    """Group tensors by module, in the order in which modules first appear."""
    groups: dict[str, list[ProfileTensor]] = {}
    for tensor in profile.tensors:
        groups.setdefault(tensor.name.rpartition(".")[0] or tensor.name, []).append(tensor)
    operations = {module.name: module.flops for module in profile.modules}
    return [
        Layer(
            name=name,
            index=index,
            kind=next((tensor.layer for tensor in tensors if tensor.layer), None),
            parameters=tuple(tensor.name for tensor in tensors),
            shapes=tuple(tensor.shape for tensor in tensors),
            elements=sum(tensor.numel for tensor in tensors),
            size_bytes=sum(tensor.size_bytes for tensor in tensors),
            need_s=min(tensor.need_s for tensor in tensors),
            ready_s=max(tensor.ready_s for tensor in tensors),
            rows=_rows_of(name, tensors, operations),
        )
        for index, (name, tensors) in enumerate(groups.items())
    ]


def _rows_of(
    name: str, tensors: Sequence[ProfileTensor], operations: Mapping[str, int | None]
) -> int | None:
    """Return the vectors that a module is applied to, from the profile or its operations."""
    for tensor in tensors:
        if tensor.rows is not None:
            return tensor.rows
        flops = operations.get(name)
        if len(tensor.shape) == 2 and tensor.numel and flops:
            # A product with one vector takes two operations an element.
            return max(1, round(flops / (2 * tensor.numel)))
    return None


def factors_of(layer: Layer, profile: Profile, narrow: Collection[str] = ()) -> Factors | None:
    """Return a layer's factors, or None if it has none; in 16 bits if its tensor is in `narrow`.

    A rank whose factors would be larger than the gradient sends the gradient. Embeddings have rows
    that were looked up, but a profile does not say whether their weight is an output layer's, too,
    whose gradient is dense: they are not planned for.
    """
    if layer.matrix is None or 0 in layer.matrix:
        return None
    outputs, inputs = layer.matrix
    tensor = layer.parameters[layer.shapes.index(layer.matrix)]
    dtype = next(one.dtype for one in profile.tensors if one.name == tensor)
    element_bytes = DTYPE_BYTES[dtype]
    rows = layer.rows or profile.batch_size
    factor_bytes = 2 if tensor in narrow else element_bytes
    block_bytes = rows * (outputs + inputs) * factor_bytes
    operations = 2.0 * rows * outputs * inputs
    whole_bytes = outputs * inputs * element_bytes
    if block_bytes > whole_bytes:
        block_bytes, operations = whole_bytes, float(outputs * inputs)
    return Factors(tensor, block_bytes + _HEADER_BYTES, operations)


def schemes_by_rule(rule: str, profile: Profile, workers: int, serving: int = 0) -> Schemes:
    """Return the layers that travel as factors under a rule.

    Args:
        rule: one of `SCHEME_RULES`.
        profile: what a step computes.
        workers: ranks that train; servers, too, unless others only serve.
        serving: so many ranks beside them that only serve.

    Raises:
        ValueError: there is no such rule.
    """
    if rule not in SCHEME_RULES:
        raise ValueError(f"unknown rule {rule!r}; known are {', '.join(SCHEME_RULES)}")

    def is_factored(layer: Layer) -> bool:
        if rule == "poseidon":
            rows = layer.rows or profile.batch_size
            counts = Counts(rows, workers, serving or workers, has_dedicated_servers=serving > 0)
            return costs_of(layer, counts, PLAN_RULES["poseidon"])[0].scheme == "sfb"
        return factors_of(layer, profile) is not None

    if workers == 1:
        return ()
    scheme = ADAM if rule == ADAM else SFB
    return tuple((layer.name, scheme) for layer in layers_of(profile) if is_factored(layer))


def operations_per_s(profile: Profile) -> float:
    """Return the accelerator's speed in the profile's own arithmetic; infinite if unknown.

    Backward has about twice the operations of forward.
    """
    if not profile.flops or profile.compute_s <= 0.0:
        return math.inf
    return 3.0 * profile.flops / profile.compute_s


def _operations_per_s_in(layer: Layer, profile: Profile) -> float:
    """Return the accelerator's speed in a layer's forward, for profiles without operation
    counts."""
    if profile.flops or layer.matrix is None or not layer.rows:
        return operations_per_s(profile)
    calls = next((one.forwards_s for one in profile.modules if one.name == layer.name), ())
    took_s = sum(end - start for start, end in calls)
    outputs, inputs = layer.matrix
    return 2.0 * layer.rows * outputs * inputs / took_s if took_s > 0.0 else math.inf


def sparse_schemes(profile: Profile) -> dict[str, dict[str, Any]]:
    """Return the schemes of gradients that travel as rows, in the simulator's format, by tensor.

    Each row travels with its number; adding rows up costs nothing here.
    """
    return {
        tensor.name: {
            "scheme": SFB,
            "block_bytes": _HEADER_BYTES
            + tensor.sparse_rows * (_ROW_NUMBER_BYTES + tensor.size_bytes // tensor.shape[0]),
            "rebuild_s": 0.0,
        }
        for tensor in profile.tensors
        if tensor.sparse_rows is not None
    }


def simulated_schemes(
    profile: Profile,
    schemes: Iterable[tuple[str, str]],
    workers: int,
    speed: float | None = None,
    narrow: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Return layers' schemes in the simulator's format, by tensor.

    Args:
        profile: what a step computes.
        schemes: layers, each with `ps`, `ring`, `sfb` or `adam`.
        workers: ranks.
        speed: operations a second at which gradients are made of factors; None: as fast as the
            profile's own arithmetic, or else as its layer's forward.
        narrow: tensors whose factors travel in 16 bits.

    Raises:
        ValueError: a layer is unknown or has no factors, or the engine does not run a scheme.
    """
    layers = {layer.name: layer for layer in layers_of(profile)}
    found: dict[str, dict[str, Any]] = {}
    for name, scheme in schemes:
        if name not in layers:
            raise ValueError(f"{profile.model} has no layer {name!r}")
        if scheme in ("ps", RING):
            found |= {tensor: {"scheme": scheme} for tensor in layers[name].parameters}
            continue
        if scheme not in FACTOR_SCHEMES:
            known = f"ps, {RING}, {' or '.join(FACTOR_SCHEMES)}"
            raise ValueError(f"the simulator has no scheme {scheme!r}: use {known}")
        layer = layers[name]
        factors = factors_of(layer, profile, narrow)
        if factors is None:
            raise ValueError(f"layer {name!r} has no factors: its scheme cannot be {scheme!r}")
        found[factors.tensor] = {
            "scheme": scheme,
            "block_bytes": factors.block_bytes,
            "rebuild_s": (workers - 1)
            * factors.operations
            / (speed or _operations_per_s_in(layer, profile)),
        }
    return found
