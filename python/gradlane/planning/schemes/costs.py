"""The schemes by which a layer's gradient can be aggregated, and what each costs a node.

After Poseidon (Zhang et al., USENIX ATC 2017, section 3.2): a fully connected layer of M x N
weights, K rows in its factors (the batch of a worker; times positions, where the layer is applied
to each word or patch), P1 workers and P2 servers. The costs are those of the paper's table 1, in
numbers that a node sends and receives together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

FULLY_CONNECTED = ("Linear",)
"""Modules whose gradient is a product of two factors: output gradients and inputs."""


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
        rows: vectors that a worker applies it to in a step; None where the profile does not say.
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
    rows: int | None = None

    @property
    def matrix(self) -> tuple[int, int] | None:
        """M and N of a fully connected layer; None where its gradient has no factors."""
        if self.kind not in FULLY_CONNECTED:
            return None
        matrices = [shape for shape in self.shapes if len(shape) == 2]
        return (matrices[0][0], matrices[0][1]) if len(matrices) == 1 else None


@dataclass(frozen=True)
class Counts:
    """What the cost of a scheme depends on, beside the layer.

    Attributes:
        rows: K, rows of the factors of one worker.
        workers: P1.
        servers: P2.
        has_dedicated_servers: whether no node is both worker and server.
    """

    rows: int
    workers: int
    servers: int
    has_dedicated_servers: bool = False


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
    """One way to aggregate a gradient: its row of table 1, for a matrix of M x N.

    Attributes:
        name: as in a plan.
        server_floats: numbers that a node sends and receives that is a server only; None where
            the scheme has none (the paper's "N/A").
        worker_floats: one that is a worker only.
        both_floats: one that is both; None where there is no such node.
    """

    name: str
    server_floats: Callable[[int, int, Counts], float] | None
    worker_floats: Callable[[int, int, Counts], float]
    both_floats: Callable[[int, int, Counts], float] | None

    def node_floats(self, rows: int, columns: int, counts: Counts) -> float:
        """Numbers that the busiest node sends and receives: one that is both, where there are such,
        else the busier of a worker and a server."""
        if not counts.has_dedicated_servers:
            return (self.both_floats or self.worker_floats)(rows, columns, counts)
        worker_floats = self.worker_floats(rows, columns, counts)
        if self.server_floats is None:
            return worker_floats
        return max(worker_floats, self.server_floats(rows, columns, counts))


SCHEMES: dict[str, Scheme] = {
    # Broadcast of sufficient factors: every worker sends its own to all others, and gets theirs.
    "sfb": Scheme(
        "sfb",
        None,
        lambda m, n, c: 2.0 * c.rows * (c.workers - 1) * (m + n),
        None,
    ),
    # Parameter servers that hold equal parts.
    "ps": Scheme(
        "ps",
        lambda m, n, c: 2.0 * c.workers * m * n / c.servers,
        lambda m, n, c: 2.0 * m * n,
        lambda m, n, c: 2.0 * m * n * (c.workers + c.servers - 2) / c.servers,
    ),
    # Project Adam's: factors to one server, the whole matrix back; costs of the busiest node.
    "adam": Scheme(
        "adam",
        lambda m, n, c: float(c.workers * (m * n + c.rows * (m + n))),
        lambda m, n, c: float(c.rows * (m + n) + m * n),
        lambda m, n, c: float((c.workers - 1) * (m * n + c.rows * m + c.rows * n)),
    ),
}
"""The schemes of table 1. Of two that cost the same the first one is chosen, so that
factors win ties, as in the paper's algorithm 1."""


def costs_of(layer: Layer, counts: Counts, schemes: Sequence[str] = tuple(SCHEMES)) -> list[Cost]:
    """Return the cost of each scheme that fits a layer, the cheapest first.

    Of a fully connected layer it is that of its matrix: a bias is left out, as in the paper (with
    factors it costs nothing, since output gradients add up to it).

    Args:
        layer: what is aggregated.
        counts: K, P1 and P2.
        schemes: names of those to look at.
    """
    matrix = layer.matrix
    rows, columns = matrix or (layer.elements, 1)
    costs = [
        Cost(name, scheme.node_floats(rows, columns, counts))
        for name, scheme in SCHEMES.items()
        if name in schemes and (matrix or name == "ps")
    ]
    return sorted(costs, key=lambda cost: cost.node_floats)
