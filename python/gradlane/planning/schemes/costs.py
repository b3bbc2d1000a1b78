"""Aggregation schemes of a layer's gradient, and their cost for a node.

After Poseidon (Zhang et al., USENIX ATC 2017, section 3.2): a fully connected layer has M x N
weights and K rows in its factors (the batch of a worker, times positions if the layer is applied to
each word or patch); there are P1 workers and P2 servers. The costs are those of the paper's table
1, in numbers that a node sends and receives together.
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
        kind: class of the module, such as `Linear`; None if unknown.
        parameters: names of its parameters.
        shapes: their dimensions.
        elements: their elements, together.
        size_bytes: bytes of their gradients.
        need_s: first read of one of them, since the start of forward; None if not recorded.
        ready_s: time of the last of their gradients in backward; None if not recorded.
        rows: vectors that a worker applies it to in a step; None if unknown.
    """

    name: str
    index: int
    kind: str | None
    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    elements: int
    size_bytes: int
    need_s: float | None
    ready_s: float | None
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
    """The numbers that a scheme's cost depends on, besides the layer.

    Attributes:
        rows: K, rows of the factors of one worker.
        workers: P1.
        servers: P2.
        has_dedicated_servers: True if no node is both worker and server.
    """

    rows: int
    workers: int
    servers: int
    has_dedicated_servers: bool = False


@dataclass(frozen=True)
class Cost:
    """The cost of a scheme for one layer and step.

    Attributes:
        scheme: its name.
        node_floats: numbers that the busiest node sends and receives, together.
    """

    scheme: str
    node_floats: float


@dataclass(frozen=True)
class Scheme:
    """An aggregation scheme: its row of table 1, for a matrix of M x N.

    Attributes:
        name: as in a plan.
        server_floats: numbers that a dedicated server sends and receives; None if the scheme has no
            servers (the paper's "N/A").
        worker_floats: the same for a node that is a worker only.
        both_floats: the same for a node that is both; None if there is no such node.
    """

    name: str
    server_floats: Callable[[int, int, Counts], float] | None
    worker_floats: Callable[[int, int, Counts], float]
    both_floats: Callable[[int, int, Counts], float] | None

    def node_floats(self, rows: int, columns: int, counts: Counts) -> float:
        """Return the numbers that the busiest node sends and receives: a node that is worker and
        server if there are such, else the busier of a worker and a server."""
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
"""The schemes of table 1. The first of two with equal costs is chosen, so that factors win ties, as
in the paper's algorithm 1."""


def costs_of(layer: Layer, counts: Counts, schemes: Sequence[str] = tuple(SCHEMES)) -> list[Cost]:
    """Return the cost of each scheme that fits a layer, the cheapest first.

    Of a fully connected layer it is that of its matrix: a bias is left out, as in the paper (with
    factors it costs nothing, since output gradients add up to it).

    Args:
        layer: what is aggregated.
        counts: K, P1 and P2.
        schemes: names of the schemes to compare.
    """
    matrix = layer.matrix
    rows, columns = matrix or (layer.elements, 1)
    costs = [
        Cost(name, scheme.node_floats(rows, columns, counts))
        for name, scheme in SCHEMES.items()
        if name in schemes and (matrix or name == "ps")
    ]
    return sorted(costs, key=lambda cost: cost.node_floats)
