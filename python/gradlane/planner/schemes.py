"""The schemes by which a layer's gradient can be aggregated, and what each costs a node.

One row a scheme. A scheme is here only if the engine runs it; others come with their code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradlane.options import RING


@dataclass(frozen=True)
class Layer:
    """A layer in the information book: the parameters of one module.

    Attributes:
        name: name of the module; of the parameter, where it has no module of its own.
        index: its place in the order of the profile's tensors.
        kind: class of the module, such as `Linear`; None where the profile does not say.
        parameters: names of its parameters.
        shapes: their dimensions.
        elements: their elements, together.
        size_bytes: bytes of their gradients.
        need_s: when forward first reads one of them, since the start of forward.
        ready_s: when backward has the last of their gradients.
    """

    name: str
    index: int
    kind: str | None
    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    elements: int
    size_bytes: int
    need_s: float
    ready_s: float


@dataclass(frozen=True)
class Cost:
    """What a scheme costs for one layer and step.

    Attributes:
        scheme: its name.
        node_floats: numbers that the busiest node sends and receives, together.
    """

    scheme: str
    node_floats: float


@dataclass(frozen=True)
class Scheme:
    """One way to aggregate a gradient.

    Attributes:
        name: as in the engine's plan.
        fits: whether it can aggregate a layer.
        node_floats: numbers that the busiest node sends and receives for a layer, given the
            numbers of workers and servers and the batch size of a worker.
        is_chosen: whether the coordinator chooses it by itself; not where sums have another order,
            since a plan that was found changes no bit.
    """

    name: str
    fits: Callable[[Layer], bool]
    node_floats: Callable[[Layer, int, int, int], float]
    is_chosen: bool = True


def _server_floats(layer: Layer, workers: int, servers: int, batch_size: int) -> float:
    """Poseidon, table 1, a node that is worker and server: 2 M N (P1 + P2 - 2) / P2."""
    del batch_size
    return 2.0 * layer.elements * (workers + servers - 2) / servers


def _ring_floats(layer: Layer, workers: int, servers: int, batch_size: int) -> float:
    """A ring: 2 M N (P1 - 1) / P1 numbers leave each node, and as many arrive."""
    del servers, batch_size
    return 4.0 * layer.elements * (workers - 1) / workers


SCHEMES: dict[str, Scheme] = {
    "ps": Scheme("ps", lambda layer: True, _server_floats),
    RING: Scheme(RING, lambda layer: True, _ring_floats, is_chosen=False),
}
"""Schemes that the engine has. Of two that cost the same the first one is chosen."""


def costs_of(layer: Layer, workers: int, servers: int, batch_size: int) -> list[Cost]:
    """Return the cost of each scheme that fits a layer, the cheapest first."""
    costs = [
        Cost(scheme.name, scheme.node_floats(layer, workers, servers, batch_size))
        for scheme in SCHEMES.values()
        if scheme.fits(layer)
    ]
    return sorted(costs, key=lambda cost: cost.node_floats)
